"""Drawing tokens: the law of the draws, and their edges."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from profiler.sampling import draw


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 0.5, 0.0, 6.0, 0.5, 0.0])
    count = 20_000
    drawn = draw(weights.expand(count, 7), torch.Generator().manual_seed(1))
    seen = torch.bincount(drawn, minlength=7)
    assert (seen[weights == 0] == 0).all()
    some = weights > 0
    expected = weights[some] / weights.sum() * count
    assert stats.chisquare(seen[some].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(("coin", "expected"), [(0.0, 1), (1 - 2**-24, 3), (1.0, 3)])
def test_the_ends_of_the_range_fall_on_tokens_with_a_weight(
    monkeypatch: pytest.MonkeyPatch, coin: float, expected: int
) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(tuple(shape), coin))
    assert draw(torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.0]]), None).tolist() == [expected]
