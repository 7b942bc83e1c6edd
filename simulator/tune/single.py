"""Settings of engines that decode one request: transformers' assisted generation, llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from policies.lengths.llamacpp import LlamaCppDraft
from simulator.bootstrap import CONFIDENCE, Interval, resamples
from simulator.pricing import autoregressive
from simulator.targets import Targets
from simulator.tune import gains
from simulator.tune.costs import longest_draft, price_grid
from simulator.tune.formats import check_settings, hf_setting, llamacpp_setting
from simulator.tune.served import SEARCH_CONFIDENCE
from simulator.tune.settings import Tuned, about_row, decided, row_of
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError, TailError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many

SingleSetting = Mapping[str, Any]
"""A document that an engine reads: the longest draft comes first, the threshold last."""


def values_said(setting: SingleSetting) -> str:
    """Return the values of a setting, as rows show them."""
    return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in setting.values())


HF_DEFAULT = hf_setting(20, threshold=0.4)
"""transformers since 4.45."""


def huggingface_options(signals: bool) -> list[SingleSetting]:
    """Return settings searched; those with a threshold only where the trace holds the signal.

    ``heuristic`` is searched without a threshold: with one, what carries over from call to
    call differs between versions.
    """
    found: list[SingleSetting] = [hf_setting(n) for n in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)]
    found += [hf_setting(n, s) for s in ("heuristic_transient", "heuristic") for n in (1, 3, 5)]
    if signals:
        thresholds = (0.2, 0.4, 0.6, 0.8)
        found += [hf_setting(n, threshold=t) for n in (3, 5, 10, 20) for t in thresholds]
        found += [hf_setting(5, "heuristic_transient", t) for t in thresholds]
    return found


LLAMACPP_DEFAULT = llamacpp_setting(3)
"""llama.cpp since May 2026; 16, 0, 0.75 before."""


def llamacpp_options(signals: bool) -> list[SingleSetting]:
    """Return settings to search; thresholds only if the trace holds the signal they need."""
    found: list[SingleSetting] = [llamacpp_setting(n) for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)]
    if signals:
        thresholds = (0.2, 0.4, 0.6, 0.75, 0.9)
        found += [
            llamacpp_setting(n, m, p) for n in (3, 5, 8, 16) for m in (0, 2) for p in thresholds
        ]
    return found


def mirrored(log: RoundLog) -> RoundLog:
    """Return the rounds with the draft's pass over what was verified, its catching up.

    After every pass of the target the server runs the draft model over the same tokens; drafting
    then begins with a pass over the target's own.  Source of the behaviour: ggml-org/llama.cpp,
    ``common/speculative.cpp``, ``common_speculative_impl_draft_simple::process`` (2026).
    """
    rounds = np.array(log.rounds)
    rounds["catch_up"] = rounds["drafted"] + 1
    rounds["draft_forwards"] += 1
    return replace(log, rounds=rounds)


class SingleEngine(NamedTuple):
    """An engine with one setting, for a single request."""

    default: SingleSetting
    """The engine's own; a trace without the signal has its longest draft alone."""
    options: Callable[[bool], list[SingleSetting]]
    """Settings searched; True if the trace holds the signal."""
    threshold: str
    """Draft signal that the engine compares."""
    first: int
    """Output position that decoding begins at."""
    alone: str
    """Why it has one setting."""
    off: str
    """Advice if no setting gives a gain."""
    worked: Callable[[RoundLog], RoundLog] | None = None
    """Adds to the rounds the passes that this engine makes for them."""
    said: tuple[str, ...] = ()
    """Warnings on every setting."""


ONE_REQUEST = {
    "hf": SingleEngine(
        HF_DEFAULT, huggingface_options, "prob", 0,
        "assisted generation of hf decodes one request", "pass no assistant model",
    ),
    "llamacpp": SingleEngine(
        LLAMACPP_DEFAULT, llamacpp_options, *LlamaCppDraft.reads, 1,
        "llama.cpp's server has one setting for every batch size, no table of them",
        "start the server without a draft model", mirrored,
        (
            "one setting serves every load: with more slots (--parallel) drafts gain less",
            "llama.cpp's draft model also reads every verified batch: this is priced here, and not "
            "in `draftsim simulate`",
        ),
    ),
}  # fmt: skip
"""Engines by name."""


