"""Each rule against a reading of its definition on full distributions, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.confidence import cmasd_confidence
from policies.memory import OnlineCorrectionMemory
from policies.rules import ExactMatch, RejectionSampling, acceptance_probability, residual
from policies.rules_context import CSD, FLy
from policies.rules_ratio import Ensemble, Lenience
from policies.rules_threshold import (
    BiLDRollback,
    CMASDVerification,
    GlobalThreshold,
    SpecVerification,
    TypicalAcceptance,
)

V = 12
seeds = st.integers(0, 2**32 - 1)
relaxed = settings(max_examples=60, deadline=None)


class Position:
    """One drafted position with both full distributions, and the records made of them."""

    def __init__(self, rng: np.random.Generator, greedy: bool = True) -> None:
        self.target_logits = rng.normal(0, rng.uniform(0.2, 4), V)
        self.draft_logits = self.target_logits + rng.normal(0, rng.uniform(0.1, 3), V)
        self.p, self.q = (
            np.exp(z) / np.exp(z).sum() for z in (self.target_logits, self.draft_logits)
        )
        self.d = int(self.q.argmax()) if greedy else int(rng.choice(V, p=self.q))
        self.best = int(self.p.argmax())
        ratio = self.p[self.d] / self.q[self.d]
        self.match = self.d == self.best if greedy else bool(rng.random() < ratio)

    @property
    def token(self) -> SimpleNamespace:
        logits, probs = np.sort(self.draft_logits)[::-1], np.sort(self.q)[::-1]
        return SimpleNamespace(
            token_id=self.d,
            prob=self.q[self.d],
            entropy=-(self.q * np.log(self.q)).sum(),
            logit_margin=logits[0] - logits[1],
            prob_margin=probs[0] - probs[1],
        )

    @property
    def score(self) -> SimpleNamespace:
        z = self.target_logits
        top = np.sort(z)[::-1]
        return SimpleNamespace(
            match=self.match, token=self.best, top1=top[0], top2=top[1],
            logsumexp=np.log(np.exp(z).sum()), entropy=-(self.p * np.log(self.p)).sum(),
            draft_logit=z[self.d], draft_rank=int((z > z[self.d]).sum()),
        )  # fmt: skip


def positions(seed: int, count: int = 8, greedy: bool = True) -> list[Position]:
    rng = np.random.default_rng(seed)
    return [Position(rng, greedy) for _ in range(count)]


def accept(rule: Any, drafted: list[Position]) -> int:
    return int(rule.accept([x.token for x in drafted], [x.score for x in drafted]))


def leading(verdicts: list[bool]) -> int:
    return verdicts.index(False) if False in verdicts else len(verdicts)


def typical(x: Position, epsilon: float, delta: float) -> bool:
    spread = -sum(v * math.log(v) for v in x.p)
    return bool(x.p[x.d] > min(epsilon, delta * math.exp(-spread)))


def cmasd_gap(x: Position) -> float:
    t = x.token
    confidence = (
        (1 - t.entropy / math.log(V)) * 0.5
        + 0.3 / (1 + math.exp(-2 * t.logit_margin))
        + 0.2 * min(1, t.prob_margin / (1 - 1 / V))
    )
    return float(0.2 + 1.5 * confidence)


DEFINITIONS: list[tuple[Any, Callable[[Position], bool]]] = [
    (ExactMatch(), lambda x: x.d == x.best),
    (RejectionSampling(), lambda x: x.d == x.best),
    (
        SpecVerification(beta=3, tau=1.0),
        lambda x: (
            x.d in np.argsort(-x.p)[:3].tolist() and math.log(x.p[x.best] / x.p[x.d]) <= 1 + 1e-9
        ),
    ),
    (
        CMASDVerification(
            tau_base=0.2, gamma=1.5, top=4, beta=2, weights=(0.5, 0.3, 0.2), vocab_size=V
        ),
        lambda x: (
            x.d in np.argsort(-x.p)[:4].tolist()
            and math.log(x.p[x.best] / x.p[x.d]) <= cmasd_gap(x) + 1e-9
        ),
    ),
    (GlobalThreshold(0.6), lambda x: x.p[x.d] / x.p[x.best] >= 0.6 - 1e-12),
    (Lenience(0.4), lambda x: x.p[x.d] >= (0.4 - 1e-12) * x.p[x.best]),
    (TypicalAcceptance(), lambda x: typical(x, 0.09, 0.3)),
    (TypicalAcceptance(0.5, 0.9), lambda x: typical(x, 0.5, 0.9)),
    (BiLDRollback(1.5), lambda x: x.d == x.best or -math.log(x.p[x.d]) <= 1.5 + 1e-9),
    (
        CSD(tau=0.3, use_memory=False),
        lambda x: x.d == x.best or x.p[x.d] / x.p[x.best] >= 0.3 - 1e-12,
    ),
]


@pytest.mark.parametrize(
    ("rule", "holds"), DEFINITIONS, ids=[type(rule).__name__ for rule, _ in DEFINITIONS]
)
@given(seed=seeds)
@relaxed
def test_rule_is_its_definition(rule: Any, holds: Callable[[Position], bool], seed: int) -> None:
    drafted = positions(seed)
    assert accept(rule, drafted) == leading([holds(x) for x in drafted])


@given(seed=seeds, weight=st.floats(0.05, 1))
@relaxed
def test_greedy_ensemble_brackets_the_argmax_of_the_mixture(seed: int, weight: float) -> None:
    certain, possible = Ensemble(weight), Ensemble(weight, undecided="accept")
    for x in positions(seed):
        truly = int((weight * x.p + (1 - weight) * x.q).argmax()) == x.d
        assert accept(certain, [x]) <= truly <= accept(possible, [x])


@given(seed=seeds, weight=st.floats(0.05, 1))
@relaxed
def test_greedy_ensemble_leaves_open_only_what_the_leading_values_do(
    seed: int, weight: float
) -> None:
    for x in positions(seed):
        second = np.sort(x.q)[-2]
        mine = weight * x.p[x.d] + (1 - weight) * x.q[x.d]
        # No other token has more than the best of both; the best target token has at least
        # its own share.
        certain = x.match or mine > weight * x.p.max() + (1 - weight) * second
        possible = x.match or mine > weight * x.p.max()
        assert accept(Ensemble(weight), [x]) == certain
        assert accept(Ensemble(weight, undecided="accept"), [x]) == possible


def test_greedy_ensemble_decides_most_positions() -> None:
    drafted = [x for seed in range(60) for x in positions(seed) if not x.match]
    open_ = sum(
        accept(Ensemble(0.5), [x]) != accept(Ensemble(0.5, undecided="accept"), [x])
        for x in drafted
    )
    assert 0 < open_ < len(drafted) / 2


@given(seed=seeds, window=st.integers(0, 4), theta=st.floats(0, 1))
@relaxed
def test_fly_is_its_definition(seed: int, window: int, theta: float) -> None:
    drafted = positions(seed)
    n, expected = len(drafted), 0
    for i, x in enumerate(drafted):
        unsure = -(x.p * np.log(x.p)).sum() / math.log(V) >= theta
        returns = i + window < n and all(y.match for y in drafted[i + 1 : i + window + 1])
        if not (x.match or (unsure and returns)):
            break
        expected += 1
    assert accept(FLy(theta, window, vocab_size=V), drafted) == expected


@given(seed=seeds)
@relaxed
def test_limits_in_which_a_lossy_rule_is_exact(seed: int) -> None:
    drafted = positions(seed)
    exact = accept(ExactMatch(), drafted)
    for rule in (
        SpecVerification(beta=1, tau=0),
        SpecVerification(beta=5, tau=0),
        CMASDVerification(tau_base=0, gamma=0, vocab_size=V),
        CMASDVerification(tau_base=3, top=1, vocab_size=V),
        CSD(threshold=math.inf),
        CSD(use_memory=False, tau=1),
        CSD(use_gate=False, threshold=math.inf),
        GlobalThreshold(1),
        TypicalAcceptance(temperature=0),
        Lenience(1),
        Ensemble(1),
        BiLDRollback(0),
        FLy(entropy_threshold=1.01, window=0, vocab_size=V),
        FLy(entropy_threshold=0, window=len(drafted), vocab_size=V),
    ):
        assert accept(rule, drafted) == exact, type(rule).__name__


@given(seed=seeds)
@relaxed
def test_looser_parameters_accept_no_less(seed: int) -> None:
    drafted = positions(seed)
    for strict, loose in (
        (SpecVerification(2, 1), SpecVerification(4, 2)),
        (CMASDVerification(0.1, 1, vocab_size=V), CMASDVerification(0.5, 2, vocab_size=V)),
        (GlobalThreshold(0.8), GlobalThreshold(0.1)),
        (TypicalAcceptance(0.2, 0.6), TypicalAcceptance(0.1, 0.3)),
        (BiLDRollback(1), BiLDRollback(3)),
        (Ensemble(0.8), Ensemble(0.3)),
        (FLy(0.6, 2, vocab_size=V), FLy(0.2, 1, vocab_size=V)),
    ):
        assert accept(strict, drafted) <= accept(loose, drafted), type(strict).__name__


def unsure_and_sure() -> tuple[SimpleNamespace, SimpleNamespace]:
    """A drafted token of an unsure drafter, and one of a sure one."""
    unsure = SimpleNamespace(entropy=math.log(V), logit_margin=0.0, prob_margin=0.0)
    return unsure, SimpleNamespace(entropy=0.0, logit_margin=50.0, prob_margin=1 - 1 / V)


def test_cmasd_intended_is_strict_where_the_drafter_is_unsure_and_literal_lenient() -> None:
    unsure, sure = unsure_and_sure()
    entropy_only: dict[str, Any] = {
        "weights": (1, 0, 0),
        "vocab_size": V,
        "tau_base": 0.1,
        "gamma": 2,
    }
    intended = CMASDVerification(**entropy_only)
    literal = CMASDVerification(**entropy_only, tau_sign="literal")
    assert intended.threshold(unsure) == pytest.approx(0.1)
    assert intended.threshold(sure) == pytest.approx(2.1)
    assert literal.threshold(unsure) == pytest.approx(2.1)
    assert literal.threshold(sure) == pytest.approx(0.1)
    # Both literal signs together cancel for entropy alone, and give the prose's behaviour.
    both = CMASDVerification(**entropy_only, tau_sign="literal", entropy_sign="literal")
    assert both.threshold(unsure) == pytest.approx(intended.threshold(unsure))
    assert both.threshold(sure) == pytest.approx(intended.threshold(sure))


def test_cmasd_threshold_uses_the_shared_confidence() -> None:
    token = SimpleNamespace(entropy=1.1, logit_margin=0.7, prob_margin=0.2)
    rule = CMASDVerification(gamma=2, beta=3, vocab_size=V)
    confidence = cmasd_confidence(1.1, 0.7, 0.2, vocab_size=V, beta=3)
    assert rule.threshold(token) == pytest.approx(0.1 + 2 * confidence)


def test_a_component_of_weight_zero_is_not_read() -> None:
    rule = CMASDVerification(weights=(0, 0, 1), vocab_size=V)
    assert rule.reads == ("prob_margin",)
    assert rule.threshold(SimpleNamespace(prob_margin=0.0)) == pytest.approx(0.1)


@pytest.mark.parametrize("rule", [CMASDVerification(), FLy(window=0)])
def test_vocabulary_size_comes_from_the_run_or_is_asked_for(rule: Any) -> None:
    with pytest.raises(ValueError, match="give it vocab_size"):
        rule.fresh().begin_run(None, 0.0)
    mine = rule.fresh()
    mine.begin_run(V, 0.0)
    own = type(rule)(vocab_size=V)
    own.begin_run(999, 0.0)
    drafted = positions(3)
    assert mine.vocab_size == own.vocab_size == V
    assert 0 <= accept(mine, drafted) <= len(drafted)


class TestCSD:
    """Memory and gate, on the pair (draft 1, target 2) with a settable logit gap."""

    @staticmethod
    def accepts(rule: CSD, gap: float = -1.0, draft: int = 1, target: int = 2) -> bool:
        token = SimpleNamespace(token_id=draft)
        score = SimpleNamespace(match=draft == target, token=target, top1=0.0, draft_logit=gap)
        return rule.accept([token], [score]) == 1

    def test_rescues_after_more_than_threshold_corrections(self) -> None:
        rule = CSD(threshold=3, tau=0.01)
        assert [self.accepts(rule) for _ in range(6)] == [False] * 4 + [True] * 2

    def test_counting_first_rescues_one_mismatch_earlier(self) -> None:
        rule = CSD(threshold=3, tau=0.01, count_first=True)
        assert [self.accepts(rule) for _ in range(5)] == [False] * 3 + [True] * 2

    @pytest.mark.parametrize(("count_rescued", "expected"), [(False, 4), (True, 7)])
    def test_counting_rescued_mismatches(self, count_rescued: bool, expected: int) -> None:
        rule = CSD(threshold=3, count_rescued=count_rescued)
        for _ in range(7):
            self.accepts(rule)
        assert rule.table.count(1, 2) == expected

    def test_the_gate_refuses_an_implausible_familiar_pair(self) -> None:
        rule = CSD(memory=OnlineCorrectionMemory().calibrate([(1, 2)] * 20))
        edge = math.log(0.01)
        assert self.accepts(rule, gap=edge)
        assert not self.accepts(rule, gap=edge - 1e-6)
        assert self.accepts(CSD(threshold=0, use_gate=False, memory=rule.table), gap=-99.0)

    def test_an_unfamiliar_pair_or_its_reverse_is_refused(self) -> None:
        rule = CSD(memory=OnlineCorrectionMemory().calibrate([(1, 2)] * 20))
        assert not self.accepts(rule, draft=2, target=1)
        assert not self.accepts(rule, draft=1, target=3)

    def test_matches_are_not_counted(self) -> None:
        rule = CSD()
        assert self.accepts(rule, draft=2, target=2)
        assert len(rule.table) == 0

    def test_tokens_after_the_refusal_are_not_counted(self) -> None:
        rule = CSD()
        token = SimpleNamespace(token_id=1)
        score = SimpleNamespace(match=False, token=2, top1=0.0, draft_logit=-1.0)
        assert rule.accept([token] * 3, [score] * 3) == 0
        assert rule.table.count(1, 2) == 1

    def test_the_order_of_requests_matters(self) -> None:
        def run(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
            rule = CSD(threshold=1, tau=0.1)
            gaps = {(1, 2): -1.0, (3, 4): -9.0}
            return [p for p in pairs if self.accepts(rule, gaps[p], *p)]

        assert run([(1, 2)] * 3) == [(1, 2)]
        assert run([(3, 4)] * 3) == []

    def test_a_run_copies_the_calibrated_memory(self) -> None:
        memory = OnlineCorrectionMemory().calibrate([(1, 2)])
        rule = CSD(memory=memory).fresh()
        self.accepts(rule)
        assert (rule.table.count(1, 2), memory.count(1, 2)) == (2, 1)

    def test_needs_shrink_with_the_ablations(self) -> None:
        assert CSD(use_gate=False).needs == ("match", "token")
        assert CSD(use_memory=False).reads == ()


def z_of(hits: int, trials: int, share: float) -> float:
    return (hits - trials * share) / math.sqrt(trials * share * (1 - share))


@pytest.mark.parametrize("weight", [0.3, 0.8])
def test_sampled_ensemble_accepts_with_its_ratio(weight: float) -> None:
    # min(1, 1 - w + w p/q) averaged over q.
    x = Position(np.random.default_rng(5))
    share = np.minimum(1, 1 - weight + weight * x.p / x.q) @ x.q
    assert abs(z_of(*draws(x, Ensemble(weight, "sample", seed=1)), share)) < 4


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0])
def test_sampled_lenience_accepts_with_its_ratio(factor: float) -> None:
    x = Position(np.random.default_rng(6))
    share = np.minimum(x.q, x.p / factor).sum()
    assert abs(z_of(*draws(x, Lenience(factor, "sample", seed=2)), share)) < 4


def draws(x: Position, rule: Any, trials: int = 4000) -> tuple[int, int]:
    """Accepted of `trials` tokens drawn from the draft at one position, with fresh coins."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(trials):
        x.d = int(rng.choice(V, p=x.q))
        x.match = bool(rng.random() < acceptance_probability(x.p[x.d], x.q[x.d]))
        hits += accept(rule, [x])
    return hits, trials


