"""Clock-free replay: a recorded trace in the place of two models.

`ReplayDecoder` keeps the contract of `policies.core.Decoder`, so `speculate` runs over
a recording as it runs over real models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core import SIGNALS, DraftPolicy, Load, P, Round, own_copy, speculate
from policies.guard import UndeclaredSignal
from policies.registry import describe
from policies.rules.base import TokenRule, VerifyRule
from policies.rules.registry import describe_rule
from traces.acceptance.tape import BLANK, END, RecordedToken, tape_of
from traces.acceptance.trace import Trace
from traces.errors import SignalError, TailError
from traces.replay.rounds import Fidelity, RoundLog
from traces.replay.scores import prepared_rule, score_tape


class ReplayDecoder:
    """One recorded request, decoded again under any policy.

    Parameters
    ----------
    trace, request:
        The recording and the index of the request in it.
    first:
        Output position to begin at: 1 if prefill emits the first token (engines),
        0 if the first verification includes the prompt (transformers); None: the trace's own.

    Raises
    ------
    TailError
        When the policy drafts past the recorded off-path tail.
    """

    def __init__(self, trace: Trace, request: int, first: int | None = None) -> None:
        self._trace = trace
        self._info = trace.requests[request]
        tape = self._tape = tape_of(trace)
        self._start = tape.starts[request]
        self.length = self._info.tokens
        self._limit = self._info.max_new_tokens
        self._rows, self._runs = tape.rows, tape.runs
        self._row_limit, self._signals = tape.row_limit, tape.signals
        # Where a drafted match would be EOS; the drafter stops at it, and only at it.
        self._eos_at = self.length - 1 if self._info.ended == "eos" else -1
        self._tokens = tape.tokens(SIGNALS)
        self.takes_verified = trace.takes_verified
        self.position = min(trace.first if first is None else first, self.length)

    def declare(self, reads: Collection[str]) -> None:
        """From now on give tokens of which these signals alone can be read."""
        self._tokens = self._tape.tokens(reads)

    @property
    def remaining(self) -> int:
        """Tokens to the limit; 0 at the end, known from the recording."""
        # The drafter does not know where EOS will fall, so the cap is the limit's.
        return self._limit - self.position if self.position < self.length else 0

    @property
    def load(self) -> Load:
        """A single stream: batch 1 at the current context."""
        start = self._start + self.position
        run = self._runs[start]
        known = start not in self._tape.unknown
        length = min(run, self._limit - self.position - 1) if known else None
        return Load(1, self._info.prompt_length + self.position, length)

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """The recorded proposal after the output so far and `so_far`; None at a draft's end."""
        start = self._start + self.position
        if not self._signals:
            drafted = len(so_far)
            at_eos = self.position + drafted == self._eos_at and self._runs[start] > drafted
            return END if at_eos else BLANK
        row = self._rows[start] + len(so_far)
        if row >= self._row_limit[start]:
            if self._trace.drafts_end:
                return None
            raise TailError(
                f"the policy drafted {len(so_far) + 1} tokens at position {self.position} of "
                f"request {self._info.id!r}, past the recorded tail "
                f"(max_gamma={self._trace.max_gamma}): lower its maximum, "
                "or record with a larger --max-gamma"
            )
        return self._tokens.known[row] or self._tokens.make(row)

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept the leading matches and move on to where the output then stands."""
        start = self._start + self.position
        run = self._runs[start]
        accepted = len(draft)
        if run < accepted:
            accepted = run
            if self._tape.open_ended and start in self._tape.open_ended:
                raise self._unobserved(run)
        self._advance(accepted)
        return accepted

    def _unobserved(self, ahead: int) -> SignalError:
        if self._trace.by_start:
            return SignalError(
                f"request {self._info.id!r} had all {ahead} drafts accepted at position "
                f"{self.position}, and no more were ever tried: lower the policy's maximum"
            )
        return SignalError(
            f"request {self._info.id!r} was not observed at position {self.position + ahead}, "
            "where this policy drafts: impute the trace first (`Trace.impute`)"
        )

    def _advance(self, accepted: int) -> None:
        # An accepted EOS ends the output: no bonus token follows it.
        position = self.position + accepted + 1
        self.position = position if position < self.length else self.length


class RuleReplayDecoder(ReplayDecoder):
    """One recorded request, verified by a lossy rule.

    The rule sees what the target would have said about every drafted token, off the path
    too, so the round at hand is exact.  What follows is not: the real decoder would go on
    from a text that was not recorded, and this one goes on along the recording, at as
    many tokens further.  A drafted EOS off the path ends no output here, so that every
    policy decodes the same number of tokens.

    Attributes
    ----------
    mismatched:
        Per round, the emitted drafted tokens that the target would not have chosen.
    departed:
        Whether any verdict so far differed from the recorded one.
    """

    def __init__(
        self, trace: Trace, request: int, rule: VerifyRule, first: int | None = None
    ) -> None:
        super().__init__(trace, request, first)
        self._rule = rule
        tape = score_tape(trace)
        self._verdicts, self._scores = tape.verdicts, tape.scores(rule.needs)
        self._read = self._tape.tokens(rule.reads)
        one_by_one = type(rule).accept is TokenRule.accept
        self._accepts = rule.accepts if isinstance(rule, TokenRule) and one_by_one else None
        self.mismatched: list[int] = []
        self.departed = False

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept what the rule accepts and move on by as many tokens."""
        return self.judge(len(draft))

    def judge(self, count: int) -> int:
        """`verify` of the `count` tokens that are drafted here."""
        row = self._rows[self._start + self.position]
        try:
            if self._accepts is not None:
                accepted = self._leading(row, count, self._accepts)
            else:
                tokens, scores = (kept.rows(row, count) for kept in (self._read, self._scores))
                accepted = self._rule.accept(tokens, scores)
        except UndeclaredSignal as error:
            raise error.by(self._rule) from None
        verdicts = self._verdicts[row : row + count]
        seen = verdicts[: accepted + 1 + self._rule.look_ahead]
        if None in seen:
            raise self._unobserved(seen.index(None))
        before = self.position
        self._advance(accepted)
        self.mismatched.append(verdicts[: min(accepted, self.position - before)].count(False))
        leading = verdicts.index(False) if False in verdicts else len(verdicts)
        # A greedy target corrects a refused match into the same token: still on the path.
        self.departed |= accepted > leading or (accepted < leading and self._trace.temperature > 0)
        return accepted

    def _leading(self, row: int, count: int, accepts: Callable[[Any, Any], bool]) -> int:
        """As `TokenRule.accept`, without a look at what follows a refusal."""
        read, scores = self._read, self._scores
        for at in range(row, row + count):
            token, score = read.known[at] or read.make(at), scores.known[at] or scores.make(at)
            if not accepts(token, score):
                return at - row
        return count


