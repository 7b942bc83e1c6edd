"""CM-ASD's Figure 2 on our pair: latency against throughput over batch sizes."""

from __future__ import annotations

import pandas as pd
import pytest

from simulator.papers.cmasd import SERVED, batch_rows
from simulator.papers.ours import Ours
from tests.test_papers import LATENCY, scored_trace
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable

STEPS_S = {1: 0.010, 2: 0.011, 4: 0.013}


def table() -> LatencyTable:
    """A pass costs the same at every width and context, more at a larger batch."""
    cells = [
        (model, "forward", batch, width, context, seconds * share, 0.0, 1)
        for model, share in (("target", 1.0), ("draft", 0.1))
        for batch, seconds in STEPS_S.items()
        for width in (1, 25)
        for context in (0, 400)
    ]
    return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)))


def test_plain_decoding_is_a_pass_a_token() -> None:
    rows = batch_rows(Ours(scored_trace(), table()))
    found = {(r.row, r.column): r.ours for r in rows}
    assert len(rows) == 2 * len(SERVED) * len(STEPS_S)
    assert found["plain decoding, batch 1", "ms a token"] == pytest.approx(10, rel=0.02)
    assert found["plain decoding, batch 1", "tokens/s"] == pytest.approx(100, rel=0.03)
    # Full batches step at their own cost, and the last, emptier ones faster.
    for batch, seconds in STEPS_S.items():
        token = found[f"plain decoding, batch {batch}", "ms a token"]
        assert 10 * 0.98 <= (token or 0) <= 1e3 * seconds * 1.02
        served = found[f"plain decoding, batch {batch}", "tokens/s"]
        assert (served or 0) <= batch / seconds * 1.02
    assert {r.mark for r in rows} == {""}
    assert all("approximate" in r.note for r in rows if r.row.startswith("CM-ASD"))


def test_one_batch_size_is_not_a_figure() -> None:
    with pytest.raises(DraftsimError, match="over several: measure them"):
        batch_rows(Ours(scored_trace(), LATENCY))
