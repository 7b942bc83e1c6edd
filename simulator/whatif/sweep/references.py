"""What every policy of a sweep is held against: fixed lengths, and the oracle.

They are replayed whether or not the sweep asks for their rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed, Oracle
from simulator.whatif.ladder import GAMMAS
from traces.acceptance.trace import Trace

POINT = ("alpha_asked", "alpha", "source", "c", "latency", "gpu", "batch", "context")
"""Columns that name one point of a sweep, the policies apart."""


def references(trace: Trace, policies: Mapping[str, DraftPolicy]) -> dict[str, DraftPolicy]:
    """The fixed lengths that the trace's tails allow and the oracle, less what `policies` hold."""
    # After longer drafts than a log holds, what was accepted would be a guess.
    seen = (trace.meta.get("imputed") or {}).get("longest_seen")
    longest = min((g for g in (trace.max_gamma, seen) if g is not None), default=max(GAMMAS))
    there = {
        policy.gamma for name, policy in policies.items()
        if family(name) == "fixed" and isinstance(policy, Fixed)
    }  # fmt: skip
    found: dict[str, DraftPolicy] = {
        f"fixed:gamma={g}": Fixed(g) for g in GAMMAS if g <= longest and g not in there
    }
    bound = Oracle(gamma_max=trace.max_gamma)
    if not any(family(n) == "oracle" and vars(p) == vars(bound) for n, p in policies.items()):
        found["oracle"] = bound
    return {name: policy for name, policy in found.items() if name not in policies}


def family(name: str) -> str:
    """What a policy is called apart from its parameters."""
    return name.partition(":")[0]


def with_regrets(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with what the best fixed length and the oracle among them do at the same point.

    New columns: ``best_fixed`` and ``best_gamma`` (0: plain decoding), ``oracle``,
    ``regret_fixed`` = 1 - speedup / best_fixed and ``regret_oracle`` likewise, and
    ``adapting``: the oracle's speedup less the best fixed length's, all that adapting the
    draft length could bring.  NaN where no such policy is among the rows.  The best fixed
    length is chosen at each point in hindsight.  The oracle drafts for each request by itself:
    in a batch, where every step drafts as often as its longest draft, it is no bound.
    """
    point = list(POINT)
    keys = frame[point].copy()
    for name in point:
        if keys[name].dtype.kind == "f":
            keys[name] = keys[name].fillna(-1.0)
    number = keys.groupby(point, sort=False, observed=True).ngroup().to_numpy()
    count = int(number.max(initial=-1)) + 1
    kind, value = frame["family"].astype(str).to_numpy(), frame["speedup"].to_numpy(float)
    fixed = kind == "fixed"
    best = np.full(count, np.nan)
    best[number[fixed]] = 1.0
    np.fmax.at(best, number[fixed], value[fixed])
    gamma = np.zeros(count)
    hit = fixed & (value == best[number])
    gamma[number[hit]] = frame["gamma"].to_numpy(float)[hit]
    oracle = np.full(count, np.nan)
    knows = kind == "oracle"
    np.fmax.at(oracle, number[knows], value[knows])
    return frame.assign(
        best_fixed=best[number], best_gamma=gamma[number], oracle=oracle[number],
        regret_fixed=1 - value / best[number], regret_oracle=1 - value / oracle[number],
        adapting=(oracle - best)[number],
    )  # fmt: skip
