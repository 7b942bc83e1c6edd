"""Work of one engine step, and its seconds from the latency table; it decides nothing.

A decode iteration over B sequences costs as many batched draft passes as the longest
draft, one target pass over the ragged total of drafted + 1 tokens, and host time.  Ragged
sizes are read at their means: a pass's tokens and cache reads add up over the sequences,
so at equal totals its cost is that of B sequences of the mean width and context.

`traces.latency.table.LatencyTable.estimate` reads arrays; an engine asks for one batch, width and
context per pass.  `PassReader` keeps the lines of the grid that it read
(`traces.latency.interpolate.Line`) and counts which sizes lay between or outside the measured ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import partial
from math import inf
from typing import Literal, NamedTuple, cast

import numpy as np

from policies.core import Round
from simulator.pricing import Host, host_at, judging_seconds, missing_parts
from simulator.serving.sequence import Slot
from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, Line
from traces.latency.table import PHASES, LatencyTable
from traces.replay.calls import passes_always
from traces.store.identity import ROLES

PLACES = (
    "target", "later", "first", "along", "target_prefill", "draft_prefill", "with_prompts", "mixed",
)  # fmt: skip
"""Cells that an engine reads: of the target's passes, of a draft's later passes and of its first,
of a drafter that runs along in every iteration, of the prompts, of sequences that decode with
prompts in the pass, and of prompts in a pass that decodes."""
TARGET, LATER, FIRST, ALONG, TARGET_PREFILL, DRAFT_PREFILL, WITH_PROMPTS, MIXED = cast(
    "tuple[int, ...]", tuple(np.arange(len(PLACES)))
)
"""Their numbers.  A draft's later and first passes may be the same cells.  NumPy scalars on
purpose: with literal ints numba would compile `loop.read` once for each."""
COMPOSED = "composed"
"""Origin of passes put together from a decoding one and the prompts' own."""
ORIGINS = ("measured", "interpolated", "extrapolated")
"""Origins of a reading, by their numbers in `traces.latency.interpolate`."""
PLANS = 1 << 14
"""Readings kept: one per batch and width that occurred, for passes differ in little else."""


class Chunk(NamedTuple):
    """Prompt tokens of one request to process in this iteration."""

    slot: Slot
    tokens: int


class Work(NamedTuple):
    """Counts over one round per sequence."""

    context: float
    drafted: float
    longest: int
    """Draft passes of the sequence that drafted most."""
    drafting: int
    """Sequences that drafted at all; the next two are theirs alone."""
    catch_up: int
    draft_context: float
    rejected: bool
    """True if any drafted token leaves the target's cache."""
    unread: bool
    """True if any token that the draft model has read leaves its cache."""


def work_of(slots: Sequence[Slot], rounds: Sequence[Round]) -> Work:
    """Return the work of `rounds`, one per slot; contexts are those from before the rounds."""
    context = drafted_all = longest = drafting = catch_up_all = draft_context = 0
    rejected = unread = False
    for slot, (_, drafted, accepted, _, forwards, catch_up) in zip(slots, rounds, strict=True):
        own = slot.context
        context += own
        drafted_all += drafted
        if accepted < drafted:
            rejected = True
        if forwards:
            drafting += 1
            catch_up_all += catch_up
            draft_context += own
            longest = forwards if forwards > longest else longest
            if accepted < forwards - 1:
                unread = True
    # As Work(...), without the Python function that a named tuple's constructor is.
    counts = context, drafted_all, longest, drafting, catch_up_all, draft_context, rejected, unread
    return tuple.__new__(Work, counts)


