"""Non-negative least squares are those of scipy, and say which of equal columns they use."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from traces.latency.nonnegative import non_negative


@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("columns", [1, 3, 5])
def test_the_solution_is_scipys(columns, noise):
    rng = np.random.default_rng(columns)
    used = 0
    for rows in (columns, 7, 40, 150):
        features = rng.random((rows, columns)) ** rng.integers(1, 5)
        target = features @ np.maximum(rng.normal(size=columns), 0) + noise * rng.normal(size=rows)
        found = non_negative(features, target)
        np.testing.assert_allclose(found, nnls(features, target)[0], rtol=1e-6, atol=1e-6)
        used += int((found > 0).sum())
    assert used > 1


def test_of_columns_that_say_the_same_the_first_is_used():
    rng = np.random.default_rng(0)
    size = rng.random(30)
    features = np.stack([np.ones(30), np.full(30, 0.7), size, 3 * size], axis=1)
    found = non_negative(features, 2 + 5 * size + 1e-3 * rng.normal(size=30))
    np.testing.assert_allclose(found, [2, 0, 5, 0], atol=2e-3)
    assert found[1] == found[3] == 0


def test_nothing_that_helps_is_nothing():
    assert non_negative(np.ones((4, 2)), np.full(4, -1.0)).tolist() == [0, 0]
