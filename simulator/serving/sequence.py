"""A recorded sequence decoded inside an engine, and the slot a running request occupies.

`ServedSequence.rounds` is `policies.core.speculate` written again, the inner loop of every engine:
it reads rows of the recording as one slice, where the loop asks a decoder for each token through
`draft` and `remaining`, and it makes rounds without the function that their constructor is.  It
knows nothing that the loop does not.  ``benchmarks/bench_replay.py`` measures what that saves, and
`tests/test_one_loop.py` holds the two together, policy by policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from policies.core import DraftPolicy, Load, Round, speculate
from policies.guard import UndeclaredSignal
from policies.rules.base import VerifyRule
from simulator.serving.arrivals import Job
from traces.acceptance.tape import BLANK, END, RecordedToken
from traces.acceptance.trace import Trace
from traces.replay.decoder import ReplayDecoder
from traces.replay.scores import score_tape


class Sequenced(Protocol):
    """What an engine asks of the sequence that a request decodes."""

    @property
    def ended(self) -> bool:
        """Whether every token of the request has been emitted."""
        ...

    def rounds(self, policy: DraftPolicy) -> Iterator[Round]:
        """Its rounds from here on."""
        ...


class EngineState:
    """What every sequence of an engine may see of it."""

    __slots__ = ("batch", "scheduled")

    def __init__(self) -> None:
        self.batch = 1
        """Requests that decode."""
        self.scheduled: int | None = None
        """Of `Load`."""


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
        """Whether every token of the request has been emitted."""
        return self.position >= self.length

    @property
    def load(self) -> Load:
        """The engine's iteration and this sequence's context."""
        start = self._start + self.position
        run = self._runs[start]
        length: int | None = min(run, self._limit - self.position - 1)
        if start in self._tape.unknown:
            length = None
        engine = self._engine
        return Load(engine.batch, self.prompt + self.position, length, engine.scheduled)

    @property
    def limit_left(self) -> int:
        """Tokens to the limit, whatever slots are reserved."""
        return self._limit - self.position

    @property
    def segment_left(self) -> int:
        """Tokens the request still emits before it ends or its recording begins again."""
        return min(self.length, self._seam) - self.position

    def rounds(self, policy: DraftPolicy) -> Iterator[Round]:
        """What `policies.core.speculate` yields, read off the recording without detours."""
        if self._rule is not None:
            return speculate(self, policy)
        return self._rounds(policy)

    def _rounds(self, policy: DraftPolicy) -> Iterator[Round]:
        keep_drafting, observe = policy.keep_drafting, policy.observe
        kind = type(policy)
        begin_round = (
            policy.begin_round if kind.begin_round is not DraftPolicy.begin_round else None
        )
        submit = policy.submit if kind.submit is not DraftPolicy.submit else None
        silent = kind.observe is DraftPolicy.observe
        self.declare(policy.reads)
        signals, rows, runs = self._signals, self._rows, self._runs
        tokens, make = self._tokens.known, self._tokens.make
        row_limit, open_ended = self._row_limit, self._tape.open_ended
        most, length, new = self._cap - 1, self.length, tuple.__new__
        anew = self.takes_verified
        catch_up = 1
        while (position := self.position) < length:
            if begin_round is not None:
                begin_round(self.load)
            at = self._start + position
            run = runs[at]
            left = self._limit - position - 1
            longest = left if left < most else most
            draft: list[RecordedToken] = []
            append = draft.append
            if signals:
                first, last = rows[at], row_limit[at]
                stop = first + longest
                for known in tokens[first : stop if stop < last else last]:
                    if not keep_drafting(draft):
                        break
                    token = known or make(first + len(draft))
                    append(token)
                    if token.ends:
                        break
                else:
                    if last < stop and keep_drafting(draft):
                        self.draft(draft)  # raises past the recorded tail, unless none follows
            else:
                end = self._eos_at - position
                for forwards in range(longest):
                    if not keep_drafting(draft):
                        break
                    if forwards == end < run:
                        append(END)  # the drafted end of the output
                        break
                    append(BLANK)
            drafted = forwards = len(draft)
            if submit is not None:
                del draft[submit(draft) :]
                drafted = len(draft)
            accepted = drafted
            if run < drafted:
                accepted = run
                if at in open_ended:
                    raise self._unobserved(run)
            after = position + accepted + 1
            if after < self._seam and after < length:
                self.position = after
            else:
                self._advance(accepted)
                after = self.position
            # As Round(...), without the Python function that its constructor is.
            outcome = new(
                Round, (position, drafted, accepted, after - position, forwards, catch_up)
            )
            if not silent:
                observe(outcome, draft)
            yield outcome
            if forwards:
                catch_up = 1 + accepted if anew else 1 if accepted < forwards else 2
            else:
                catch_up += 1

    def judge(self, draft: Sequence[Any]) -> int:
        """How many of `draft` verification accepts, without moving on.

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
        self._advance(accepted)
        return accepted

    def ends_after(self, accepted: int) -> bool:
        """Whether accepting this many tokens emits the request's last one."""
        return self.position + accepted + 1 >= self.length

    def commit(self, accepted: int) -> None:
        """Move on by `accepted` drafted tokens and the token of the verification."""
        self._advance(accepted)

    def _advance(self, accepted: int) -> None:
        position = self.position + accepted + 1
        if position < self._seam and position < self.length:
            self.position = position
            return
        self.position = min(position, self._seam, self.length)
        if self.position == self._seam < self.length:
            self._wrap()

    def _wrap(self) -> None:
        # Rows are read at start + position: moving the start back begins the recording anew.
        self._start -= self._recorded
        self._seam += self._recorded
        self._limit = self._seam
        if self._eos_at >= 0:
            self._eos_at += self._recorded


class Slot:
    """A request inside the engine: what it still has to do and what it has cost."""

    __slots__ = (
        "accepted",
        "arrival_s",
        "capacity",
        "catch_up",
        "context",
        "decoder",
        "draft_forwards",
        "drafted",
        "first_s",
        "index",
        "job",
        "last_s",
        "policy",
        "preemptions",
        "prefill_left",
        "prefilled",
        "rounds",
        "steps",
        "tokens",
    )  # fmt: skip

    def __init__(self, index: int, job: Job, arrival_s: float, decoder: Any) -> None:
        self.index = index
        self.job = job
        self.arrival_s = arrival_s
        self.decoder = decoder
        self.rounds: Iterator[Round] = iter(())
        self.policy: Any = None
        self.prefill_left = job.prompt_tokens
        self.prefilled = 0
        self.context = job.prompt_tokens
        """Prompt and output tokens so far; the cache holds one fewer once decoding began."""
        self.capacity = 0
        self.catch_up = 1
        self.first_s = -1.0
        self.last_s = -1.0
        self.tokens = 0
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.draft_forwards = 0
        self.preemptions = 0
