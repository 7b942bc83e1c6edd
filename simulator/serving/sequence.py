"""Recorded sequences in an engine: decoded as the clock goes on, or replayed once for all runs."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from policies.arrays import Ints
from policies.core import DraftPolicy, Load, Round, speculate
from policies.guard import PolicyError
from policies.rules.base import VerifyRule
from policies.together import Member, Together
from policies.wrapper import unwrapped
from simulator.serving.arrivals import LONGEST, Job
from traces.acceptance.trace import Trace
from traces.replay.decoder import ReplayDecoder
from traces.replay.ruled import score_lists

NO_ROUNDS: Ints = np.empty((0, len(Round._fields)), np.int64)
KEPT = 16
"""Policies of a trace whose rounds are kept: a study of many would hold them all."""


@dataclass(slots=True)
class EngineState:
    """The state of an engine that all its sequences may see."""

    batch: int = 1
    """Requests that decode."""
    scheduled: int | None = None
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
        self._scores = None if rule is None else score_lists(trace).scores(rule.needs)
        self._read = self._lists.tokens(() if rule is None else rule.reads)
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
            except PolicyError as error:
                raise error.by(self._rule) from None
        start = self._start + self.position
        run = self._runs[start]
        if run < len(draft) and start in self._lists.open_ended:
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
        self.unread = 1
        """Tokens that the first draft pass reads in an engine that drafts in every iteration."""
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


def clock_free(policy: DraftPolicy, rule: VerifyRule | None) -> bool:
    """Return True if a request's rounds depend on its recording alone.

    They do not if the policy learns across requests or decides by the load, or if the rule
    learns.
    """
    copied = type(unwrapped(policy)).fresh is DraftPolicy.fresh
    forgets = not policy.learns_across_requests and copied
    return (
        forgets and not policy.decides_by_load()
        and (rule is None or type(rule).end_request is VerifyRule.end_request)
    )  # fmt: skip


class RoundTable:
    """The rounds of one sequence from its first token on, replayed as far as asked for."""

    def __init__(self, rounds: Iterator[Round]) -> None:
        self.rounds = NO_ROUNDS
        """(rounds, fields of `Round`) so far."""
        self.reached = 1
        """Output tokens emitted once they have ended."""
        self._more = rounds
        self._refusal: Exception | None = None

    def replay(self, tokens: int) -> bool:
        """Replay until `tokens` output tokens have been emitted; True if that added rounds.

        Raises what a replay raises before that, every time.
        """
        if self.reached >= tokens:
            return False
        # In doubling steps, so that the rounds of a long request are laid out seldom.
        goal = max(tokens, min(2 * self.reached, LONGEST))
        new: list[Round] = []
        try:
            for outcome in self._more:
                new.append(outcome)
                self.reached = outcome.position + outcome.emitted
                if self.reached >= goal:
                    break
        except Exception as error:
            # A generator that raised gives no more rounds, and tables are shared by runs.
            self._refusal = error
        finally:
            # After an interruption, too: `reached` counts these rounds.
            if new:
                self.rounds = np.concatenate([self.rounds, np.array(new, np.int64)])
        if self._refusal is not None and self.reached < tokens:
            raise self._refusal
        return True


class Replays:
    """The rounds of a trace's sequences under one policy and rule.

    A recording longer than its request is cut; a shorter one begins again, and caps its
    drafts at the seam (`ServedSequence`): the two kinds of request share no rounds.
    """

    def __init__(
        self, trace: Trace, policy: DraftPolicy, rule: VerifyRule | None, lookahead: int
    ) -> None:
        self._trace, self._policy, self._rule = trace, policy, rule
        self._lookahead = lookahead
        self._tables: dict[tuple[int, bool], RoundTable] = {}
        # The rounds of all tables, and where those of each begin.
        self._flat = NO_ROUNDS
        self._first: dict[tuple[int, bool], int] = {}

    def flat(self, jobs: Sequence[Job]) -> tuple[Ints, Ints]:
        """Return the rounds of all sequences, (rounds, fields), and each job's first, (jobs,).

        The rounds last at least as long as the jobs ask for; a job of one token has none.
        """
        recorded = [request.tokens for request in self._trace.requests]
        longest: dict[tuple[int, bool], int] = {}
        keys = []
        for _, sequence, _, output, _ in jobs:
            key = sequence, output > recorded[sequence]
            keys.append(key)
            if output > longest.get(key, 0):
                longest[key] = output
        grew = [self._table(key).replay(tokens) for key, tokens in longest.items()]
        if any(grew):
            self._flat = np.concatenate([table.rounds for table in self._tables.values()])
            counts = (len(table.rounds) for table in self._tables.values())
            self._first = dict(zip(self._tables, accumulate(counts, initial=0), strict=False))
        return self._flat, np.array([self._first.get(key, -1) for key in keys], np.int64)

    def _table(self, key: tuple[int, bool]) -> RoundTable:
        table = self._tables.get(key)
        if table is None:
            sequence, wraps = key
            info = self._trace.requests[sequence]
            whole = Job(
                0.0, sequence, max(info.prompt_length, 1), LONGEST if wraps else info.tokens
            )
            served = ServedSequence(self._trace, whole, self._lookahead, EngineState(), self._rule)
            table = self._tables[key] = RoundTable(speculate(served, self._policy.fresh()))
        return table


_kept: WeakKeyDictionary[Trace, OrderedDict[tuple[bytes, int], Replays]] = WeakKeyDictionary()


def replays_of(
    trace: Trace, policy: DraftPolicy, rule: VerifyRule | None, lookahead: int
) -> Replays:
    """Return the replays of `trace` under `policy`, shared by all runs of equal policies."""
    made = Replays(trace, policy, rule, lookahead)
    try:
        key = pickle.dumps((policy, rule)), lookahead
    except Exception:  # a user's policy may hold anything; then its replays are not shared
        return made
    kept = _kept.setdefault(trace, OrderedDict())
    shared = kept.setdefault(key, made)
    kept.move_to_end(key)
    while len(kept) > KEPT:
        kept.popitem(last=False)
    return shared
