"""``draftsim --help`` lists every command, and imports none."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from commands.app import COMMANDS
from commands.lazy import leaves
from tests.conftest import ROOT, Run

HEAVY = {"numpy", "pandas", "scipy", "matplotlib", "pyarrow", "torch", "simpy", "joblib"}
OURS = {"policies", "traces", "simulator", "profiler"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []], ids=str)
def test_nothing_is_imported_to_list_the_commands(arguments: list[str]) -> None:
    code = (
        "import sys, draftsim\n"
        f"sys.argv = ['draftsim', *{arguments}]\n"
        "try:\n    draftsim.main()\n"
        "except SystemExit as ended:\n    print('ended', ended.code)\n"
        "print('imported', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said, _, imported = done.stdout.partition("imported ")
    assert "ended 0" in said
    assert not {name.partition(".")[0] for name in imported.split()} & (HEAVY | OURS)
    ours = {name for name in imported.split() if name.startswith("commands.")}
    assert ours == {
        "commands.app", "commands.common", "commands.common.bounds",
        "commands.common.configured", "commands.lazy", "commands.stopping",
    }  # fmt: skip


def test_every_command_is_listed_in_a_line(run: Run) -> None:
    listed = run("--help").out.splitlines()
    for name, one in COMMANDS.items():
        assert [line for line in listed if line.split()[:1] == [name]] == [
            line for line in listed if line.startswith(f"  {name} ") and line.endswith(one.says)
        ]
        assert any(line.startswith(f"  {name} ") for line in listed)


@pytest.mark.parametrize("name", leaves(COMMANDS))
def test_a_command_has_its_own_help(name: str, run: Run) -> None:
    said = " ".join(run(*name.split(), "--help").out.split())
    summary = (inspect.getdoc(leaves(COMMANDS)[name].function()) or "").partition("\n\n")[0]
    assert f"draftsim {name} [OPTIONS]" in said
    assert " ".join(summary.split()).replace("``", "") in said.replace("``", "")


def test_a_name_that_is_none_is_told_with_the_nearest(run: Run) -> None:
    said = run("simulat")
    assert said.code == 2
    assert "Did you mean 'simulate'?" in said.err
