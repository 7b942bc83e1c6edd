"""Drafters on features from the command line: recorded, replayed, run for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT, Run
from tests.conftest import SMALL_PROFILE as USUAL
from traces.files import read_latency
from traces.sources import read_recordings

SMALL_PROFILE = (*USUAL, "--limit", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random drafters for the bundled target."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig

    from profiler.features import Eagle, Eagle3, layer_config, write_drafter

    out = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(0)
    layer = layer_config(AutoConfig.from_pretrained(ROOT / "profiler" / "bundled" / "target"))
    write_drafter(Eagle(layer), out / "one")
    write_drafter(Eagle3(layer, range(0, 2000, 2), (2, 4, 5)), out / "three")
    return out


def test_a_profiled_drafter_replays_as_it_really_decodes(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    names = ("one", "three")
    sources = [p for n in names for p in ("--source", f"eagle:model={folder / n}")]
    made = run(*SMALL_PROFILE, "--out", out, *sources)
    assert made.code == 0, made.err
    found = read_recordings(out)
    assert set(found.starts) == {"eagle.one", "eagle.three"}
    assert found.exits is None
    table = read_latency(out / "latency.parquet")
    assert table.has("eagle", "forward")
    assert table.has("eagle3", "forward")

    kept = {p.name: p.read_bytes() for p in out.glob("*.parquet")}
    assert run(*SMALL_PROFILE, "--out", out, *sources).code == 0
    assert {p.name: p.read_bytes() for p in out.glob("*.parquet")} == kept

    rows = run(
        "simulate", "--trace", out, "--source", "eagle:model=three", "--policy", "fixed:gamma=3",
        "--policy", "confidence", "--json", "-",
    ).rows  # fmt: skip
    assert [r["policy"] for r in rows] == ["autoregressive", "fixed:gamma=3", "confidence:gamma=8"]
    assert rows[1]["source"] == "eagle"
    assert rows[1]["fidelity"] == "exact"

    checked = run(
        "validate", "--run", out, "--source", "eagle:model=eagle3", "--policy", "fixed:gamma=3",
        "--policy", "eagle", "--repeats", 1, "--json", "-",
    )  # fmt: skip
    assert checked.code == 2
    assert "has a draft source of its own" in checked.err
    for options in (("--source", "eagle:model=one", "--policy", "fixed:gamma=3"),
                    ("--policy", "eagle", "--policy", "eagle3")):  # fmt: skip
        rows = run("validate", "--run", out, *options, "--repeats", 1, "--json", "-").rows
        assert len(rows) == len(options) // 2 + 1 - (options[0] == "--source")
        for row in rows:
            assert row["rounds_differ"] == row["outputs_differ"] == 0, row
            assert row["predicted_s"] > 0

    assert run(*SMALL_PROFILE, "--out", out, "--latency-only").code == 0
    assert read_latency(out / "latency.parquet").has("eagle3", "forward")


def test_what_is_amiss_is_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    for options, message in (
        (("--source", "eagle"), "names no drafter: give its folder"),
        (("--source", "early-exit:tau=0.7"), "belong to --exit-layers"),
        (("--source", "eagle:model=a/x", "--source", "eagle:model=b/x"), "are called x"),
        (("--source", f"eagle:model={folder}", "--latency-only"), "--latency-only records nothing"),
    ):  # fmt: skip
        refused = run(*SMALL_PROFILE, *out, *options)
        assert refused.code == 2
        assert message in refused.err
    refused = run("simulate", "--trace", "bundled", "--source", "eagle")
    assert refused.code == 2
    assert "draftsim profile --source eagle:model=DIR" in refused.err
