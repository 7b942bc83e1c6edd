"""The set of plots drawn from one recording, and what is not in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from policies.registry import is_bound
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

COMPARED = (
    "fixed", "hf-heuristic", "confidence", "gammatune", "svip", "oracle", "eagle", "eagle3",
)  # fmt: skip
"""Policies and systems drawn where a plot holds only a few and all were asked for."""
STARTING = ("fixed", "hf-heuristic", "confidence", "gammatune", "gammatune-plus")
"""Policies that start from a draft length (GammaTune, Table 2), where none is named."""
LONGEST = 24
"""Draft length that policies are made for where the recording sets no bound."""


FEW = 6
"""Names that a line on what is left out still lists."""


class Drawn(NamedTuple):
    """Plots that were written."""

    paths: list[Path]
    left_out: list[str]
    """A line for each plot that does not hold all policies."""


class Families(NamedTuple):
    """Policies as functions of the draft length that they start from."""

    made: dict[str, Callable[[int], DraftPolicy]]
    gammas: list[int]
    """The lengths."""
    left_out: list[str]
    """Lines on policies without such a length, and on lengths that were not recorded."""


def families_of(trace: Trace, texts: Sequence[str] | None) -> Families:
    """Return the policies of `texts` as functions of their parameter gamma, ``fixed`` first.

    Without texts, or with ``all``, these are `STARTING` (and what is named beside ``all``).
    Raises DraftsimError if the recording holds no drafts of two tokens.
    """
    from commands.common.inputs import load_policies
    from policies.spec import parameters
    from simulator.robustness import INITIAL_GAMMAS
    from traces.sources.methods import method_of

    longest = min(trace.max_gamma or LONGEST, LONGEST)
    gammas = [g for g in INITIAL_GAMMAS if g <= longest]
    if len(gammas) < 2:
        raise DraftsimError(
            "one draft length shows no robustness: record with --max-gamma 2 or larger"
        )
    made: dict[str, Callable[[int], DraftPolicy]] = {}
    names = [text for text in texts or () if text != "all"]
    without = [text for text in names if method_of(text) is not None]
    names = [text for text in names if text not in without]
    if names + without == [] or "all" in (texts or ()):
        names += [name for name in STARTING if name not in names]
    for name, policy in load_policies(list(dict.fromkeys(["fixed", *names])), trace, say=False):
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
        made.setdefault(_family_name(name, inner), make)
    said = []
    if without:
        said.append(
            "robustness is of policies with a parameter gamma to start from, which leaves out "
            f"{', '.join(without)}"
        )
    if longest < max(INITIAL_GAMMAS):
        said.append(f"initial draft lengths 1 to {longest}: no longer drafts were recorded")
    return Families(made, gammas, said)


def _starting_from(policy: DraftPolicy, longest: int) -> Callable[[int], DraftPolicy]:
    from policies.batch.base import SingleStream
    from policies.from_file import Cut
    from policies.spec import parameters

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


def _family_name(name: str, policy: object) -> str:
    """`name` without the length that is varied, and without the bound that goes with it."""
    from policies.from_file import split_name
    from policies.spec import describe_spec

    return describe_spec(policy, split_name(name)[0], ("gamma", "gamma_max"))


def robustness_rows(
    trace: Trace, latency: LatencyTable, texts: Sequence[str] | None
) -> tuple[pd.DataFrame, list[str]]:
    """Return mean and sd over initial draft lengths, and what has to be said of them."""
    from simulator.robustness import robustness, speedup_by_gamma

    families = families_of(trace, texts)
    speedups = speedup_by_gamma(trace, families.made, latency, families.gammas)
    return robustness(speedups), families.left_out


def _fastest(logs: Sequence[RoundLog], speed: Mapping[str, float]) -> RoundLog | None:
    """Return the fastest that one could run and whose text is the target's own."""
    real = [log for log in logs if log.mismatched is None and not is_bound(log.policy)]
    return max(real, key=lambda log: speed[log.policy], default=None)


def save_all(
    trace: Trace,
    latency: LatencyTable,
    logs: Sequence[RoundLog],
    folder: Path,
    validation: pd.DataFrame | None = None,
    systems: Sequence[RoundLog] = (),
    texts: Sequence[str] | None = None,
    title: str = "",
) -> Drawn:
    """Draw everything a recording shows into `folder`.

    ``logs`` are of the draft model; ``systems``, with drafts or rules of their own, are added where
    speedups are drawn.  ``texts`` are the policies as they were named: these are in
    every plot that can hold them, as is the fastest.  Where all were asked for, plots of a few
    hold `COMPARED`. ``title`` names pair and device above every plot.
    """
    from policies.from_file import split_name
    from simulator import plots
    from simulator.ratios import own_ratios
    from simulator.robustness import speedup_by_gamma
    from simulator.summary import summarize, summarize_by_category
    from traces.sources.registry import DRAFT_MODEL

    every = [*logs, *systems]
    label = "lower bounds: the log does not tell its draft lengths" if trace.is_lower_bound else ""
    overall = summarize(every, latency)
    speed = dict(zip(overall["policy"], overall["speedup"], strict=True))
    if texts and "all" not in texts:
        some = list(every)
    else:
        wanted = {*COMPARED, *(split_name(text.rpartition("/")[2])[0] for text in texts or ())}
        best = None if trace.is_lower_bound else _fastest(every, speed)
        some = [log for log in every if split_name(log.policy)[0] in wanted or log is best]
        some = some or list(logs)
    if not trace.is_lower_bound:
        some.sort(key=lambda log: -speed[log.policy])
    figures = {
        "speedup": plots.plot_speedup(overall),
        "categories": plots.plot_categories(summarize_by_category(some, latency)),
        "survival": plots.plot_survival(trace),
    }
    said = []
    if others := [log.policy for log in every if log not in some]:
        names = ", ".join(dict.fromkeys(others)) if len(others) <= FEW else f"{len(others)} others"
        said.append(
            f"categories.png and cost_ratio.png hold the fastest and {len(some) - 1} to compare it "
            f"with, without {names}: name policies with --policy to draw them"
        )
    drafted = [log for log in some if log.source == DRAFT_MODEL]
    if drafted:
        own = own_ratios(trace, latency)
        figures["cost_ratio"] = plots.plot_cost_ratio(drafted, latency=latency, own=own)
    elsewhere = [log.policy for log in some if log.source != DRAFT_MODEL]
    if elsewhere:
        said.append(
            f"cost_ratio.png is of the draft model: without {', '.join(dict.fromkeys(elsewhere))}"
        )
    try:
        families = families_of(trace, texts)
    except DraftsimError as error:
        said.append(f"robustness.png is not drawn: {error}")
    else:
        speedups = speedup_by_gamma(trace, families.made, latency, families.gammas)
        figures["robustness"] = plots.plot_robustness(speedups)
        said += families.left_out
    if validation is not None:
        figures["validation"] = plots.plot_validation(validation.dropna(subset=["predicted_s"]))
    paths = [
        plots.save_all_kinds(figure, folder / f"{name}.png", label, title)
        for name, figure in figures.items()
    ]
    return Drawn(paths, said)
