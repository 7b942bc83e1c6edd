"""A draft tree's order and its cut, on one written by hand."""

from __future__ import annotations

import torch

from profiler.features.runner import Layer, Trees
from profiler.sources.start_record import ranks


def test_equal_scores_are_taken_from_the_upper_layer_first() -> None:
    """All tokens are as likely as each other: certain ones, and ties within and across layers."""
    trees = Trees.__new__(Trees)
    trees.topk, trees._at, trees._own = 2, torch.zeros(1), torch.ones(2, 2, dtype=torch.bool)
    zeros = torch.zeros(1, 4)
    first = Layer(zeros[:, :2], torch.tensor([[7, 8]]), torch.zeros(1, 2, dtype=torch.long),
                  torch.tensor([[0, 1]]), zeros)  # fmt: skip
    second = Layer(zeros, torch.tensor([[7, 8, 7, 8]]), torch.tensor([[0, 0, 1, 1]]),
                   torch.tensor([[0, 1]]), zeros)  # fmt: skip
    trees.layers = [first, second]
    rank = ranks(trees, torch.tensor([[8, 7]]))[0]
    assert rank.tolist() == [[1, 1], [-1, 4]]
    cut = trees.cut(5, 2)
    assert cut.tokens.tolist() == [7, 8, 7, 8, 7]
    assert cut.parent.tolist() == [0, 0, 1, 1, 2]
    assert cut.depth.tolist() == [0, 1, 1, 2, 2, 2]
    assert cut.sees.int().tolist()[5] == [1, 0, 1, 0, 0, 1]