class Seconds(NamedTuple):
    """The time of an iteration by what took it."""

    draft_s: float
    target_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the iteration."""
        draft_s, target_s, host_s = self
        return draft_s + target_s + host_s


def cells_read(latency: LatencyTable, speculates: bool) -> dict[str, tuple[str, str]]:
    """Return (model, phase) of each of `PLACES` that `latency` has cells of, in their order.

    The first draft pass has none of its own where it costs what later ones do.
    """
    first = latency.first_draft_phase("draft")
    cells = (
        ("target", "forward"), ("draft", "forward"), ("draft", first), ("draft", "along"),
        ("target", "prefill"), ("draft", "prefill"), ("target", "with_prompts"),
        ("target", "mixed"),
    )  # fmt: skip
    return {
        place: own for place, own in zip(PLACES, cells, strict=True)
        if (speculates or own[0] == "target")
        and (place in ("target", "later") or (own[1] != "forward" and latency.has(*own)))
    }  # fmt: skip


class Coverage(NamedTuple):
    """Passes of one model priced at cells of one origin, and their least and largest sizes."""

    model: str
    phase: str
    origin: str
    passes: int
    batch: tuple[float, float]
    new_tokens: tuple[float, float]
    context: tuple[float, float]


def covered(cells: tuple[str, str], origin: str, tally: Sequence[float]) -> Coverage:
    """Return the coverage of a tally: passes, then least and largest batch, width and context."""
    passes, *ends = tally
    return Coverage(*cells, origin, int(passes), *zip(ends[::2], ends[1::2], strict=True))


def _count(tally: list[float], passes: float, *sizes: tuple[float, float]) -> None:
    """Add passes to a tally, with the least and largest of each size."""
    tally[0] += passes
    for i, (low, high) in enumerate(sizes):
        tally[2 * i + 1] = min(low, tally[2 * i + 1])
        tally[2 * i + 2] = max(high, tally[2 * i + 2])


class PassReader:
    """Seconds of one phase of one model at (batch, new tokens, context), each maybe fractional.

    Raises DraftsimError if nothing was measured for this model and phase.
    """

    def __init__(self, table: LatencyTable, model: str, phase: str = "forward") -> None:
        self._grid = table.grid(model, phase)
        self.model, self.phase = model, phase
        self._check = partial(table.check_sizes, model, phase)
        # A line of the grid at one (batch, width), None where nothing measured surrounds it; and
        # by origin the passes read from it, with their lowest and highest context.
        self._plans: dict[tuple[float, float], tuple[Line | None, list[list[float]]]] = {}
        self._seen = [[0.0, *[inf, -inf] * 3] for _ in ORIGINS]

    def covers(self, batch: float, new_tokens: float) -> bool:
        """Return True if such passes lie within the measured ones."""
        return self._grid.covers(batch, new_tokens)

    def __call__(self, batch: float, new_tokens: float, context: float) -> float:
        """Return seconds of a pass over `batch` sequences of `new_tokens` after `context`."""
        line, tallies = self._plans.get((batch, new_tokens)) or self._plan(batch, new_tokens)
        if line is None:
            tally = tallies[EXTRAPOLATED]
            sizes = (np.array([float(size)]) for size in (batch, new_tokens, context))
            seconds = float(self._grid.read(*sizes)[0][0])
        else:
            i = max(bisect_right(line.cuts, context) - 1, 0)
            cut = line.cuts[i]
            tally = tallies[line.at_cut[i] if context == cut else line.after[i]]
            seconds = line.seconds[i] + line.slopes[i] * (context - cut)
        passes, low, high = tally
        tally[0] = passes + 1
        # Contexts grow from round to round, so this is the usual case: no calls for it.
        if not low <= context <= high:
            tally[1] = context if context < low else low
            tally[2] = context if context > high else high
        return seconds

    def run(self, batch: float, context: float, count: int) -> float:
        """Return seconds of `count` passes in a row, a token each, from `context` tokens on."""
        line, tallies = self._plans.get((batch, 1.0), (None, []))
        last = context + (count - 1)
        if count > 1 and line is not None:
            i = bisect_right(line.cuts, context)
            stop = line.cuts[i] if i < len(line.cuts) else inf
            if i and line.cuts[i - 1] < context and last < stop:
                tally = tallies[line.after[i - 1]]
                tally[:] = tally[0] + count, min(context, tally[1]), max(last, tally[2])
                middle = 0.5 * (context + last) - line.cuts[i - 1]
                return count * (line.seconds[i - 1] + line.slopes[i - 1] * middle)
        return sum((self(batch, 1.0, context + step) for step in range(count)), 0.0)

    @property
    def coverage(self) -> list[Coverage]:
        """One entry per origin that occurred."""
        self._fold()
        seen = zip(ORIGINS, self._seen, strict=True)
        return [
            covered((self.model, self.phase), origin, tally) for origin, tally in seen if tally[0]
        ]

    def _plan(self, batch: float, width: float) -> tuple[Line | None, list[list[float]]]:
        if batch <= 0 or width <= 0:
            raise DraftsimError(f"a pass over {batch} sequences of {width} tokens has no latency")
        self._check(batch, width)
        if len(self._plans) >= PLANS:
            self._fold()
            self._plans.clear()
        tallies = [[0, inf, -inf] for _ in ORIGINS]
        self._plans[batch, width] = self._grid.line(batch, width), tallies
        return self._plans[batch, width]

    def _fold(self) -> None:
        """Add the plans' tallies to the totals, and reset them."""
        for (batch, width), (_, tallies) in self._plans.items():
            for seen, tally in zip(self._seen, tallies, strict=True):
                passes, low, high = tally
                if passes:
                    _count(seen, passes, (batch, batch), (width, width), (low, high))
                    tally[:] = [0, inf, -inf]


