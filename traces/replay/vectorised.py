"""Replay of many settings at once, for studies: the rounds of the loop, without the loop.

Under a lossy rule, drafts that no round changes are judged all at once, or round by round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np

from policies.arrays import Bools, Ints, next_true
from policies.core import DraftPolicy
from policies.rules.base import VerifyRule
from policies.vectorised import VectorisedPlan, own_word, plan_of
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.errors import DraftsimError
from traces.replay.layout import CELLS, Lengths32, Lockstep, layout_of
from traces.replay.rounds import RoundLog, Rounds
from traces.replay.ruled import SCORE_COLUMNS, RuleReplayDecoder, prepared_rule
from traces.replay.run import own_policy, recorded_log, replay, ruled_log

HELD = 1 << 22
"""Starts of a recording, times settings, whose rounds are held at a time."""
FEWEST = 8
"""Settings times requests below which the loop is faster."""


def replay_many(
    trace: Trace,
    policies: Mapping[str, DraftPolicy] | Sequence[tuple[str, DraftPolicy]],
    *,
    rule: VerifyRule | None = None,
    first: int | None = None,
    batch: int = 1,
    leave_out: Callable[[str, DraftsimError], bool] | None = None,
) -> Iterator[RoundLog]:
    """Yield the logs of `traces.replay.run.replay` for named `policies`, in their order.

    Policies with a plan (`policies.vectorised`) advance together, setting by
    setting and request by request; any other goes through the loop, and so does one that leaves
    what was recorded, so that the loop says where.  Logs are made a block of settings at a
    time, so that a study of thousands holds few of them.

    A lossy ``rule`` judges all that such policies draft at once, or where it remembers round by
    round (`judged_rounds`); policies whose drafts depend on what was accepted before go
    through the loop with it.

    Raises what `replay` raises, unless ``leave_out(name, error)`` says to go on without it.
    """
    first = trace.first if first is None else first
    named = list(policies.items() if isinstance(policies, Mapping) else policies)
    lockstep = Lockstep(layout_of(trace), first, trace.takes_verified)
    judged = prepared_rule(rule, trace) is not None
    block = max(1, HELD // lockstep.width)
    for i in range(0, len(named), block):
        some = named[i : i + block]
        found = (
            _together(trace, [policy for _, policy in some], lockstep, batch) if not judged else ()
        )
        for (name, policy), rounds in zip_longest(some, found):
            if rounds is not None:
                log = recorded_log(trace, rounds, name, policy, first)
                yield log if rule is None else ruled_log(log, rule, None, (), False)
                continue
            try:
                known = None
                if rule is not None and judged:
                    known = _judged(trace, policy, rule, lockstep, name, batch)
                log = known or replay(trace, policy, rule, name=name, first=first, batch=batch)
            except DraftsimError as error:
                if leave_out is None or not leave_out(name, error):
                    raise
                continue
            yield log


def _together(
    trace: Trace, policies: Sequence[DraftPolicy], lockstep: Lockstep, batch: int
) -> list[Rounds | None]:
    """Return the rounds of each policy that has a plan, and stays within what was recorded."""
    # Plans advance together if their states have one class and they agree on watching and learning.
    kinds: dict[tuple[type | None, bool, bool], dict[int, VectorisedPlan]] = {}
    for i, policy in enumerate(policies):
        if (plan := _planned(trace, policy, batch)) is None:
            continue
        kind: tuple[type | None, bool, bool] = (None, False, False)
        if plan.state is not None:
            kind = (type(plan.state), plan.watch is not None, policy.learns_across_requests)
        kinds.setdefault(kind, {})[i] = plan
    found: list[Rounds | None] = [None] * len(policies)
    for (state, _, learns), plans in kinds.items():
        if len(plans) * (1 if learns else len(lockstep.entries)) < FEWEST:
            continue
        # Few requests a setting need many settings to a step.
        block = len(plans) if learns else max(1, CELLS // lockstep.width)
        places, every = list(plans), list(plans.values())
        for begin in range(0, len(every), block):
            some = every[begin : begin + block]
            tried = lockstep.steady(some) if state is None else lockstep.adaptive(some, learns)
            for i, rounds in zip(
                places[begin : begin + block], lockstep.rounds(tried), strict=True
            ):
                found[i] = rounds
    return found


def _judged(
    trace: Trace, policy: DraftPolicy, rule: VerifyRule, lockstep: Lockstep, name: str, batch: int
) -> RoundLog | None:  # fmt: skip
    """Return the log under a lossy rule of drafts that no round changes; None for any other."""
    plan, own = _planned(trace, policy, batch), prepared_rule(rule, trace)
    drafts = None if plan is None else lockstep.drafts(plan)
    if drafts is None or own is None:
        return None
    judged = judged_rounds(trace, own, lockstep, *drafts)
    if judged is None:
        return None
    rounds, mismatched, departed = judged
    log = recorded_log(trace, rounds, name, policy, lockstep.first)
    return ruled_log(log, rule, own, mismatched, departed)


def _planned(trace: Trace, policy: DraftPolicy, batch: int) -> VectorisedPlan | None:
    """Return the plan of a policy whose reads were recorded."""
    if not set(policy.reads) <= trace.signals:
        return None
    try:
        # A plan changes nothing, so that the prototype itself can give it unless a run begins it.
        begun = type(policy).begin_run is not DraftPolicy.begin_run
        return plan_of(own_policy(trace, policy) if begun else policy, batch)
    except DraftsimError:
        return None  # the loop says what it lacks


Judged = tuple[Rounds, Sequence[int], bool]
"""Rounds, and ``mismatched`` and ``departed`` of `traces.replay.ruled.RuleReplayDecoder`."""


def judged_rounds(
    trace: Trace, rule: VerifyRule, lockstep: Lockstep, forwards: Lengths32, sent: Lengths32
) -> Judged | None:
    """Return the rounds of drafts known by start, (starts + 1,) each, under a run's lossy `rule`.

    None if one leaves what was recorded: there the loop says what is missing.
    """
    verdicts = trace.columns["match"]
    if not (verdicts == UNKNOWN).any():
        tokens, scores = columns_of(trace, rule)
        accepts: Bools | None = own_word(rule, "accepts_each", tokens, scores)
        if accepts is not None:
            return _at_once(trace, rule, lockstep, forwards, sent, accepts)
    return _one_by_one(trace, rule, lockstep, forwards, sent)


def columns_of(trace: Trace, rule: VerifyRule) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the fields of tokens and of scores that a rule reads, an array over the rows each."""
    layout = layout_of(trace)
    scores = {name: trace.columns[SCORE_COLUMNS[name]] for name in rule.needs}
    for name, values in scores.items():
        if name == "match":
            scores[name] = values == MATCH
        elif values.dtype.kind == "f":
            # The loop's numbers are Python's.
            scores[name] = values.astype(np.float64)
    tokens = {name: layout.signal(name) for name in rule.reads}
    return SimpleNamespace(**tokens), SimpleNamespace(**scores)


