"""vLLM's table of draft lengths by batch size, and by batch size and context."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.basic import Fixed
from policies.batch_tables import BatchTable
from simulator.tune.choice import Choice, Objective, can_hold_back, cross_fitted, folds, resamples
from simulator.tune.costs import (
    DEFAULT_LENGTHS,
    Grid,
    Slo,
    default_batches,
    default_contexts,
    fixed_logs,
    price_grid,
)
from simulator.tune.evidence import (
    about_batches,
    about_recording,
    about_row,
    about_served,
    summed_up,
)
from simulator.tune.formats import CONTEXT_END
from simulator.tune.repair import mended
from simulator.tune.served import closed_load, served_rates, unbeaten
from simulator.tune.settings import Tuned
from traces.errors import DraftsimError
from traces.latency import LatencyTable
from traces.trace import Trace

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
    contexts.  Last, the table is served as a whole at every batch, and mended where some
    fixed K is faster there (`simulator.tune.repair`); ``served_gain`` of the rows is its rate
    over the fastest fixed K's.

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
    logs = fixed_logs(trace, sorted({0, *lengths}))
    grids = [[price_grid(list(logs.values()), latency, b, c, slo) for c in where] for b in sizes]
    options = list(logs)
    weights = resamples(len(trace.requests), draws, seed)
    second = folds([r.category for r in trace.requests])
    objectives = [[Objective(g.tokens, g.seconds, weights) for g in row] for row in grids]
    loads = [closed_load(trace, b, slo, seed) for b in sizes]
    # An engine that drafts anywhere prefills the draft model, at K = 0 as well.
    drafting = [replace(s, limits=replace(s.limits, lookahead=max(options))) for s in loads]
    alone = [served_rates(trace, latency, [Fixed(k) for k in options], load) for load in drafting]
    served = [np.ones(len(options), bool) if by_context else unbeaten(r) for r in alone]
    first = _choose(objectives, served)
    for rates, load in zip(alone, loads, strict=True):
        rates[0] = served_rates(trace, latency, [Fixed(0)], load)[0]  # the rival loads no draft

    @cache
    def together(ranges: str, i: int) -> Floats:
        rates = served_rates(trace, latency, [BatchTable(json.loads(ranges))], loads[i])
        return np.asarray(rates[0])

    found = mended(
        first, alone, lambda table, i: together(json.dumps(_rows(table, sizes, where, options)), i)
    )
    table = found.table
    held_out = can_hold_back(second)
    halves = [
        _choose([[o.on(half) for o in row] for row in objectives], served)
        for half in (~second, second)
    ] if held_out else None  # fmt: skip
    rows = []
    for i, j in np.ndindex(*table.shape):
        o, option, kept = objectives[i][j], int(table[i, j]), bool(table[i, j] == first[i, j])
        # What serving put in place of a choice, all prompts chose.
        own = None if halves is None or not kept else (
            int(halves[0][i, j]), int(halves[1][i, j])
        )  # fmt: skip
        chosen = cross_fitted(o, second, (o.tokens[0], o.seconds[0]), option, own, 0)
        gain = float(found.gains[i])
        row = _row(grids[i][j], o, options, chosen, own is not None, gain)
        said = about_served(options[found.best[i]], gain, kept, bool(found.worse[i]))
        scaled = "scaled" in latency.meta
        rows.append({**row, "scaled": scaled, "warnings": [*about_row(row), *said]})
    ranges = _rows(table, sizes, where, options)
    document = {
        # vLLM refuses a window of 0, so a table that never drafts is given one of 1.
        "num_speculative_tokens": max(1, *(options[k] for k in table.ravel())),
        "num_speculative_tokens_per_batch_size": ranges,
    }
    warnings = [*about_recording(trace, latency), *about_batches(sizes), *summed_up(rows)]
    if not table.any():
        warnings.append("speculation pays at no batch searched: leave it off")
    elif table[-1].any():
        warnings.append(
            f"vLLM keeps the last K beyond batch {sizes[-1]}, the largest searched: "
            "search on, or limit max_num_seqs"
        )
    return Tuned("vllm", document, BatchTable(ranges), rows, warnings)


def _row(
    grid: Grid, objective: Objective, options: Sequence[int], chosen: Choice, held_out: bool,
    served_gain: float,
) -> Mapping[str, Any]:  # fmt: skip
    return {
        "engine": "vllm", "batch": grid.batch, "context": grid.context,
        "setting": f"K={options[chosen.option]}",
        "throughput_tok_s": grid.batch * float(objective.rates[chosen.option]),
        "default": "off", "gain": chosen.gain, "gain_lo": chosen.lo, "gain_hi": chosen.hi,
        "within_slo": float(grid.within[chosen.option]),
        "outside": float(max(grid.outside[chosen.option], grid.outside[0])),
        "held_out": held_out, "served_gain": served_gain,
    }  # fmt: skip


def _choose(objectives: Sequence[Sequence[Objective]], served: Sequence[Bools]) -> Ints:
    """Option of every batch and context, the same over ranges that one serves alike."""
    admissible = np.array([[o.admissible for o in row] for row in objectives])
    both = admissible & np.array(served)[:, None]
    allowed = np.where(both.any(axis=2, keepdims=True), both, np.array(served)[:, None])
    by_batch = _merged(allowed)
    by_context = _merged(np.swapaxes(by_batch, 0, 1))
    return np.asarray(np.swapaxes(by_context, 0, 1).argmax(axis=2))


def _merged(allowed: Bools) -> Bools:
    """Along the first axis, options that a whole run of neighbours shares; (n, m, options).

    Runs are as long as every place along the second axis still has a shared option, which
    gives the fewest runs.
    """
    out = allowed.copy()
    start, common = 0, allowed[0]
    for i in range(1, len(allowed) + 1):
        both = common & allowed[i] if i < len(allowed) else np.zeros_like(common)
        if both.any(axis=1).all():
            common = both
            continue
        out[start:i] = common
        if i < len(allowed):
            start, common = i, allowed[i]
    return out


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
