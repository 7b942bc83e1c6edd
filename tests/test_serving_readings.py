"""Many prices read at once are those read one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.serving.cost.reader import PassReader
from tests.serving import GRID, table

RAGGED = table(
    [
        ("target", "forward", b, n, c + b + 5 * n, 0.01 + 1e-4 * b * n + 2e-6 * b * c * n)
        for b, n in ((1, 1), (1, 4), (1, 9), (2, 1), (2, 3), (2, 9), (8, 1), (8, 2), (8, 9))
        for c in (20, 90, 210) if (b, n, c) != (2, 3, 210)
    ]
)  # fmt: skip
"""Every line has contexts of its own."""
SIZES = st.tuples(
    st.lists(
        st.tuples(
            st.one_of(st.floats(1, 9), st.integers(1, 9).map(float)),
            st.one_of(st.floats(0, 900), st.sampled_from([0.0, 20.0, 50.0, 90.0, 210.0, 300.0])),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([1, 2, 3, 5.5, 8]),
)


@pytest.mark.invariant(3)
@settings(max_examples=120, deadline=None)
@given(SIZES, st.sampled_from([GRID, RAGGED]))
def test_many_readings_are_the_readings_one_by_one(sizes, latency):
    pairs, batch = sizes
    together, alone = PassReader(latency, "target"), PassReader(latency, "target")
    widths, contexts = (np.array(column) for column in zip(*pairs, strict=True))
    many = together.many(batch, widths, contexts)
    expected = [alone(batch, w, c) for w, c in pairs]
    np.testing.assert_allclose(many, expected, rtol=1e-12)
    together.count(batch, widths, contexts)
    assert together.coverage == alone.coverage


@pytest.mark.invariant(3)
@pytest.mark.parametrize("batch", [1, 5.5, 12])
def test_many_readings_beyond_the_measured_sizes_are_the_readings_one_by_one(batch):
    together, alone = PassReader(GRID, "target"), PassReader(GRID, "target")
    widths, contexts = np.linspace(1, 14, 60), np.linspace(900, 0, 60).round()
    many = together.many(batch, widths, contexts)
    expected = [alone(batch, w, c) for w, c in zip(widths, contexts, strict=True)]
    np.testing.assert_allclose(many, expected, rtol=1e-12)
    together.count(batch, widths, contexts)
    assert {entry.origin for entry in alone.coverage} >= {"extrapolated"}
    assert together.coverage == alone.coverage


def test_few_sizes_beyond_the_measured_ones_are_left_to_the_reader():
    reader = PassReader(GRID, "target")
    one = np.ones(1)
    assert reader.many(9, one, one) is None
    assert reader.many(1, 10 * one, one) is None
    assert reader.many(1, one, 301 * one) is not None
