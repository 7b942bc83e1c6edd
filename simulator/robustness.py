"""How much a policy depends on the draft length it starts from (GammaTune, Table 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from policies.arrays import Floats
from policies.batch.base import SingleStream
from policies.core import DraftPolicy
from policies.from_file import Cut, split_name
from policies.spec import describe_spec, parameters
from simulator.chosen import load_policies
from simulator.pricing import autoregressive, price
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.vectorised import replay_many
from traces.sources.methods import method_of

INITIAL_GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
"""The twelve initial draft lengths of GammaTune, Table 2."""
STARTING = ("fixed", "hf-heuristic", "confidence", "gammatune", "gammatune-plus")
"""Policies that start from a draft length, where none is named."""
LONGEST = 24
"""Draft length that policies are made for where the recording sets no bound."""


class GammaSeconds(NamedTuple):
    """Decode seconds of every request from every initial draft length."""

    plain_s: Floats
    """Seconds of plain decoding, shape (requests,)."""
    policy_s: Mapping[tuple[str, int], Floats]
    """By policy and initial draft length, shape (requests,) each."""

    def speedups(self, requests: Sequence[int] | None = None) -> pd.DataFrame:
        """Return speedups over all requests or some, by place; rows: policy, gamma, speedup."""
        of = slice(None) if requests is None else list(requests)
        plain = self.plain_s[of].sum()
        rows = [(name, gamma, plain / s[of].sum()) for (name, gamma), s in self.policy_s.items()]
        return pd.DataFrame(rows, columns=["policy", "gamma", "speedup"])


def seconds_at_each(
    trace: Trace,
    families: Mapping[str, Callable[[int], DraftPolicy]],
    latencies: Sequence[LatencyTable],
    gammas: Sequence[int] = INITIAL_GAMMAS,
) -> list[GammaSeconds]:
    """Replay every policy from every initial draft length, and price it at each latency table.

    ``families`` maps a name to a function that makes the policy for an initial gamma.
    Raises what `traces.replay.run.replay` raises.
    """
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

    Parameters and errors as in `seconds_at_each`.  Rows: policy, gamma, speedup.
    """
    return seconds_at_each(trace, families, [latency], gammas)[0].speedups()


def robustness(speedups: pd.DataFrame, reference: str = "fixed") -> pd.DataFrame:
    """Return the mean and standard deviation over initial gamma, relative to `reference`'s mean.

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


class Families(NamedTuple):
    """Policies as functions of the draft length that they start from."""

    made: dict[str, Callable[[int], DraftPolicy]]
    gammas: list[int]
    """The lengths."""
    left_out: list[str]
    """Lines on policies without such a length, and on lengths that were not recorded."""


def families_of(
    trace: Trace, texts: Sequence[str] | None, fewest: int = 2, latency: LatencyTable | None = None
) -> Families:
    """Return the policies of `texts` as functions of their parameter gamma, ``fixed`` first.

    They weigh the costs of `latency`, if it is given (`simulator.chosen.informed`).
    Without texts, or with ``all``, these are `STARTING` (and those named with ``all``).
    Raises DraftsimError if the recording holds drafts of fewer than `fewest` lengths.
    """
    longest = min(trace.max_gamma or LONGEST, LONGEST)
    gammas = [g for g in INITIAL_GAMMAS if g <= longest]
    if len(gammas) < fewest:
        raise DraftsimError(
            "one draft length shows no robustness: record with --max-gamma 2 or larger"
        )
    made: dict[str, Callable[[int], DraftPolicy]] = {}
    names = [text for text in texts or () if text != "all"]
    without = [text for text in names if method_of(text) is not None]
    names = [text for text in names if text not in without]
    if names + without == [] or "all" in (texts or ()):
        names += [name for name in STARTING if name not in names]
    every = list(dict.fromkeys(["fixed", *names]))
    for name, policy in load_policies(every, trace, latency=latency):
        inner: Any = getattr(policy, "policy", policy)
        start = parameters(type(inner)).get("gamma")
        if start is None or not isinstance(inner.gamma, int):
            if name != "autoregressive":
                without.append(name)
            continue
        make = _starting_from(policy, longest)
        try:
            for gamma in gammas:
                make(gamma)
        except ValueError as error:
            without.append(f"{name} ({error})")
            continue
        # Without the length that is varied, and the bound that goes with it.
        family = describe_spec(inner, split_name(name)[0], ("gamma", "gamma_max"))
        made.setdefault(family, make)
    said = []
    if without:
        said.append(
            "left out, because they have no parameter gamma (initial draft length): "
            f"{', '.join(without)}"
        )
    if longest < max(INITIAL_GAMMAS):
        said.append(f"initial draft lengths 1 to {longest}: no longer drafts were recorded")
    return Families(made, gammas, said)


def speedups_of(
    trace: Trace, latency: LatencyTable, texts: Sequence[str] | None
) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of `speedup_by_gamma` for the `families_of` texts, and what is left out."""
    made, gammas, left_out = families_of(trace, texts, latency=latency)
    return speedup_by_gamma(trace, made, latency, gammas), left_out


def _starting_from(policy: DraftPolicy, longest: int) -> Callable[[int], DraftPolicy]:
    inner: Any = getattr(policy, "policy", policy)
    known = parameters(type(inner))
    values = {name: getattr(inner, name) for name in known}
    if "gamma_max" in known and values["gamma_max"] == known["gamma_max"].default:
        values["gamma_max"] = longest

    def make(gamma: int) -> DraftPolicy:
        made = type(inner)(**{**values, "gamma": gamma})
        if isinstance(policy, Cut):
            return Cut(made, policy.longest)
        return SingleStream(made) if isinstance(policy, SingleStream) else made

    return make