def _at_once(
    trace: Trace, rule: VerifyRule, lockstep: Lockstep, forwards: Lengths32, sent: Lengths32,
    accepts: Bools,
) -> Judged | None:  # fmt: skip
    row = np.append(lockstep.layout.rows, 0)
    accepted = np.minimum(sent, _leading(accepts, row)).astype(np.int32)
    start = lockstep.begun(accepted + 1)
    if (forwards[start] > lockstep.recorded[start]).any():
        return None
    for _ in trace.requests:
        rule.end_request()
    match = trace.columns["match"] == MATCH
    count, taken = sent[start], accepted[start]
    wrong = np.append(0, np.cumsum(~match))
    kept = np.minimum(taken, lockstep.room[start])
    leading = np.minimum(count, _leading(match, row[start]))
    # A greedy target corrects a refused match into the same token: still on the path.
    departed = (taken > leading) | ((taken < leading) & (trace.temperature > 0))
    return (
        lockstep.told(start, forwards[start], count, taken),
        (wrong[row[start] + kept] - wrong[row[start]]).tolist(),
        bool(departed.any()),
    )


def _leading(which: Bools, rows: Ints) -> Ints:
    """Return how many rows in a row from each of `rows` are of `which`."""
    return next_true(~which)[rows] - rows


def _one_by_one(
    trace: Trace, rule: VerifyRule, lockstep: Lockstep, forwards: Lengths32, sent: Lengths32
) -> Judged | None:
    drafted, given, recorded = forwards.tolist(), sent.tolist(), lockstep.recorded.tolist()
    starts: list[int] = []
    accepted: list[int] = []
    mismatched: list[int] = []
    departed = False
    for i, begin in enumerate(lockstep.layout.begins.tolist()):
        decoder = RuleReplayDecoder(trace, i, rule, lockstep.first)
        while decoder.remaining > 0:
            start = begin + decoder.position
            if drafted[start] > recorded[start]:
                return None
            starts.append(start)
            accepted.append(decoder.judge(given[start]))
        rule.end_request()
        mismatched += decoder.mismatched
        departed |= decoder.departed
    rounds = lockstep.told(np.array(starts, np.int64), *(np.array(v, np.int32) for v in (
        [drafted[s] for s in starts], [given[s] for s in starts], accepted
    )))  # fmt: skip
    return rounds, mismatched, departed
