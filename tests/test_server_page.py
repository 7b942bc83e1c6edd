"""The page "From your server to a setting": its commands run, on files that a real vLLM wrote."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from docs.server_tables import (
    SERVED,
    confirmed,
    server_confirmed,
    server_left_out,
    server_terms,
)
from simulator.aggregate.benches import read_benches
from simulator.aggregate.observed import read_acceptance
from tests.conftest import ROOT, Run

PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()
    if line.startswith("draftsim ")
]  # fmt: skip


@pytest.mark.usefixtures("short_chains")
def test_every_command_of_the_page_runs(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SERVED, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert len(COMMANDS) >= 5
    for command in COMMANDS:
        ran = run(*shlex.split(command)[1:])
        assert ran.code == 0, (command, ran.err)


@pytest.mark.usefixtures("short_chains")
def test_counters_change_nothing_where_results_hold_acceptance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SERVED)
    [asked] = [command for command in COMMANDS if command.startswith("draftsim recommend --bench")
               and "--metrics" in command]  # fmt: skip
    arguments = shlex.split(asked)[1:]
    counted = run(*arguments)
    alone = run(*arguments[: arguments.index("--metrics")])
    assert "--metrics has no effect" in counted.err
    assert counted.out == alone.out


@pytest.mark.usefixtures("short_chains")
def test_the_runs_of_llamacpp_on_the_page_are_read(tmp_path: Path, run: Run) -> None:
    [block] = [block for block in BLOCKS if block.startswith("batch,")]
    path = tmp_path / "runs.csv"
    path.write_text(block)
    run("recommend", "--engine", "llamacpp", "--bench", path).ok()


def test_counters_and_results_of_one_server_agree() -> None:
    """The counters are those around the run that wrote k3-c4.json."""
    counted = read_acceptance(f"{SERVED / 'metrics-before.txt'},{SERVED / 'metrics-after.txt'}")
    told = read_acceptance(str(SERVED / "results" / "k3-c4.json"))
    assert len(counted.survival) == len(told.survival) == 3
    np.testing.assert_allclose(counted.survival, told.survival, atol=0.02)


def test_most_runs_that_were_not_given_are_inside_the_intervals() -> None:
    """Fewer than half inside 80% intervals would be far too few by chance."""
    rows, choices = confirmed()
    held = [row.predicted.holds(speed) for row in rows for speed in row.measured]
    assert len(rows) >= 6
    assert np.mean(held) > 0.5
    for row in choices:
        assert row.gain > 0.9 * row.most, row
    assert server_confirmed().count("\n| ") >= len(rows)


@pytest.mark.parametrize("name", ["server_few_runs", "server_each_run"])
def test_tables_of_public_studies_have_all_of_them(name: str) -> None:
    lines = server_left_out(name).splitlines()
    assert lines[-1].startswith("| all studies |")
    assert len(lines) > 6
    assert server_terms(name).splitlines()[2].startswith("| all terms |")


def test_every_term_has_its_coverage() -> None:
    rows = [line.split("|") for line in server_terms("server_few_runs").splitlines()[2:]]
    assert len(rows) > 3
    assert all(cells[5].strip().endswith("%") for cells in rows)


@pytest.mark.parametrize(("name", "lengths"), [("float32", 4), ("bfloat16", 5)])
def test_runs_with_slow_short_passes_are_read(name: str, lengths: int) -> None:
    runs = read_benches([str(SERVED.parent / f"short-passes-{name}.csv")]).runs
    assert {(run.batch, run.k) for run in runs} == set(
        product((1, 2, 4, 8), (0, 1, 2, 3, 5)[:lengths])
    )
    alone = {run.batch: run.batch / run.tokens_per_s for run in runs if run.k == 0}
    assert alone[2] > alone[4]


def test_the_files_are_small_and_name_no_machine() -> None:
    files = [path for path in SERVED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert "/root" not in text
        assert "/work" not in text
        if path.suffix == ".json":
            assert json.loads(text)["completed"] > 0
