"""How much a policy depends on the draft length it starts from (GammaTune, Table 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.core import DraftPolicy
from simulator.pricing import autoregressive, price
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.vectorised import replay_many

Floats = npt.NDArray[np.float64]

INITIAL_GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
"""The twelve initial draft lengths of GammaTune, Table 2."""


class GammaSeconds(NamedTuple):
    """Decode seconds of every request from every initial draft length."""

    plain_s: Floats
    """Seconds of plain decoding, shape (requests,)."""
    policy_s: Mapping[tuple[str, int], Floats]
    """By policy and initial draft length, shape (requests,) each."""

    def speedups(self, requests: Sequence[int] | None = None) -> pd.DataFrame:
        """Speedup over all requests, or over those named by index; rows: policy, gamma, speedup."""
        of = slice(None) if requests is None else list(requests)
        plain = self.plain_s[of].sum()
        rows = [(name, gamma, plain / s[of].sum()) for (name, gamma), s in self.policy_s.items()]
        return pd.DataFrame(rows, columns=["policy", "gamma", "speedup"])


def seconds_by_gamma(
    trace: Trace,
    families: Mapping[str, Callable[[int], DraftPolicy]],
    latency: LatencyTable,
    gammas: Sequence[int] = INITIAL_GAMMAS,
) -> GammaSeconds:
    """Replay every policy from every initial draft length and price it.

    ``families`` maps a name to a function that makes the policy for an initial gamma.
    Raises what `traces.replay.run.replay` raises.
    """
    [found] = seconds_at_each(trace, families, [latency], gammas)
    return found


def seconds_at_each(
    trace: Trace,
    families: Mapping[str, Callable[[int], DraftPolicy]],
    latencies: Sequence[LatencyTable],
    gammas: Sequence[int] = INITIAL_GAMMAS,
) -> list[GammaSeconds]:
    """`seconds_by_gamma` at each of several latency tables, from one replay."""
    named = {(name, gamma): make(gamma) for name, make in families.items() for gamma in gammas}
    logs = list(replay_many(trace, [(name, policy) for (name, _), policy in named.items()]))
    return [
        GammaSeconds(
            price(autoregressive(logs[0]), latency).decode_s,
            {key: price(log, latency).decode_s for key, log in zip(named, logs, strict=True)},
        )
        for latency in latencies
    ]


def speedup_by_gamma(
    trace: Trace,
    families: Mapping[str, Callable[[int], DraftPolicy]],
    latency: LatencyTable,
    gammas: Sequence[int] = INITIAL_GAMMAS,
) -> pd.DataFrame:
    """Decode speedup of every policy from every initial draft length.

    Parameters and errors as of `seconds_by_gamma`.  Rows: policy, gamma, speedup.
    """
    return seconds_by_gamma(trace, families, latency, gammas).speedups()


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
