"""Real decoding of the bundled pair under a rule."""

from __future__ import annotations

from functools import cache

from policies import parse_policy
from policies.rules.base import VerifyRule
from policies.rules.registry import parse_rule
from profiler.checks.spot_check import Measured, PlannedPolicy, run_requests
from tests import bundled
from traces.acceptance.trace import Trace


@cache
def short_trace() -> Trace:
    """Three prompts, sixteen tokens."""
    return bundled.record(3, max_new=16)


def decode(
    text: str, trace: Trace, policy: str = "fixed:gamma=5"
) -> tuple[PlannedPolicy, Measured]:
    planned = PlannedPolicy(
        policy, parse_policy(policy, max_gamma=trace.max_gamma), parse_rule(text)
    )
    return planned, run_requests(bundled.pair(), trace, [planned], repeats=1)


def prepared(text: str) -> VerifyRule:
    rule = parse_rule(text)
    rule.begin_run(bundled.runners()[0].vocab_size, 0.0)
    return rule
