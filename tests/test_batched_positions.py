"""Positions of a ragged batched pass, made on the device without making anyone wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from profiler.decoding.batch import _on_device, span_positions  # noqa: E402

SPANS = st.lists(
    st.one_of(
        st.just((0, 0)),
        st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda p: (p[0], sum(p))),
    ),
    min_size=1,
    max_size=6,
).filter(lambda spans: any(stop for _, stop in spans))


@given(SPANS, st.booleans())
def test_every_row_holds_its_span_and_padding(spans, right):
    width = max(stop - start for start, stop in spans)
    found = span_positions(torch.tensor(spans), torch.arange(width), right).tolist()
    for row, (start, stop) in zip(found, spans, strict=True):
        padding = [-1] * (width - (stop - start))
        own = list(range(start, stop))
        assert row == (padding + own if right else own + padding)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="waiting is a matter of CUDA devices")
def test_neither_host_nor_device_waits_for_positions():
    columns = torch.arange(8, device="cuda")
    _on_device([(0, 0)], columns.device)  # the first call sets up pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        spans = _on_device([(3, 6), (0, 8)], columns.device)
        positions = span_positions(spans, columns, right=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert positions.tolist() == [[-1, -1, -1, -1, -1, 3, 4, 5], list(range(8))]
