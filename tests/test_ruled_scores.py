"""The scores that a rule sees of a real pass, and the decoder's use of its verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from policies.core import SIGNALS, speculate
from policies.lengths.basic import Fixed
from policies.rules.base import SCORES, VerifyRule
from policies.rules.registry import parse_rule
from profiler.decoding.single import ModelDecoder, judge, target_numbers
from tests import bundled
from tests.rule_runs import short_trace
from traces.replay.scores import score_tape


def test_scores_are_the_recorded_ones() -> None:
    """A rule's scores in a real first round equal the columns of the recording."""
    trace, seen = short_trace(), []

    class Spy(VerifyRule):
        reads, needs = SIGNALS, SCORES

        def accept(self, draft: list, scores: list) -> int:  # type: ignore[type-arg, override]
            seen.append((list(draft), list(scores)))
            return 0

    prompt = torch.tensor(trace.requests[1].prompt_ids)
    decoder = ModelDecoder(*bundled.runners(), prompt, 16, rule=Spy())
    next(speculate(decoder, Fixed(4)))
    draft, scores = seen[-1]
    start = int(trace.request_starts[1]) + 1
    row = int(trace.on_path[start])
    recorded = score_tape(trace).scores(SCORES).rows(row, 4)
    for i, (token, mine, theirs) in enumerate(zip(draft, scores, recorded, strict=True)):
        assert (mine.match, mine.token, mine.draft_rank) == (
            theirs.match, theirs.token, theirs.draft_rank
        )  # fmt: skip
        for name in ("top1", "top2", "logsumexp", "entropy", "draft_logit"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-3)
        for name in SIGNALS:
            recorded_value = float(trace.signal(name)[row + i])
            assert getattr(token, name) == pytest.approx(recorded_value, abs=1e-3)


def test_target_numbers_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), math.log(2.0)]])
    pick, top1, top2, lse, entropy, logit, rank = target_numbers(logits, torch.tensor([2]))[
        0
    ].tolist()
    assert (pick, rank) == (1, 1)
    shares = np.array([1, 3, 2]) / 6
    wanted = [math.log(3), math.log(2), math.log(6), -(shares * np.log(shares)).sum(), math.log(2)]
    assert [top1, top2, lse, entropy, logit] == pytest.approx(wanted, abs=1e-6)


def test_judge_without_a_draft_gives_the_targets_token() -> None:
    none = torch.empty(0, dtype=torch.long)
    seen = judge(parse_rule("lossy-global"), [], none, torch.tensor([[0.0, 2.0]]), 0.0)
    assert (seen.accepted, seen.picks, seen.mismatched) == (0, [1], [])
