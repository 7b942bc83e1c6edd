"""Choosing among settings of an engine that decodes one request, each replayed and priced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.bootstrap import CONFIDENCE, resamples
from simulator.pricing import autoregressive
from simulator.targets import Targets
from simulator.tune.costs import longest_draft, price_grid
from simulator.tune.formats import check_settings
from simulator.tune.gains import (
    MISSED,
    OFF,
    ON,
    Objective,
    can_hold_back,
    choose,
    cross_fitted,
    folds,
    to_deploy,
)
from simulator.tune.served import SEARCH_CONFIDENCE
from simulator.tune.settings import (
    Gain,
    Tuned,
    about_recording,
    about_row,
    about_targets,
    plain_row,
    row_of,
    summed_up,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many

SingleSetting = Mapping[str, Any]
"""A document that an engine reads; its first value is the longest draft."""


def text_of(setting: SingleSetting) -> str:
    """Return the values of a setting, as rows show them."""
    return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in setting.values())


@dataclass(frozen=True)
class SingleEngine:
    """The facts about an engine that choosing its setting needs."""

    name: str
    default: SingleSetting
    """The engine's default setting.  ``default_gain`` is over it, with no longer drafts than the
    recorded ones."""
    first: int
    """Output position that decoding begins at, see `traces.replay.rounds.RoundLog`."""
    off: str
    """The advice if no setting gives a gain."""
    threshold: str
    """The draft signal that its threshold is compared with."""
    worked: Callable[[RoundLog], RoundLog] | None = None
    """The rounds with the passes that this engine makes for them; None: as replayed."""


def tune_single(
    engine: SingleEngine, trace: Trace, latency: LatencyTable, settings: Sequence[SingleSetting],
    *, slo: Targets | None = None, draws: int = 1000, seed: int = 0,
) -> Tuned:  # fmt: skip
    """Return the setting that drafts least of those that the best does not beat beyond its
    interval.

    Settings that draft past the recorded tails are left out.

    Raises
    ------
    DraftsimError
        If the default, cut to the longest recorded draft, cannot be replayed.
    """
    tokens, bound = next(iter(engine.default)), longest_draft(trace)
    most = math.inf if bound is None else bound
    cut = {**engine.default, tokens: min(engine.default[tokens], most)}
    default = text_of(cut)
    asked = {text_of(s): s for s in (cut, *settings) if s[tokens] <= most}
    policies: dict[str, Any] = {text: check_settings(engine.name, s) for text, s in asked.items()}
    replayed = replay_many(
        trace, policies, first=engine.first, leave_out=lambda _, e: isinstance(e, TailError)
    )
    logs: dict[str, RoundLog] = {
        log.policy: log if engine.worked is None else engine.worked(log) for log in replayed
    }
    if default not in logs:
        raise DraftsimError(
            f"the default of {engine.name} ({default}) drafts past the recorded tails: "
            "record with a larger --max-gamma"
        )
    ordered = sorted(logs, key=lambda s: int(logs[s].rounds["draft_forwards"].sum()))
    # The first option is no speculation.
    priced = [autoregressive(logs[default]), *(logs[s] for s in ordered)]
    grid = price_grid(priced, latency, slo=slo)
    meets = grid.within >= (0.0 if slo is None else slo.share)
    reachable = bool(meets.any())
    if not reachable:  # then all tokens count, as in a batch
        grid = replace(price_grid(priced, latency), within=grid.within)
    # A setting that misses targets which another one meets is no option.
    allowed = np.flatnonzero(meets[1:] if meets[1:].any() else ~meets[1:])
    weights = resamples(len(trace.requests), draws, seed)
    objective = Objective(grid.tokens[1:][allowed], grid.seconds[1:][allowed], weights)
    second = folds([r.category for r in trace.requests])
    held_out = can_hold_back(second)
    option = choose(objective)
    halves = (choose(objective.on(~second)), choose(objective.on(second))) if held_out else None
    best, at = ordered[allowed[option]], 1 + int(allowed[option])
    base = 1 + ordered.index(default)

    def over(k: int, confidence: float = CONFIDENCE) -> Gain:
        pair = grid.tokens[k], grid.seconds[k]
        return cross_fitted(objective, second, pair, option, halves, confidence)

    # As where settings are served: a gain beyond the search's interval, one prompt having none.
    low = over(0, SEARCH_CONFIDENCE)[1 if len(trace.requests) > 1 else 0]
    rates = grid.tokens.sum(axis=1) / grid.seconds.sum(axis=1)
    deploy = to_deploy(low > 1, bool(meets[at]), bool(meets[0])) if reachable else MISSED
    row = row_of(
        engine.name, grid, latency, setting=best, deploy=deploy, served_tok_s=None, gain=over(0),
        decode_tok_s=float(rates[at]), decode_gain=over(0), default=default,
        default_gain=1.0 if at == base else over(base)[0], within=float(grid.within[at]),
        outside=grid.outside[[0, at]].max(), held_out=held_out,
    )  # fmt: skip
    row["warnings"] = about_row(row)
    warnings = [*about_recording(trace, latency), *about_targets([row], slo)]
    if engine.threshold not in trace.signals:
        warnings.append(
            f"the trace lacks the draft signal {engine.threshold} (`draftsim profile` records it): "
            "no threshold was searched"
        )
    if deploy == ON:
        warnings += summed_up([row])
        return Tuned(engine.name, asked[best], [row], warnings)
    if deploy == OFF:
        warnings.append(
            f"the best setting, {best}, gives {row['gain']:.3g}x no speculation "
            f"({rates[0]:.3g} tokens/s): {engine.off}"
        )
        row = plain_row(row, grid, None, float(grid.within[0]))
    return Tuned(engine.name, None, [row], [*warnings, *summed_up([row])])
