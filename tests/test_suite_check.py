"""Measured runs held against their predictions, without running anything."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from commands.common.printed import OFF_TERMINAL
from commands.validate.recorded import markdown_table
from profiler.suite.__main__ import main
from simulator.validation import MEDIAN_BOUND, WORST_BOUND, anchor_drift, verdict
from tests.conftest import Run
from tests.suite_results import META, MODES, POLICIES, cells, write_forced, write_latencies
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.store.files import read_latency, write_latency

PAIR = "llama-3.1-8b+1b"


def unpacked(tmp_path: Path, **forced: Any) -> Path:
    write_latencies(tmp_path / "out", [row for mode in MODES for row in cells(PAIR, mode)])
    write_forced(tmp_path / "out", [PAIR], **forced)
    assert main(["unpack", "--out", str(tmp_path / "out"), "--into", str(tmp_path / "in")]) == 0
    return tmp_path / "in"


def check(run: Run, folder: Path, *more: object) -> Any:
    ran = run("validate", "--recorded", folder, "--json", "-", *more).ok()
    return ran.document


def test_predictions_of_what_was_measured_are_exact(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpacked(tmp_path)
    capsys.readouterr()
    table = tmp_path / "table.md"
    document = check(run, folder, "--markdown", table)
    rows = document["results"]
    assert [(r["mode"], r["policy"]) for r in rows] == [(m, p) for m in MODES for p in POLICIES]
    for row in rows:
        assert (row["pair"], row["batch"], row["rounds_differ"]) == (PAIR, 1, 0)
        # The middle one of three repeats, each a thousandth slower than the one before.
        assert row["error"] == pytest.approx(1 / 1.001 - 1)
        assert row["spread"] == pytest.approx(0.0005, rel=0.01)
        assert row["drift"] == pytest.approx(0.0)
    assert [b["recording"] for b in document["bounds"]] == [
        f"{PAIR}, eager", f"{PAIR}, graph", "all"
    ]  # fmt: skip
    for kept in document["bounds"]:
        assert kept["met"] == {"median": True, "worst": True, "ranking": True, "sign": True}
        assert kept["ranked_pairs"] > 0
        assert kept["sign_arms"] > 0
    lines = table.read_text().splitlines()
    assert lines[0].startswith("| pair | mode | batch | policy | predicted | measured | error |")
    assert len([line for line in lines if line.startswith(f"| {PAIR} |")]) == len(rows)
    assert [line for line in lines if line.startswith("| all | 6 | 0.1% met |")]
    assert lines[-1].startswith("* met, MISSED: median |error| up to 2%")


def test_what_misses_a_bound_says_so(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    # Drafting four tokens took three times as long as predicted: slower than plain decoding.
    folder = unpacked(tmp_path, slower={"fixed:gamma=4": 2.0, "fixed:gamma=2": 0.03})
    capsys.readouterr()
    document = check(run, folder)
    for kept in document["bounds"]:
        assert kept["met"] == {"median": False, "worst": False, "ranking": False, "sign": False}
        assert kept["worst_policy"] == "fixed:gamma=4"
        assert kept["worst_error"] == pytest.approx(1 / 3 - 1, abs=1e-3)
        assert kept["wrong_sign"] > 0
    ran = run("validate", "recorded", next(folder.iterdir())).ok()
    assert "-66.7%" in ran.out
    assert max(map(len, ran.out.splitlines())) <= OFF_TERMINAL
    assert "MISSED" in ran.out


def test_a_slower_device_shows_in_the_anchors(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpacked(tmp_path, slower=dict.fromkeys(POLICIES, 0.04), drift=0.04)
    capsys.readouterr()
    assert anchor_drift(next(folder.iterdir())) == {1: pytest.approx(0.04)}
    document = check(run, folder)
    for kept in document["bounds"]:
        assert not kept["met"]["median"]
        assert kept["undrifted_error"] == pytest.approx(0.001, abs=1e-4)


def rows(errors: list[float], policies: tuple[str, ...] = POLICIES) -> pd.DataFrame:
    frame = pd.DataFrame({"policy": policies, "error": errors, "measured_s": [3.0, 2.0, 1.0]})
    return frame.assign(
        verify="exact", batch=1, forced=True, spread=0.01, rounds_differ=0, speedup_error=0.0,
        predicted_s=frame["measured_s"] * (1 + frame["error"]),
    )  # fmt: skip


def test_bounds_are_kept_up_to_their_own_value() -> None:
    at = verdict(rows([MEDIAN_BOUND, -WORST_BOUND, 0.0]))
    assert at.met == {"median": True, "worst": True, "ranking": True, "sign": True}
    assert (at.worst_error, at.worst_policy) == (-WORST_BOUND, POLICIES[1])
    beyond = verdict(rows([0.021, 0.021, 0.051]))
    assert not beyond.met["median"]
    assert not beyond.met["worst"]
    # Policies of two recordings are not ranked against each other.
    assert verdict(*[rows([0.0] * 3)] * 2).ranked_pairs == 2 * at.ranked_pairs
    with pytest.raises(DraftsimError, match="no compared runs"):
        verdict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recorded", "nowhere"), "nowhere: no measured runs there: name a folder"),
        (
            ("--recorded", "bundled", "--run", "x"),
            "--recorded chooses `draftsim validate recorded`: drop one of them",
        ),
        ((), "Missing option '--run'"),
        (("--run", "x", "--markdown", "y"), "--markdown belongs to `draftsim validate recorded`"),
    ],
)
def test_wrong_requests_get_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ran = run("validate", *arguments)
    assert message in ran.refusal


def test_broken_folders_are_named_and_skipped(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without a table, one whose table lacks the draft: the others are read."""
    folder = unpacked(tmp_path)
    for name in ("bare", "draftless"):
        shutil.copytree(folder / f"h200-{PAIR}-eager", folder / name)
    (folder / "bare" / "latency.parquet").unlink()
    table = read_latency(folder / "draftless" / "latency.parquet")
    write_latency(
        LatencyTable(table.cells[table.cells["model"] == "target"], table.meta),
        folder / "draftless" / "latency.parquet",
    )
    capsys.readouterr()
    ran = run("validate", "--recorded", folder, "--json", "-").ok()
    document = ran.document
    assert [s["recording"] for s in document["skipped"]] == ["bare", "draftless"]
    assert "left out bare: " in ran.err
    assert {b["recording"] for b in document["bounds"]} == {
        f"{PAIR}, eager", f"{PAIR}, graph", "all"
    }  # fmt: skip
    for mode in MODES:
        shutil.rmtree(folder / f"h200-{PAIR}-{mode}")
    ran = run("validate", "--recorded", folder)
    assert "none of 2 recordings can be predicted" in ran.refusal


