"""Seconds of one engine iteration from the latency table; decides nothing.

A decode iteration over B sequences costs as many batched draft passes as the longest
draft, one target pass over the ragged total of drafted + 1 tokens, and host time.  Ragged
sizes are read at their means: a pass's tokens and cache reads add up over the sequences,
so at equal totals its cost is that of B sequences of the mean width and context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from policies.core import Round
from simulator.host import HOSTS
from simulator.serving.cost.drafts import DraftCost
from simulator.serving.cost.host import HostCost
from simulator.serving.cost.mixed import MixedPasses
from simulator.serving.cost.prompts import NO_PROMPTS, PromptCost, Prompts
from simulator.serving.cost.reader import Coverage, PassReader
from simulator.serving.cost.work import Chunk, Work, drafting_always, work_of
from simulator.serving.sequence import Slot
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.always import passes_always

MODELS = ("target", "draft")


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
    If the table has the time of a drafter that runs in every iteration (``along``), an iteration
    without drafts costs that.  The first pass of a draft is then over all tokens that the iteration
    verifies, because such a drafter runs after them.

    `mixed` prices the prompts in a pass that decodes: they are no part of its mean width.  In such
    a pass sequences decode with another kernel, where the table has its cells (``beside``).  A
    table of an engine that always drafts (`traces.replay.always`) has its passes in every iteration
    that decodes.
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
        own = latency.has("target", "beside")
        self._beside = PassReader(latency, "target", "beside") if own else self._target
        self._mixed = MixedPasses(latency)
        self._drafts = DraftCost(latency, speculates, self.always, draft_batch, passes)
        self._hosts = HostCost(latency, reads)
        self._prompts = PromptCost(latency, MODELS if speculates else MODELS[:1])

    def __call__(
        self, slots: Sequence[Slot], rounds: Sequence[Round], chunks: Sequence[Chunk]
    ) -> Seconds:
        """Seconds of an iteration of `rounds` (one per slot) and prompt `chunks`.

        Slots must still show their context from before the rounds.
        """
        prompts = self.prompts(chunks)
        if not rounds:
            around_s = self._hosts.around_iteration_s(len(chunks))
            return Seconds(prompts.draft_s, prompts.target_s, around_s)
        work, batch = work_of(slots, rounds), len(rounds)
        if self.by_totals:
            return self.of_work(work, batch, prompts)
        if least := self.always:
            rounds = [r._replace(draft_forwards=max(r.draft_forwards, least)) for r in rounds]
            work = work_of(slots, rounds)
        draft_s = prompts.draft_s + self._drafts.by_sequence(work, slots, rounds)
        if self.passes == "padded" and not prompts.tokens:
            target_s = self._rectangle(slots, rounds)
        else:
            target_s = self._target_pass(work, batch, prompts)
        return Seconds(draft_s, target_s, self._host_seconds(work, batch))

    def of_work(self, work: Work, batch: int, prompts: Prompts = NO_PROMPTS) -> Seconds:
        """Seconds of an iteration over `batch` sequences, all sizes at their means."""
        if self.always:
            work = drafting_always(work, batch, self.always)
        draft_s = prompts.draft_s + self._drafts.of_work(work, batch)
        target_s = self._target_pass(work, batch, prompts)
        # As in `work_of`.
        return tuple.__new__(Seconds, (draft_s, target_s, self._host_seconds(work, batch)))

    @property
    def by_totals(self) -> bool:
        """Return True if an iteration's cost depends on its total work, not on single sequences."""
        return self.passes == "ragged" and self.draft_batch == "padded"

    def prompts(self, chunks: Sequence[Chunk]) -> Prompts:
        """Return the time of `chunks`; to be asked before they are processed."""
        if not chunks:
            return NO_PROMPTS
        draft_s = self._prompts.seconds("draft", self._drafts.later, chunks)
        if not self._prompts.prices("target"):
            return Prompts(draft_s, 0.0, 0, 0)
        return Prompts(
            draft_s, self._prompts.seconds("target", self._target, chunks),
            sum([c.tokens for c in chunks]), sum([c.slot.prefilled for c in chunks]),
        )  # fmt: skip

    def around_request_s(self, batch: int) -> float:
        """Return the server's own time around a request that ends with `batch` running, itself
        included.
        """
        return self._hosts.around_request_s(batch)

    def hosts_at(self, batch: int) -> tuple[float, ...]:
        """The host's seconds (`Host`), and a server's around an iteration and a request."""
        hosts = self._hosts
        return (
            *hosts.at(batch), hosts.around_iteration_s(batch), hosts.around_request_s(batch)
        )  # fmt: skip

    @property
    def coverage(self) -> list[Coverage]:
        """How many passes were measured, interpolated and extrapolated, per model and phase."""
        besides = [] if self._beside is self._target else [self._beside]
        readers = [self._target, *self._drafts.readers, *self._prompts.readers, *besides]
        return [row for reader in readers for row in reader.coverage] + self._mixed.coverage

    @property
    def unpriced(self) -> list[str]:
        """Return what happened at no cost because the table lacks its cells."""
        return self._prompts.unpriced + [
            phase for phase in ("host_round", *(("signal",) if self.reads else ()))
            if not any(self.latency.has(m, phase) for m in HOSTS)
        ]  # fmt: skip

    def _host_seconds(self, work: Work, batch: int) -> float:
        # Taken apart at once: reading a tuple's fields by name takes longer.
        _, _, longest, _, _, _, rejected, unread = work
        host_s, draft_s, target_rollback_s, draft_rollback_s = self._hosts.at(batch)
        if rejected:
            host_s += target_rollback_s
        if unread:
            host_s += draft_rollback_s
        if longest and not self._drafts.idle(work):
            host_s += longest * draft_s
        return host_s

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
        decode_s = self._beside(decoding, tokens / decoding, cached / decoding)
        return self._mixed.seconds(decode_s, tokens, *prompts[1:])
