"""Acceptance lengths extended from few draft lengths, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simulator.aggregate.acceptance import extended, pick_curve, read_curves
from simulator.aggregate.hazard import HAZARD, emitted_at, lengths
from tests.conftest import Run
from traces.errors import FileError

TEXT = """# a comment
model:
  thinking_on:
    1: 1.83   # measured
    2: 2.43
    3: 2.88
    4: N/A
    5: 3.46
  thinking_off:
    1: 1.80
    2: 2.33
"""


def test_a_file_of_curves_is_read(tmp_path: Path) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text(TEXT)
    curves = read_curves(path)
    assert list(curves) == ["model/thinking_on", "model/thinking_off"]
    assert curves["model/thinking_on"] == {1: 1.83, 2: 2.43, 3: 2.88, 5: 3.46}
    assert pick_curve(f"{path}#thinking_off") == {1: 1.80, 2: 2.33}
    with pytest.raises(FileError, match="name one as"):
        pick_curve(str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [("model:\n  1: 3.5\n", "line 2: 3.5 tokens a round"), ("model:\n", "holds no acceptance"),
     ("- a\n", "line 1"), ("m:\n  1: x\n", "line 2")],
)  # fmt: skip
def test_a_damaged_file_of_curves_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=said):
        read_curves(path)


def test_curves_of_four_large_models_lie_in_their_intervals(shared_data: Path) -> None:
    """From K = 1, 2, 3 to 8: more lie in the intervals, and nearer, than under one rate."""
    rows = []
    for path in sorted((shared_data / "acceptance_curves").glob("*.yaml")):
        for curve in read_curves(path).values():
            rows += extended(curve, (1, 2, 3), range(4, 9))
    assert len(rows) == 30
    # Lengths of one curve miss together: six curves, of which four out of five should hold.
    assert np.mean([row["inside"] for row in rows]) > 0.8 - 2 * np.sqrt(0.8 * 0.2 / 6)
    hazard, iid = (
        np.median([abs(row[f"{name}_error"]) for row in rows]) for name in ("hazard", "iid")
    )
    assert hazard < 0.03 < iid


def test_intervals_hold_curves_of_the_prior_as_often_as_they_claim() -> None:
    """80% or more: they are also wide enough for positions that leave the line."""
    random = np.random.default_rng(3)
    held = []
    for _ in range(40):
        values = np.array([[p.mean + p.spread * random.standard_normal() for p in HAZARD.values()]])
        known = {k: float(lengths(values, k)[0]) for k in (1, 2, 3)}
        true = float(lengths(values, 7)[0])
        held.append(emitted_at(known, 7).holds(true))
    assert np.mean(held) > 0.8 - 3 * np.sqrt(0.8 * 0.2 / 40)


def test_curve_on_the_command_line(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text(TEXT)
    ran = run("curve", f"{path}#thinking_on", "--json", "-")
    rows = {row["k"]: row for row in ran.rows}
    assert set(rows) == {4, 5, 6, 7, 8}
    assert rows[5]["measured"] == 3.46
    assert rows[5]["inside"]
    assert "1 of 1 measured lengths are in their 80% intervals" in ran.err
    assert rows[8]["low"] < rows[8]["hazard"] < rows[8]["high"]
    shown = run("curve", "1:1.83,2:2.43,3:2.88", "--k", "5,8")
    assert "measured" not in shown.out
    assert shown.err.startswith("1:1.83,2:2.43,3:2.88: K = 5: 3.42 tokens per round (")
    assert "K = 8: 3.73 tokens per round (" in shown.err
    assert run("curve", path, "--given", "7").code == 2
    own = run("curve", "bundled", "--given", "1,2", "--k", "4", "--json", "-").rows[0]
    assert own["inside"]
    assert json.dumps(own)
