"""transformers' assisted generation: length, schedule and confidence threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from simulator.targets import Targets
from simulator.tune.costs import longest_draft
from simulator.tune.formats import HF_KEYS
from simulator.tune.settings import Tuned
from simulator.tune.single import SingleEngine, SingleSetting, tune_single
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.latency.table import LatencyTable


def _setting(tokens: int, schedule: str = "constant", threshold: float = 0.0) -> dict[str, Any]:
    return dict(zip(HF_KEYS, (tokens, schedule, threshold), strict=True))


DEFAULT = _setting(20, threshold=0.4)
"""transformers since 4.45."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
CAPS = (3, 5, 10, 20)


def options(signals: bool) -> list[SingleSetting]:
    """Return settings searched; those with a threshold only where the trace holds the signal.

    ``heuristic`` is searched without a threshold: with one, what carries over from call to
    call differs between versions.
    """
    found: list[SingleSetting] = [_setting(n) for n in LENGTHS]
    found += [_setting(n, s) for s in ("heuristic_transient", "heuristic") for n in (1, 3, 5)]
    if signals:
        found += [_setting(n, threshold=t) for n in CAPS for t in THRESHOLDS]
        found += [_setting(5, "heuristic_transient", t) for t in THRESHOLDS]
    return found


def tune_huggingface(
    trace: Trace,
    latency: LatencyTable,
    *,
    slo: Targets | None = None,
    draws: int = 1000,
    seed: int = 0,
    settings: Sequence[SingleSetting] | None = None,
) -> Tuned:
    """Tune ``num_assistant_tokens``, its schedule and ``assistant_confidence_threshold``.

    Every setting is replayed as transformers 5.23 decodes (the first verification includes
    the prompt, batch 1), and of those that the best does not beat beyond the interval the
    one is taken that drafts least.  The gain is over no speculation, ``default_gain`` over
    transformers' default, 20 tokens under a constant schedule with threshold 0.4.  Where the trace
    lacks the draft's probability, the default cannot be replayed, and 20 tokens without a
    threshold take its place.

    Settings that draft past the recorded tails are left out.

    Raises
    ------
    DraftsimError
        If nothing can be replayed.
    """
    signals = "prob" in trace.signals
    default = DEFAULT if signals else _setting(DEFAULT[HF_KEYS[0]])
    engine = SingleEngine("hf", default, first=0, off="pass no assistant model", threshold="prob")
    found = tune_single(
        engine, trace, latency, settings or options(signals), slo=slo, draws=draws, seed=seed
    )
    most = longest_draft(trace)
    if most is None or most >= DEFAULT[HF_KEYS[0]]:
        return found
    cut = f"recorded drafts have at most {counted(most, 'token')}, so the default is cut there"
    return replace(found, warnings=[*found.warnings, cut])
