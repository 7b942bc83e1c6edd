"""The rounds of a recorded sequence as arrays, replayed once and read ever after."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.core import DraftPolicy, Round
from policies.rules.base import VerifyRule
from simulator.serving.arrivals import LONGEST, Job
from simulator.serving.cost.together import Kept
from simulator.serving.sequence import EngineState, ServedSequence
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

Ints = npt.NDArray[np.int64]

CONTEXT, DRAFTED, ACCEPTED, EMITTED, FORWARDS = range(5)
DRAFTING, CATCH_UP, DRAFT_CONTEXT, REJECTED, UNREAD = range(5, 10)
"""Rows of what a round adds to its iteration (`simulator.serving.cost.work.Work`); contexts
count output tokens alone, to which a request adds its prompt."""
BLOCKS = ROWS = 10
"""A row more in a ledger: the cache blocks that a request holds."""
KEPT = 16
"""Policies of a trace whose rounds are kept: a study of many would hold them all."""


def clock_free(policy: DraftPolicy, rule: VerifyRule | None) -> bool:
    """Return True if a request's rounds depend on its recording alone.

    They do not if the policy learns across requests or decides by the load, or if the rule
    learns.
    """
    forgets = not policy.learns_across_requests and type(policy).fresh is DraftPolicy.fresh
    return (
        forgets and not policy.decides_by_load()
        and (rule is None or type(rule).end_request is VerifyRule.end_request)
    )  # fmt: skip


class Replayed(Protocol):
    """What an engine by spans serves in the place of recordings."""

    def sequence(self, job: Job) -> ReplayedSequence:
        """A request to be decoded."""
        ...


class Rounds:
    """Rounds of one sequence that follow each other, as arrays.

    Parameters
    ----------
    rounds:
        (fields of `Round`, rounds).
    begin:
        Output tokens emitted before the first.

    Attributes
    ----------
    rounds:
        As given.
    added:
        (ROWS, rounds) int64, what each round adds to its iteration.
    reached:
        (rounds + 1,) output tokens emitted before the first round, and once each has ended.
    totals:
        (4, rounds + 1) drafted, accepted, emitted, draft passes up to there.
    alone:
        What iterations of these rounds by themselves took (`TogetherCost.alone`).
    """

    def __init__(self, rounds: Ints, begin: int = 1) -> None:
        self.rounds = rounds
        position, drafted, accepted, emitted, forwards, catch_up = rounds
        drafting = forwards > 0
        self.added: Ints = np.array([
            position, drafted, accepted, emitted, forwards, drafting, catch_up * drafting,
            position * drafting, accepted < drafted, drafting & (accepted < forwards - 1),
        ])  # fmt: skip
        self.totals: Ints = np.zeros((4, rounds.shape[1] + 1), np.int64)
        np.cumsum(rounds[[1, 2, 3, 4]], axis=1, out=self.totals[:, 1:])
        self.reached: Ints = begin + self.totals[2]
        self.alone: Kept = {}
        self._entered: tuple[tuple[int, int, int], Ints] | None = None

    def entered(self, prompt_tokens: int, ahead: int, block: int) -> Ints:
        """(ROWS + 1, rounds): `added` behind such a prompt, and the cache blocks held.

        Those are of `block` tokens, for the context and `ahead` tokens more, rounded down.
        """
        key = prompt_tokens, ahead, block
        # A recorded sequence mostly comes with the same prompt.
        if self._entered is None or self._entered[0] != key:
            added = self.added
            whole = np.concatenate(
                [added, (added[CONTEXT : CONTEXT + 1] + prompt_tokens + ahead) // block]
            )
            whole[CONTEXT] += prompt_tokens
            whole[DRAFT_CONTEXT] += added[DRAFTING] * prompt_tokens
            self._entered = key, whole
        return self._entered[1]

    def needed(self, tokens: int) -> int:
        """Rounds until `tokens` output tokens have been emitted, the prompt's own included."""
        return int(self.reached.searchsorted(tokens))

    def round(self, index: int) -> Round:
        """One of them."""
        return Round(*self.rounds[:, index].tolist())


