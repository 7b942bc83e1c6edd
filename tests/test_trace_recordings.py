"""Recordings found by name or path, and latencies given in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from traces.acceptance.sampling import Sampling
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.latency.table import LatencyTable
from traces.store.files import write_latency, write_trace
from traces.store.recordings import (
    BUNDLED,
    ELSEWHERE,
    Defaulted,
    find_latency,
    find_trace,
    folder_of,
    parse_latency,
    recordings,
    trace_folder,
)


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    for name in ("code-pair", "chat-pair"):
        (tmp_path / name).mkdir()
        write_trace(synthetic_trace(0.5, requests=3, tokens=7), tmp_path / name / "trace.parquet")
        write_latency(LatencyTable.constant(1, 0.1), tmp_path / name / "latency.parquet")
    (tmp_path / "no-recording").mkdir()
    return tmp_path


def test_recordings_are_listed_with_a_summary(bundled: Path, tmp_path: Path) -> None:
    assert [r.name for r in recordings(bundled)] == ["chat-pair", "code-pair"]
    assert recordings(bundled)[0].summary == "synthetic: 3 requests, 21 tokens"
    assert (recordings(bundled)[0].folder / "trace.parquet").is_file()
    assert recordings(tmp_path / "none") == []


def test_what_is_bundled_can_be_read() -> None:
    for recording in recordings():
        if "latencies alone" in recording.summary:
            assert "?" not in recording.summary
            with pytest.raises(FileError, match=r"has no trace\.parquet: name another's"):
                find_trace(recording.name)
        else:
            assert find_trace(recording.name).tokens > 0
        # Some recordings hold outputs alone: other latencies price them.
        if (recording.folder / "latency.parquet").is_file():
            assert find_latency(recording.name).has("target", "forward")


def test_a_recording_of_sampled_outputs_alone_is_one(bundled: Path) -> None:
    hot = synthetic_trace(0.5, requests=3, tokens=7)
    meta = {**hot.meta, "sampling": {"temperature": 0.3}}
    (bundled / "hot").mkdir()
    write_trace(
        Trace(hot.columns, hot.requests, hot.max_gamma, meta), bundled / "hot" / "sampled.parquet"
    )
    assert find_trace("hot", bundled).sampling == Sampling(0.3)
    assert folder_of("hot", bundled) == bundled / "hot"
    # With a greedy trace they have to be named by their file.
    shutil.copy(bundled / "hot" / "sampled.parquet", bundled / "code-pair")
    assert find_trace("code-pair", bundled).sampling.greedy
    [found] = [r for r in recordings(bundled) if r.name == "hot"]
    assert found.summary == "synthetic: acceptance alone, 3 requests, 21 tokens, sampled at T=0.3"
    with pytest.raises(FileError, match=r"hot has no latency.parquet: .* \(chat-pair, code-pair\)"):
        find_latency("hot", bundled)
    with pytest.raises(FileError, match=r"acceptance alone: .* same pair add --latency bundled$"):
        find_latency("bundled-t0.3")


def test_what_a_recording_lacks_is_listed() -> None:
    """`find_latency` refuses the first, and the second's drafts would cost nothing."""
    listed = {r.name: r.summary for r in recordings()}
    assert ": acceptance alone, 182 requests" in listed["qwen-coder-cpu"]
    assert ": no drafter was timed, 182 requests" in listed["qwen-coder-vllm-lookups-cpu"]
    for name in ("qwen-coder-vllm-cpu", "smollm2-cpu", "smollm2-vllm-eagle3-cpu"):
        assert "alone" not in listed[name]
        assert "no drafter" not in listed[name]


def test_names_folders_and_files(bundled: Path) -> None:
    folder = bundled / "code-pair"
    for where in ("code-pair", folder, str(folder), folder / "trace.parquet"):
        assert find_trace(where, bundled).tokens == 21
    assert find_latency("code-pair", bundled).is_constant
    assert find_latency("const:target=1,draft=0.1", bundled).is_constant


def test_unknown_names_suggest_the_nearest(bundled: Path) -> None:
    with pytest.raises(FileError, match=r"did you mean 'code-pair'.*chat-pair, code-pair"):
        find_trace("code-par", bundled)
    with pytest.raises(FileError, match="none is bundled"):
        find_latency("code-pair", bundled / "no-recording")
    with pytest.raises(FileError, match="no such file"):
        find_trace("a/b.parquet", bundled)
    with pytest.raises(FileError, match="is a directory"):
        find_trace(bundled / "no-recording", bundled)
    with pytest.raises(FileError, match="is a latency table, not an acceptance trace"):
        find_trace(bundled / "code-pair" / "latency.parquet", bundled)


def test_latencies_in_words() -> None:
    table = parse_latency("const:target=0.0143,draft=0.00176,verify=0.0150,host_round=1e-4")
    passes = table.seconds("target", "forward", new_tokens=[1, 2, 9])
    assert passes.tolist() == [0.0143, 0.015, 0.015]
    assert table.seconds("draft", "forward") == 0.00176
    assert table.seconds("target", "host_round") == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("const:", "lacks target and draft"),
        ("const:target=1", "lacks draft"),
        ("const:verify=1", "lacks target and draft"),
        ("const:target=1,draft=x", "draft='x', no number"),
        (
            "const:target=1,draft",
            r"'draft' is not of the form key=value \(times: target, ",
        ),
        ("const:traget=1,draft=1", "has no time 'traget': did you mean 'target'"),
        ("const:target=1,target=2,draft=1", "time 'target' is given twice"),
        ("const:target=-1,draft=1", "gives target=-1, expected > 0"),
        ("const:target=nan,draft=1", "gives target='nan', no number"),
        ("constant:target=1", "does not begin with 'const:'"),
    ],
)
def test_wrong_words_say_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        parse_latency(text)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/", 3, None])
def test_a_trace_elsewhere_is_in_a_folder_next_to_this_one(tmp_path: Path, name: object) -> None:
    """``..`` would be the trace of the folder that holds them all."""
    folder = tmp_path / "recording"
    folder.mkdir()
    (folder / ELSEWHERE).write_text(json.dumps({"trace": name}))
    with pytest.raises(FileError, match=r"elsewhere.json: names no trace: unpack"):
        trace_folder(folder)


def test_a_folder_with_a_bundled_recordings_name_is_not_confused_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = synthetic_trace(0.5, requests=1, tokens=7)
    (tmp_path / "smollm2-cpu").mkdir()
    write_trace(own, tmp_path / "smollm2-cpu" / "trace.parquet")
    monkeypatch.chdir(tmp_path)
    assert find_trace("./smollm2-cpu").tokens == 7
    with pytest.raises(FileError, match=r"and a folder here: write \./smollm2-cpu for the folder"):
        find_trace("smollm2-cpu")
    for bundled in (BUNDLED / "smollm2-cpu", Defaulted("smollm2-cpu"), "bundled"):
        assert find_trace(bundled).tokens > 7
    with pytest.raises(FileError, match="no such file"):
        find_trace("./bundled")
    assert folder_of("./smollm2-cpu") == Path("smollm2-cpu")
