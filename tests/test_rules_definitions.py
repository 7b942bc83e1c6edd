"""Each rule against a reading of its definition on full distributions, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rules.base import ExactMatch, RejectionSampling
from policies.rules.context import CSD, FLy
from policies.rules.memory import OnlineCorrectionMemory
from policies.rules.threshold import (
    BiLDRollback,
    CMASDVerification,
    Ensemble,
    GlobalThreshold,
    Lenience,
    RelaxedAcceptance,
    SpecVerification,
    TypicalAcceptance,
)
from tests.rule_positions import (
    Position,
    V,
    accept,
    acceptance_probability,
    leading,
    positions,
    relaxed,
    seeds,
)


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


def test_a_token_tied_with_the_best_is_as_good_where_a_rule_compares_logits() -> None:
    tied = SimpleNamespace(
        match=False, draft_rank=0, top1=3.0, draft_logit=3.0, logsumexp=4.0, token=1
    )
    assert not ExactMatch().accepts(None, tied)
    for rule in (SpecVerification(beta=1, tau=0.0), GlobalThreshold(1.0), Lenience(1.0)):
        assert rule.accepts(None, tied)


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
    (
        RelaxedAcceptance(3, 0.2),
        lambda x: x.d in np.argsort(-x.p)[:3].tolist() and x.p[x.best] - x.p[x.d] <= 0.2,
    ),
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
        RelaxedAcceptance(topk=1),
        RelaxedAcceptance(delta=0),
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
        (RelaxedAcceptance(2, 0.1), RelaxedAcceptance(4, 0.3)),
        (TypicalAcceptance(0.2, 0.6), TypicalAcceptance(0.1, 0.3)),
        (BiLDRollback(1), BiLDRollback(3)),
        (Ensemble(0.8), Ensemble(0.3)),
        (FLy(0.6, 2, vocab_size=V), FLy(0.2, 1, vocab_size=V)),
    ):
        assert accept(strict, drafted) <= accept(loose, drafted), type(strict).__name__


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


def draws(x: Position, rule: Any, trials: int = 4000) -> tuple[int, int]:
    """Accepted of `trials` tokens drawn from the draft at one position, with fresh coins."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(trials):
        x.d = int(rng.choice(V, p=x.q))
        x.match = bool(rng.random() < acceptance_probability(x.p[x.d], x.q[x.d]))
        hits += accept(rule, [x])
    return hits, trials


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


def test_full_lenience_keeps_every_lossless_verdict_coin_for_coin() -> None:
    rule = Lenience(1, "sample")
    for seed in range(20):
        drafted = positions(seed, greedy=False)
        assert accept(rule, drafted) == leading([x.match for x in drafted])


@pytest.mark.invariant(6)
def test_stochastic_rules_repeat_with_their_seed_and_accept_a_generator() -> None:
    drafted = [positions(seed, 1, greedy=False) for seed in range(200)]

    def run(seed: int | np.random.Generator) -> list[int]:
        rule = Ensemble(0.5, "sample", seed=seed)
        return [accept(rule, x) for x in drafted]

    assert run(3) == run(np.random.default_rng(3))
    assert run(3) != run(4)