def tune_single(
    engine: str, trace: Trace, latency: LatencyTable, *, slo: Targets | None = None,
    draws: int = 1000, seed: int = 0, settings: Sequence[SingleSetting] | None = None,
) -> Tuned:  # fmt: skip
    """Return the setting of an engine in `ONE_REQUEST` that drafts least of those not beaten.

    Every setting is replayed as the engine decodes: transformers 5.23, whose first verification
    includes the prompt, or a slot of llama.cpp's server, whose draft model also reads every
    verified batch (`mirrored`).  The best must beat a setting beyond its interval.  The gain is
    over no speculation, ``default_gain`` over the engine's default.  Where the trace lacks the
    signal of the default's threshold, its draft length without one takes its place.  Settings that
    draft past the recorded tails are left out.

    Raises
    ------
    DraftsimError
        If nothing can be replayed.
    """
    own = ONE_REQUEST[engine]
    signals = own.threshold in trace.signals
    tokens, bound = next(iter(own.default)), longest_draft(trace)
    # The threshold is the last value of a setting.
    default = own.default if signals else {**own.default, [*own.default][-1]: 0.0}
    most = math.inf if bound is None else bound
    cut = {**default, tokens: min(default[tokens], most)}
    base_text = values_said(cut)
    searched = settings or own.options(signals)
    asked = {values_said(s): s for s in (cut, *searched) if s[tokens] <= most}
    policies: dict[str, Any] = {text: check_settings(engine, s) for text, s in asked.items()}
    replayed = replay_many(
        trace, policies, first=own.first, leave_out=lambda _, e: isinstance(e, TailError)
    )
    logs = {log.policy: log if own.worked is None else own.worked(log) for log in replayed}
    if base_text not in logs:
        raise DraftsimError(
            f"the default of {engine} ({base_text}) drafts past the recorded tails: "
            "record with a larger --max-gamma"
        )
    ordered = sorted(logs, key=lambda s: int(logs[s].rounds["draft_forwards"].sum()))
    # The first option is no speculation.
    priced = [autoregressive(logs[base_text]), *(logs[s] for s in ordered)]
    grid = price_grid(priced, latency, slo=slo)
    meets = grid.within >= (0.0 if slo is None else slo.share)
    reachable = bool(meets.any())
    if not reachable:  # then all tokens count, as in a batch
        grid = replace(price_grid(priced, latency), within=grid.within)
    # A setting that misses targets which another one meets is no option.
    allowed = np.flatnonzero(meets[1:] if meets[1:].any() else ~meets[1:])
    weights = resamples(len(trace.requests), draws, seed)
    objective = gains.Objective(grid.tokens[1:][allowed], grid.seconds[1:][allowed], weights)
    second = gains.folds([r.category for r in trace.requests])
    held_out = gains.can_hold_back(second)
    option = gains.choose(objective)
    halves = None
    if held_out:
        halves = gains.choose(objective.on(~second)), gains.choose(objective.on(second))
    best, at = ordered[allowed[option]], 1 + int(allowed[option])
    base = 1 + ordered.index(base_text)

    def over(k: int, confidence: float = CONFIDENCE) -> Interval:
        pair = grid.tokens[k], grid.seconds[k]
        return gains.cross_fitted(objective, second, pair, option, halves, confidence)

    # As where settings are served: a gain beyond the search's interval, one prompt having none.
    searched_gain = over(0, SEARCH_CONFIDENCE)
    low = searched_gain.low if len(trace.requests) > 1 else searched_gain.value
    rates = grid.tokens.sum(axis=1) / grid.seconds.sum(axis=1)
    deploy = gains.MISSED
    if reachable:
        deploy = gains.to_deploy(low > 1, bool(meets[at]), bool(meets[0]))
    row = row_of(
        engine, grid, latency, setting=best, deploy=deploy, served_tok_s=None, gain=over(0),
        decode_tok_s=float(rates[at]), decode_gain=over(0), default=base_text,
        default_gain=1.0 if at == base else over(base).value, within_slo=float(grid.within[at]),
        outside=float(grid.outside[[0, at]].max()), held_out=held_out,
    )  # fmt: skip
    row["warnings"] = about_row(row)
    warnings = list(own.said)
    if not signals:
        warnings.append(
            f"the trace lacks the draft signal {own.threshold} (`draftsim profile` records it): "
            "no threshold was searched"
        )
    if own.default[tokens] > most:
        warnings.append(
            f"recorded drafts have at most {counted(int(most), 'token')}, so the default is cut "
            "there"
        )
    if latency.meta.get("passes_apart") is False:
        warnings.append(
            "these latencies come from runs that cannot separate a draft pass from a verified "
            "token, and the threshold depends on that: calibrate with runs at two thresholds or "
            "two concurrencies"
        )
    if deploy == gains.OFF:
        warnings.append(f"the best setting, {best}, gives {row['gain']:.3g}x no speculation")
    return decided(
        engine, trace, latency, slo, [row], [grid], {1: (None, float(grid.within[0]))},
        asked[best], told=warnings, remedy=own.off,
    )  # fmt: skip
