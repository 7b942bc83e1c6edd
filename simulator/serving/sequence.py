"""A recorded sequence decoded inside an engine, and the slot a running request occupies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.core import Load, Round
from policies.guard import UndeclaredSignal
from policies.rules.base import VerifyRule
from policies.together import Member, Together
from simulator.serving.arrivals import Job
from traces.acceptance.trace import Trace
from traces.replay.decoder import ReplayDecoder
from traces.replay.scores import score_tape


class EngineState:
    """The state of an engine that all its sequences may see."""

    __slots__ = ("batch", "scheduled")

    def __init__(self) -> None:
        self.batch = 1
        """Requests that decode."""
        self.scheduled: int | None = None
        """As in `Load`."""


class ServedSequence(ReplayDecoder):
    """One request's replay at the request's own lengths.

    A recording longer than the request is cut, a shorter one begins again at its first
    token; no draft crosses that seam.  Drafts are capped at `lookahead` tokens, the slots
    the engine reserves.
    """

    def __init__(
        self,
        trace: Trace,
        job: Job,
        lookahead: int,
        engine: EngineState,
        rule: VerifyRule | None = None,
    ) -> None:
        # Whatever the recording did, an engine's prefill emits the first token.
        super().__init__(trace, job.sequence, first=1)
        self._recorded = self.length
        self._seam = self.length
        self.length = job.output_tokens
        if self.length > self._recorded:
            self._limit = self._recorded
        self._cap = lookahead + 1
        self._engine = engine
        self._rule = rule
        self._scores = None if rule is None else score_tape(trace).scores(rule.needs)
        self._read = self._tape.tokens(() if rule is None else rule.reads)
        self.prompt = job.prompt_tokens
        self.position = 1
        if self.length > 1 and self._seam == 1:
            self._wrap()

    @property
    def remaining(self) -> int:
        """Tokens to the limit, at most one more than the engine reserved slots for."""
        position = self.position
        if position >= self.length:
            return 0
        left = self._limit - position
        return left if left < self._cap else self._cap

    @property
    def ended(self) -> bool:
        """Return True if every token of the request has been emitted."""
        return self.position >= self.length

    @property
    def load(self) -> Load:
        """The engine's iteration and this sequence's context."""
        engine, run = self._engine, super().load.run_length
        return Load(engine.batch, self.prompt + self.position, run, engine.scheduled)

    @property
    def limit_left(self) -> int:
        """Tokens to the limit, whatever slots are reserved."""
        return self._limit - self.position

    @property
    def segment_left(self) -> int:
        """Tokens the request still emits before it ends or its recording begins again."""
        return min(self.length, self._seam) - self.position

    def judge(self, draft: Sequence[Any]) -> int:
        """Return how many of `draft` verification accepts, without moving on.

        Under a lossy rule the request goes on along the recording, as in
        `traces.replay.ruled.RuleReplayDecoder`.
        """
        if self._scores is not None and self._rule is not None:
            row, count = self._rows[self._start + self.position], len(draft)
            scores = self._scores.rows(row, count)
            try:
                return self._rule.accept(self._read.rows(row, count), scores)
            except UndeclaredSignal as error:
                raise error.by(self._rule) from None
        start = self._start + self.position
        run = self._runs[start]
        if run < len(draft) and start in self._tape.open_ended:
            raise self._unobserved(run)
        return min(len(draft), run)

    def verify(self, draft: Sequence[Any]) -> int:
        """Check `draft`, move on, and return how many tokens were accepted."""
        accepted = self.judge(draft)
        self.commit(accepted)
        return accepted

    def ends_after(self, accepted: int) -> bool:
        """Return True if accepting this many tokens emits the request's last one."""
        return self.position + accepted + 1 >= self.length

    def commit(self, accepted: int) -> None:
        """Move on by `accepted` drafted tokens and the token of the verification."""
        position = self.position + accepted + 1
        if position < self._seam and position < self.length:
            self.position = position
            return
        self.position = min(position, self._seam, self.length)
        if self.position == self._seam < self.length:
            self._wrap()

    def _wrap(self) -> None:
        # Rows are read at start + position: moving the start back makes the recording begin again.
        self._start -= self._recorded
        self._seam += self._recorded
        self._limit = self._seam
        if self._eos_at >= 0:
            self._eos_at += self._recorded


class Slot(Member):
    """A request inside the engine: what it still has to do and what it has cost."""

    def __init__(self, index: int, job: Job, arrival_s: float, decoder: Any) -> None:
        super().__init__(index)
        self.index = index
        self.job = job
        self.arrival_s = arrival_s
        self.decoder = decoder
        self.takes_verified = getattr(decoder, "takes_verified", False)
        self.prefill_left = job.prompt_tokens
        self.prefilled = 0
        self.context = job.prompt_tokens
        """Prompt and output tokens so far; the cache holds one fewer once decoding began."""
        self.capacity = 0
        self.first_s = -1.0
        self.last_s = -1.0
        self.tokens = 0
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.draft_forwards = 0
        self.preemptions = 0

    @property
    def remaining(self) -> int:
        """Tokens to the limit, at most one more than slots are reserved for."""
        return int(self.decoder.remaining)


def step(together: Together, slots: Sequence[Slot]) -> list[Round]:
    """Decode one iteration of `slots`: a round of each, in order, and no seconds."""
    together.draft(
        slots, lambda slot: slot.decoder.load,
        lambda active: [slot.decoder.draft(slot.draft) for slot in active],
    )  # fmt: skip
    accepted = [slot.decoder.judge(slot.draft) for slot in slots]
    ends = [slot.decoder.ends_after(a) for slot, a in zip(slots, accepted, strict=True)]
    rounds = []
    for slot, kept in zip(slots, together.keep(accepted, ends), strict=True):
        position = slot.decoder.position
        slot.decoder.commit(kept)
        rounds.append(slot.settled(position, kept, slot.decoder.position - position))
    together.observe(slots, rounds)
    for slot in slots:
        if slot.decoder.ended:
            together.leave(slot)
    return rounds
