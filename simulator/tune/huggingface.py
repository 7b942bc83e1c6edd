"""transformers' assisted generation: length, schedule and confidence threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from policies.basic import Autoregressive
from policies.huggingface import Confidence, HFHeuristic
from simulator.pricing import autoregressive
from simulator.tune.choice import (
    Choice,
    Objective,
    can_hold_back,
    choose,
    cross_fitted,
    folds,
    gain,
    resamples,
)
from simulator.tune.costs import Slo, longest_draft, price_grid
from simulator.tune.evidence import about_recording, about_row, origin, summed_up
from simulator.tune.settings import Tuned
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.latency.table import LatencyTable
from traces.replay.decoder import replay
from traces.replay.rounds import RoundLog


class Setting(NamedTuple):
    """The three keys that transformers reads from the draft's generation config."""

    tokens: int
    schedule: str
    threshold: float

    def policy(self) -> Confidence:
        """transformers 5.23 under this setting, scikit-learn installed."""
        if self.schedule == "constant":
            # The threshold is re-fitted within each call, as 5.23 does.
            update: Any = "in_call" if self.threshold else "off"
            return Confidence(self.tokens, self.threshold, update)
        persists = self.schedule == "heuristic"
        update = "in_call" if self.threshold and not persists else "off"
        return HFHeuristic(
            self.tokens, "sent", self.threshold, update,
            "persistent" if persists else "transient",
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.tokens}, {self.schedule}, {self.threshold:g}"


DEFAULT = Setting(20, "constant", 0.4)
"""transformers since 4.45."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
CAPS = (3, 5, 10, 20)


def options(signals: bool) -> list[Setting]:
    """Settings searched; those with a threshold only where the trace holds the signal.

    ``heuristic`` is searched without a threshold: with one, what carries over from call to
    call differs between versions.
    """
    found = [Setting(n, "constant", 0.0) for n in LENGTHS]
    found += [Setting(n, s, 0.0) for s in ("heuristic_transient", "heuristic") for n in (1, 3, 5)]
    if signals:
        found += [Setting(n, "constant", t) for n in CAPS for t in THRESHOLDS]
        found += [Setting(5, "heuristic_transient", t) for t in THRESHOLDS]
    return found


def tune_huggingface(
    trace: Trace,
    latency: LatencyTable,
    *,
    slo: Slo | None = None,
    draws: int = 1000,
    seed: int = 0,
    settings: Sequence[Setting] | None = None,
) -> Tuned:
    """``num_assistant_tokens``, its schedule and ``assistant_confidence_threshold``.

    Every setting is replayed as transformers 5.23 decodes (the first verification includes
    the prompt, batch 1), and of those that the best does not beat beyond the interval the
    one is taken that drafts least.  Gains are over transformers' default, 20 tokens under
    a constant schedule with threshold 0.4; where the trace lacks the draft's probability, the
    default cannot be replayed and 20 tokens without a threshold stand for it.

    Settings that draft past the recorded tails are left out.

    Raises
    ------
    DraftsimError
        If nothing can be replayed.
    """
    signals = "prob" in trace.signals
    default = DEFAULT if signals else DEFAULT._replace(threshold=0.0)
    most = longest_draft(trace)
    if most is not None:
        default = default._replace(tokens=min(default.tokens, most))
    logs: dict[Setting, RoundLog] = {}
    for setting in dict.fromkeys([default, *(settings or options(signals))]):
        if most is not None and setting.tokens > most:
            continue
        try:
            logs[setting] = replay(trace, setting.policy(), name=str(setting), first=0)
        except TailError:
            continue
    if default not in logs:
        raise DraftsimError(
            f"transformers' default ({default}) drafts past the recorded tails: "
            "record with a larger --max-gamma"
        )
    ordered = sorted(logs, key=lambda s: int(logs[s].rounds["draft_forwards"].sum()))
    grid = price_grid([logs[s] for s in ordered], latency, slo=slo)
    plain = price_grid([autoregressive(logs[default])], latency, slo=slo)
    weights = resamples(len(trace.requests), draws, seed)
    objective = Objective(grid.tokens, grid.seconds, weights)
    second = folds([r.category for r in trace.requests])
    held_out = can_hold_back(second)
    option, base = choose(objective), ordered.index(default)
    halves = (choose(objective.on(~second)), choose(objective.on(second))) if held_out else None
    chosen = cross_fitted(
        objective, second, (objective.tokens[base], objective.seconds[base]), option, halves,
        default_option=base,
    )  # fmt: skip
    best = ordered[option]
    plain_rate = float(plain.tokens.sum() / plain.seconds.sum())
    pays = plain_rate < objective.rates[option]
    if not pays:
        base_pair = np.stack([objective.tokens[base], objective.seconds[base]])
        own = np.stack([plain.tokens[0], plain.seconds[0]])
        chosen = Choice(option, *gain(own, base_pair, weights))
    row: dict[str, Any] = {
        "engine": "hf", "batch": 1, "context": None, "setting": str(best) if pays else "off",
        "deploy": "on" if pays else "off",
        "throughput_tok_s": float(objective.rates[option]) if pays else plain_rate,
        "default": str(default),
        "gain": chosen.gain, "gain_lo": chosen.lo, "gain_hi": chosen.hi,
        "within_slo": float(grid.within[option]), "outside": float(grid.outside[option]),
        "held_out": held_out or not pays, "served_gain": None, **origin(latency, 1),
    }  # fmt: skip
    row["warnings"] = about_row(row)
    warnings = [*about_recording(trace, latency), *summed_up([row])]
    if not signals:
        warnings.append("the trace lacks the draft's probability: no threshold was searched")
    if default.tokens < DEFAULT.tokens:
        warnings.append(f"the recording is cut at {most} drafts, and so is the default")
    if not pays:
        warnings.append(
            f"plain decoding is faster ({plain_rate:.3g} tokens/s): pass no assistant model"
        )
    if not pays:
        return Tuned("hf", None, Autoregressive(), [row], warnings)
    document = {
        "num_assistant_tokens": best.tokens,
        "num_assistant_tokens_schedule": best.schedule,
        "assistant_confidence_threshold": best.threshold,
    }
    return Tuned("hf", document, best.policy(), [row], warnings)
