"""How far off a tilted trace is, measured against other recordings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies import CMASD, SVIP
from simulator.whatif.tilt.fidelity import (
    UNKNOWN_ERROR,
    compare_groups,
    compare_tilt,
    summarize_error,
    tilt_errors,
)
from simulator.whatif.tilt.trace import Tilter, acceptance
from tests.tilted import bursty
from traces.acceptance.synthetic import synthetic_trace


def test_error_is_measured_against_another_recording() -> None:
    # Two recordings of the same kind, one of harder text: the tilt must come nearer to the
    # second than the first as it is, in every row.
    easy, hard = bursty(1, 0.95, 0.5), bursty(2, 0.88, 0.3)
    rows = compare_tilt(Tilter(easy), hard)
    assert set(rows["metric"]) == {"block_efficiency", "speedup"}
    untilted = (rows["untilted"] / rows["recorded"] - 1).abs()
    assert (rows["error"].abs() < untilted).mean() > 0.8
    assert rows["error"].abs().median() < rows["iid_error"].abs().median()
    found = summarize_error(rows)
    assert found.worst == rows[rows["metric"] == "speedup"]["error"].abs().max()
    assert found.at(acceptance(hard), acceptance(easy)) == pytest.approx(
        found.per_logit * found.largest
    )
    assert found.tried(acceptance(hard), acceptance(easy))
    assert not found.tried(0.999, acceptance(easy))


def test_a_recording_is_compared_with_itself_by_groups_of_prompts() -> None:
    rows = compare_groups(bursty())
    assert {"hard -> easy", "easy -> hard"} <= set(rows["pair"])
    errors, speedups = tilt_errors(bursty()), rows[rows["metric"] == "speedup"]
    for reads in (False, True):
        assert errors.of(reads) == summarize_error(speedups[speedups["reads"] == reads])
    alike = synthetic_trace(0.7, requests=3, tokens=60)
    assert tilt_errors(alike) == (UNKNOWN_ERROR, UNKNOWN_ERROR)
    assert np.isnan(UNKNOWN_ERROR.at(0.5, 0.6))
    # Where nothing matches, or everything, no error was measured and none is infinite.
    for end in (0.0, 1.0):
        assert np.isnan(errors.lengths.at(end, 0.7))
        assert not errors.lengths.tried(end, 0.7)


def test_moved_signals_come_nearer_to_a_real_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(bursty(s, 0.95, 0.5), bursty(s + 10, 0.85, 0.3)) for s in range(2)]
    reading = {"svip": SVIP(gamma_max=16), "cm-asd": CMASD(gamma_max=16)}

    def errors() -> Any:
        rows = [
            compare_tilt(Tilter(source), reference, reading)
            for easy, hard in pairs for source, reference in ((easy, hard), (hard, easy))
        ]  # fmt: skip
        found = pd.concat(rows)
        return found.loc[found["metric"] == "speedup", "error"].to_numpy(float)

    moved = errors()
    monkeypatch.setattr(Tilter, "_shown", lambda *_: None)
    kept = errors()
    assert np.sqrt((moved**2).mean()) < np.sqrt((kept**2).mean())