NOTHING = Rounds(np.empty((len(Round._fields), 0), np.int64))
"""Before anything is replayed or planned."""


class RoundTable(Rounds):
    """The rounds of one sequence from its first token on, replayed as far as anybody asked."""

    def __init__(self, begin: Callable[[], Iterator[Round]]) -> None:
        # As of `NOTHING`; a request of a single token asks for no more, and begins nothing.
        self.rounds, self.added = NOTHING.rounds, NOTHING.added
        self.totals, self.reached = NOTHING.totals, NOTHING.reached
        self.alone = {}
        self._entered = None
        self._begin = begin
        self._refusal: DraftsimError | None = None

    @cached_property
    def _more(self) -> Iterator[Round]:
        return self._begin()

    def needed(self, tokens: int) -> int:
        """As of `Rounds`, which it first replays as far as that."""
        last = int(self.reached[-1])
        if last < tokens:
            # In doubling steps, so that a long request does not make the arrays anew every time.
            self._replay(max(tokens, min(2 * last, LONGEST)))
        return super().needed(tokens)

    def _replay(self, goal: int) -> None:
        if self._refusal is not None:
            raise self._refusal
        new = []
        try:
            for outcome in self._more:
                new.append(outcome)
                if outcome.position + outcome.emitted >= goal:
                    break
        except DraftsimError as error:
            # Tables are kept, and a replay that raised gives no more rounds: the next run that
            # reads this one has to be told as well.
            self._refusal = error
            raise
        super().__init__(np.concatenate([self.rounds, np.array(new, np.int64).T], axis=1))


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

    def sequence(self, job: Job) -> ReplayedSequence:
        """A request, whose rounds are known."""
        return ReplayedSequence(job, self.table(job))

    def table(self, job: Job) -> RoundTable:
        """Rounds of the sequence that `job` replays, at least as long as it asks for."""
        recorded = self._trace.requests[job.sequence].tokens
        wraps = job.output_tokens > recorded
        table = self._tables.get((job.sequence, wraps))
        if table is None:
            whole = job._replace(output_tokens=LONGEST if wraps else recorded)
            table = RoundTable(partial(self._replay, whole))
            self._tables[job.sequence, wraps] = table
        return table

    def _replay(self, whole: Job) -> Iterator[Round]:
        served = ServedSequence(self._trace, whole, self._lookahead, EngineState(), self._rule)
        return served.rounds(self._policy.fresh())


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

    def __init__(self, job: Job, table: Rounds) -> None:
        self.job = job
        self.follow(table)

    def follow(self, table: Rounds) -> None:
        """Go on with the first round of `table`."""
        self.table = table
        self.at = 0
        self.count = table.needed(self.job.output_tokens)
        # Tokens of the last round that the request no longer wants.
        self.over = max(int(table.reached[self.count]) - self.job.output_tokens, 0)

    @property
    def ended(self) -> bool:
        """Whether every token of the request has been emitted."""
        return bool(self.table.reached[self.at] >= self.job.output_tokens)

    def pass_by(self, rounds: int) -> list[int]:
        """So many rounds have been; returns what they drafted, accepted, emitted, and the draft
        passes that they ran."""
        before, self.at = self.at, self.at + rounds
        totals = self.table.totals
        gained: list[int] = (totals[:, self.at] - totals[:, before]).tolist()
        return gained

    def rounds(self, policy: DraftPolicy) -> Iterator[Round]:
        """The rounds from here on; `policy` has decided them already."""
        del policy
        while not self.ended:
            outcome = self.table.round(self.at)
            self.at += 1
            if self.at == self.count and self.over:
                outcome = outcome._replace(emitted=outcome.emitted - self.over)
            yield outcome
