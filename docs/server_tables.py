"""Predictions for a real server, next to what it measured at loads that were not given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from docs.reading import table
from simulator.aggregate.benches import read_benches
from simulator.aggregate.hazard import interval_of
from simulator.aggregate.server import ServerRun, calibrate
from simulator.bootstrap import Interval

SERVED = Path(__file__).resolve().parent / "examples" / "server"
"""Folder of the server's files: `results` are given, `confirmed` are predicted."""
LEVEL = 0.8
"""Level of the intervals."""
LEFT_OUT = Path(__file__).resolve().parent.parent / "benchmarks"
"""Folder of what ``python -m benchmarks.server_left_out --out`` wrote."""


class Confirmed(NamedTuple):
    """A load that was not given, with the prediction and the runs that measured it."""

    batch: int
    k: int
    predicted: Interval
    measured: tuple[float, ...]
    """Tokens/s of each repeat."""

    @property
    def error(self) -> float:
        """Relative error of the predicted value against the mean of the repeats."""
        return float(self.predicted.value / np.mean(self.measured) - 1)


class Chosen(NamedTuple):
    """The draft length predicted fastest at a load, and the fastest measured."""

    batch: int
    k: int
    gain: float
    """Measured speedup over no speculation of the draft length predicted fastest."""
    fastest: int
    most: float
    """Measured speedup of the draft length that was fastest."""


def confirmed() -> tuple[list[Confirmed], list[Chosen]]:
    """Return every load that was not given, and the choice at every load measured."""
    given = read_benches([str(SERVED / "results")]).runs
    asked = read_benches([str(SERVED / "confirmed")]).runs
    server = calibrate(given)
    context, prompts = server.usual

    def speed(batch: int, k: int) -> Interval:
        return interval_of(server.tokens_per_s(batch, k, context, prompts), LEVEL)

    rows = [Confirmed(*load, speed(*load), speeds) for load, speeds in _by_load(asked).items()]
    every = _by_load([*given, *asked])
    choices = []
    for batch in sorted({batch for batch, _ in every}):
        here = {k: float(np.mean(speeds)) for (b, k), speeds in every.items() if b == batch}
        k = max(here, key=lambda k: speed(batch, k).value)
        fastest = max(here, key=here.__getitem__)
        choices.append(Chosen(batch, k, here[k] / here[0], fastest, here[fastest] / here[0]))
    return rows, choices


def _by_load(runs: Sequence[ServerRun]) -> dict[tuple[int, int], tuple[float, ...]]:
    found: dict[tuple[int, int], tuple[float, ...]] = defaultdict(tuple)
    for run in sorted(runs, key=lambda run: (run.batch, run.k)):
        found[run.batch, run.k] += (run.tokens_per_s,)
    return found


def server_confirmed() -> str:
    """Return the predicted and measured tokens/s, and the best draft length by load."""
    rows, choices = confirmed()
    speeds = table(
        ("requests", "K", "predicted tokens/s", "80% interval", "measured", "error"),
        [
            (
                row.batch, row.k, f"{row.predicted.value:.1f}",
                f"{row.predicted.low:.1f} to {row.predicted.high:.1f}",
                ", ".join(f"{speed:.1f}" for speed in row.measured), f"{row.error:+.1%}",
            )
            for row in rows
        ],
    )  # fmt: skip
    inside = [row.predicted.holds(speed) for row in rows for speed in row.measured]
    errors = np.abs([row.error for row in rows])
    said = (
        f"The median error is {np.median(errors):.1%}, the largest {errors.max():.1%}; "
        f"{sum(inside)} of {len(inside)} measured runs are inside the 80% intervals."
    )
    best = table(
        ("requests", "K predicted fastest", "its measured speedup", "K measured fastest",
         "its speedup"),
        [(row.batch, row.k, f"{row.gain:.2f}", row.fastest, f"{row.most:.2f}") for row in choices],
    )  # fmt: skip
    return f"{speeds}\n\n{said}\n\n{best}"


def server_left_out(name: str) -> str:
    """Return errors and coverage by study, with all terms, as `name`.csv has them."""
    rows = pd.read_csv(LEFT_OUT / f"{name}.csv")
    return _errors(rows[rows["terms"] == "all terms"], "study")


def server_outside() -> str:
    """Return errors and coverage on servers that nothing was chosen with, a line a study.

    First those predicted from a few runs.  The last two columns are median error and coverage of
    each draft length, and of each concurrency, predicted from the others.
    """
    rows = pd.read_csv(LEFT_OUT / "outside_found.csv").set_index(["study", "terms"])

    def found(study: str, design: str) -> str:
        if (study, design) not in rows.index:
            return "–"
        row = rows.loc[study, design]
        return f"{row['median_error']:.1%}, {row['coverage']:.0%}"

    few = rows[rows["given"].notna()].reset_index()
    return table(
        ("study", "given", "predicted", "median error", "largest", "inside 80%", "sign right",
         "best K right", "each K", "each load"),
        [
            (
                row["study"], f"{row['given']:.0f}", row["runs"], f"{row['median_error']:.1%}",
                f"{row['largest_error']:.0%}", f"{row['coverage']:.0%}",
                _share(row["signs_right"], row["signs"]), _share(row["best_right"], row["best"]),
                *(found(row["study"], f"each {part} from the others") for part in ("K", "load")),
            )
            for row in few.to_dict("records")
        ],
    )  # fmt: skip


def server_terms(name: str) -> str:
    """Return errors and coverage of all studies together, by the terms that the model has."""
    rows = pd.read_csv(LEFT_OUT / f"{name}.csv")
    return _errors(rows[rows["study"] == "all studies"], "terms")


def server_widths() -> str:
    """Return how wide intervals have to be by server, and coverage with the others' width."""
    rows = pd.read_csv(LEFT_OUT / "server_widths.csv")
    return table(
        ("server", "runs", "width needed", "width that the others need", "inside with that"),
        [
            (
                row["server"], row["runs"], f"{row['needs']:.2f}", f"{row['others_need']:.2f}",
                f"{row['coverage']:.0%}",
            )
            for row in rows.to_dict("records")
        ],
    )  # fmt: skip


def _errors(rows: pd.DataFrame, first: str) -> str:
    return table(
        (first, "runs", "median error", "largest", "inside 80%", "sign right", "best K right"),
        [
            (
                row[first], row["runs"], f"{row['median_error']:.1%}",
                f"{row['largest_error']:.0%}",
                "–" if np.isnan(row["coverage"]) else f"{row['coverage']:.0%}",
                _share(row["signs_right"], row["signs"]), _share(row["best_right"], row["best"]),
            )
            for row in rows.to_dict("records")
        ],
    )  # fmt: skip


def _share(right: int, of: int) -> str:
    return f"{right} of {of}" if of else "–"
