"""How much a policy depends on the draft length it starts from (GammaTune, Table 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from policies.core import DraftPolicy
from simulator.pricing import autoregressive, price
from traces.errors import DraftsimError
from traces.latency import LatencyTable
from traces.replay import replay
from traces.trace import Trace

INITIAL_GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
"""The twelve initial draft lengths of GammaTune, Table 2."""


def speedup_by_gamma(
    trace: Trace,
    families: Mapping[str, Callable[[int], DraftPolicy]],
    latency: LatencyTable,
    gammas: Sequence[int] = INITIAL_GAMMAS,
) -> pd.DataFrame:
    """Decode speedup of every policy from every initial draft length.

    ``families`` maps a name to a function that makes the policy for an initial gamma.
    Rows: policy, gamma, speedup.  Raises what `traces.replay.replay` raises.
    """
    rows = []
    for name, make in families.items():
        for gamma in gammas:
            log = replay(trace, make(gamma), name=name)
            plain = price(autoregressive(log), latency).total_s
            rows.append((name, gamma, plain / price(log, latency).total_s))
    return pd.DataFrame(rows, columns=["policy", "gamma", "speedup"])


def robustness(speedups: pd.DataFrame, reference: str = "fixed") -> pd.DataFrame:
    """Mean and standard deviation over initial gamma, relative to `reference`'s mean.

    ``speedups`` is what `speedup_by_gamma` returns.  Rows: policy, mean, sd, lowest,
    highest; the reference's mean is 1 by construction and `sd` is the sample's (n - 1).

    Raises
    ------
    DraftsimError
        If the reference is not among the policies.
    """
    groups = speedups.groupby("policy", sort=False)["speedup"]
    frame = groups.agg(["mean", "std", "min", "max"])
    if reference not in frame.index:
        raise DraftsimError(
            f"the reference policy {reference!r} is not among {', '.join(map(str, frame.index))}"
        )
    frame = frame / float(speedups.loc[speedups["policy"] == reference, "speedup"].mean())
    frame.columns = pd.Index(["mean", "sd", "lowest", "highest"])
    return frame.reset_index()
