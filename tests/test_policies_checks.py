"""The public contract: every built-in policy keeps it, and each breach is caught."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from policies import (
    BatchPolicy,
    DraftPolicy,
    IsotonicAcceptance,
    Load,
    PolicyError,
    Round,
    check_policy,
    describe,
    parse_policy,
    parse_serving_policy,
    policy_names,
)
from policies.batch.base import Policy
from policies.lengths.basic import Oracle
from policies.lengths.specdec_pp import Disco, SpecDecPP
from policies.registry import is_bound

VARIANTS = [
    "fixed:gamma=0",
    "fixed:gamma=24",
    "confidence:roc_update=in_call",
    "confidence:roc_update=next_call",
    "confidence:confidence_threshold=0",
    "hf-heuristic:full_accept_means=budget",
    "hf-heuristic:persist=persistent",
    "hf-heuristic:confidence_threshold=0.4,roc_update=next_call",
    "gammatune:full_accept_means=budget",
    "adaedl:keep_trigger_token=false",
    "oracle:convention=run+1",
    "bild:target_first=true",
    "cm-asd:window=literal",
    "cm-asd:window=lagged,entropy_sign=literal",
    "cm-asd:weights=[1,0,0]",
    "specdec-pp:lag=false",
    "ucb:variant=ucb_paper",
    "ucb:variant=greedy_code,learns_across_requests=true",
    "exp3:learns_across_requests=true",
    "disable-by-batch-size:threshold=1",
    "turbospec:variant=batch-dsd,interval=3",
    "confidence-freeze:stop_early=true",
    "adaptive-verification:budget=4",
    "confidence-scheduled:captured=16,ema=0.5",
]


@pytest.mark.invariant(4)
@pytest.mark.parametrize("text", [*policy_names(), *VARIANTS])
def test_every_built_in_policy_keeps_the_contract(text: str) -> None:
    check_policy(parse_policy(text))
    check_policy(parse_serving_policy(text))


@pytest.mark.parametrize("build", [SpecDecPP, Disco])
def test_policies_on_a_fitted_estimator_keep_the_contract(build: Any) -> None:
    estimator = IsotonicAcceptance("entropy", [0.0, 0.5, 2.0], [0.95, 0.6, 0.1])
    policy = build(estimator=estimator)
    assert policy.reads == ("entropy",)
    check_policy(policy)


class Foresees(DraftPolicy):
    """Drafts what will be accepted, which a recording tells and real decoding does not."""

    longest = 8

    def __init__(self) -> None:
        self.run = 0

    def begin_round(self, load: Load) -> None:
        self.run = load.run_length or 0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < min(self.run, self.longest)


class HalfOracle(Oracle):
    """Knows the outcomes, and drafts half of what would be accepted."""

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < (self._length + 1) // 2


class Sound(DraftPolicy):
    """Keeps the contract: each class below breaks one part of it."""

    reads: ClassVar[tuple[str, ...]] = ("prob",)

    def __init__(self, gamma: int = 4) -> None:
        self.gamma = gamma
        self._rounds = 0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self.gamma

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self._rounds += 1


class RenamesParameter(Sound):
    def __init__(self, length: int = 4) -> None:
        super().__init__(length)


class RenamesItsSecond(Sound):
    def __init__(self, gamma: int = 4, length: int = 4) -> None:
        super().__init__(min(gamma, length))


class ChangesParameter(Sound):
    def __init__(self, gamma: int = 4) -> None:
        super().__init__(gamma + 1)


class NoDefault(Sound):
    def __init__(self, gamma: int) -> None:
        super().__init__(gamma)


class ReadsUndeclared(Sound):
    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 4 and not (draft and draft[-1].entropy > 3)


class ReadsTheTarget(Sound):
    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 4 and not (draft and draft[-1].match)


class UnknownSignal(Sound):
    reads: ClassVar[tuple[str, ...]] = ("confidence",)


class NotABool(Sound):
    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return self.gamma - len(draft)  # type: ignore[return-value]


class NeverStops(Sound):
    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return True


class SubmitsTooMany(Sound):
    def submit(self, draft: Sequence[Any]) -> int:
        return len(draft) + 1


class SubmitsABool(Sound):
    def submit(self, draft: Sequence[Any]) -> int:
        return len(draft) > 2


class ChangesTheDraft(Sound):
    def submit(self, draft: Sequence[Any]) -> int:
        if draft:
            draft.pop()  # type: ignore[attr-defined]
        return len(draft)


class ReordersTheDraft(Sound):
    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        draft.reverse()  # type: ignore[attr-defined]


class Random(Sound):
    generator: ClassVar[np.random.Generator] = np.random.default_rng(0)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 8 and bool(self.generator.random() < 0.7)


class SharesState(Sound):
    history: ClassVar[list[int]] = []

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 1 + len(self.history) // 100

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self.history.append(outcome.accepted)


class FreshIsItself(Sound):
    def fresh(self) -> FreshIsItself:
        return self


class LearnsButCopies(Sound):
    learns_across_requests = True

    def fresh(self) -> LearnsButCopies:
        return LearnsButCopies(self.gamma)


class FailsOnEmptyDrafts(Sound):
    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self.share = outcome.accepted / outcome.drafted


class FailsOnShortDrafts(Sound):
    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self.last = draft[3].prob if draft else None


class TrustsTheDecoder(Sound):
    def begin_round(self, load: Load) -> None:
        assert load.context < 12


class FailsInBatches(Sound):
    def begin_round(self, load: Load) -> None:
        assert load.batch == 1


class Planned(BatchPolicy):
    """Keeps the contract for one sequence, and breaks it for several."""

    longest = 4

    def __init__(self, several: Any = 4, sent: Any = 0) -> None:
        self.several, self.sent = several, sent

    def plan(self, loads: Sequence[Load]) -> int:
        return 4 if len(loads) == 1 else self.several  # type: ignore[no-any-return]

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        return [len(draft) if len(drafts) == 1 else self.sent for draft in drafts]


class AllotsOne(Planned):
    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        return [len(drafts[0])]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (RenamesParameter(), "does not store its parameter 'length'"),
        (RenamesItsSecond(), "does not store its parameter 'length'"),
        (ChangesParameter(), "stores its parameter 'gamma' changed"),
        (NoDefault(3), "no default for its parameter 'gamma'"),
        (ReadsUndeclared(), "reads the signal 'entropy' without declaring it"),
        (ReadsTheTarget(), "reads 'match', which is not a draft signal"),
        (UnknownSignal(), "declares the signal 'confidence'"),
        (NotABool(), "keep_drafting returned 4, expected a bool"),
        (NeverStops(), "keep_drafting never stops"),
        (SubmitsTooMany(), "submit returned 1, expected 0 to 0"),
        (SubmitsABool(), "submit returned False, expected an int"),
        (ChangesTheDraft(), "submit changed the draft"),
        (ReordersTheDraft(), "observe changed the draft"),
        (Random(), "not deterministic"),
        (SharesState(), "not deterministic|remembers earlier requests"),
        (FreshIsItself(), "not deterministic|fresh\\(\\) does not return a copy"),
        (LearnsButCopies(), "learns across requests, but fresh"),
        (FailsOnEmptyDrafts(), "raised ZeroDivisionError"),
        (FailsOnShortDrafts(), "raised IndexError"),
        (TrustsTheDecoder(), "raised AssertionError"),
        (FailsInBatches(), "raised AssertionError"),
        (Foresees(), "drafts by load.run_length, which only a recording knows"),
        (Planned(several=5), "plan returned 5, expected 0 to 4"),
        (Planned(several=2.5), "plan returned 2.5, expected an int"),
        (Planned(sent=-1), "allot returned -1, expected 0 to"),
        (AllotsOne(), "allot returned 1 lengths, expected 64"),
    ],
)
def test_each_breach_is_named(broken: Policy, message: str) -> None:
    check_policy(Sound())
    check_policy(Planned())
    with pytest.raises(PolicyError, match=message) as caught:
        check_policy(broken)
    assert str(caught.value).startswith(type(broken).__name__)


def test_a_bound_of_ones_own_is_a_subclass_of_the_oracle() -> None:
    check_policy(HalfOracle())
    assert describe(HalfOracle(gamma_max=4)) == "oracle (HalfOracle:gamma_max=4)"
    assert is_bound(describe(HalfOracle()))


@pytest.mark.invariant(11)
def test_checking_leaves_the_policy_as_it_was() -> None:
    policy = parse_policy("hf-heuristic:persist=persistent")
    before = vars(policy).copy()
    check_policy(policy)
    assert vars(policy) == before
