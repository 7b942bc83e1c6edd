"""The signals of a tilted trace: moved with the acceptance, and borrowed from like positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator.whatif.tilt.trace import Tilter, signal_table
from tests.tilted import bursty, tilter
from traces.acceptance.schema import MISMATCH
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace

SCORES = ("draft_logprob", "draft_entropy", "draft_top1", "draft_top2", "draft_logsumexp")


def shown(trace: Trace) -> set[tuple[float, ...]]:
    """Outcome and scores of every on-path position."""
    columns = [trace.columns[n][trace.on_path].tolist() for n in ("match", *SCORES)]
    return set(zip(*columns, strict=True))


@pytest.mark.parametrize("method", ["coupled", "redraw"])
def test_signals_move_with_the_acceptance(method: Any) -> None:
    trace = bursty()
    mean = {"recorded": trace.signal("prob")[trace.on_path].mean()}
    for alpha in (0.3, 0.9):
        tilted = tilter(method).to(alpha)
        # Those of one recorded position of that outcome, all together.
        assert shown(tilted) <= shown(trace)
        mean[str(alpha)] = tilted.signal("prob")[tilted.on_path].mean()
    assert mean["0.3"] < mean["recorded"] < mean["0.9"]


def test_signals_still_tell_the_chance_of_a_match() -> None:
    # Calibrated as recorded: among positions that show like chances, that share matches.
    # (Synthetic drafts match with just their probability.)
    trace = synthetic_trace(Bursty(), requests=60, tokens=150, concentration=8.0, seed=5)
    for alpha in (0.45, 0.8):
        tilted = Tilter(trace).to(alpha)
        match = tilted.columns["match"][tilted.on_path] == 1
        prob = tilted.signal("prob")[tilted.on_path]
        kept = trace.signal("prob")[trace.on_path]
        gaps = {}
        for name, chance in (("moved", prob), ("kept", kept)):
            parts = np.array_split(np.argsort(chance, kind="stable"), 6)
            gaps[name] = max(abs(match[p].mean() - chance[p].mean()) for p in parts)
        assert gaps["moved"] < gaps["kept"] / 2, alpha


def test_redrawn_outcomes_show_the_signals_of_like_ones() -> None:
    trace, again = bursty(), tilter("redraw").shifted(0.0)
    old, new = trace.on_path, again.on_path
    same = trace.columns["match"][old] == again.columns["match"][new]
    assert 0 < same.mean() < 1
    for name in SCORES:
        np.testing.assert_array_equal(
            again.columns[name][new][same], trace.columns[name][old][same]
        )


def test_new_mismatches_borrow_from_like_signals() -> None:
    trace = bursty()
    tilted = tilter().to(0.3)
    new = np.flatnonzero(
        (trace.columns["match"][trace.on_path] != MISMATCH)
        & (tilted.columns["match"][tilted.on_path] == MISMATCH)
    )
    signals = signal_table(trace)
    own = signals[trace.on_path]
    # The lender is known by its tail's first token, which the borrower shows.
    lent = tilted.columns["draft_logprob"][np.minimum(tilted.on_path[new] + 1, len(tilted) - 1)]
    first = trace.columns["draft_logprob"]
    heads = np.flatnonzero(trace.columns["offset"] == 1)
    lender = {float(first[row]): row - 1 for row in heads}
    known = [(i, lender[float(v)]) for i, v in zip(new, lent, strict=True) if float(v) in lender]
    assert len(known) > len(new) / 2
    distance = np.linalg.norm(own[[i for i, _ in known]] - signals[[r for _, r in known]], axis=1)
    rng = np.random.default_rng(0)
    mismatched = trace.on_path[trace.columns["match"][trace.on_path] == MISMATCH]
    anyone = signals[rng.choice(mismatched, len(known))]
    random = np.linalg.norm(own[[i for i, _ in known]] - anyone, axis=1)
    assert np.median(distance) < np.median(random) / 3
