"""Results of the GPU suite as recordings: one copy of a trace, found, listed and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from profiler.suite.__main__ import main
from tests.suite_results import META, MODES, cells, write_forced, write_latencies
from traces.errors import FileError
from traces.store.recordings import (
    BUNDLED,
    ELSEWHERE,
    find_latency,
    find_trace,
    folder_of,
    recordings,
    trace_folder,
)

PAIRS = ("llama-3.1-8b+1b", "vicuna-7b+68m")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two pairs in both modes, and a target without a draft."""
    rows = [row for pair in PAIRS for mode in MODES for row in cells(pair, mode)]
    rows += [row for mode in MODES for row in cells("codellama-7b", mode, draft=False)]
    write_latencies(tmp_path / "out" / "latency", rows)
    write_forced(tmp_path / "out" / "forced", PAIRS)
    into = tmp_path / "recorded"
    for _ in range(2):  # again over what is there
        assert main(["unpack", "--out", str(tmp_path / "out"), "--into", str(into)]) == 0
    return into


def test_a_trace_is_stored_once(recorded: Path) -> None:
    assert len(list(recorded.iterdir())) == 6
    [home] = recorded.glob("*/trace.parquet")
    assert len(list(recorded.glob(f"*/{ELSEWHERE}"))) == 3
    for pair in PAIRS:
        for mode in MODES:
            name = f"h200-{pair}-{mode}"
            assert trace_folder(recorded / name) == home.parent
            assert find_trace(name, recorded).tokens == find_trace(home).tokens
            assert find_trace(recorded / name).tokens == 40
            assert folder_of(name, recorded) == home.parent
            assert (recorded / name / "measured.parquet").is_file()
            assert find_latency(name, recorded).meta["mode"] == mode


def test_recordings_say_what_they_are(recorded: Path) -> None:
    listed = {r.name: r for r in recordings(recorded)}
    assert len(listed) == 6
    one = listed["h200-vicuna-7b+68m-graph"]
    assert one.summary == (
        "vicuna-7b+68m, graph: dictated verdicts, 2 requests, 40 tokens, NVIDIA H200"
    )
    assert (trace_folder(one.folder) / "trace.parquet").is_file()
    assert one.folder.name == one.name
    alone = listed["h200-codellama-7b-eager"]
    assert alone.summary == "codellama-7b, eager: latencies alone, NVIDIA H200"
    with pytest.raises(FileError, match=r"codellama-7b-eager has no trace.parquet: name another"):
        find_trace(alone.name, recorded)


@pytest.mark.parametrize("kind", ["trace", "latency"])
def test_names_with_dots_are_names(recorded: Path, kind: str) -> None:
    find = {"trace": find_trace, "latency": find_latency}[kind]
    with pytest.raises(FileError, match=r"did you mean 'h200-llama-3.1-8b[+]1b-graph'"):
        find("h200-llama-3.1-8b+1b-grap", recorded)
    with pytest.raises(FileError, match=r"bundle.parquet: no such file: check the path"):
        find("bundle.parquet", recorded)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"trace": 3}', '{"trace": "../recorded"}', '{"trace": "gone"}']
)
def test_a_damaged_reference_is_one_line(recorded: Path, text: str) -> None:
    path = next(recorded.glob(f"*/{ELSEWHERE}"))
    path.write_text(text)
    with pytest.raises(FileError, match=r"elsewhere.json: .*: unpack the recording again"):
        find_trace(path.parent.name, recorded)


def test_miniatures_say_so_in_their_name(tmp_path: Path) -> None:
    quick = {**META, "quick": True}
    write_latencies(tmp_path / "out", cells(PAIRS[0], "eager"), quick)
    assert main(["unpack", "--out", str(tmp_path / "out"), "--into", str(tmp_path / "in")]) == 0
    assert [f.name for f in (tmp_path / "in").iterdir()] == [f"h200-quick-{PAIRS[0]}-eager"]


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float32"}, {"device": "NVIDIA H100"}, {"versions": {"torch": "2.12.0"}}],
    ids=["dtype", "device", "torch"],
)
def test_other_settings_are_not_mixed_into_a_folder(
    other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Long names of devices are cut and can be alike.
    monkeypatch.setattr("profiler.suite.unpack.device_name", lambda meta: "gpu")
    meta = {**META, "dtype": "bfloat16", "versions": {"torch": "2.11.0"}}
    one, two = tmp_path / "one", tmp_path / "two"
    write_latencies(one / "latency", cells(PAIRS[0], "eager"), meta)
    write_forced(two / "forced", PAIRS[:1], meta={**meta, **other})
    assert main(["unpack", "--out", str(one), "--into", str(tmp_path / "in")]) == 0
    shutil.copytree(one, two, dirs_exist_ok=True)
    for into in ("in", "new"):
        assert main(["unpack", "--out", str(two), "--into", str(tmp_path / into)]) == 2
        error = capsys.readouterr().err.strip()
        assert "unpack --into another folder" in error
        assert all(str(v) in error for v in (*other.values(), "bfloat16") if isinstance(v, str))
        assert "\n" not in error
        held = {f.name for f in (tmp_path / into / f"gpu-{PAIRS[0]}-eager").iterdir()}
        assert not {"latency.parquet", "measured.parquet"} <= held


def test_a_sampled_recording_lies_next_to_its_trace(tmp_path: Path) -> None:
    out, pair = tmp_path / "out", "trained-12+3"
    write_latencies(out, [row for mode in MODES for row in cells(pair, mode)])
    (out / "latency.json").rename(out / "trained.json")
    (out / "latency.parquet").rename(out / "trained-latency.parquet")
    for name in ("trace", "sampled"):
        shutil.copy(BUNDLED / "bundled" / "trace.parquet", out / f"trained-{name}.parquet")
    into = tmp_path / "in"
    for _ in range(2):
        assert main(["unpack", "--out", str(out), "--into", str(into)]) == 0
    assert {f.name for f in into.iterdir()} == {f"h200-{pair}-{mode}" for mode in MODES}
    assert len(list(into.glob("*/sampled.parquet"))) == len(list(into.glob("*/trace.parquet"))) == 1
    assert len(find_trace(into / f"h200-{pair}-graph").requests) == 56


def test_another_trace_takes_the_place_of_a_reference(recorded: Path, tmp_path: Path) -> None:
    from traces.acceptance.synthetic import synthetic_trace
    from traces.store.files import write_trace

    out = tmp_path / "out" / "forced"
    other = synthetic_trace(0.7, requests=2, tokens=20, prompt_length=16, max_gamma=6, seed=4)
    write_trace(other, out / "forced-trace.parquet")
    assert main(["unpack", "--out", str(tmp_path / "out"), "--into", str(recorded)]) == 0
    for pair in PAIRS:
        for mode in MODES:
            assert find_trace(f"h200-{pair}-{mode}", recorded).meta["seed"] == 4
    assert len(list(recorded.glob("*/trace.parquet"))) == 1
    provenance = json.loads((recorded / f"h200-{PAIRS[0]}-eager" / "provenance.json").read_text())
    assert set(provenance) == {"latency", "forced"}
