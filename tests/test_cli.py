"""The command line as a contract: JSON rows, one-line errors, exit code 2, no torch needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT, Run
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.store.files import read_trace, write_latency, write_trace

CONST = "const:target=0.0143,draft=0.00176,verify=0.0150"

SIMULATE_FIELDS = [
    "policy", "verify", "source", "tokens", "rounds", "drafted", "accepted", "draft_forwards",
    "target_forwards", "block_efficiency", "acceptance_rate", "wall_s", "speedup", "speedup_lo",
    "speedup_hi", "fidelity", "note", "outside", "unpriced", "mismatches_accepted", "against",
    "gain", "gain_lo", "gain_hi",
    "agreement", "relative_bleu", "scored", "solved", "solved_greedy", "tested", "passed",
    "passed_greedy",
]  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a synthetic trace that holds signals and tails."""
    folder = tmp_path_factory.mktemp("run")
    trace = synthetic_trace(0.7, requests=8, tokens=60, max_gamma=24, concentration=4.0, seed=1)
    write_trace(trace, folder / "trace.parquet")
    write_latency(LatencyTable.constant(0.0143, 0.00176, 0.015), folder / "latency.parquet")
    return folder


def test_simulate_writes_the_contracted_rows(run: Run, recorded: Path) -> None:
    found = run(
        "simulate",
        "--trace",
        recorded,
        "--latency",
        CONST,
        "--policy",
        "fixed:gamma=4",
        "--json",
        "-",
    ).rows
    assert [r["policy"] for r in found] == ["autoregressive", "fixed:gamma=4"]
    for row in found:
        assert list(row) == SIMULATE_FIELDS
    plain, fixed = found
    assert plain["speedup"] == 1
    cost = fixed["draft_forwards"] * 0.00176 + fixed["rounds"] * 0.015
    last = fixed["wall_s"]
    # Rounds with nothing left to draft run the target at width 1.
    assert last == pytest.approx(cost, abs=8 * (0.015 - 0.0143) + 1e-12)
    assert fixed["speedup"] == pytest.approx(plain["wall_s"] / fixed["wall_s"])
    assert fixed["speedup_lo"] <= fixed["speedup"] <= fixed["speedup_hi"]


def test_simulate_without_a_policy_runs_them_all(run: Run, recorded: Path) -> None:
    found = run("simulate", "--trace", recorded, "--json", "-").rows
    names = [r["policy"].partition(":")[0] for r in found]
    # A fixed length always says which one it is, and the best of them is listed with it.
    fixed = {r["policy"]: r for r in found if r["policy"].startswith("fixed")}
    assert "fixed:gamma=5" in fixed
    [best] = [r for r in fixed.values() if r["note"] == "best fixed"]
    assert best["speedup"] == max(r["speedup"] for r in fixed.values())
    assert next(r for r in found if r["policy"] == "rate-optimal")["note"] == (
        "fitted on other prompts"
    )
    for name in (
        "autoregressive", "confidence", "hf-heuristic", "gammatune", "gammatune-plus",
        "svip", "adaedl", "draft-and-verify", "oracle",
    ):  # fmt: skip
        assert names.count(name) == 1, name


def test_category_and_robustness_tables(run: Run, recorded: Path) -> None:
    by = run(
        "simulate", "--trace", recorded, "--policy", "svip", "--by-category", "--json", "-"
    ).rows
    assert {"category", "policy", "speedup"} <= set(by[0])
    spread = run("simulate", "robustness", "--trace", recorded, "--json", "-").rows
    fixed = next(r for r in spread if r["policy"] == "fixed")
    assert fixed["mean"] == pytest.approx(1)
    assert fixed["sd"] > 0


def _truncate(folder: Path, source: Path) -> Path:
    path = folder / "short.parquet"
    path.write_bytes(source.read_bytes()[:-400])
    return path


def bad_inputs(recorded: Path, folder: Path) -> dict[str, tuple[list[object], str]]:
    trace, latency = recorded / "trace.parquet", recorded / "latency.parquet"
    garbage = folder / "garbage.parquet"
    garbage.write_bytes(b"not a table")
    return {
        "missing": (["--trace", folder / "none.parquet"], "none.parquet"),
        "truncated": (["--trace", _truncate(folder, trace)], "short.parquet"),
        "garbage": (["--trace", garbage], "garbage.parquet"),
        "swapped": (["--trace", latency], "latency"),
        "swapped latency": (["--trace", trace, "--latency", trace], "trace"),
        "policy": (["--trace", recorded, "--policy", "gammatun"], "gammatune"),
        "parameter": (["--trace", recorded, "--policy", "fixed:gama=3"], "gamma"),
        "value": (["--trace", recorded, "--policy", "fixed:gamma=-3"], "-3"),
        "past the tail": (["--trace", recorded, "--policy", "fixed:gamma=60"], "max_gamma=24"),
        "constant": (["--trace", recorded, "--latency", "const:target=-1,draft=1"], "-1"),
        "half a constant": (["--trace", recorded, "--latency", "const:target=1"], "draft"),
        "bundled name": (["--trace", "bundeld"], "bundeld"),
        "option": (["--trase", recorded], "--trase"),
        "range": (["--resamples", -1], "--resamples"),
    }


