"""A run owns what it learns, from its first request to its last; the caller's object stays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from policies import DraftPolicy, parse_policy, policy_names
from policies.batch.base import BatchPolicy
from policies.lengths.basic import Fixed
from policies.registry import parse_serving_policy
from policies.rules.registry import RULES, parse_rule
from simulator.serving import Scenario, simulate
from simulator.serving.arrivals import ClosedLoop
from tests.made_up import TRACE
from tests.serving import CONSTANT
from tests.test_policies_checks import VARIANTS
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.sources.lookups.sources import PLD
from traces.sources.replay import replay_source

LEARNERS = (
    "hf-heuristic:persist=persistent",
    "confidence:roc_update=next_call",
    "hf-heuristic:confidence_threshold=0.4,roc_update=next_call",
    "ucb:learns_across_requests=true",
    "exp3:learns_across_requests=true",
    "goodput:gamma_max=4",
    "sglang-adaptive",
    "sglang-throughput",
    "tensorrt-llm:window=2,threshold=3",
)


def repeating(requests: int = 6, tokens: int = 60) -> Trace:
    """Outputs over three tokens, which a lookup finds again."""
    ids = np.random.default_rng(3).integers(0, 3, requests * tokens).astype(np.int32)
    infos = [Request(str(i), "", 3, tokens, tokens, "length", (0, 1, 2)) for i in range(requests)]
    return Trace.without_tails(infos, None, {}, match=np.zeros(len(ids), np.int8), token=ids)


REPEATING = repeating()
RECORDED = synthetic_trace(0.8, requests=6, tokens=60, concentration=3.0, max_gamma=24, seed=5)


def thrice(policy: Any, run: Callable[[], Any]) -> None:
    """Three runs in a row give the same, and leave `policy` as it was."""

    def rounds() -> Any:
        made = run()
        return made.rounds.tolist() if isinstance(made, RoundLog) else made

    before = pickle.dumps(policy)
    first = rounds()
    assert pickle.dumps(policy) == before
    assert rounds() == first
    assert rounds() == first
    assert pickle.dumps(policy) == before


@pytest.mark.invariant(6)
@pytest.mark.parametrize("text", dict.fromkeys([*policy_names(), *VARIANTS, *LEARNERS]))
def test_replays_of_one_policy_are_alike(text: str) -> None:
    policy = parse_policy(text, max_gamma=RECORDED.max_gamma)
    thrice(policy, lambda: replay(RECORDED, policy))
    [log] = replay_many(RECORDED, {"": policy})
    assert log.rounds.tolist() == replay(RECORDED, policy).rounds.tolist()


@pytest.mark.invariant(11)
@pytest.mark.parametrize("text", LEARNERS)
def test_every_way_to_run_leaves_a_learner_as_it_was(text: str) -> None:
    policy = parse_policy(text, max_gamma=24)
    assert policy.learns_across_requests
    alone = [replay(RECORDED.select([i]), policy).rounds.tolist() for i in range(6)]
    together = replay(RECORDED, policy).rounds
    assert [tuple(r)[1:] for r in together.tolist()] != [
        tuple(r)[1:] for rounds in alone for r in rounds
    ], "what it learns must matter here"
    if not policy.reads:
        thrice(policy, lambda: replay_source(REPEATING, PLD(), policy))
    thrice(policy, lambda: replay(RECORDED, policy, batch=4))
    served = parse_serving_policy(text, max_gamma=24)
    modes = ["continuous", "static"]
    if not isinstance(served, BatchPolicy):
        modes += ["static-minimum", "static-mean", "pearl", "dsi"]
    for mode in modes:
        scenario = Scenario(ClosedLoop(1 if mode in ("pearl", "dsi") else 2), requests=6, mode=mode)  # type: ignore[arg-type]
        thrice(served, lambda s=scenario: outcome(served, s))  # type: ignore[misc]


def outcome(policy: Any, scenario: Scenario) -> tuple[int, int, int]:
    run = simulate(RECORDED, CONSTANT, policy, scenario)
    return run.recorder.iterations, run.recorder.drafted, run.recorder.accepted


@pytest.mark.invariant(6)
@pytest.mark.parametrize("text", list(RULES))
def test_replays_under_one_rule_are_alike(text: str) -> None:
    rule = parse_rule(text)
    policy = Fixed(5)
    try:
        replay(TRACE, policy, rule)
    except DraftsimError:
        pytest.skip("cannot run along a greedy recording")
    thrice(rule, lambda: replay(TRACE, policy, rule))
    thrice(policy, lambda: replay(TRACE, policy, rule))


class CountsRequests(DraftPolicy):
    """Drafts as many tokens as requests were begun."""

    learns_across_requests = True

    def __init__(self) -> None:
        self.begun = 0

    def begin_request(self) -> None:
        self.begun += 1

    def keep_drafting(self, draft: Any) -> bool:
        return len(draft) < self.begun


def test_a_learner_is_told_where_each_request_begins() -> None:
    policy = CountsRequests()
    log = replay(RECORDED, policy)
    longest = np.maximum.reduceat(
        log.rounds["drafted"], np.searchsorted(log.rounds["request"], range(6))
    )
    assert longest.tolist() == [1, 2, 3, 4, 5, 6]
    assert policy.begun == 0
