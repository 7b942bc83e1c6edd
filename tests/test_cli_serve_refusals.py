"""One-line refusals of ``draftsim serve``: impossible options, bad arrival files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Serve
from tests.serving import arrival_file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "--rate holds 0.0, expected positive"),
        (["--rate=-2"], "--rate holds -2.0"),
        (["--rate", "nan"], "--rate holds nan"),
        (["--rate", "fast"], "--rate is 'fast'"),
        (["--batch", "1.5"], "--batch is '1.5', expected whole numbers"),
        (["--batch", "0"], "--batch holds 0"),
        (["--batch", "1", "--rate", "1"], "(--batch) keep the engine full: drop them, or --rate"),
        (["--scale", "2"], "--scale speeds up a file of arrivals"),
        (["--rate", "1", "--process", "bursty"], "expected poisson or deterministic"),
        (["--batch", "2", "--process", "poisson"], "--process shapes arrivals at a rate"),
        (["--batch", "2", "--interference", "0.5"], "--interference is of --mode pearl and dsi"),
        (["--policy", "fixd"], "did you mean 'fixed'"),
        (["--mode", "dynamic"], "mode is 'dynamic', expected one of continuous"),
        (["--mode", "pearl", "--batch", "4"], "one stream at a time"),
        (["--mode", "static-mean", "--policy", "goodput"], "use --mode static"),
        (["--requests", "0"], "requests is 0"),
        (["--max-batch", "0", "--rate", "1"], "max_batch is 0"),
        (["--kv-blocks", "0"], "kv_blocks is 0"),
        (["--token-budget", "2", "--batch", "1", "--policy", "fixed"], "token_budget is 2"),
        (["--ttft", "0"], "--ttft is '0', expected more than 0 seconds"),
        (["--tpot", "soon"], "--tpot is 'soon', expected a time such as 200ms"),
        (["--slo", "ttft=2h"], "ttft is '2h', expected a time"),
        (["--slo", "ttft=1,p=0.9"], "drop p, or ask for a plan or settings"),
        (["--slo", "ttft=1", "--tpot", "1"], "--slo sets both targets"),
        (["--replicas", "100000000", "--rate", "1"], "--replicas is 100000000, expected at most"),
        (["--batch", "1,1000000000"], "--batch holds 1000000000, expected at most 65536"),
        (["--max-batch", "1000000000", "--rate", "1"], "--max-batch is 1000000000, expected at"),
        (["--seed=-1", "--batch", "1"], "seed is -1, expected a whole number >= 0"),
        (["--out", "missing/r.jsonl", "--batch", "1"], "missing/r.jsonl: cannot be written"),
        (["--timeline", "missing/t.json", "--batch", "1"], "missing/t.json: cannot be written"),
    ],
)
def test_impossible_options_are_one_line_and_exit_2(
    serve: Serve, arguments: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ran = serve("--requests", "5", *arguments)
    last = ran.err.strip().splitlines()[-1]
    assert ran.code == 2
    assert last.startswith("draftsim: ")
    assert message in last
    assert ran.out == ""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no request, only a header"),
        (["3,5,5", "1,5,5"], "goes back in time"),
        (["-3,5,5", "1,5,5"], "TIMESTAMP is -3"),
        (["0,5,0"], "GeneratedTokens is 0"),
        (["0,5,nan"], "GeneratedTokens is nan"),
        (["0,1e300,5"], "ContextTokens is 1e+300, expected a whole number, 1 to 10000000"),
        (["0,5,5", "hello,5,5"], "row 2: TIMESTAMP is hello"),
    ],
)
def test_bad_arrival_files_are_named_with_their_row(
    serve: Serve, tmp_path: Path, lines: list[str], message: str
) -> None:
    file = arrival_file(tmp_path / "a.csv", *lines)
    out = tmp_path / "kept.jsonl"
    out.write_text("an older result")
    ran = serve("--arrivals", file, "--out", out)
    assert ran.code == 2
    assert f"arrivals file {file}" in ran.err
    assert message in ran.err
    assert out.read_text() == "an older result"
