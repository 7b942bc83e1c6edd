"""Rounds of recorded sequences that do not depend on the clock, replayed once for all runs."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from policies.arrays import Ints
from policies.core import DraftPolicy, Round, speculate
from policies.rules.base import VerifyRule
from simulator.serving.arrivals import LONGEST, Job
from simulator.serving.sequence import EngineState, ServedSequence
from traces.acceptance.trace import Trace

NO_ROUNDS: Ints = np.empty((0, len(Round._fields)), np.int64)
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


class RoundTable:
    """The rounds of one sequence from its first token on, replayed as far as they were asked for.

    Attributes
    ----------
    rounds:
        (rounds, fields of `Round`) so far.
    reached:
        Output tokens emitted once they have ended.
    first:
        Index of the first in the array that `Replays.flat` returned last; negative before.
    """

    def __init__(self, rounds: Iterator[Round]) -> None:
        self.rounds = NO_ROUNDS
        self.reached = 1
        self.first = -1
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
        self._flat = NO_ROUNDS

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
        grew = [key for key, tokens in longest.items() if self._table(key).replay(tokens)]
        if grew:
            first = 0
            for table in self._tables.values():
                table.first = first
                first += len(table.rounds)
            self._flat = np.concatenate([table.rounds for table in self._tables.values()])
        tables = self._tables
        return self._flat, np.array([tables[key].first for key in keys], np.int64)

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


def replays_of(
    trace: Trace, policy: DraftPolicy, rule: VerifyRule | None, lookahead: int
) -> Replays:
    """Return the replays of `trace` under `policy`, shared by all runs of equal policies."""
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
