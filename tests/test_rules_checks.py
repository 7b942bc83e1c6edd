"""`check_rule` passes every built-in rule and fails rules that break one clause each."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from policies.guard import PolicyError
from policies.rules.base import TokenRule, VerifyRule
from policies.rules.checks import check_rule, sample_round
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from policies.rules.registry import RULES, parse_rule

VARIANTS = [
    "lenience:mode=sample",
    "ensemble:mode=sample",
    "ensemble:undecided=accept",
    "cm-asd:tau_sign=literal,entropy_sign=literal,weights=[0,1,0]",
    "csd:threshold=0,tau=0.5",
    "csd:threshold=1,count_first=true,count_rescued=true,capacity=3",
    "csd-ocm:threshold=0",
    "typical:temperature=0",
    "fly:window=1,entropy_threshold=0.1",
]


@pytest.mark.parametrize("name", [*RULES, *VARIANTS])
def test_built_in_rules_keep_the_contract(name: str) -> None:
    check_rule(parse_rule(name))


def test_the_prototype_is_left_as_it_was() -> None:
    rule = CSD(threshold=0, memory=OnlineCorrectionMemory().calibrate([(1, 2)]))
    check_rule(rule)
    assert rule.table.items() == [((1, 2), 1)]


class TooMany(VerifyRule):
    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return len(draft) + 1


class FromNothing(VerifyRule):
    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return len(draft) or -1


class NotAnInteger(VerifyRule):
    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return 0.0  # type: ignore[return-value]


class Numpy(TokenRule):
    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return np.int64(super().accept(draft, scores))  # type: ignore[return-value]

    def accepts(self, token: Any, score: Any) -> bool:
        return bool(score.match)


class Raises(VerifyRule):
    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return {0: 0}[len(draft)]


class Clockwork(TokenRule):
    """Shares a stream of randomness between all copies."""

    rng = np.random.default_rng(0)

    def accepts(self, token: Any, score: Any) -> bool:
        return bool(self.rng.random() < 0.5)


class Peeking(VerifyRule):
    """Lets a last mismatch stand only if something follows it."""

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return len(draft) if len(draft) > 3 else 0


class FalselyLossless(TokenRule):
    lossless = True
    needs = ("match", "draft_rank")

    def accepts(self, token: Any, score: Any) -> bool:
        return bool(score.draft_rank < 2)


class UndeclaredScore(TokenRule):
    def accepts(self, token: Any, score: Any) -> bool:
        return bool(score.match or score.entropy > 1)


class MisspeltScore(TokenRule):
    def accepts(self, token: Any, score: Any) -> bool:
        return bool(score.matches)


class Copying(TokenRule):
    """Keeps copies of what it is given."""

    def accepts(self, token: Any, score: Any) -> bool:
        return bool(deepcopy(score).match)


class UndeclaredSignal(TokenRule):
    def accepts(self, token: Any, score: Any) -> bool:
        return bool(token.prob > 0.5)


class UnknownScore(TokenRule):
    needs = ("mood",)

    def accepts(self, token: Any, score: Any) -> bool:
        return False


class NegativeLookAhead(TokenRule):
    look_ahead = -1

    def accepts(self, token: Any, score: Any) -> bool:
        return bool(score.match)


class Counting(TokenRule):
    """Forgives every second mismatch it ever sees; keeps the count in a list."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def accepts(self, token: Any, score: Any) -> bool:
        if score.match:
            return True
        self.seen.append(1)
        return len(self.seen) % 2 == 0


class SharedState(Counting):
    def fresh(self) -> SharedState:
        other = SharedState()
        other.seen = self.seen
        return other


class NoCopy(Counting):
    def fresh(self) -> NoCopy:
        return self


def test_a_rule_with_state_of_its_own_is_fine() -> None:
    check_rule(Counting())
    check_rule(Numpy())
    check_rule(Copying())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TooMany(), "accept returned 1, expected 0 to 0"),
        (FromNothing(), "accept returned -1, expected 0 to 0"),
        (NotAnInteger(), "returned 0.0, expected an int"),
        (Raises(), "Raises raised KeyError: "),
        (Clockwork(), "two copies in the same state disagree"),
        (Peeking(), "more than look_ahead=0 after them"),
        (FalselyLossless(), "calls itself lossless but accepted"),
        (UndeclaredScore(), "reads the score 'entropy' without declaring it"),
        (MisspeltScore(), "reads 'matches', which is not a target score"),
        (UndeclaredSignal(), "reads the signal 'prob' without declaring it"),
        (UnknownScore(), "unknown signals or scores: mood"),
        (NegativeLookAhead(), "look_ahead of -1"),
        (SharedState(), "two copies in the same state disagree|shares state"),
        (NoCopy(), "returns the prototype"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_rule_fails(rule: VerifyRule, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        check_rule(rule)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_rounds_are_coherent(temperature: float) -> None:
    draft, scores = sample_round(np.random.default_rng(0), 200, temperature)
    for token, score in zip(draft, scores, strict=True):
        assert score["draft_rank"] == 0 or score["draft_logit"] < score["top1"]
        assert (score["draft_rank"] == 0) == (token["token_id"] == score["token"])
        assert score["logsumexp"] > score["top1"] > score["top2"]
        assert 0 <= token["prob_margin"] <= token["top_prob"] <= token["top10_prob"] <= 1
        assert token["prob"] <= token["top_prob"]
        assert token["logit_margin"] >= 0
        if temperature == 0:
            assert token["prob"] == token["top_prob"]
            assert score["match"] == (score["draft_rank"] == 0)
            assert token["prob"] >= token["prob_margin"]
