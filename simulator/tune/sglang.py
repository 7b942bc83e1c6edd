"""SGLang's adaptive steps: which candidates each batch-size slot may move between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.batch.base import BatchPolicy
from policies.batch.sglang import SGLangAdaptive
from policies.lengths.basic import Autoregressive
from simulator.forks import results_of
from simulator.serving.arrivals import ClosedLoop
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Limits
from simulator.serving.station import Policy
from simulator.tune.choice import (
    CONFIDENCE,
    Objective,
    can_hold_back,
    choose,
    folds,
    resamples,
    shared_by_neighbours,
)
from simulator.tune.costs import DEFAULT_LENGTHS, Grid, Slo, default_batches, fixed_logs, price_grid
from simulator.tune.evidence import (
    about_batches,
    about_deploying,
    about_recording,
    about_row,
    about_served,
    origin,
    summed_up,
)
from simulator.tune.repair import mended
from simulator.tune.served import counted_rate, deployed, unbeaten
from simulator.tune.settings import Tuned, switched_off
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROUNDS = 200
"""Iterations a simulation should last at the least: SGLang's rule moves every fifth."""
SINGLE = (1, 2, 3, 5)
"""Fixed lengths among the lists: what people set by hand has to be among the rivals."""


def tune_sglang(
    trace: Trace,
    latency: LatencyTable,
    batches: Sequence[int] | None = None,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    slo: Slo | None = None,
    draws: int = 8,
    seed: int = 0,
) -> Tuned:
    """``--speculative-adaptive-config``: candidate steps per batch-size slot.

    The rule that moves between candidates sees accepted drafts and no cost, so the
    candidates must keep it from lengths that do not pay.  A few lists are built from the
    lengths that pay at some batch (the best for all prompts, the best of each category, half
    of it, none), single lengths and SGLang's own; all are served at every batch in simulated
    time, and of those that the best does not beat the one with the fewest steps is taken.
    Neighbours that some list serves alike share a slot, which begins just above the searched
    batch before: there an engine that pads batches to the sizes of its graphs, as far as these
    are among the batches searched, finds the same slot as one that does not.  Then the slots
    are served together and mended, and compared with an engine that never drafts, as in
    `simulator.tune.vllm.tune_vllm`.

    Gains are over SGLang's default configuration.  Every draw serves resampled prompts, under
    all lists alike; the interval is the bootstrap t interval from the spread of the draws
    (Efron & Tibshirani 1993, ch. 12).  Half of the draws take their prompts from one half
    of the recording, half from the other; the gain is that of lists chosen on the other half.

    Parameters
    ----------
    batches:
        Batch sizes searched; by default powers of two up to the largest measured batch.
    lengths:
        Steps tried.
    slo:
        Targets; only tokens of requests that meet them count.
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
    plain, logs = fixed_logs(trace, sorted({0, *lengths}))
    options = list(logs)
    second = folds([r.category for r in trace.requests])
    held_out = can_hold_back(second)
    late = np.arange(draws) >= draws // 2
    halves = [np.flatnonzero(second == part if held_out else second | True) for part in late]
    drawn = [
        trace.select(np.random.default_rng(seed + i).choice(half, len(half)).tolist())
        for i, half in enumerate(halves)
    ]
    grids = [price_grid([plain, *logs.values()], latency, batch, slo=slo) for batch in sizes]
    names = [r.category for r in trace.requests]
    defaults = [_default_steps(batch, max(options)) for batch in sizes]
    found = {steps for grid in grids for steps in _lists(grid, options, names)}
    found |= {(k,) for k in SINGLE if k <= max(options)} | set(defaults)
    lists = sorted(found, key=lambda steps: (sum(steps), len(steps), steps))
    policies: list[list[Policy]] = [
        [Autoregressive(), *(_policy(b, steps) for steps in lists)] for b in sizes
    ]
    rates, met = _serve(drawn, latency, sizes, policies, slo)
    off, alone, within = rates[:, 0], rates[:, 1:], met[:, 1:]

    def chosen_on(part: npt.NDArray[np.bool_]) -> Ints:
        good = np.array([unbeaten(rates[:, part]) for rates in alone])[:, None]
        fewest: Ints = np.argmax(shared_by_neighbours(good), axis=2)
        return fewest

    @cache
    def together(chosen: tuple[int, ...]) -> Floats:
        slots = [(b, lists[k]) for b, k in zip(sizes, chosen, strict=True)]
        policy = SGLangAdaptive(_document(slots))
        return _serve(drawn, latency, sizes, [[policy]] * len(sizes), slo)[0][:, 0]

    first = chosen_on(np.ones_like(late))
    best = mended(first, list(alone), lambda table: together(tuple(table[:, 0].tolist())))
    deploy = deployed(best.rates, off)
    warnings = [*about_recording(trace, latency), *about_batches(sizes)]
    warnings += about_deploying(sizes, best.rates, off)
    if "on" not in deploy:
        return switched_off("sglang", grids, latency, warnings)
    told = np.where(late, chosen_on(~late), chosen_on(late))  # (batches, draws)
    rows = []
    for i, batch in enumerate(sizes):
        option, kept = int(best.table[i, 0]), bool(best.table[i, 0] == first[i, 0])
        own = told[i] if held_out and kept else np.full(draws, option)
        base = lists.index(defaults[i])
        gains = alone[i][own, np.arange(draws)] / alone[i][base]
        gain, reach = float(gains.mean()), _reach(gains)
        if option == base:
            gain, reach = 1.0, 0.0
        elif min(map(len, halves)) < 2:
            reach = float("nan")  # one prompt resampled is that prompt again
        rival = max(float(alone[i][best.best[i]].mean()), float(off[i].mean()))
        row: dict[str, Any] = {
            "engine": "sglang", "batch": batch, "context": None,
            "setting": _words(lists[option]), "deploy": deploy[i],
            "throughput_tok_s": float(best.rates[i].mean()),
            "default": _words(defaults[i]),
            "gain": gain, "gain_lo": gain - reach, "gain_hi": gain + reach,
            "within_slo": float(within[i][option]), "outside": float(grids[i].outside.max()),
            "held_out": held_out and kept,
            "served_gain": float(best.rates[i].mean()) / max(rival, 1e-300),
            **origin(latency, batch),
        }  # fmt: skip
        said = about_served(
            f"steps {_words(lists[best.best[i]])}", float(best.gains[i]), kept, bool(best.worse[i])
        )
        rows.append({**row, "warnings": [*about_row(row), *said]})
    warnings += summed_up(rows)
    warnings.append("SGLang adapts the steps of EAGLE and EAGLE3 drafts with topk 1 only")
    document = _document([(b, lists[k]) for b, k in zip(sizes, best.table[:, 0], strict=True)])
    return Tuned("sglang", document, SGLangAdaptive(document), rows, warnings)


def _lists(grid: Grid, options: Sequence[int], categories: Sequence[str]) -> set[tuple[int, ...]]:
    """Candidate lists made of the lengths that pay at one batch; the grid's first is no draft."""
    weights = resamples(len(categories), 500, 0)
    objective = Objective(grid.tokens[1:], grid.seconds[1:], weights)
    best = options[choose(objective)]
    names = np.array(categories)
    apart = {
        options[int(np.argmax(objective.on(names == name).rates))]
        for name in dict.fromkeys(categories)
    }
    lists = {(best,), (0, best), ((best + 1) // 2, best), (best, *apart)}
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
    """One list at every batch, with the hysteresis of its slot."""
    settings = {"candidate_steps": list(steps), "down_hysteresis": _hysteresis(batch)}
    return SGLangAdaptive({"1": settings})


def _document(slots: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """Slots with equal neighbours merged, each from just above the batch before."""
    document: dict[str, Any] = {}
    last: dict[str, Any] | None = None
    before = 0
    for batch, steps in slots:
        start, before = before + 1, batch
        settings = {
            "candidate_steps": list(steps), "up_hysteresis": 0.0,
            "down_hysteresis": _hysteresis(batch), "ceiling_coeff": 0,
        }  # fmt: skip
        if settings != last:
            document[str(start)] = settings
            last = settings
    return document


def _words(steps: Sequence[int]) -> str:
    return " ".join(map(str, steps))


def _serve(
    traces: Sequence[Trace], latency: LatencyTable, batches: Sequence[int],
    policies: Sequence[Sequence[Policy]], slo: Slo | None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Tokens per second that count, (batches, policies, draws); share within, (batches, policies).

    Each batch has policies of its own.
    """
    targets = slo or Slo()

    def rates(trace: Trace, batch: int, policy: Policy) -> tuple[float, float]:
        mean = trace.tokens / len(trace.requests)
        load = Scenario(
            ClosedLoop(batch), Limits(max_batch=batch),
            requests=max(len(trace.requests), 2 * batch, int(batch * ROUNDS / mean)),
            ttft_target_s=targets.ttft_s, tpot_target_s=targets.tpot_s,
        )  # fmt: skip
        run = simulate(trace, latency, policy, load)
        return counted_rate(run), run.row()["within_targets"] if slo else 1.0

    parts = [
        partial(rates, trace, batch, policy)
        for batch, own in zip(batches, policies, strict=True) for policy in own for trace in traces
    ]  # fmt: skip
    found = np.array(results_of(parts, len(parts) * traces[0].tokens))
    found = found.reshape(len(batches), -1, len(traces), 2)
    return found[..., 0], found[..., 1].mean(axis=2)


def _reach(values: Floats) -> float:
    """Half the width of the 95 % t interval whose standard error the draws' spread is."""
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2) * np.std(values, ddof=1))