def replay(
    trace: Trace,
    policy: DraftPolicy,
    rule: VerifyRule | None = None,
    *,
    name: str | None = None,
    first: int | None = None,
) -> RoundLog:
    """Replay every request of `trace` under `policy`, in recording order.

    ``first`` is the output position decoding begins at (see `ReplayDecoder`); by default
    the trace's own (`Trace.first`).  The fidelity is ``exact``
    for a greedy trace, ``exact in distribution`` for a sampled one, and ``approximate``
    where matches were imputed (`Trace.impute`) or the trace says so of itself
    (``meta["fidelity"]``); ``lower bound`` where they were imputed as rejections.

    ``rule`` decides what is accepted; by default, as every lossless rule, the recorded
    verdicts do.  It is a prototype: one copy serves all requests in recording order,
    which is part of the run where the rule learns, and ends up in ``RoundLog.rule``.
    Under a lossy rule every round is exact in itself, and the run ``approximate`` from
    the first verdict that leaves the recorded path (see `RuleReplayDecoder`).

    Raises
    ------
    SignalError
        If the policy or rule reads something the trace does not hold, or the policy
        drafts where no outcome was observed.
    DraftsimError
        If the rule cannot run at the recording's temperature.
    TailError
        If the policy drafts past the recorded tails.
    """
    trace.check_reads(policy.reads, type(policy).__name__)
    if first is None:
        first = trace.first
    own_rule = prepared_rule(rule, trace)
    # A policy that learns across requests learns within this run, not in the caller's hands.
    shared = own_policy(trace, policy)
    mismatched: list[int] = []
    departed = False

    def decode() -> Iterator[list[Round]]:
        nonlocal departed
        for i in range(len(trace.requests)):
            mine = shared.fresh()
            if own_rule is None:
                yield _run(ReplayDecoder(trace, i, first), mine)
                continue
            decoder = RuleReplayDecoder(trace, i, own_rule, first)
            yield _run(decoder, mine)
            own_rule.end_request()
            mismatched.extend(decoder.mismatched)
            departed |= decoder.departed

    rounds = RoundLog.pack(decode())
    log = recorded_log(trace, rounds, name or describe(policy), policy.reads, first)
    return log if rule is None else ruled_log(log, rule, own_rule, mismatched, departed)


