"""A policy that reads what it does not declare is refused everywhere, in one clear line."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from policies.batch.base import BatchPolicy
from policies.checks import PolicyError, check_policy
from policies.core import SIGNALS, DraftPolicy, Load, Round, speculate
from policies.guard import undeclared
from policies.lengths.basic import Fixed
from policies.rules.base import SCORES, ExactMatch, VerifyRule
from simulator.serving import Scenario, simulate
from simulator.serving.arrivals import ClosedLoop
from tests.made_up import TRACE, MadeUpDecoder
from tests.serving import CONSTANT
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.replay.run import replay
from traces.sources.lookups.sources import PLD
from traces.sources.replay import replay_source

RECORDED = synthetic_trace(0.8, requests=4, tokens=40, concentration=3.0, max_gamma=24, seed=5)
BARE = synthetic_trace(0.8, requests=4, tokens=40, seed=5)


class Undeclared(DraftPolicy):
    """Drafts up to four tokens, looking at a signal of each."""

    def __init__(self, signal: str = "entropy", declared: tuple[str, ...] = ("prob",)) -> None:
        self.signal = signal
        self.declared = declared
        vars(self)["reads"] = declared

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 4 and not (draft and getattr(draft[-1], self.signal) is NotImplemented)


class UndeclaredBatch(BatchPolicy):
    def plan(self, loads: Sequence[Load]) -> int:
        return 3

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        return [sum(token.entropy >= 0 for token in draft) for draft in drafts]


def line(policy: object, signal: str) -> str:
    return (
        f"^{type(policy).__name__} reads the signal '{signal}' without declaring it: "
        "add it to `reads`$"
    )


@pytest.mark.invariant(4)
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_replay_refuses_each_signal_that_is_not_declared(signal: str) -> None:
    others = tuple(s for s in SIGNALS if s != signal)
    for declared in ((), others):
        policy = Undeclared(signal, declared)
        with pytest.raises(PolicyError, match=line(policy, signal)):
            replay(TRACE, policy)
        with pytest.raises(DraftsimError, match="without declaring"):
            list(speculate(MadeUpDecoder([1], ExactMatch()), policy))
        with pytest.raises(PolicyError, match=f"reads the signal {signal!r} without"):
            check_policy(policy)
    assert len(replay(TRACE, Undeclared(signal, (signal,))))


def test_a_recording_without_signals_gives_none() -> None:
    policy = Undeclared("prob", ())
    with pytest.raises(PolicyError, match=line(policy, "prob")):
        replay(BARE, policy)


def test_lookups_refuse_it() -> None:
    from tests.test_runs import REPEATING

    policy = Undeclared("token_id", ())
    with pytest.raises(PolicyError, match=line(policy, "token_id")):
        replay_source(REPEATING, PLD(), policy)
    assert len(replay_source(REPEATING, PLD(), Undeclared("token_id", ("token_id",))))


@pytest.mark.invariant(4)
@pytest.mark.parametrize(
    "mode", ["continuous", "static", "static-minimum", "static-mean", "pearl", "dsi"]
)
@pytest.mark.parametrize("declared", [(), ("prob",)])
def test_serving_refuses_it(mode: Any, declared: tuple[str, ...]) -> None:
    scenario = Scenario(ClosedLoop(1 if mode in ("pearl", "dsi") else 2), requests=4, mode=mode)
    policies: list[Any] = [Undeclared("entropy", declared)]
    if mode in ("continuous", "static"):
        policies.append(UndeclaredBatch())
    for policy in policies:
        with pytest.raises(PolicyError, match=line(policy, "entropy")):
            simulate(RECORDED, CONSTANT, policy, scenario)


def real_runs() -> list[Callable[[Any], Any]]:
    from profiler.decoding.forced import ForcedDecoder
    from profiler.decoding.single import ModelDecoder
    from profiler.models.runner import Runner
    from tests import bundled
    from tests.batched_decoding import decode_batch

    trace = bundled.record(2, max_new=12)
    prompts = [torch.tensor(r.prompt_ids) for r in trace.requests]
    batched = [Runner(m, 400, 2) for m in (bundled.pair().target, bundled.pair().draft)]
    return [
        lambda p: list(speculate(ModelDecoder(*bundled.runners(), prompts[0], 12), p)),
        lambda p: list(speculate(ForcedDecoder(*bundled.runners(), trace, 0), p)),
        lambda p: decode_batch(*batched, [q[-200:] for q in prompts], 12, frozenset(), p),
    ]


@pytest.mark.invariant(4)
def test_real_models_refuse_it() -> None:
    policies = [Undeclared("entropy", ()), Undeclared("entropy", ("prob",))]
    for run in real_runs():
        for policy in policies:
            with pytest.raises(PolicyError, match=line(policy, "entropy")):
                run(policy)
        assert run(Undeclared("entropy", ("entropy",)))
    with pytest.raises(PolicyError, match=line(UndeclaredBatch(), "entropy")):
        real_runs()[-1](UndeclaredBatch())


class NosyRule(VerifyRule):
    needs = ("match",)

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return sum(token.prob > 0.5 for token in draft[:1])


def test_rules_are_held_to_what_they_declare() -> None:
    from profiler.decoding.single import ModelDecoder
    from tests import bundled

    with pytest.raises(PolicyError, match=line(NosyRule(), "prob")):
        replay(TRACE, Fixed(4), NosyRule())
    prompt = bundled.pair().encode(bundled.prompts()[0].text)
    real = speculate(ModelDecoder(*bundled.runners(), prompt, 12, rule=NosyRule()), Fixed(4))
    with pytest.raises(PolicyError, match=line(NosyRule(), "prob")):
        next(real)


class NeedyRule(VerifyRule):
    """Accepts whatever is right, looking at a score of it."""

    def __init__(self, score: str, declared: tuple[str, ...]) -> None:
        self.score = score
        self.declared = self.needs = declared

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return sum(getattr(score, self.score) is NotImplemented for score in scores)


@pytest.mark.invariant(4)
@pytest.mark.parametrize("score", SCORES)
def test_rules_are_held_to_the_scores_that_they_declare(score: str) -> None:
    said = f"^NeedyRule reads the score '{score}' without declaring it: add it to `needs`$"
    served = Scenario(ClosedLoop(2), requests=3)
    for declared in ((), tuple(s for s in SCORES if s != score)):
        with pytest.raises(PolicyError, match=said):
            replay(TRACE, Fixed(4), NeedyRule(score, declared))
        with pytest.raises(PolicyError, match=said):
            simulate(TRACE, CONSTANT, Fixed(4), served, rule=NeedyRule(score, declared))
        assert str(
            pickle.loads(pickle.dumps(undeclared(score, "needs").by(NeedyRule(score, ()))))
        ) == (said.strip("^$"))
    assert len(replay(TRACE, Fixed(4), NeedyRule(score, (score,))))


def test_real_verification_holds_rules_to_their_scores() -> None:
    from profiler.decoding.single import ModelDecoder
    from tests import bundled

    prompt = bundled.pair().encode(bundled.prompts()[0].text)
    for declared in ((), ("match",)):
        rule = NeedyRule("top1", declared)
        real = speculate(ModelDecoder(*bundled.runners(), prompt, 12, rule=rule), Fixed(4))
        with pytest.raises(PolicyError, match=r"^NeedyRule reads the score 'top1' without"):
            next(real)


class ObservesUndeclared(Fixed):
    """Looks at a signal only when the round is over."""

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        assert all(token.entropy >= 0 for token in draft)


@pytest.mark.invariant(4)
@pytest.mark.parametrize(
    "policy",
    [Undeclared(), Undeclared(declared=()), UndeclaredBatch(), ObservesUndeclared(3)],
    ids=lambda p: type(p).__name__,
)
def test_engines_refuse_it(policy: Any) -> None:
    """A proposer in a pretended vLLM, with drafts that carry every signal."""
    from tests.test_engine_proposer import drafted

    with pytest.raises(PolicyError, match=line(policy, "entropy")):
        drafted(policy)
