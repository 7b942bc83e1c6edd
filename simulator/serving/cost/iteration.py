"""Seconds of one engine iteration from the latency table; decides nothing.

A decode iteration over B sequences costs as many batched draft passes as the longest
draft, one target pass over the ragged total of drafted + 1 tokens, and host time.  Ragged
sizes are read at their means: a pass's tokens and cache reads add up over the sequences,
so at equal totals its cost is that of B sequences of the mean width and context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from policies.core import Round
from simulator.serving.cost.mixed import MixedPasses
from simulator.serving.cost.reader import Coverage, PassReader
from simulator.serving.cost.slab import Floats
from simulator.serving.cost.work import (
    Ints,
    Work,
    Works,
    drafting_always,
    drafting_always_each,
    work_of,
)
from simulator.serving.sequence import Slot
from traces.errors import DraftsimError
from traces.latency.settling import settling_sums
from traces.latency.table import LatencyTable
from traces.replay.always import passes_always

MODELS = ("target", "draft")
UNCOUNTED = 256
"""Readings of spans that wait to be counted together."""


class Chunk(NamedTuple):
    """Prompt tokens of one request to process in this iteration."""

    slot: Slot
    tokens: int


class Seconds(NamedTuple):
    """Where an iteration's time went."""

    draft_s: float
    target_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the iteration."""
        draft_s, target_s, host_s = self
        return draft_s + target_s + host_s


class _Host(NamedTuple):
    """The host's seconds at one batch size."""

    round_s: float
    draft_s: float
    """Of each draft step, signals included where the policy reads any."""
    target_rollback_s: float
    draft_rollback_s: float


class Reading(NamedTuple):
    """Sizes read together, and the iteration of a span that each belongs to."""

    reader: PassReader
    batch: int
    widths: Floats
    contexts: Floats
    of: Ints


