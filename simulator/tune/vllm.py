"""vLLM's table of draft lengths by batch size, and by batch size and context."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from policies.arrays import Bools, Floats, Ints
from policies.batch.base import Policy
from policies.batch.tables import BatchTable
from policies.json_text import parse_json
from policies.lengths.basic import Autoregressive, Fixed
from policies.registry import NO_SPECULATION
from simulator.bootstrap import resamples
from simulator.executors import results_of
from simulator.serving.scenario import FILLS, Scenario
from simulator.targets import Targets
from simulator.tune import costs, gains, served
from simulator.tune.formats import BY_BATCH, BY_LENGTH, CONTEXT_END, merged
from simulator.tune.settings import (
    Tuned,
    about_rising,
    about_row,
    about_served,
    decided,
    row_of,
)
from traces.acceptance.trace import Trace
from traces.aliases import Count, Progress, silent
from traces.latency.table import LatencyTable

WITHOUT = {
    "vllm": "--speculative-config", "sglang": "--speculative-algorithm",
    "tensorrt-llm": "speculative_config", "dynamo": "aic_nextn",
}  # fmt: skip
"""The option that each engine is started without if it is not to draft."""
AT_ZERO = {
    "vllm": "K = 0 still runs the drafter",
    "tensorrt-llm": "K = 0 is priced with a draft pass, which TensorRT-LLM may skip",
}
"""The cost of K = 0, by engine that reads a table."""
WHY_ONE_LENGTH = {
    "vllm": "vLLM 0.32 fails with a table for medusa and suffix drafts",
    "sglang": "SGLang adapts no steps of a draft model (STANDALONE)",
    "dynamo": "Dynamo's mocker reads one draft length",
}
"""Why an engine is given one K for all loads."""


def tune_vllm(
    trace: Trace,
    latency: LatencyTable,
    batches: Sequence[int] | None = None,
    *,
    by_context: bool = False,
    contexts: Sequence[int] | None = None,
    lengths: Sequence[int] = costs.DEFAULT_LENGTHS,
    slo: Targets | None = None,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress = silent,
    engine: str = "vllm",
    one_length: bool = False,
) -> Tuned:
    """Search ``num_speculative_tokens_per_batch_size``: K by batch size.

    At every batch (and context) the recorded rounds of each fixed K are priced.  The smallest K is
    taken that the best K does not beat beyond the paired bootstrap interval over prompts.  Without
    contexts, no other K may beat it when served at that batch either, where requests of different
    lengths meet and prompts are read in between; if no K satisfies both, serving decides.
    Neighbours with a K in common share a range.  A range ends at the geometric mean of two searched
    batches, and midway between two contexts.  Then the whole table is served at every batch.  It is
    changed if some fixed K is faster there, or if K rises with the batch and serving cannot tell
    the difference (`simulator.tune.served`).

    K = 0 costs a draft pass in every step (`policies.batch.base.KeptInStep`), and the draft model
    reads every prompt.  An engine without a draft model saves both.  A row's ``deploy`` is on only
    if the table serves more than such an engine; if it is on nowhere, no setting is written.

    With an SLO, only requests within it count.  A setting that misses it for more than
    ``1 - slo.share`` of the requests is chosen only if every setting does: then K is the one with
    the most tokens, and ``deploy`` is ``SLO missed``.

    Parameters
    ----------
    batches:
        Batch sizes searched; by default powers of two up to the largest measured.
    by_context:
        Search the batch x context form.
    contexts:
        Cached tokens per sequence searched then; by default those measured.
    lengths:
        Draft lengths tried; a table also tries 0.
    slo:
        Targets of a request.
    draws:
        Resamples of the bootstrap of decoding; `simulator.tune.gains.DRAWS` are served.
    seed:
        Seed of the bootstrap and of the requests served.
    progress:
        Called with what is served (`traces.aliases.Progress`).
    engine:
        Engine named in rows and warnings: one of `WITHOUT`.
    one_length:
        Search ``num_speculative_tokens`` alone, one K above 0 for all loads: that of the largest
        batch at which it is to be deployed.

    Raises
    ------
    DraftsimError
        For impossible batches or contexts, no draft length, or an empty recording.
    """
    where: list[int | None] = [None]
    if by_context:
        where = list(
            costs.rising("contexts", contexts or costs.default_contexts(latency, max(lengths)))
        )
    sizes = costs.rising("batches", batches or latency.usual_batches)
    tried = set(lengths) - {0} if one_length else {0, *lengths}
    plain, logs = costs.fixed_logs(trace, sorted(tried))
    priced = [plain, *logs.values()]
    options = list(logs)
    weights = resamples(len(trace.requests), draws, seed)
    second = gains.folds([r.category for r in trace.requests])
    held_out = gains.can_hold_back(second)
    loads = [served.closed_load(trace, b, slo, seed, latency) for b in sizes]
    # At K = 0, too, the draft model of an engine that drafts elsewhere reads the prompts.
    drafting = [replace(s, limits=replace(s.limits, lookahead=max(options))) for s in loads]
    policies = [Fixed(k) if k else costs.RESTING for k in options]
    lone = [(trace, policy, load) for load in drafting for policy in policies]
    plainly = [(trace, Autoregressive(), load) for load in loads]

    def grids_of(targets: Targets | None) -> list[list[costs.PricedOptions]]:
        return [[costs.price_grid(priced, latency, b, c, targets) for c in where] for b in sizes]

    asked = [*dict.fromkeys((slo, None))]
    parts: list[Callable[[], Any]] = [partial(grids_of, one) for one in asked]
    parts += served.served_each(latency, [*lone, *plainly])
    found_parts = results_of(
        parts, trace.tokens * len(parts), progress=partial(progress, "serving every draft length")
    )
    priced_for = dict(zip(asked, found_parts, strict=False))
    outcomes = found_parts[len(asked) :]
    off: list[served.Outcome] = outcomes[len(lone) :]
    fixed = [outcomes[i : i + len(options)] for i in range(0, len(lone), len(options))]
    targets = served.within_reach(
        slo, [[plain, *own] for plain, own in zip(off, fixed, strict=True)]
    )
    grids: list[list[costs.PricedOptions]] = [priced_for[own][i] for i, own in enumerate(targets)]
    alone = served.searched_rates(fixed, targets)
    objectives = [
        [gains.Objective(g.tokens[1:], g.seconds[1:], weights) for g in row] for row in grids
    ]
    good = [np.ones(len(options), bool) if by_context else served.unbeaten(r) for r in alone]

    drawn = gains.resampled(trace, second, gains.DRAWS, seed)
    drawing = partial(progress, "serving resampled prompts")

    @cache
    def gives_gain(i: int, k: int) -> bool:
        """Return True if option `k` throughout is to be deployed at batch `i`."""
        tables = [[[1, sizes[-1], options[k]]]] * 2
        (own,), (rest,) = _on_draws(latency, drawn, loads[i : i + 1], targets[i:], tables, drawing)
        faster = gains.Against(own, rest, drawn.told).faster
        return gains.to_deploy(faster, fixed[i][k].meets(slo), off[i].meets(slo)) == gains.ON

    def choice(part: Bools | None = None) -> Ints:
        """Return the options chosen on all prompts, or on some."""
        found = _choose(
            [[o if part is None else o.on(part) for o in row] for row in objectives], good
        )
        if one_length:
            drafting = [i for i, k in enumerate(found[:, 0].tolist()) if gives_gain(i, k)]
            found = np.full_like(found, found[max(drafting, default=0), 0])
        return found

    first = choice()

    @cache
    def together(ranges: str) -> list[served.Outcome]:
        policy = BatchTable(parse_json(ranges))
        each = served.served_each(latency, [(trace, policy, load) for load in loads])
        told = partial(progress, "serving tables of draft lengths")
        return results_of(each, trace.tokens * len(each), progress=told)

    def whole(table: Ints) -> list[served.Outcome]:
        return together(json.dumps(table_rows(table, sizes, where, options)))

    def serve(table: Ints) -> Floats:
        return np.concatenate(served.searched_rates([[own] for own in whole(table)], targets))

    found = served.held(first, alone, serve) if one_length else (
        served.smoothed(served.mended(first, alone, serve), alone, serve)
    )  # fmt: skip
    table = found.table
    # What serving put in place of a choice, all prompts chose.
    kept = (table == first).all(axis=1)
    halves = [choice(half) for half in (~second, second)] if held_out else None
    own, rest = _on_draws(
        latency, drawn, loads, targets,
        [table_rows(np.where(kept[:, None], h, table), sizes, where, options)
         for h in (halves if halves is not None else (table, table))],
        drawing,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for i, j in np.ndindex(*table.shape):
        o, grid, option = objectives[i][j], grids[i][j], int(table[i, j])
        told = None if halves is None or not kept[i] else (
            int(halves[0][i, j]), int(halves[1][i, j])
        )  # fmt: skip
        chosen = gains.cross_fitted(o, second, (grid.tokens[0], grid.seconds[0]), option, told)
        against, now = gains.Against(own[i], rest[i], drawn.told), whole(table)[i]
        served_tok_s, share = now.mean(targets[i])
        row = row_of(
            engine, grid, latency, setting=f"K={options[option]}",
            deploy=gains.to_deploy(against.faster, now.meets(slo), off[i].meets(slo)),
            served_tok_s=served_tok_s, gain=against.gain,
            decode_tok_s=grid.batch * float(o.rates[option]), decode_gain=chosen,
            default=NO_SPECULATION, default_gain=against.gain.value,
            within_slo=share, outside=float(grid.outside[[0, 1 + option]].max()),
            held_out=told is not None,
        )  # fmt: skip
        said = about_served(
            f"K={options[found.best[i]]}", float(found.gains[i]), bool(kept[i]),
            bool(found.worse[i]),
        )  # fmt: skip
        rows.append({**row, "warnings": [*about_row(row), *said]})
    more = about_rising("K", sizes, options, table, alone)
    if by_context:
        more.append(
            "served_tok_s and gain are those of the recorded requests at each batch, whatever the "
            "context; decode_tok_s and decode_gain are those at the context"
        )
        more.append(
            "vLLM 0.32 reads rows [lo, hi, K] only and refuses those with contexts: use this form "
            "with a vLLM that documents it"
        )
    if one_length:
        k = options[int(table[0, 0])]
        more.append(f"{WHY_ONE_LENGTH[engine]}: K = {k} is drafted at every load")
    elif engine == "vllm" and table[-1].any():
        more.append(
            f"vLLM keeps the last K beyond batch {sizes[-1]}, the largest searched: "
            "search larger batches with --batch, or limit max_num_seqs"
        )
    # vLLM refuses a window of 0, so a table that never drafts is given one of 1.
    document: dict[str, Any] = {
        "num_speculative_tokens": max(1, *(options[k] for k in table.ravel()))
    }
    if not one_length:
        document[BY_BATCH] = table_rows(table, sizes, where, options)
    deployed = {row["batch"] for row in rows if row["deploy"] != gains.OFF}
    bare = {b: o.mean(counted) for b, o, counted in zip(sizes, off, targets, strict=True)}
    plain_tok_s = [None if b in deployed else bare[b][0] for b in sizes]
    more += about_every_length(sizes, options, table, alone, plain_tok_s, engine)
    return decided(
        "vllm", trace, latency, slo, rows, [grid for own in grids for grid in own], bare, document,
        reason="because it drafts at every load" if one_length else
        "because the draft model reads every prompt and, where K is 0, every token",
        remedy=f"start the server without {WITHOUT[engine]} for loads that stay there", more=more,
    )  # fmt: skip


def by_length(found: Tuned) -> Tuned:
    """Turn a search by context at one batch size into vLLM's table by sequence length.

    ``num_speculative_tokens_per_seq_len`` is the key of vllm-project/vllm pull request 54801.
    """
    if found.document is None:
        return found
    table = found.document[BY_BATCH]
    [(_, batch)] = {tuple(row[:2]) for row in table}
    rows = [row[2:] for row in table]
    document = {
        "num_speculative_tokens": found.document["num_speculative_tokens"], BY_LENGTH: rows
    }  # fmt: skip
    warnings = [w for w in found.warnings if "vLLM keeps" not in w and "vLLM 0.32 reads" not in w]
    warnings += [
        f"K by sequence length was searched at batch {batch}: vLLM uses it at every batch size",
        "vLLM 0.32 does not read this table: use it with a vLLM that documents it",
    ]
    return replace(found, document=document, warnings=warnings)


def _on_draws(
    latency: LatencyTable, drawn: gains.Resampled, loads: Sequence[Scenario],
    targets: Sequence[Targets | None], tables: Sequence[list[list[int]]],
    progress: Count,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return rates of the tables and of no speculation on resampled prompts, (batches, draws) each.

    Resamples of the first half are served under the second of `tables`, which was chosen on the
    other half, and those of the second half under the first.
    """
    policies = [BatchTable(tables[0] if late else tables[1]) for late in drawn.late]
    runs: list[tuple[Trace, Policy, Scenario]] = []
    for load in loads:
        for trace, policy in zip(drawn.traces, policies, strict=True):
            short = replace(load, requests=max(len(trace.requests), FILLS * load.limits.max_batch))
            runs += [(trace, policy, short), (trace, Autoregressive(), short)]
    parts = served.served_each(latency, runs, replications=1)
    outcomes = results_of(parts, sum(trace.tokens for trace, *_ in runs), progress=progress)
    rates = np.array([
        outcome.rates(targets[i // (2 * len(policies))])[0] for i, outcome in enumerate(outcomes)
    ])  # fmt: skip
    found = rates.reshape(len(loads), len(policies), 2)
    return found[..., 0], found[..., 1]


def _choose(objectives: Sequence[Sequence[gains.Objective]], good: Sequence[Bools]) -> Ints:
    """Return the option of every batch and context, the same over ranges that one serves alike."""
    admissible = np.array([[o.admissible for o in row] for row in objectives])
    both = admissible & np.array(good)[:, None]
    allowed = np.where(both.any(axis=2, keepdims=True), both, np.array(good)[:, None])
    by_batch = gains.shared_by_neighbours(allowed)
    by_context = gains.shared_by_neighbours(np.swapaxes(by_batch, 0, 1))
    return np.asarray(np.swapaxes(by_context, 0, 1).argmax(axis=2))


def about_every_length(
    batches: Sequence[int], options: Sequence[int], table: Ints, alone: Sequence[Floats],
    plain: Sequence[float | None], engine: str = "vllm",
) -> list[str]:  # fmt: skip
    """Return from which batch on every K is slower than no speculation, and by how much.

    K = 0 has a cost, too (`AT_ZERO`), so that the table may keep a longer draft there.

    Parameters
    ----------
    table:
        Places in `options`, shape (batches, contexts).
    alone:
        Rates of each option at every batch, each of shape (options, replications).
    plain:
        Rate of no speculation at every batch; None where it is not to be deployed.
    """
    slower: dict[int, Floats] = {}
    for i in reversed(range(len(batches))):
        rate = plain[i]
        lost = np.zeros(1) if rate is None else 1 - alone[i].mean(axis=1) / rate
        if lost.min() <= 0:
            break
        slower[i] = lost
    if not slower:
        return []
    places = sorted(slower)
    least = ", ".join(f"{slower[i].min():.1%} at batch {batches[i]}" for i in places)
    said = f"from batch {batches[places[0]]} on every K is slower than no speculation, the best by"
    if 0 not in options:
        return [f"{said} {least}"]
    rest = options.index(0)
    resting = ", ".join(f"{slower[i][rest]:.1%} at batch {batches[i]}" for i in places)
    kept = sorted({options[k] for i in places for k in table[i].tolist()} - {0})
    keeps = f"the table keeps {' and '.join(f'K={k}' for k in kept)}, because " if kept else ""
    return [f"{said} {least}: {keeps}{AT_ZERO[engine]} (slower by {resting})"]


def table_rows(
    table: Ints, batches: Sequence[int], contexts: Sequence[int | None], options: Sequence[int]
) -> list[list[int]]:
    """Return rows [lo, hi, K], or [lo, hi, context_lo, context_hi, K] on a rectangular grid.

    ``table`` holds places in `options`, shape (batches, contexts).
    """
    batch_ends = [math.isqrt(a * b) for a, b in pairwise(batches)] + [batches[-1]]
    ranges = merged(batch_ends, table.tolist())
    if contexts == [None]:
        return [[low, high, options[k]] for low, high, [k] in ranges]
    at = [c for c in contexts if c is not None]
    context_ends = [(a + b) // 2 for a, b in pairwise(at)] + [CONTEXT_END]
    columns = merged(context_ends, [*zip(*(row for *_, row in ranges), strict=True)])
    return [
        [low, high, *held, options[column[i]]]
        for i, (low, high, _) in enumerate(ranges) for *held, column in columns
    ]  # fmt: skip
