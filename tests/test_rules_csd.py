"""CSD's memory of corrections and its gate."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory


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