class Prompts(NamedTuple):
    """The time of one iteration's prompt chunks by themselves, and the chunks."""

    draft_s: float
    target_s: float
    tokens: int
    """Zero if the target's prompts have no price."""
    cached: int
    """Tokens of the same prompts that were processed before."""


NO_PROMPTS = Prompts(0.0, 0.0, 0, 0)


class EngineCost:
    """Prices iterations of one engine.

    Parameters
    ----------
    latency:
        Measured or assumed cells.  Host phases it lacks cost nothing; without prefill
        cells, prompts cost nothing either, as in clock-free pricing (`unpriced` says so).
    extras:
        Phases of the run that not all runs have (`simulator.pricing.extras_of`).
    speculates:
        True if the draft model runs at all; its prompts are charged if so.
    passes:
        ``ragged``: sizes at their means, as with kernels for sequences of any length;
        ``padded``: every decode pass is the rectangle of its widest sequence and longest
        context, as `profiler.decoding.batch` runs it.
    longest:
        The longest draft.  Every iteration costs the verdicts of ``extras`` on its mean draft.

    Attributes
    ----------
    phases, readers:
        (model, phase) of the cells at each of `PLACES`, and their readers.

    Notes
    -----
    Every draft pass runs over the whole decoding batch, as under CUDA graphs.

    If the table has the time of a drafter that runs in every iteration (``along``), an iteration
    without drafts costs that.  The first pass of a draft is then over all tokens that the iteration
    verifies, because such a drafter runs after them.

    A prompt processed whole is priced by the prefill cells at its own length, because attention
    grows with the square of it.  Several such prompts in a pass get the discount that prompts of
    their mean length get together.  A chunk takes what its prompt takes up to its end less what it
    takes up to its beginning, and no less than its tokens alone or a decoding pass after that
    context.  Where the forward cells hold passes as wide as the chunks, these are read at the mean
    width and context instead.  A model without prefill cells reads prompts at no cost.

    Prompts in a pass that decodes are no part of its mean width: attention of the decoding
    sequences costs as much as alone, and all tokens go through the layers together.  If an engine
    was measured, cells of phase ``mixed`` hold the time that one prompt adds to the decoding
    sequences.  Otherwise, and beyond these cells, the seconds are prefill + decode less one launch,
    because weights are read and kernels launched once.  In such a pass sequences decode with
    another kernel, where the table has its cells (``with_prompts``).

    A table of an engine that always drafts (`traces.replay.calls`) has its passes in every
    iteration that decodes.
    """

    def __init__(
        self,
        latency: LatencyTable,
        extras: Collection[str] = (),
        speculates: bool = True,
        passes: Literal["ragged", "padded"] = "ragged",
        longest: int = 0,
    ) -> None:
        self.latency = latency
        self.extras = frozenset(extras)
        self.speculates = speculates
        self.always = passes_always(latency) if speculates else 0
        if passes not in ("ragged", "padded"):
            raise DraftsimError(f"passes is {passes!r}, expected 'ragged' or 'padded'")
        self.passes = passes
        self.phases = cells_read(latency, speculates)
        readers = {place: PassReader(latency, *own) for place, own in self.phases.items()}
        self.readers, self._target = readers, readers["target"]
        self._later = readers.get("later")
        self._first = readers.get("first", self._later)
        self._along = readers.get("along")
        self._with_prompts = readers.get("with_prompts", self._target)
        self._mixed = readers.get("mixed")
        self._most_mixed = 0.0 if self._mixed is None else latency.grid("target", "mixed").widest
        self._launch_s = latency.grid("target", "forward").quickest_s
        self._composed = [0.0, *[inf, -inf] * 3]
        self._prefill = {m: readers[f"{m}_prefill"] for m in ROLES if f"{m}_prefill" in readers}
        # The longest prompt that was measured together with others.
        self._longest = {m: latency.grid(m, "prefill").widest_together for m in self._prefill}
        self._settled: dict[int, list[float]] = {}
        self._hosts: dict[int, Host] = {}
        # Sorted: a set's order, and so the last bit of a sum, differs from process to process.
        self.verdicts = [p for p in sorted(self.extras) if PHASES[p].per == "verdict"]
        self.longest = longest if self.verdicts else 0
        self._judged: dict[int, list[float]] = {}

    def __call__(
        self, slots: Sequence[Slot], rounds: Sequence[Round], chunks: Sequence[Chunk]
    ) -> Seconds:
        """Return seconds of an iteration of `rounds` (one per slot) and prompt `chunks`.

        Slots must still show their context from before the rounds.
        """
        prompts = self.prompts(chunks)
        if not rounds:
            around_s = self.host(len(chunks)).iteration_s
            return Seconds(prompts.draft_s, prompts.target_s, around_s)
        if least := self.always:
            rounds = [r._replace(draft_forwards=max(r.draft_forwards, least)) for r in rounds]
        work, batch = work_of(slots, rounds), len(rounds)
        if self.passes == "ragged":
            return self.of_work(work, batch, prompts)
        draft_s = prompts.draft_s + self._draft_rectangles(work, slots, rounds)
        target_s = (
            self._target_pass(work, batch, prompts) if prompts.tokens
            else self._rectangle(slots, rounds)
        )  # fmt: skip
        return Seconds(draft_s, target_s, self._host_seconds(work, batch))

    def of_work(self, work: Work, batch: int, prompts: Prompts = NO_PROMPTS) -> Seconds:
        """Return seconds of an iteration over `batch` sequences, all sizes at their means.

        `work` counts the passes of an engine that always drafts.
        """
        draft_s = prompts.draft_s + self._draft_seconds(work, batch)
        target_s = self._target_pass(work, batch, prompts)
        # As in `work_of`.
        return tuple.__new__(Seconds, (draft_s, target_s, self._host_seconds(work, batch)))

    def prompts(self, chunks: Sequence[Chunk]) -> Prompts:
        """Return the time of `chunks`; to be asked before they are processed."""
        if not chunks:
            return NO_PROMPTS
        draft_s = self._prompt_seconds("draft", self._later, chunks)
        if "target" not in self._prefill:
            return Prompts(draft_s, 0.0, 0, 0)
        return Prompts(
            draft_s, self._prompt_seconds("target", self._target, chunks),
            sum([c.tokens for c in chunks]), sum([c.slot.prefilled for c in chunks]),
        )  # fmt: skip

    @property
    def coverage(self) -> list[Coverage]:
        """Count measured, interpolated and extrapolated passes, per model and phase."""
        read = [row for reader in self.readers.values() for row in reader.coverage]
        if self._composed[0]:
            read.append(covered(("target", "mixed"), COMPOSED, self._composed))
        return read

    def host(self, batch: int) -> Host:
        """Return the host's seconds at `batch`."""
        found = self._hosts.get(batch)
        if found is None:
            found = self._hosts[batch] = host_at(self.latency, self.extras, batch)
        return found

    @property
    def unpriced(self) -> list[str]:
        """Return what happened at no cost because the table lacks its cells."""
        models = ROLES if self.speculates else ROLES[:1]
        prompts = [f"{m} prefill" for m in models if m not in self._prefill]
        return prompts + missing_parts(self.latency, self.extras)

    def _prompt_seconds(
        self, model: str, forward: PassReader | None, chunks: Sequence[Chunk]
    ) -> float:
        """Return seconds of one pass of `model` over `chunks`; ``forward`` reads its passes."""
        prefill = self._prefill.get(model)
        if prefill is None or forward is None:
            return 0.0
        if len(chunks) == 1:  # as mostly, and then it is worth while to be quick
            [(slot, tokens)] = chunks
            if not slot.prefilled and slot.prefill_left == tokens:
                return prefill(1, float(tokens), 0.0)
        lengths = [c.tokens for c in chunks]
        count, mean = len(lengths), sum(lengths) / len(lengths)
        cached = sum([c.slot.prefilled for c in chunks])
        cut = cached or any(c.slot.prefill_left != c.tokens for c in chunks)
        if cut and forward.covers(count, mean):
            return forward(count, mean, cached / count)
        if count == 1:
            return self._chunk_seconds(prefill, forward, mean, cached)
        # Beyond the longest that were measured together, prompts share as much as those.
        alike = min(mean, self._longest[model])
        together_s = prefill(count, alike, 0.0)
        if not cached and all(length == alike for length in lengths):
            return together_s
        if not together_s:  # a drafter without a model of its own
            return 0.0
        alone_s = sum(
            [self._chunk_seconds(prefill, forward, c.tokens, c.slot.prefilled) for c in chunks]
        )
        return together_s * alone_s / (count * prefill(1, alike, 0.0))

    @staticmethod
    def _chunk_seconds(
        prefill: PassReader, forward: PassReader, tokens: float, context: float
    ) -> float:
        """Return seconds of a chunk alone."""
        tokens_s = prefill(1, tokens, 0.0)
        if not context:
            return tokens_s
        added_s = prefill(1, context + tokens, 0.0) - prefill(1, context, 0.0)
        return max(tokens_s, added_s, forward(1, 1, context))

    def _idle(self, work: Work) -> bool:
        """Return True if a drafter that runs along is asked for nothing.

        `policies.batch.base.KeptInStep` counts the pass that it takes as one of a draft.
        """
        return self._along is not None and not work.drafted and work.longest < 2

    def _drafting(self) -> tuple[PassReader, PassReader]:
        """Return the readers of a draft's later passes and of its first."""
        if self._later is None or self._first is None:
            raise DraftsimError("the policy drafted, but the engine was told it never would")
        return self._later, self._first

    def _draft_seconds(self, work: Work, batch: int) -> float:
        """Return seconds of an iteration's draft passes over `batch` sequences, at their means."""
        verified, before = work.drafted / batch + 1.0, work.context / batch - 1.0
        if self._along is not None and self._idle(work):
            return self._along(batch, 1.0, before)
        if not work.longest:
            return 0.0
        read, read_first = self._drafting()
        longest, mean = work.longest, work.draft_context / work.drafting
        if self._along is not None:
            # It goes over all that the iteration verifies, of every sequence.
            first_s = read_first(batch, verified, before)
        else:
            width = work.catch_up / work.drafting
            first_s = read_first(batch, width, mean - width if mean > width else 0.0)
        return first_s + self._settling(batch, longest) + read.run(batch, mean, longest - 1)

    def _draft_rectangles(
        self, work: Work, slots: Sequence[Slot], rounds: Sequence[Round]
    ) -> float:
        """Return seconds of draft passes as wide as the widest sequence: one round per slot."""
        if not work.longest or self._idle(work):
            return self._draft_seconds(work, len(rounds))
        read, read_first = self._drafting()
        sizes = [
            (r.draft_forwards, r.catch_up, slot.context)
            for slot, r in zip(slots, rounds, strict=True) if r.draft_forwards
        ]  # fmt: skip
        width = max(catch_up for _, catch_up, _ in sizes)
        seconds = self._settling(len(rounds), work.longest)
        for step in range(work.longest):
            longest = max(context for forwards, _, context in sizes if forwards > step)
            # At its end a pass sees every known token and the drafts so far.
            pass_s = read if step else read_first
            seconds += pass_s(len(rounds), width, max(longest + step - width, 0))
            width = 1
        return seconds

    def _settling(self, batch: int, passes: int) -> float:
        """Return the extra time of a round's first `passes` draft passes."""
        settled = self._settled.get(batch)
        if settled is None:
            settled = self._settled[batch] = self.latency.settling_sums("draft", batch).tolist()
        return settled[min(passes, len(settled)) - 1]

    def _host_seconds(self, work: Work, batch: int) -> float:
        # Taken apart at once: reading a tuple's fields by name takes longer.
        _, drafted, longest, _, _, _, rejected, unread = work
        host_s, draft_s, target_rollback_s, draft_rollback_s, _, _ = self.host(batch)
        if rejected:
            host_s += target_rollback_s
        if unread:
            host_s += draft_rollback_s
        if longest and not self._idle(work):
            host_s += longest * draft_s
        return host_s + self.verdict_s(batch, drafted / batch) if self.verdicts else host_s

    def judged(self, batch: int, longest: int) -> list[float]:
        """Return seconds of the verdicts on 0, 1, ..., `longest` drafted tokens of each sequence.

        The list may go on.
        """
        seconds = self._judged.get(batch, [])
        if len(seconds) <= longest:
            found = np.zeros(longest + 1)
            for phase in self.verdicts:
                found += judging_seconds(self.latency, phase, batch, longest)
            seconds = self._judged[batch] = found.tolist()
        return seconds

    def verdict_s(self, batch: int, drafted: float) -> float:
        """Return seconds of the verdicts on `drafted` tokens of each sequence, their mean."""
        low = int(drafted)
        seconds = self.judged(batch, max(low + 1, self.longest))
        return seconds[low] + (drafted - low) * (seconds[low + 1] - seconds[low])

    def _rectangle(self, slots: Sequence[Slot], rounds: Sequence[Round]) -> float:
        width = max(r.drafted for r in rounds) + 1
        seen = max(s.context + r.drafted for s, r in zip(slots, rounds, strict=True))
        return self._target(len(rounds), width, max(seen - width, 0))

    def _target_pass(self, work: Work, decoding: int, prompts: Prompts) -> float:
        tokens = decoding + work.drafted
        # The last token emitted is in no cache yet: it is the first this pass processes.
        cached = work.context - decoding
        if not prompts.tokens:
            return self._target(decoding, tokens / decoding, cached / decoding)
        decode_s = self._with_prompts(decoding, tokens / decoding, cached / decoding)
        _, prompt_s, read, before = prompts
        if self._mixed is not None and not before and read <= self._most_mixed:
            return decode_s + self._mixed(tokens, read, 0.0)
        _count(self._composed, 1, (tokens, tokens), (read, read), (before, before))
        return max(decode_s, prompt_s, decode_s + prompt_s - self._launch_s)


