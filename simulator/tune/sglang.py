"""SGLang's adaptive steps: which candidates each batch-size slot may move between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats, Ints
from policies.batch.base import Policy
from policies.batch.sglang import DEFAULT_CONFIG, SGLangAdaptive
from policies.lengths.basic import Autoregressive
from simulator.bootstrap import ratio, resamples
from simulator.executors import results_of
from simulator.serving.scenario import Scenario
from simulator.targets import Targets
from simulator.tune import costs, gains, served
from simulator.tune.formats import fixed_steps, merged
from simulator.tune.settings import Tuned, about_row, about_served, decided, row_of
from simulator.tune.vllm import tune_vllm
from traces.acceptance.trace import Trace
from traces.aliases import Count, Progress, silent
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

ROUNDS = 200
"""Iterations a simulation should last at the least: SGLang's rule moves every fifth."""
SINGLE = (1, 2, 3, 5)
"""Fixed lengths among the lists: what people set by hand has to be among the rivals."""


def tune_sglang(
    trace: Trace,
    latency: LatencyTable,
    batches: Sequence[int] | None = None,
    *,
    lengths: Sequence[int] = costs.DEFAULT_LENGTHS,
    slo: Targets | None = None,
    draws: int = gains.DRAWS,
    seed: int = 0,
    progress: Progress = silent,
) -> Tuned:
    """Tune ``--speculative-adaptive-config``: candidate steps per batch-size slot.

    SGLang's rule moves between candidates by accepted drafts, without costs, so the candidates must
    exclude lengths that give no speedup.  A few lists are built from lengths that give a speedup at
    some batch (the best for all prompts, the best of each category, half of it, none), from single
    lengths, and from SGLang's default.  All are served at every batch in simulated time.  Among
    those that the best does not beat, the list with the fewest steps is taken.  Neighbouring
    batches with a list in common share a slot, which begins just above the searched batch before:
    so an engine that pads batches to the sizes of its graphs finds the same slot, if these sizes
    are among the batches searched.  Then the slots are served together and mended, and compared
    with an engine that never drafts, as in `simulator.tune.vllm.tune_vllm`.

    The gain is over no speculation, ``default_gain`` over SGLang's default configuration.  Every
    draw serves resampled prompts, under all lists alike (`simulator.tune.gains`).  Half of the
    draws take their prompts from one half of the recording, half from the other; the gain is that
    of lists chosen on the other half.  Targets and parameters are those of
    `simulator.tune.vllm.tune_vllm`; ``draws``, an even number of 4 or more, are all served.

    Raises
    ------
    DraftsimError
        For impossible batches or draws, or an empty recording.
    """
    sizes = costs.rising("batches", batches or latency.usual_batches)
    if draws < 4 or draws % 2:
        raise DraftsimError(f"draws is {draws}, expected an even number >= 4")
    plain, logs = costs.fixed_logs(trace, sorted({0, *lengths}))
    options = list(logs)
    second = gains.folds([r.category for r in trace.requests])
    held_out = gains.can_hold_back(second)
    drawn = gains.resampled(trace, second, draws, seed)
    grids = [costs.price_grid([plain, *logs.values()], latency, batch, slo=slo) for batch in sizes]
    names = [r.category for r in trace.requests]
    defaults = [_default_steps(batch, max(options)) for batch in sizes]
    found = {steps for grid in grids for steps in _lists(grid, options, names)}
    found |= {(k,) for k in SINGLE if k <= max(options)} | set(defaults)
    lists = sorted(found, key=lambda steps: (sum(steps), len(steps), steps))
    policies: list[list[Policy]] = [
        [Autoregressive(), *(SGLangAdaptive(_document([(b, steps)])) for steps in lists)]
        for b in sizes
    ]
    outcomes = _serve(
        drawn.traces,
        latency,
        sizes,
        policies,
        slo,
        partial(progress, "serving every list of steps"),
    )
    off, fixed = [own[0] for own in outcomes], [own[1:] for own in outcomes]
    targets = served.within_reach(slo, outcomes)
    alone = served.searched_rates(fixed, targets)

    def chosen_on(part: npt.NDArray[np.bool_]) -> Ints:
        good = np.array([served.unbeaten(rates[:, part]) for rates in alone])[:, None]
        fewest: Ints = np.argmax(gains.shared_by_neighbours(good), axis=2)
        return fewest

    @cache
    def together(chosen: tuple[int, ...]) -> list[list[served.Outcome]]:
        slots = [(b, lists[k]) for b, k in zip(sizes, chosen, strict=True)]
        policy = SGLangAdaptive(_document(slots))
        told = partial(progress, "serving slots together")
        return _serve(drawn.traces, latency, sizes, [[policy]] * len(sizes), slo, told)

    def serve(table: Ints) -> Floats:
        return np.concatenate(served.searched_rates(together(tuple(table[:, 0].tolist())), targets))

    first = chosen_on(np.ones_like(drawn.late))
    best = served.mended(first, alone, serve)
    whole = [own for (own,) in together(tuple(best.table[:, 0].tolist()))]
    told = np.where(drawn.late, chosen_on(~drawn.late), chosen_on(drawn.late))  # (batches, draws)
    rows: list[dict[str, Any]] = []
    for i in range(len(sizes)):
        option, kept = int(best.table[i, 0]), bool(best.table[i, 0] == first[i, 0])
        base = lists.index(defaults[i])
        each = np.array([o.rates(targets[i]) for o in fixed[i]])  # (lists, draws)
        own = whole[i].rates(targets[i])
        if held_out and kept:
            own = each[told[i], np.arange(draws)]
        against = gains.Against(own, off[i].rates(targets[i]), drawn.told)
        served_tok_s, share = whole[i].mean(targets[i])
        row = row_of(
            "sglang", grids[i], latency, setting=_words(lists[option]),
            deploy=gains.to_deploy(against.faster, whole[i].meets(slo), off[i].meets(slo)),
            served_tok_s=served_tok_s, gain=against.gain,
            decode_tok_s=None, decode_gain=None, default=_words(defaults[i]),
            default_gain=1.0 if option == base else gains.gain_of(ratio(own, each[base])).value,
            within_slo=share, outside=float(grids[i].outside.max()), held_out=held_out and kept,
        )  # fmt: skip
        said = about_served(
            f"steps {_words(lists[best.best[i]])}", float(best.gains[i]), kept, bool(best.worse[i])
        )
        rows.append({**row, "warnings": [*about_row(row), *said]})
    bare = {b: o.mean(counted) for b, o, counted in zip(sizes, off, targets, strict=True)}
    document = _document([(b, lists[k]) for b, k in zip(sizes, best.table[:, 0], strict=True)])
    return decided(
        "sglang", trace, latency, slo, rows, grids, bare, document,
        reason="because the draft model reads every prompt and every token",
        remedy="start the server without --speculative-algorithm for loads that stay there",
        more=["SGLang adapts the steps of EAGLE and EAGLE3 drafts with topk 1 only"],
    )  # fmt: skip