class IterationCost:
    """Prices iterations of one engine.

    Parameters
    ----------
    latency:
        Measured or assumed cells.  Host phases it lacks cost nothing; without prefill
        cells, prompts cost nothing either, as in clock-free pricing (`unpriced` says so).
    reads:
        Whether the policy reads draft signals, whose computation is then charged per
        draft step.
    speculates:
        Whether the draft model runs at all; its prompts are charged if so.
    draft_batch:
        ``padded``: every draft pass runs over the whole decoding batch, as under CUDA
        graphs; ``active``: sequences that stopped drafting leave the batch.
    passes:
        ``ragged``: sizes at their means, as with kernels for sequences of any length;
        ``padded``: every decode pass is the rectangle of its widest sequence and longest
        context, as `profiler.decoding.batch` runs it.

    Notes
    -----
    Where the table has what a drafter takes that an engine runs along in every iteration
    (``along``), an iteration without drafts costs that, and the first pass of a draft is over all
    that the iteration verifies, behind which such a drafter runs.

    Prompts processed whole are read from the prefill cells, chunks from the forward cells at
    their mean width and context.  What prompts make of a pass that decodes, `mixed` prices:
    they are no part of its mean width.  A table of an engine that always drafts
    (`traces.replay.always`) has its passes in every iteration that decodes.
    """

    def __init__(
        self,
        latency: LatencyTable,
        reads: bool = False,
        speculates: bool = True,
        draft_batch: Literal["padded", "active"] = "padded",
        passes: Literal["ragged", "padded"] = "ragged",
    ) -> None:
        if draft_batch not in ("padded", "active"):
            raise DraftsimError(f"draft_batch is {draft_batch!r}, expected 'padded' or 'active'")
        self.latency = latency
        self.reads = reads
        self.speculates = speculates
        self.always = passes_always(latency) if speculates else 0
        if passes not in ("ragged", "padded"):
            raise DraftsimError(f"passes is {passes!r}, expected 'ragged' or 'padded'")
        self.draft_batch = draft_batch
        self.passes = passes
        self._target = PassReader(latency, "target")
        self._mixed = MixedPasses(latency)
        self._draft = PassReader(latency, "draft") if speculates else None
        first = latency.first_draft_phase("draft")
        own_first = speculates and first != "forward"
        self._first = PassReader(latency, "draft", first) if own_first else self._draft
        runs_along = speculates and latency.has("draft", "along")
        self._along = PassReader(latency, "draft", "along") if runs_along else None
        self._prefill = {
            m: PassReader(latency, m, "prefill")
            for m in (MODELS if speculates else MODELS[:1]) if latency.has(m, "prefill")
        }  # fmt: skip
        self._host: dict[int, _Host] = {}
        self._settled: dict[int, list[float]] = {}
        self._uncounted: list[Reading] = []

    def __call__(
        self, slots: Sequence[Slot], rounds: Sequence[Round], chunks: Sequence[Chunk]
    ) -> Seconds:
        """Seconds of an iteration of `rounds` (one per slot) and prompt `chunks`.

        Slots must still show their context from before the rounds.
        """
        if not rounds:
            drafting_s = self._prompts("draft", self._draft, chunks)
            return Seconds(drafting_s, self._prompts("target", self._target, chunks), 0.0)
        if self.always and not self.by_totals:
            rounds = [r._replace(draft_forwards=max(r.draft_forwards, self.always)) for r in rounds]
        work, batch = work_of(slots, rounds), len(rounds)
        if self.by_totals:
            return self.of_work(work, batch, chunks)
        host_s = self._host_seconds(work, batch)
        if self._only_along(work):
            draft_s = self._along_s(work, batch)
        else:
            draft_s = self._draft_by_sequence(work, slots, rounds) if work.longest else 0.0
        if chunks:
            draft_s += self._prompts("draft", self._draft, chunks)
        if self.passes == "padded" and not (chunks and "target" in self._prefill):
            target_s = self._rectangle(slots, rounds)
        else:
            target_s = self._target_pass(work, batch, chunks)
        return tuple.__new__(Seconds, (draft_s, target_s, host_s))  # as in `work_of`

    @property
    def by_totals(self) -> bool:
        """Whether the work of an iteration says all, whatever single sequences do."""
        return self.passes == "ragged" and self.draft_batch == "padded"

    def of_work(self, work: Work, batch: int, chunks: Sequence[Chunk]) -> Seconds:
        """Seconds of an iteration of `batch` rounds with this work, where `by_totals`."""
        if self.always:
            work = drafting_always(work, batch, self.always)
        host_s = self._host_seconds(work, batch)
        if self._only_along(work):
            draft_s = self._along_s(work, batch)
        else:
            draft_s = self._draft_passes(work, batch) if work.longest else 0.0
        if chunks:
            draft_s += self._prompts("draft", self._draft, chunks)
        target_s = self._target_pass(work, batch, chunks)
        return tuple.__new__(Seconds, (draft_s, target_s, host_s))

    def of_works(self, works: Works, batch: int) -> tuple[Floats, list[Reading]] | None:
        """(n,) seconds of n iterations of `batch` rounds without prompts, where `by_totals`.

        With them what was read, for `count`; None where a size lies beyond the measured ones,
        which `of_work` prices.
        """
        readings: list[Reading] = []
        if self.always:
            works = drafting_always_each(works, batch, self.always)

        def read(reader: PassReader, widths: Floats, contexts: Floats, of: Ints) -> Floats | None:
            readings.append(Reading(reader, batch, widths, contexts, of))
            return reader.many(batch, widths, contexts)

        every = np.arange(len(works.context))
        seconds = read(
            self._target, works.drafted / batch + 1.0, works.context / batch - 1.0, every
        )
        if seconds is None:
            return None
        host = self._host_at(batch)
        seconds += host.round_s
        if host.target_rollback_s:
            seconds += host.target_rollback_s * (works.rejected > 0)
        if host.draft_rollback_s:
            seconds += host.draft_rollback_s * (works.unread > 0)
        at = works.longest.nonzero()[0]
        if self._along is not None:
            idle = (works.drafted == 0) & (self.always < 2)
            none, at = idle.nonzero()[0], (~idle).nonzero()[0]
            if len(none):
                cached = works.context[none] / batch - 1.0
                along = read(self._along, np.ones(len(none)), cached, none)
                if along is None:
                    return None
                seconds[none] += along
        if not len(at):
            return seconds, readings
        longest, drafting = works.longest[at], works.drafting[at]
        width, mean = works.catch_up[at] / drafting, works.draft_context[at] / drafting
        later, first = self._draft_readers()
        if self._along is None:
            cached = np.maximum(mean - width, 0.0)
        else:
            width, cached = works.drafted[at] / batch + 1.0, works.context[at] / batch - 1.0
        drafts = read(first, width, cached, at)
        if drafts is None:
            return None
        steps = longest - 1
        owner = np.repeat(np.arange(len(at)), steps)
        if len(owner):
            within = np.arange(len(owner)) - np.repeat(np.cumsum(steps) - steps, steps)
            passes = read(later, np.ones(len(owner)), mean[owner] + within, at[owner])
            if passes is None:
                return None
            drafts += np.bincount(owner, passes, len(at))
        settled = self._settling(batch)
        drafts += np.take(settled, np.minimum(steps, len(settled) - 1))
        seconds[at] += drafts + host.draft_s * longest
        return seconds, readings

    def count(self, readings: Sequence[Reading], iterations: int | None = None) -> None:
        """Count what `of_works` read; of the first `iterations` alone where so many happened."""
        if iterations is not None:
            kept = [reading.of < iterations for reading in readings]
            readings = [
                reading._replace(widths=reading.widths[own], contexts=reading.contexts[own])
                for reading, own in zip(readings, kept, strict=True)
            ]
        self._uncounted.extend(readings)
        # Many at a time: counting a span costs as much as counting a hundred.
        if len(self._uncounted) > UNCOUNTED:
            self._count()

    def _count(self) -> None:
        together: dict[tuple[PassReader, int], list[Reading]] = {}
        for reading in self._uncounted:
            together.setdefault((reading.reader, reading.batch), []).append(reading)
        for (reader, batch), group in together.items():
            widths, contexts = (
                np.concatenate(parts)
                for parts in ([r.widths for r in group], [r.contexts for r in group])
            )
            reader.count(batch, widths, contexts)
        self._uncounted.clear()

    @property
    def coverage(self) -> list[Coverage]:
        """How many passes were measured, interpolated and extrapolated, per model and phase."""
        self._count()
        drafts = dict.fromkeys(r for r in (self._draft, self._first, self._along) if r)
        readers = [self._target, *drafts, *self._prefill.values()]
        return [row for reader in readers for row in reader.coverage] + self._mixed.coverage

    @property
    def unpriced(self) -> list[str]:
        """What happened at no cost because the table lacks its cells."""
        models = MODELS if self.speculates else MODELS[:1]
        missing = [f"{m} prefill" for m in models if m not in self._prefill]
        return missing + [
            phase for phase in ("host_round", *(("signal",) if self.reads else ()))
            if not any(self.latency.has(m, phase) for m in MODELS)
        ]  # fmt: skip

    def _host_seconds(self, work: Work, batch: int) -> float:
        # Taken apart at once, here and below: reading a tuple's fields by name takes longer.
        _, _, longest, _, _, _, rejected, unread = work
        host_s, draft_s, target_rollback_s, draft_rollback_s = self._host_at(batch)
        if rejected:
            host_s += target_rollback_s
        if unread:
            host_s += draft_rollback_s
        if longest and not self._only_along(work):
            host_s += longest * draft_s
        return host_s

    def _host_at(self, batch: int) -> _Host:
        host = self._host.get(batch)
        if host is None:
            host = self._host[batch] = self._host_costs(batch)
        return host

    def _draft_readers(self) -> tuple[PassReader, PassReader]:
        """Of a draft's later passes and of its first."""
        if self._draft is None or self._first is None:
            raise DraftsimError("the policy drafted, but the engine was told it never would")
        return self._draft, self._first

    def _only_along(self, work: Work) -> bool:
        """Whether a drafter that always runs is asked for nothing (`policies.batch.base.KeptInStep`
        counts that pass as the draft's own)."""
        return self._along is not None and not work.drafted and self.always < 2

    def _along_s(self, work: Work, batch: int) -> float:
        assert self._along is not None
        return self._along(batch, 1.0, work.context / batch - 1.0)

    def _settling(self, batch: int) -> list[float]:
        """What the first 0, 1, ... draft passes behind a first take beyond later ones."""
        settled = self._settled.get(batch)
        if settled is None:
            settled = self._settled[batch] = settling_sums(self.latency, "draft", batch).tolist()
        return settled

    def _first_sizes(self, work: Work, batch: int) -> tuple[float, float]:
        """Tokens a sequence of a draft's first pass, and those cached before; both at their means.

        A drafter that runs along goes over all that the iteration verifies, of every sequence.
        """
        if self._along is not None:
            return work.drafted / batch + 1.0, work.context / batch - 1.0
        width, mean = work.catch_up / work.drafting, work.draft_context / work.drafting
        return width, mean - width if mean > width else 0.0

    def _draft_passes(self, work: Work, batch: int) -> float:
        read, read_first = self._draft_readers()
        longest, mean = work.longest, work.draft_context / work.drafting
        width, cached = self._first_sizes(work, batch)
        first_s = read_first(batch, width, cached)
        settled = self._settling(batch)
        settling_s = settled[min(longest, len(settled)) - 1]
        return first_s + settling_s + read.run(batch, mean, longest - 1)

    def _draft_by_sequence(
        self, work: Work, slots: Sequence[Slot], rounds: Sequence[Round]
    ) -> float:
        read, read_first = self._draft_readers()
        longest, drafting = work.longest, work.drafting
        if self.passes == "padded":
            return self._draft_rectangles(slots, rounds, longest)
        batch = drafting if self._along is None else len(rounds)
        seconds = read_first(batch, *self._first_sizes(work, batch))
        settled = self._settling(drafting)
        seconds += settled[min(longest, len(settled)) - 1]
        for step in range(1, longest):
            still = [
                s.context for s, r in zip(slots, rounds, strict=True) if r.draft_forwards > step
            ]
            seconds += read(len(still), 1.0, sum(still) / len(still) + step - 1)
        return seconds

    def _draft_rectangles(
        self, slots: Sequence[Slot], rounds: Sequence[Round], longest: int
    ) -> float:
        read, read_first = self._draft_readers()
        sizes = [
            (r.draft_forwards, r.catch_up, slot.context)
            for slot, r in zip(slots, rounds, strict=True) if r.draft_forwards
        ]  # fmt: skip
        width = max(catch_up for _, catch_up, _ in sizes)
        settled = self._settling(len(rounds))
        seconds = settled[min(longest, len(settled)) - 1]
        for step in range(longest):
            active = [context for forwards, _, context in sizes if forwards > step]
            batch = len(active) if self.draft_batch == "active" else len(rounds)
            # What a pass sees when it ends: every known token and the drafts so far.
            pass_s = read if step else read_first
            seconds += pass_s(batch, width, max(max(active) + step - width, 0))
            width = 1
        return seconds

    def _rectangle(self, slots: Sequence[Slot], rounds: Sequence[Round]) -> float:
        width = max(r.drafted for r in rounds) + 1
        seen = max(s.context + r.drafted for s, r in zip(slots, rounds, strict=True))
        return self._target(len(rounds), width, max(seen - width, 0))

    def _target_pass(self, work: Work, decoding: int, chunks: Sequence[Chunk]) -> float:
        if chunks and "target" not in self._prefill:
            chunks = ()
        tokens = decoding + work.drafted
        # The last token emitted is in no cache yet: it is the first this pass processes.
        cached = work.context - decoding
        decode_s = self._target(decoding, tokens / decoding, cached / decoding)
        if not chunks:
            return decode_s
        prompt_s = self._prompts("target", self._target, chunks)
        prompts = sum([c.tokens for c in chunks]), sum([c.slot.prefilled for c in chunks])
        return self._mixed.seconds(decode_s, tokens, prompt_s, *prompts)

    def _prompts(self, model: str, forward: PassReader | None, chunks: Sequence[Chunk]) -> float:
        prefill = self._prefill.get(model)
        if prefill is None or forward is None or not chunks:
            return 0.0
        count = len(chunks)
        tokens = sum([c.tokens for c in chunks])
        cached = sum([c.slot.prefilled for c in chunks])
        whole = all(c.slot.prefill_left == c.tokens for c in chunks)
        reader, context = (prefill, 0.0) if whole and not cached else (forward, cached / count)
        return reader(count, tokens / count, context)

    def _host_costs(self, batch: int) -> _Host:
        def seconds(phase: str, *models: str) -> float:
            return sum(self._scalar(m, phase, batch) for m in models if self.latency.has(m, phase))

        draft_s = seconds("host_draft", *MODELS)
        if self.reads:
            draft_s += seconds("signal", *MODELS)
        rollbacks = seconds("rollback", "target"), seconds("rollback", "draft")
        return _Host(seconds("host_round", *MODELS), draft_s, *rollbacks)

    def _scalar(self, model: str, phase: str, batch: int) -> float:
        # A search serves one table hundreds of times: every engine would read the same cells.
        known = _scalars.setdefault(self.latency, {})
        seconds = known.get((model, phase, batch))
        if seconds is None:
            seconds = known[model, phase, batch] = _host_phase_s(self.latency, model, phase, batch)
        return seconds


_scalars: WeakKeyDictionary[LatencyTable, dict[tuple[str, str, int], float]] = WeakKeyDictionary()


def _host_phase_s(latency: LatencyTable, model: str, phase: str, batch: int) -> float:
    cells = latency.cells
    own = cells[(cells["model"] == model) & (cells["phase"] == phase)]
    # Host phases are measured at one size: read them at that size, at any context.
    new, context = int(own["new_tokens"].iloc[0]), int(own["context"].iloc[0])
    nearest = int(np.clip(batch, own["batch"].min(), own["batch"].max()))
    return float(latency.seconds(model, phase, batch=nearest, new_tokens=new, context=context))
