"""The speedup of each kind of policy on a pair, by category of prompt."""

from __future__ import annotations

import pandas as pd

from docs.reading import code, table
from simulator.api import predict

HEAD = ("prompts", "best fixed length", "best adaptive policy", "GammaTune", "oracle")
PLAIN, ORACLE, SHOWN = "autoregressive", "oracle", "gammatune:"


def ladder(name: str) -> str:
    """Return speedups over no speculation with their 95% intervals: all prompts, then categories.

    Only lossless policies are in it.  A row's best policies are chosen on its own prompts, so they
    show the most that a choice for each category could reach.

    Raises
    ------
    DraftsimError
        If there is no such recording.
    """
    found = predict(name, by_category=True, resamples=400).table
    found = found[found["verify"] == "exact"]
    overall, parts = found[found["category"].isna()], found[found["category"].notna()]
    rungs = [("all", _rung(overall))]
    rungs += [(str(category), _rung(own)) for category, own in parts.groupby("category")]
    return table(HEAD, [(category, *cells) for category, cells in rungs])


def _rung(own: pd.DataFrame) -> tuple[str, ...]:
    fixed = own["policy"].str.startswith("fixed:")
    others = ~fixed & ~own["policy"].str.startswith((PLAIN, ORACLE))
    rest = [own[own["policy"].str.startswith(name)].iloc[0] for name in (SHOWN, ORACLE)]
    return (_named(own[fixed]), _named(own[others]), *map(_cell, rest))


def _named(rows: pd.DataFrame) -> str:
    best = rows.loc[rows["speedup"].idxmax()]
    return f"{code(best['policy'])} {_cell(best)}"


def _cell(row: pd.Series) -> str:
    return f"{row['speedup']:.2f} ({row['speedup_lo']:.2f} to {row['speedup_hi']:.2f})"