class TableCost:
    """Seconds of a decode iteration over equal sequences (`policies.batch.base.IterationCost`).

    The price of serving (`EngineCost`) for an iteration in which every sequence drafts alike,
    catches up on one token, and nothing is taken out of a cache.

    Parameters
    ----------
    latency:
        The table; host phases it lacks cost nothing.
    extras:
        Phases of the run that not all runs have (`simulator.pricing.extras_of`).
    speculates:
        False for an engine without a drafter, which drafts nothing.
    """

    def __init__(
        self, latency: LatencyTable, extras: Collection[str] = (), speculates: bool = True
    ) -> None:
        self.latency, self.extras, self.speculates = latency, frozenset(extras), speculates
        self._cost = EngineCost(latency, extras, speculates)

    @property
    def coverage(self) -> list[Coverage]:
        """Count measured, interpolated and extrapolated passes, per model and phase."""
        return self._cost.coverage

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Return seconds of `draft_length` batched draft steps and one verification."""
        known, always = (context + 1) * batch, self._cost.always
        passes = max(draft_length, always)
        drafting = batch if passes else 0
        work = Work(
            known, verify_tokens - batch, passes, drafting, drafting, known, rejected=False,
            unread=always > 1,
        )  # fmt: skip
        return self._cost.of_work(work, batch).total_s