def test_full_lenience_keeps_every_lossless_verdict_coin_for_coin() -> None:
    rule = Lenience(1, "sample")
    for seed in range(20):
        drafted = positions(seed, greedy=False)
        assert accept(rule, drafted) == leading([x.match for x in drafted])


def test_stochastic_rules_repeat_with_their_seed_and_accept_a_generator() -> None:
    drafted = [positions(seed, 1, greedy=False) for seed in range(200)]

    def run(seed: int | np.random.Generator) -> list[int]:
        rule = Ensemble(0.5, "sample", seed=seed)
        return [accept(rule, x) for x in drafted]

    assert run(3) == run(np.random.default_rng(3))
    assert run(3) != run(4)


@given(seed=seeds)
@relaxed
def test_acceptance_and_residual_recover_the_target(seed: int) -> None:
    x = positions(seed, 1)[0]
    accepted = np.array([q * acceptance_probability(p, q) for p, q in zip(x.p, x.q, strict=True)])
    emitted = accepted + (1 - accepted.sum()) * residual(x.p, x.q)
    np.testing.assert_allclose(emitted, x.p, atol=1e-12)
    np.testing.assert_allclose(residual(x.p, x.p), x.p)


def test_acceptance_of_a_token_the_draft_cannot_propose_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_prob is 0"):
        acceptance_probability(0.3, 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpecVerification(beta=0), "beta is 0, expected >= 1"),
        (lambda: SpecVerification(tau=-1), "tau is -1, expected >= 0"),
        (lambda: CMASDVerification(weights=(1, 1, 1)), "sum to 1"),
        (lambda: CMASDVerification(tau_sign="up"), "tau_sign is 'up', expected one of intended"),  # type: ignore[arg-type]
        (lambda: GlobalThreshold(0), "tau is 0, expected above 0"),
        (lambda: GlobalThreshold(1.5), "tau is 1.5, expected between 0 and 1"),
        (lambda: TypicalAcceptance(temperature=0.7), "temperature is 0.7, expected 0 or 1"),
        (lambda: Lenience(0), "factor is 0"),
        (lambda: Ensemble(1.1), "weight is 1.1"),
        (lambda: Ensemble(mode="hot"), "mode is 'hot', expected one of greedy, sample"),  # type: ignore[arg-type]
        (lambda: BiLDRollback(-1), "threshold is -1"),
        (lambda: CSD(threshold=-1), "threshold is -1"),
        (lambda: CSD(threshold=math.nan), "threshold is nan"),
        (lambda: CSD(use_memory=False, use_gate=False), "would accept every token"),
        (lambda: CSD(capacity=0), "capacity is 0"),
        (lambda: FLy(window=-1), "window is -1"),
        (lambda: FLy(vocab_size=1), "vocab_size is 1"),
    ],
)
def test_impossible_parameters_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_modes_that_do_not_fit_the_temperature_are_refused() -> None:
    with pytest.raises(ValueError, match="sampled at temperature 1, not 0"):
        Lenience(mode="sample").begin_run(V, 0.0)
    with pytest.raises(ValueError, match="use mode=greedy"):
        Ensemble(mode="sample").begin_run(V, 0.0)
    with pytest.raises(ValueError, match="use mode=sample"):
        Ensemble().begin_run(V, 0.7)
    Lenience(mode="sample").begin_run(V, 1.0)
    with pytest.raises(ValueError, match=r"not 1 with top-p 0\.9"):
        Lenience(mode="sample").begin_run(V, 1.0, 0.9)
    Ensemble(mode="sample").begin_run(V, 1.0, 0.9)
