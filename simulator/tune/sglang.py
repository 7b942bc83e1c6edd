"""SGLang's adaptive steps: which candidates each batch-size slot may move between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from policies.batch import BatchPolicy
from policies.sglang import SGLangAdaptive
from simulator.serving.arrivals import ClosedLoop
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Limits
from simulator.tune.choice import (
    CONFIDENCE,
    Objective,
    can_hold_back,
    choose,
    folds,
    resamples,
)
from simulator.tune.costs import DEFAULT_LENGTHS, Grid, Slo, default_batches, fixed_logs, price_grid
from simulator.tune.evidence import about_batches, about_recording, about_row, summed_up
from simulator.tune.settings import Tuned
from traces.errors import DraftsimError
from traces.latency import LatencyTable
from traces.trace import Trace

Floats = npt.NDArray[np.float64]

ROUNDS = 200
"""Iterations a simulation should last at the least: SGLang's rule moves every fifth."""


def tune_sglang(
    trace: Trace,
    latency: LatencyTable,
    batches: Sequence[int] | None = None,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    slo: Slo | None = None,
    draws: int = 12,
    seed: int = 0,
) -> Tuned:
    """``--speculative-adaptive-config``: candidate steps per batch-size slot.

    The rule that moves between candidates sees accepted drafts and no cost, so the
    candidates must keep it from lengths that do not pay.  For each batch size a few lists
    are built from the lengths that pay there (the best for all prompts, the best of each
    category, half of it, none) and SGLang's own; each is served at that batch in simulated
    time, and the one with the fewest steps is taken that the best does not beat.  A slot
    begins at the geometric middle between two searched batches.

    Gains are over SGLang's default configuration.  Every draw serves resampled prompts, under
    all lists alike; the interval is the bootstrap t interval from the spread of the draws
    (Efron & Tibshirani 1993, ch. 12).  Half of the prompts choose, in half of the draws;
    the others tell the gain.

    Parameters
    ----------
    batches:
        Batch sizes searched; by default powers of two up to the largest measured batch.
    lengths:
        Steps tried.
    slo:
        Targets; throughput counts in proportion to the requests that meet them.
    draws, seed:
        Resamples of the prompts, an even number >= 4.

    Raises
    ------
    DraftsimError
        For impossible batches or draws, or an empty recording.
    """
    sizes = sorted(set(batches or default_batches(latency)))
    if sizes[0] < 1:
        raise DraftsimError(f"batches holds {sizes[0]}, expected whole numbers >= 1")
    if draws < 4 or draws % 2:
        raise DraftsimError(f"draws is {draws}, expected an even number >= 4")
    logs = fixed_logs(trace, sorted({0, *lengths}))
    most = max(logs)
    second = folds([r.category for r in trace.requests])
    held_out = can_hold_back(second)
    chosen_from = np.flatnonzero(~second if held_out else np.ones_like(second))
    told_from = np.flatnonzero(second if held_out else np.ones_like(second))
    resampled = [
        _resample(trace, chosen_from if i < draws // 2 else told_from, seed + i)
        for i in range(draws)
    ]
    slots: dict[int, list[int]] = {}
    rows = []
    for batch in sizes:
        grid = price_grid(list(logs.values()), latency, batch, slo=slo)
        made = _lists(grid, list(logs), [r.category for r in trace.requests])
        default = _default_steps(batch, most)
        lists = sorted({*made, default}, key=lambda steps: (sum(steps), len(steps), steps))
        rates, within = _serve(resampled, latency, batch, lists, slo)
        half = draws // 2
        option = _pick(rates[:, :half])
        held = rates[option, half:] / rates[lists.index(default), half:]
        spread = 0.0 if lists[option] == default else _reach(held)
        gain = float(held.mean())
        row: dict[str, Any] = {
            "engine": "sglang", "batch": batch, "context": None,
            "setting": " ".join(map(str, lists[option])),
            "throughput_tok_s": float(rates[option].mean()),
            "default": " ".join(map(str, default)),
            "gain": gain, "gain_lo": gain - spread, "gain_hi": gain + spread,
            "within_slo": float(within[option]), "outside": float(grid.outside.max()),
            "held_out": held_out, "served_gain": None,
            "scaled": "scaled" in latency.meta,
        }  # fmt: skip
        row["warnings"] = about_row(row)
        rows.append(row)
        slots[batch] = list(lists[option])
    document = _document(slots)
    warnings = [*about_recording(trace, latency), *about_batches(sizes), *summed_up(rows)]
    if all(steps == [0] for steps in slots.values()):
        warnings.append("speculation pays at no batch searched: leave it off")
    warnings.append("SGLang adapts the steps of EAGLE and EAGLE3 drafts with topk 1 only")
    longest = max(max(steps) for steps in slots.values())
    return Tuned("sglang", document, SGLangAdaptive(document), rows, warnings, longest)


def _lists(grid: Grid, options: Sequence[int], categories: Sequence[str]) -> set[tuple[int, ...]]:
    """Candidate lists made of the lengths that pay at one batch."""
    weights = resamples(len(categories), 500, 0)
    objective = Objective(grid.tokens, grid.seconds, weights)
    best = options[choose(objective)]
    names = np.array(categories)
    apart = {
        options[int(np.argmax(objective.on(names == name).rates))]
        for name in dict.fromkeys(categories)
    }
    lists = {(best,), (0, best), ((best + 1) // 2, best), (best, *apart), (0, best, *apart)}
    return {tuple(sorted(set(steps))) for steps in lists}


def _default_steps(batch: int, most: int) -> tuple[int, ...]:
    """Candidates that SGLang's default has for `batch`, none above the longest recorded."""
    slots = {int(k): v for k, v in DEFAULT_CONFIG.items()}
    steps = slots[max(size for size in slots if size <= batch)]
    return tuple(s for s in steps if s <= most) or (most,)


DEFAULT_CONFIG: Mapping[str, tuple[int, ...]] = {
    "1": (1, 3, 5, 7), "8": (0, 1, 3), "32": (0, 1), "64": (0,),
}  # fmt: skip
"""Candidate steps of SGLang 0.5.23, ``DEFAULT_ADAPTIVE_CONFIG``."""


def _hysteresis(batch: int) -> float:
    """``down_hysteresis`` of the default's slot: a longer memory for single streams."""
    return -0.25 if batch < 8 else 0.0


def _policy(batch: int, steps: Sequence[int]) -> BatchPolicy:
    settings = {"candidate_steps": list(steps), "down_hysteresis": _hysteresis(batch)}
    return SGLangAdaptive({"1": settings})


def _document(slots: Mapping[int, list[int]]) -> dict[str, Any]:
    """Slots with equal neighbours merged; one begins at the geometric middle to the last."""
    document: dict[str, Any] = {}
    last: dict[str, Any] | None = None
    before = 0
    for batch, steps in slots.items():
        start, before = math.isqrt(before * batch) + 1, batch
        settings = {
            "candidate_steps": steps, "up_hysteresis": 0.0,
            "down_hysteresis": _hysteresis(batch), "ceiling_coeff": 0,
        }  # fmt: skip
        if settings != last:
            document[str(start)] = settings
            last = settings
    return document


def _resample(trace: Trace, prompts: npt.NDArray[np.int64], seed: int) -> Trace:
    return trace.select(np.random.default_rng(seed).choice(prompts, len(prompts)).tolist())


def _serve(
    traces: Sequence[Trace], latency: LatencyTable, batch: int,
    lists: Sequence[tuple[int, ...]], slo: Slo | None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Tokens per second that count, (lists, draws), and the share within targets, (lists,)."""
    targets = slo or Slo()
    rates = np.empty((len(lists), len(traces)))
    within = np.empty_like(rates)
    for j, trace in enumerate(traces):
        mean = trace.tokens / len(trace.requests)
        base = Scenario(
            ClosedLoop(batch), Limits(max_batch=batch),
            requests=max(len(trace.requests), 2 * batch, int(batch * ROUNDS / mean)),
            ttft_target_s=targets.ttft_s, tpot_target_s=targets.tpot_s,
        )  # fmt: skip
        for i, steps in enumerate(lists):
            # An engine that drafts anywhere prefills the draft model, at 0 steps as well.
            longest = max(*steps, 1)
            row = simulate(
                trace, latency, _policy(batch, steps),
                replace(base, limits=replace(base.limits, lookahead=longest)),
            ).row()  # fmt: skip
            within[i, j] = row["within_targets"] if slo else 1.0
            rates[i, j] = row["throughput_tok_s"] * within[i, j]
    return rates, np.asarray(within.mean(axis=1))


def _pick(rates: Floats) -> int:
    """The first list that the best does not beat beyond the interval of their ratio."""
    best = int(np.argmax(rates.mean(axis=1)))
    for i, own in enumerate(rates):
        gain = rates[best] / np.where(own > 0, own, np.nan)
        if i == best or gain.mean() - _reach(gain) <= 1:
            return i
    return best


def _reach(values: Floats) -> float:
    """Half the width of the 95 % t interval whose standard error the draws' spread is."""
    return float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2) * np.std(values, ddof=1))