def tune_standalone(
    trace: Trace, latency: LatencyTable, batches: Sequence[int] | None = None, **options: Any
) -> Tuned:
    """Search ``--speculative-num-steps`` for a draft model, whose steps SGLang does not adapt.

    One K for all loads, chosen as `simulator.tune.vllm.tune_vllm` says of ``one_length``.  Options
    and errors are those of `tune_vllm`.
    """
    found = tune_vllm(trace, latency, batches, engine="sglang", one_length=True, **options)
    if found.document is None:
        return replace(found, engine="sglang")
    document = fixed_steps(found.document["num_speculative_tokens"])
    return replace(found, engine="sglang", document=document)


def _lists(
    grid: costs.PricedOptions, options: Sequence[int], categories: Sequence[str]
) -> set[tuple[int, ...]]:
    """Return candidate lists of lengths that give a speedup at one batch; the first drafts none."""
    weights = resamples(len(categories), 500, 0)
    objective = gains.Objective(grid.tokens[1:], grid.seconds[1:], weights)
    best = options[gains.choose(objective)]
    names = np.array(categories)
    apart = {
        options[int(np.argmax(objective.on(names == name).rates))]
        for name in dict.fromkeys(categories)
    }
    lists = {(best,), (0, best), ((best + 1) // 2, best), (best, *apart)}
    return {tuple(sorted(set(steps))) for steps in lists}


def _default_slot(batch: int) -> Mapping[str, Any]:
    """Return the slot that SGLang's default has for `batch`."""
    return DEFAULT_CONFIG[max((s for s in DEFAULT_CONFIG if int(s) <= batch), key=int)]


def _default_steps(batch: int, most: int) -> tuple[int, ...]:
    """Return candidates that SGLang's default has for `batch`, none above the longest recorded."""
    return tuple(s for s in _default_slot(batch)["candidate_steps"] if s <= most) or (most,)


def _document(slots: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """Return slots with equal neighbours merged, each from just above the batch before.

    The hysteresis is that of the default's slot: a longer memory for single streams.
    """
    settings = [
        {"candidate_steps": list(steps), "up_hysteresis": 0.0,
         "down_hysteresis": _default_slot(batch)["down_hysteresis"], "ceiling_coeff": 0}
        for batch, steps in slots
    ]  # fmt: skip
    return {str(low): own for low, _, own in merged([batch for batch, _ in slots], settings)}


def _words(steps: Sequence[int]) -> str:
    return " ".join(map(str, steps))


def _serve(
    traces: Sequence[Trace], latency: LatencyTable, batches: Sequence[int],
    policies: Sequence[Sequence[Policy]], slo: Targets | None,
    progress: Count,
) -> list[list[served.Outcome]]:  # fmt: skip
    """Return the results of serving each batch's policies, one replication per trace."""

    def load(trace: Trace, batch: int) -> Scenario:
        full = served.closed_load(trace, batch, slo, latency=latency)
        rounds = int(batch * ROUNDS * len(trace.requests) / trace.tokens)
        return replace(full, requests=max(full.requests or 0, rounds))

    runs = [
        (trace, policy, load(trace, batch))
        for batch, own in zip(batches, policies, strict=True) for policy in own for trace in traces
    ]  # fmt: skip
    parts = served.served_each(latency, runs, replications=1)
    each = iter(results_of(parts, len(parts) * traces[0].tokens, progress=progress))
    return [
        [served.Outcome(*np.concatenate([next(each) for _ in traces], axis=1)) for _ in own]
        for own in policies
    ]
