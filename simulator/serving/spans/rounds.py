"""The rounds of a recorded sequence as arrays, replayed once and read ever after."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.core import DraftPolicy, Round
from policies.rules.base import VerifyRule
from simulator.serving.arrivals import LONGEST, Job
from simulator.serving.sequence import EngineState, ServedSequence
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

Ints = npt.NDArray[np.int64]

CONTEXT, DRAFTED, ACCEPTED, EMITTED, FORWARDS = range(5)
DRAFTING, CATCH_UP, DRAFT_CONTEXT, REJECTED, UNREAD = range(5, 10)
"""Rows of what a round adds to its iteration (`simulator.serving.cost.work.Work`); contexts
count output tokens alone, to which a request adds its prompt."""
ROWS = 10
KEPT = 16
"""Policies of a trace whose rounds are kept: a study of many would hold them all."""


def clock_free(policy: DraftPolicy, rule: VerifyRule | None) -> bool:
    """Whether a request's rounds depend on its recording alone.

    So it is unless the policy learns across requests or looks at the load when a round
    begins, or the rule learns.
    """
    kind = type(policy)
    blind = kind.begin_round is DraftPolicy.begin_round or not policy.reads_load
    forgets = not policy.learns_across_requests and kind.fresh is DraftPolicy.fresh
    return (
        blind and forgets
        and (rule is None or type(rule).end_request is VerifyRule.end_request)
    )  # fmt: skip


class RoundTable:
    """The rounds of one sequence, replayed as far as anybody asked.

    Attributes
    ----------
    added:
        (ROWS, rounds) int64, what each round adds to its iteration.
    after:
        (rounds,) output tokens emitted once a round has ended.
    totals:
        (4, rounds) drafted, accepted, emitted, draft passes up to the end of a round.
    """

    def __init__(self, rounds: Iterator[Round]) -> None:
        self._more = rounds
        self._last = 1
        self._refusal: DraftsimError | None = None
        self._rounds: Ints = np.empty((0, len(Round._fields)), np.int64)
        self.added: Ints = np.empty((ROWS, 0), np.int64)
        self.after: Ints = np.empty(0, np.int64)
        self.totals: Ints = np.empty((4, 0), np.int64)

    def needed(self, tokens: int) -> int:
        """Rounds until `tokens` output tokens have been emitted, the prompt's own included."""
        if self._last < tokens:
            self._replay(tokens)
        return int(self.after.searchsorted(tokens)) + 1 if tokens > 1 else 0

    def round(self, index: int) -> Round:
        """A round as it was replayed."""
        return Round(*self._rounds[index].tolist())

    def _replay(self, tokens: int) -> None:
        # In doubling steps, so that a long request does not make the arrays anew every time.
        goal = max(tokens, min(2 * self._last, LONGEST))
        if self._refusal is not None:
            raise self._refusal
        new = []
        before = self._last
        try:
            for outcome in self._more:
                new.append(outcome)
                self._last = outcome.position + outcome.emitted
                if self._last >= goal:
                    break
        except DraftsimError as error:
            # Tables are kept, and a replay that raised gives no more rounds: the next run that
            # reads this one has to be told as well.
            self._refusal, self._last = error, before
            raise
        self._rounds = np.concatenate([self._rounds, np.array(new, np.int64)])
        position, drafted, accepted, emitted, forwards, catch_up = self._rounds.T
        drafting = forwards > 0
        self.added = np.stack([
            position, drafted, accepted, emitted, forwards, drafting, catch_up * drafting,
            position * drafting, accepted < drafted, drafting & (accepted < forwards - 1),
        ])  # fmt: skip
        self.after = position + emitted
        self.totals = np.cumsum([drafted, accepted, emitted, forwards], axis=1)


class Replays:
    """The round tables of a trace under one policy and rule.

    A recording longer than its request is cut; a shorter one begins again, and then caps its
    drafts at the seam (`ServedSequence`): the two kinds of request share no rounds.
    """

    def __init__(
        self, trace: Trace, policy: DraftPolicy, rule: VerifyRule | None, lookahead: int
    ) -> None:
        self._trace, self._policy, self._rule = trace, policy, rule
        self._lookahead = lookahead
        self._tables: dict[tuple[int, bool], RoundTable] = {}

    def table(self, job: Job) -> RoundTable:
        """Rounds of the sequence that `job` replays, at least as long as it asks for."""
        recorded = self._trace.requests[job.sequence].tokens
        wraps = job.output_tokens > recorded
        table = self._tables.get((job.sequence, wraps))
        if table is None:
            whole = job._replace(output_tokens=LONGEST if wraps else recorded)
            served = ServedSequence(self._trace, whole, self._lookahead, EngineState(), self._rule)
            table = RoundTable(served.rounds(self._policy.fresh()))
            self._tables[job.sequence, wraps] = table
        return table


def replays_of(
    trace: Trace, policy: DraftPolicy, rule: VerifyRule | None, lookahead: int
) -> Replays:
    """The replays of `trace` under `policy`, shared by all runs of equal policies."""
    made = Replays(trace, policy, rule, lookahead)
    try:
        key = pickle.dumps((policy, rule)), lookahead
    except Exception:  # a policy of one's own may hold anything; then nobody shares
        return made
    kept = _kept.setdefault(trace, OrderedDict())
    shared = kept.setdefault(key, made)
    kept.move_to_end(key)
    while len(kept) > KEPT:
        kept.popitem(last=False)
    return shared


_kept: WeakKeyDictionary[Trace, OrderedDict[tuple[bytes, int], Replays]] = WeakKeyDictionary()


class ReplayedSequence:
    """A request's rounds read off a table, in the place of a `ServedSequence`.

    ``at`` is the next round, ``count`` the number of rounds.
    """

    __slots__ = ("at", "count", "job", "over", "table")

    def __init__(self, job: Job, table: RoundTable) -> None:
        self.job = job
        self.table = table
        self.at = 0
        self.count = table.needed(job.output_tokens)
        # Tokens of the last round that the request no longer wants.
        last = int(table.after[self.count - 1]) if self.count else job.output_tokens
        self.over = last - job.output_tokens

    @property
    def ended(self) -> bool:
        """Whether every token of the request has been emitted."""
        return self.at >= self.count

    def rounds(self, policy: DraftPolicy) -> Iterator[Round]:
        """The rounds from here on; `policy` has decided them already."""
        del policy
        while self.at < self.count:
            outcome = self.table.round(self.at)
            self.at += 1
            if self.at == self.count and self.over:
                outcome = outcome._replace(emitted=outcome.emitted - self.over)
            yield outcome
