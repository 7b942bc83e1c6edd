"""The fitting of drafters of the miniature target: losses, drawn candidates, directions."""

from __future__ import annotations

import pytest
import torch

from benchmarks.training.draft import principal_directions
from benchmarks.training.fit import Candidates, soft_loss


def test_sampled_candidates_estimate_the_whole_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(400)
    candidates = Candidates(torch.arange(20), torch.arange(20, 400), sampled=40)
    estimates = []
    for _ in range(2000):
        ids, raised = candidates.draw()
        estimates.append((logits[ids] + raised).exp().sum())
    drawn = torch.stack(estimates)
    error = drawn.std() / len(drawn) ** 0.5
    assert abs(drawn.mean() - logits.exp().sum()) < 4 * error


def test_the_loss_is_least_for_the_teacher_itself() -> None:
    torch.manual_seed(0)
    teacher, weights = torch.randn(30, 9), torch.rand(30)
    same, agreement = soft_loss(teacher, teacher, weights)
    entropy = (-(teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1) * weights).sum()
    torch.testing.assert_close(same, entropy / weights.sum())
    assert agreement == 1
    assert soft_loss(teacher + 0.3 * torch.randn(30, 9), teacher, weights)[0] > same


def test_principal_directions_lose_least() -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 12) * torch.arange(1, 13)
    directions = principal_directions(rows, torch.zeros(200), 5)
    torch.testing.assert_close(directions.T @ directions, torch.eye(5), rtol=0, atol=1e-5)
    kept = (rows @ directions).pow(2).sum()
    assert kept == pytest.approx(float(torch.linalg.svdvals(rows)[:5].pow(2).sum()), rel=1e-4)
