"""Replay of many settings at once, for studies: the rounds of the loop, without the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from policies.core import DraftPolicy
from policies.rules.base import VerifyRule
from policies.vectorised import VectorisedPlan, plan_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.judged import judged_rounds
from traces.replay.layout import CELLS, Lockstep, Rounds, layout_of
from traces.replay.rounds import RoundLog
from traces.replay.ruled import prepared_rule
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
    round (`traces.replay.judged`); policies whose drafts depend on what was accepted before go
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
    """Return the log of a policy whose drafts no round changes, under a lossy rule; None for any
    other.

    None, too, where a draft leaves what was recorded.
    """
    plan, own = _planned(trace, policy, batch), prepared_rule(rule, trace)
    drafts = None if plan is None else lockstep.drafts(plan)
    if drafts is None or own is None:
        return None
    judged = judged_rounds(trace, own, lockstep, *drafts)
    if judged is None:
        return None
    log = recorded_log(trace, judged.rounds, name, policy, lockstep.first)
    return ruled_log(log, rule, own, judged.mismatched, judged.departed)


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
