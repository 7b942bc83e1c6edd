"""vLLM's table of draft lengths by batch size, and by batch size and context."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.batch.tables import BatchTable
from policies.json_text import parse_json
from policies.lengths.basic import Autoregressive, Fixed
from simulator.forks import results_of
from simulator.tune.choice import (
    Objective,
    can_hold_back,
    cross_fitted,
    folds,
    resamples,
    shared_by_neighbours,
)
from simulator.tune.costs import (
    DEFAULT_LENGTHS,
    RESTING,
    Grid,
    Slo,
    default_batches,
    default_contexts,
    fixed_logs,
    price_grid,
)
from simulator.tune.evidence import (
    about_batches,
    about_deploying,
    about_recording,
    about_row,
    about_served,
    origin,
    summed_up,
)
from simulator.tune.formats import CONTEXT_END
from simulator.tune.repair import mended
from simulator.tune.served import closed_load, deployed, served_each, unbeaten
from simulator.tune.settings import Tuned, switched_off
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def tune_vllm(
    trace: Trace,
    latency: LatencyTable,
    batches: Sequence[int] | None = None,
    *,
    by_context: bool = False,
    contexts: Sequence[int] | None = None,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    slo: Slo | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> Tuned:
    """``num_speculative_tokens_per_batch_size``: K by batch size, 0 where it does not pay.

    At every batch (and context) the recorded rounds of each fixed K are priced and the
    smallest K is taken that the best does not beat beyond the paired bootstrap interval
    over prompts.  Without contexts it must also be one that no other K beats when served at
    that batch, where requests of unlike lengths meet and prompts are prefilled in between;
    if none is both, serving decides.  Neighbours that some K serves alike share a range.  A
    range ends at the geometric middle between two searched batches, and at the middle between
    contexts.  Then the table is served as a whole at every batch, and mended where some
    fixed K is faster there (`simulator.tune.repair`); ``served_gain`` of the rows is its rate
    over the fastest fixed K's or that of no speculation.

    A K of 0 costs a draft pass in every iteration (`policies.batch.base.KeptInStep`) and the
    draft model reads every prompt, which an engine without one saves.  Where that engine is
    faster than the table, the row's ``deploy`` is off; if it is everywhere, so is the setting.

    The default that gains are held against is vLLM's own: no speculation.

    Parameters
    ----------
    batches:
        Batch sizes searched; by default powers of two up to the largest measured.
    by_context:
        Search the batch x context form.
    contexts:
        Cached tokens per sequence searched then; by default those measured.
    lengths:
        Draft lengths tried.
    slo:
        Targets; only tokens of prompts that meet them count.
    draws:
        Resamples of the bootstrap.
    seed:
        Of the bootstrap and of the requests served.

    Raises
    ------
    DraftsimError
        For impossible batches or contexts, or an empty recording.
    """
    where: list[int | None] = [None]
    if by_context:
        where = list(_rising("contexts", contexts or default_contexts(latency, max(lengths))))
    sizes = _rising("batches", batches or default_batches(latency))
    plain, logs = fixed_logs(trace, sorted({0, *lengths}))
    priced = [plain, *logs.values()]
    options = list(logs)
    weights = resamples(len(trace.requests), draws, seed)
    second = folds([r.category for r in trace.requests])
    loads = [closed_load(trace, b, slo, seed) for b in sizes]
    # At K = 0, too, the draft model of an engine that drafts elsewhere reads the prompts.
    drafting = [replace(s, limits=replace(s.limits, lookahead=max(options))) for s in loads]
    policies = [Fixed(k) if k else RESTING for k in options]
    lone = [(policy, load) for load in drafting for policy in policies]
    plainly = [(Autoregressive(), load) for load in loads]

    def grids_of() -> list[list[Grid]]:
        return [[price_grid(priced, latency, b, c, slo) for c in where] for b in sizes]

    parts: list[Callable[[], Any]] = [grids_of, *served_each(trace, latency, [*lone, *plainly])]
    grids, *rates = results_of(parts, trace.tokens * len(parts))
    alone = np.reshape(rates[: len(lone)], (len(sizes), len(options), -1))
    off = rates[len(lone) :]
    objectives = [[Objective(g.tokens[1:], g.seconds[1:], weights) for g in row] for row in grids]
    served = [np.ones(len(options), bool) if by_context else unbeaten(r) for r in alone]
    first = _choose(objectives, served)

    @cache
    def together(ranges: str) -> Floats:
        policy = BatchTable(parse_json(ranges))
        each = served_each(trace, latency, [(policy, load) for load in loads])
        return np.array(results_of(each, trace.tokens * len(each)))

    def serve(table: Ints) -> Floats:
        return together(json.dumps(_rows(table, sizes, where, options)))

    found = mended(first, list(alone), serve)
    table = found.table
    held_out = can_hold_back(second)
    halves = [
        _choose([[o.on(half) for o in row] for row in objectives], served)
        for half in (~second, second)
    ] if held_out else None  # fmt: skip
    deploy = deployed(found.rates, off)
    warnings = [*about_recording(trace, latency), *about_batches(sizes)]
    warnings += about_deploying(sizes, found.rates, off)
    if "on" not in deploy:
        return switched_off("vllm", [g for row in grids for g in row], latency, warnings)
    rows = []
    for i, j in np.ndindex(*table.shape):
        o, grid, option = objectives[i][j], grids[i][j], int(table[i, j])
        kept = bool(table[i, j] == first[i, j])
        # What serving put in place of a choice, all prompts chose.
        own = None if halves is None or not kept else (
            int(halves[0][i, j]), int(halves[1][i, j])
        )  # fmt: skip
        chosen = cross_fitted(o, second, (grid.tokens[0], grid.seconds[0]), option, own)
        rival = max(float(alone[i][found.best[i]].mean()), float(off[i].mean()))
        row = {
            "engine": "vllm", "batch": grid.batch, "context": grid.context,
            "setting": f"K={options[option]}", "deploy": deploy[i],
            "throughput_tok_s": grid.batch * float(o.rates[option]),
            "default": "off", "gain": chosen.gain, "gain_lo": chosen.lo, "gain_hi": chosen.hi,
            "within_slo": float(grid.within[1 + option]),
            "outside": float(max(grid.outside[1 + option], grid.outside[0])),
            "held_out": own is not None,
            "served_gain": float(found.rates[i].mean()) / max(rival, 1e-300),
            **origin(latency, grid.batch),
        }  # fmt: skip
        said = about_served(
            f"K={options[found.best[i]]}", float(found.gains[i]), kept, bool(found.worse[i])
        )
        rows.append({**row, "warnings": [*about_row(row), *said]})
    ranges = _rows(table, sizes, where, options)
    warnings += summed_up(rows)
    if table[-1].any():
        warnings.append(
            f"vLLM keeps the last K beyond batch {sizes[-1]}, the largest searched: "
            "search on, or limit max_num_seqs"
        )
    document = {
        # vLLM refuses a window of 0, so a table that never drafts is given one of 1.
        "num_speculative_tokens": max(1, *(options[k] for k in table.ravel())),
        "num_speculative_tokens_per_batch_size": ranges,
    }
    return Tuned("vllm", document, BatchTable(ranges), rows, warnings)


def _choose(objectives: Sequence[Sequence[Objective]], served: Sequence[Bools]) -> Ints:
    """Option of every batch and context, the same over ranges that one serves alike."""
    admissible = np.array([[o.admissible for o in row] for row in objectives])
    both = admissible & np.array(served)[:, None]
    allowed = np.where(both.any(axis=2, keepdims=True), both, np.array(served)[:, None])
    by_batch = shared_by_neighbours(allowed)
    by_context = shared_by_neighbours(np.swapaxes(by_batch, 0, 1))
    return np.asarray(np.swapaxes(by_context, 0, 1).argmax(axis=2))


def _rows(
    table: Ints, batches: Sequence[int], contexts: Sequence[int | None], options: Sequence[int]
) -> list[list[int]]:
    """Rows [lo, hi, K], or [lo, hi, context_lo, context_hi, K] on a rectangular grid."""
    batch_ends = [math.isqrt(a * b) for a, b in pairwise(batches)] + [batches[-1]]
    firsts = [i for i in range(len(table)) if i == 0 or (table[i] != table[i - 1]).any()]
    ranges = []
    for first, after in zip(firsts, [*firsts[1:], len(table)], strict=True):
        ranges.append((batch_ends[first - 1] + 1 if first else 1, batch_ends[after - 1], first))
    if contexts == [None]:
        return [[low, high, options[table[i, 0]]] for low, high, i in ranges]
    at = [c for c in contexts if c is not None]
    context_ends = [(a + b) // 2 for a, b in pairwise(at)] + [CONTEXT_END]
    cuts = [j for j in range(len(at)) if j == 0 or (table[:, j] != table[:, j - 1]).any()]
    rows = []
    for low, high, i in ranges:
        for j, after in zip(cuts, [*cuts[1:], len(at)], strict=True):
            context_low = context_ends[j - 1] + 1 if j else 1
            rows.append([low, high, context_low, context_ends[after - 1], options[table[i, j]]])
    return rows


def _rising(name: str, values: Sequence[int]) -> list[int]:
    out = sorted(set(values))
    if out[0] < 1:
        raise DraftsimError(f"{name} holds {out[0]}, expected whole numbers >= 1")
    return out