@pytest.mark.invariant(15)
@pytest.mark.parametrize(
    "case",
    [
        "missing", "truncated", "garbage", "swapped", "swapped latency", "policy", "parameter",
        "value", "past the tail", "constant", "half a constant", "bundled name", "option",
        "range",
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    run: Run, recorded: Path, tmp_path: Path, case: str
) -> None:
    arguments, names = bad_inputs(recorded, tmp_path)[case]
    ran = run("simulate", *arguments, "--json", "-")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert names in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.invariant(12)
def test_a_policy_that_reads_what_the_trace_lacks_is_refused(run: Run, tmp_path: Path) -> None:
    trace = synthetic_trace(0.6, requests=2, tokens=40, seed=2)
    write_trace(trace, tmp_path / "bare.parquet")
    ran = run(
        "simulate", "--trace", tmp_path / "bare.parquet", "--latency", CONST, "--policy", "svip"
    )
    assert "entropy" in ran.refusal


def test_other_tokenizers_long_prompts_and_missing_models_are_refused(
    run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from profiler.recording.run import BUNDLED

    other = tmp_path / "other"
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    ).save_pretrained(other)
    shutil.copy(BUNDLED / "draft" / "config.json", other)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f():\n")
    ran = run(
        "profile", "--target", BUNDLED / "target", "--draft", other, "--prompts", prompts,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert "different tokenizers" in ran.refusal
    assert not (tmp_path / "run").exists()

    ran = run(
        "profile", "--target", tmp_path / "nowhere", "--draft", "bundled", "--prompts", prompts,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert "nowhere" in ran.refusal

    long = tmp_path / "long.txt"
    long.write_text("import os " * 3000 + "\n")
    ran = run(
        "profile", "--target", "bundled", "--draft", "bundled", "--prompts", long,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert "context" in ran.refusal
    assert not list((tmp_path / "run").glob("*.parquet"))


def test_a_run_folder_is_asked_for_where_one_is_needed(run: Run, tmp_path: Path) -> None:
    ran = run("validate", "--run", tmp_path)
    assert "not a run folder" in ran.refusal


@pytest.mark.invariant(14)
def test_without_torch_simulate_check_and_serve_work(recorded: Path) -> None:
    """The import system refuses torch and transformers, as where they are not installed."""
    commands = {
        "simulate": ("--json", "-"), "check": ("--tokens", "1000", "--json", "-"),
        "serve": ("--batch", "1", "--requests", "4", "--policy", "fixed", "--json", "-"),
    }  # fmt: skip
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers', 'profiler'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import simulator, draftsim\n"
        f"for name, options in {commands!r}.items():\n"
        f"    sys.argv = ['draftsim', name, '--trace', {str(recorded)!r}, *options]\n"
        "    try:\n"
        "        draftsim.main()\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 0, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in commands:
        assert f'"command": "{name}"' in done.stdout


@pytest.mark.parametrize(
    ("closed", "encoding", "said"),
    [(">&-", "utf-8", ""), (">&- 2>&-", "utf-8", ""), ("", "ascii", "\\xb1")],
)
def test_printing_never_fails(closed: str, encoding: str, said: str) -> None:
    """Neither where the streams are closed, nor where they lack a character."""
    done = subprocess.run(
        f"{sys.executable} -m draftsim list columns {closed}", shell=True, cwd=ROOT,
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout


def test_importing_logs_of_other_tools(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    steps = {"per_step_drafted": [3, 3, 3], "per_step_accepted": [3, 1, 0]}
    log.write_text(json.dumps({"id": "a", "metrics": {"speculative_decoding": steps}}) + "\n")
    run("import", "vllm", log, "--out", tmp_path / "t.parquet").ok()
    trace: Trace = read_trace(tmp_path / "t.parquet")
    assert len(trace.requests) == 1
    assert np.isin(trace.columns["match"], (-1, 0, 1)).all()
    found = run(
        "simulate", "--trace", tmp_path / "t.parquet", "--latency", CONST, "--json", "-"
    ).rows
    assert {r["fidelity"] for r in found[1:]} == {"approximate"}


def test_list_shows_devices_and_published_times(run: Run) -> None:
    devices = run("list", "devices", "--json", "-").rows
    assert {"a100-80gb", "h100", "h200", "h800", "rtx-3090"} <= {d["name"] for d in devices}
    published = run("list", "published", "--json", "-").rows
    assert all({"table", "published", "ours", "error"} <= set(row) for row in published)
