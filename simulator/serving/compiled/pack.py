"""What the compiled engine reads, laid out in arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.serving.arrivals import Job
from simulator.serving.compiled.prices import (
    ALONG,
    BESIDE,
    DRAFT_PREFILL,
    FIRST,
    FIT,
    HOST,
    LATER,
    MIXED,
    NOWHERE,
    READER,
    READERS,
    TARGET,
    TARGET_PREFILL,
    Floats,
    Prices,
    Records,
)
from simulator.serving.compiled.state import REQUEST, ROUND, Limits
from simulator.serving.cost.iteration import IterationCost
from simulator.serving.cost.lines import lines_of
from simulator.serving.scheduler import Scheduler
from simulator.serving.spans.rounds import Replays, RoundTable
from traces.latency.settling import settling_sums


def phases_of(cost: IterationCost) -> list[tuple[str, str] | None]:
    """(model, phase) that each of the readers reads, or None where the engine has no such."""
    latency = cost.latency
    phases: list[tuple[str, str] | None] = [None for _ in READERS]
    first = latency.first_draft_phase("draft")
    phases[TARGET] = "target", "forward"
    if cost.speculates:
        phases[LATER] = "draft", "forward"
        phases[FIRST] = ("draft", first) if first != "forward" else None
        phases[ALONG] = ("draft", "along") if latency.has("draft", "along") else None
        phases[DRAFT_PREFILL] = ("draft", "prefill") if latency.has("draft", "prefill") else None
    for reader, phase in ((TARGET_PREFILL, "prefill"), (BESIDE, "beside"), (MIXED, "mixed")):
        phases[reader] = ("target", phase) if latency.has("target", phase) else None
    return phases


def prices_of(cost: IterationCost, max_batch: int) -> Prices:
    """The prices of an engine of up to `max_batch` requests."""
    latency = cost.latency
    readers = np.zeros(len(READERS), READER).view(np.recarray)
    batches: list[float] = []
    by_batch: list[dict[float, tuple[Floats, Floats]]] = []
    for place, own in enumerate(phases_of(cost)):
        reader = readers[place]
        reader.read, reader.most = NOWHERE if own is None else place, np.inf
        reader.first = len(batches)
        if own is not None:
            grid = latency.grid(*own)
            batches += grid.batches
            by_batch += [grid.lines[batch] for batch in grid.batches]
            reader.constant, reader.only_batch = grid.flat, grid.only_batch or 0.0
            if not grid.flat:
                for name, weight in zip(FIT, grid.fit, strict=True):
                    reader[name] = weight
        reader.last = len(batches)
    for place, other in ((FIRST, LATER), (BESIDE, TARGET)):
        if readers[place].read == NOWHERE:
            readers[place].read = readers[other].read
    for place in (TARGET_PREFILL, DRAFT_PREFILL):
        if readers[place].read != NOWHERE:
            model = "target" if place == TARGET_PREFILL else "draft"
            readers[place].most = lines_of(latency, model, "prefill").widest_together
    if readers[MIXED].read != NOWHERE:
        readers[MIXED].most = lines_of(latency, "target", "mixed").widest
    widths = [width for lines in by_batch for width in sorted(lines)]
    lines = [lines[width] for lines in by_batch for width in sorted(lines)]
    contexts, seconds = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    above = len(batches) + len(widths)
    children = [*map(len, by_batch), *(len(own) for own, _ in lines)]
    sums = [settling_sums(latency, "draft", batch) for batch in range(max_batch + 1)]
    longest = max(map(len, sums))
    return Prices(
        readers, np.concatenate([batches, widths, contexts]),
        np.cumsum([len(batches), *children]), np.concatenate([np.zeros(above), seconds]),
        np.array([np.pad(own, (0, longest - len(own)), "edge") for own in sums]),
        np.array([cost.hosts_at(batch) for batch in range(max_batch + 1)], HOST).view(np.recarray),
        lines_of(latency, "target", "forward").quickest_s, cost.always,
    )  # fmt: skip


def rounds_of(replays: Replays, jobs: Sequence[Job], requests: Records) -> Records:
    """The rounds of all sequences that `jobs` decode; `requests` are told which are theirs."""
    tables: dict[int, tuple[int, RoundTable]] = {}
    """By its own number: the place of each table that occurs."""
    place = np.empty(len(jobs), np.int64)
    for i, job in enumerate(jobs):
        table = replays.table(job)
        place[i] = tables.setdefault(id(table), (len(tables), table))[0]
    order = place.argsort(kind="stable")
    groups = np.split(order, np.bincount(place).cumsum()[:-1])
    outputs, first, rounds, over = (
        requests[name] for name in ("output", "first_round", "rounds", "over")
    )
    before, parts = 0, []
    for (_, table), of in zip(tables.values(), groups, strict=True):
        wanted = outputs[of]
        table.needed(int(wanted.max()))
        count = table.reached.searchsorted(wanted)
        first[of], rounds[of] = before, count
        over[of] = np.maximum(table.reached[count] - wanted, 0)
        parts.append(table.rounds)
        before += table.rounds.shape[1]
    _, *columns = np.concatenate(parts, axis=1)  # positions are those of contexts
    return np.rec.fromarrays(columns, ROUND)


def limits_of(scheduler: Scheduler) -> Limits:
    """An engine's configuration."""
    own = scheduler.limits
    return Limits(
        own.max_batch, own.token_budget, own.kv_blocks or 0, own.block_size, own.chunked_prefill,
        own.prefix_caching, own.whole_prompts, scheduler.lookahead,
    )  # fmt: skip


def requests_of(scheduler: Scheduler, jobs: Sequence[Job], skip: int) -> Records:
    """Requests before anything has become of them; statistics leave out the first `skip`."""
    requests = np.zeros(len(jobs), REQUEST).view(np.recarray)
    names = ["arrival_s", "sequence", "prompt", "output", "number"]
    requests[names] = np.array(jobs, REQUEST[names])
    requests.counted = requests.number >= skip
    requests.prefill_left = requests.context = requests.prompt
    requests.admissible = [
        scheduler.admissible(job.prompt_tokens, job.output_tokens) for job in jobs
    ]
    return requests