def ruled_log(
    log: RoundLog, rule: VerifyRule, own_rule: VerifyRule | None, mismatched: Sequence[int],
    departed: bool,
) -> RoundLog:  # fmt: skip
    """The log of a run under `rule`; ``own_rule`` is the run's copy, None where it is lossless."""
    log = replace(log, verify=describe_rule(rule))
    if own_rule is not None:
        log = replace(log, mismatched=np.array(mismatched, dtype=np.int32), rule=own_rule)
    return replace(log, fidelity="approximate") if departed else log


def recorded_log(
    trace: Trace, rounds: npt.NDArray[Any], name: str, reads: tuple[str, ...], first: int
) -> RoundLog:
    """A log of `rounds` along the recorded output, verified losslessly."""
    return RoundLog(
        rounds, trace.requests, name, source=trace.source, drafter=trace.drafter,
        verify="rejection-sampling" if trace.temperature > 0 else "exact",
        fidelity=fidelity_of(trace), reads=reads, first=first,
    )  # fmt: skip


def own_policy(trace: Trace, policy: P) -> P:
    """A run's own copy of `policy`, told the vocabulary of the recorded pair.

    Raises SignalError where the policy needs one and neither it nor the recording has it.
    """
    try:
        return own_copy(policy, trace.vocab_size)
    except ValueError as error:
        raise SignalError(str(error)) from None


def can_replay(trace: Trace, policy: DraftPolicy) -> bool:
    """Whether the recording holds what `policy` reads, and the vocabulary that it may need."""
    if not set(policy.reads) <= trace.signals:
        return False
    try:
        own_policy(trace, policy)
    except SignalError:
        return False
    return True


def _run(decoder: ReplayDecoder, policy: DraftPolicy) -> list[Round]:
    try:
        return list(speculate(decoder, policy))
    except ValueError as error:
        # `Oracle` asks for the run length, which `load` withholds where it is not known.
        if decoder.remaining and decoder.load.run_length is None:
            raise SignalError(
                f"{type(policy).__name__} asks how far the drafts match, which was not observed at "
                f"position {decoder.position} of an imported request: impute the trace first "
                "(`Trace.impute`)"
            ) from error
        raise


def fidelity_of(trace: Trace) -> Fidelity:
    if trace.is_lower_bound:
        return "lower bound"
    if "imputed" in trace.meta or trace.meta.get("fidelity") == "approximate":
        return "approximate"
    return "exact in distribution" if trace.temperature > 0 else "exact"