def test_figures_say_what_they_are_of(tmp_path: Path, run: Run) -> None:
    versions = {"torch": "2.13.0", "transformers": "5.23.0"}
    meta = {**META, "versions": versions, "kernels": {"eager": "one by one", "graph": "at once"}}
    out = tmp_path / "out"
    write_latencies(out, [row for mode in MODES for row in cells(PAIR, mode)], meta)
    write_forced(out, [PAIR], meta=meta)
    assert main(["unpack", "--out", str(out), "--into", str(tmp_path / "in")]) == 0
    remarks = check(run, tmp_path / "in")["remarks"]
    assert remarks[1:3] == ["eager: one by one", "graph: at once"]
    assert remarks[3] == "NVIDIA H200: torch 2.13.0, transformers 5.23.0"


def test_damaged_provenance_gets_one_line(tmp_path: Path) -> None:
    folder = next(unpacked(tmp_path).iterdir())
    for text in ("{", "[]", '{"forced": {"units": {"a": {"anchors": [{}]}}}}'):
        (folder / "provenance.json").write_text(text)
        with pytest.raises(DraftsimError, match=r"provenance.json: .*unpack the recording"):
            anchor_drift(folder)
    (folder / "provenance.json").unlink()
    assert anchor_drift(folder) == {}


def test_a_cell_with_a_bar_stays_one() -> None:
    assert markdown_table([{"a|b": "c"}]) == "| a\\|b |\n| --- |\n| c |\n"
