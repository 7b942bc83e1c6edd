"""The command line's groups, completion and options from a file."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands.app import COMMANDS
from commands.common.configured import read_config
from commands.lazy import leaves
from tests.conftest import ROOT, Run


def test_commands_are_listed_by_what_people_have(run: Run) -> None:
    shown = run("--help").out
    groups = list(dict.fromkeys(one.group for one in COMMANDS.values()))
    places = [shown.index(f"{group}:") for group in groups]
    assert places == sorted(places)


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_options_come_from_a_file(suffix: str, tmp_path: Path, run: Run) -> None:
    said = {
        ".yaml": "trace: bundled\npolicy: [fixed:gamma=2, gammatune]\nbatch: [1, 2]\nrequests: 6\n",
        ".json": json.dumps({"trace": "bundled", "policy": ["fixed:gamma=2", "gammatune"],
                             "batch": "1,2", "requests": 6}),
        ".toml": 'trace = "bundled"\npolicy = ["fixed:gamma=2", "gammatune"]\n'
        'batch = "1,2"\nrequests = 6\n',
    }  # fmt: skip
    file = tmp_path / f"run{suffix}"
    file.write_text(said[suffix])
    rows = run("serve", "--config", file, "--json", "-").rows
    asked = ("--trace", "bundled", "--policy", "fixed:gamma=2", "--policy", "gammatune",
             "--requests", 6)  # fmt: skip
    found = run("serve", *asked, "--batch", "1,2", "--json", "-").rows
    for row in (*rows, *found):
        del row["elapsed_s"]
    assert json.dumps(rows) == json.dumps(found)  # some values are NaN
    # The command line comes first.
    rows = run("serve", "--config", file, "--batch", 4, "--json", "-").rows
    assert {row["concurrency"] for row in rows} == {4}


def test_a_file_switches_off_what_the_command_line_does(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(
        "commands.validate.command.check",
        lambda _, kind, *__: given.append(kind.keywords["assisted"]),
    )
    file = tmp_path / "run.yaml"
    for text in ("no-assisted: true", "no_assisted: true", "no-assisted: false", "assisted: no"):
        file.write_text(f"run: here\n{text}\n")
        run("validate", "--config", file)
    assert given == [False, False, True, False]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.yaml", "requets: 6", "requets is no option of this command: did you mean requests?"),
        ("run.yaml", "requests: [", "is no YAML"),
        ("run.yaml", "requests: lots", "run.yaml: --requests: expected a whole number"),
        ("run.yaml", "- 1", "holds no names and values"),
        ("run.yaml", "out:", "out has no value: give one, or remove the line"),
        ("run.yaml", "requests: {a: 1}", "expected a value or list"),
        ("run.yaml", "json: true", "json is true or false, expected a value"),
        ("run.yaml", "rate: 1\nrate: 2", "rate comes twice"),
        ("run.json", '{"rate": 1, "rate": 2}', "rate comes twice"),
        ("run.yaml", "batch: 1\nconcurrency: 2", "batch and concurrency are one option"),
        ("run.yaml", "trace: no-such-pair", "no-such-pair: no such file"),
        ("run.yaml", "on: 1", "is not text, as names of options are"),
        ("run.yaml", "serve: {requests: 1}", "serve is no option: write options without a heading"),
        ("run.yaml", "config: other.yaml", "config is for the command line: a file names no other"),
        ("run.ini", "", "unknown suffix"),
        ("run.toml", "=", "is no TOML"),
    ],
)
def test_a_wrong_file_is_one_line(
    name: str, text: str, said: str, tmp_path: Path, run: Run
) -> None:
    file = tmp_path / name
    file.write_text(text)
    ran = run("serve", "--config", file)
    assert said in ran.refusal


def test_numbers_of_a_file_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("acceptance: 1:1.8\nrate: [0.10, 2]\none-pass: yes\n")
    found = {"acceptance": "1:1.8", "rate": ["0.10", "2"], "one-pass": True}
    assert read_config(file) == found


def test_a_missing_file_is_one_line(tmp_path: Path, run: Run) -> None:
    ran = run("tune", "--engine", "vllm", "--config", tmp_path / "none.yaml")
    assert "no such file" in ran.refusal


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("serve", "--batch", "1,4", "--requests", 20, "--policy", "fixed:gamma=2"),
            "at 1 request ",
        ),
        (("tune", "--engine", "vllm", "--batch", "1"), "vllm: "),
        (("check", "--tokens", 2000), "closed forms agree with simulation"),
    ],
)
def test_an_answer_begins_with_a_sentence(
    arguments: tuple[object, ...], said: str, run: Run
) -> None:
    ran = run(arguments[0], "--trace", "bundled", *arguments[1:])
    first = next(line for line in ran.err.splitlines() if said in line)
    assert "bundled" in first
    assert max(map(len, ran.out.splitlines())) <= 100


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
        "commands.app", "commands.common", "commands.common.configured", "commands.lazy",
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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo", "Default: 14; 40 with --full."),
        ("serve", "Default: autoregressive, fixed:gamma=1, fixed:gamma=4, gammatune."),
        ("capacity", "Default: autoregressive, fixed:gamma=1, fixed:gamma=4, gammatune."),
        ("simulate", "all = every policy (`draftsim list policies`). Default: all."),
        ("report", "all = every policy (`draftsim list policies`). Default: all."),
        ("profile decode", "Default: fixed."),
        ("validate", "Default: a few, and those that are predicted fastest."),
        ("sweep", "Default: `grid` has fixed:gamma={1..LONGEST} and the oracle, `ladder` all."),
        ("serve", "static-minimum: all keep as many tokens as the one with fewest accepted"),
        ("simulate", "as JSON to FILE instead of printing the table; - is standard output."),
        ("sweep", "--gpu NAME,... Extrapolate latencies measured on another GPU to each of these"),
        ("tune", "--gpu NAME Extrapolate latencies measured on another GPU to this one"),
        ("validate engine", "counts requests whose text is not that of plain decoding"),
        ("validate recorded", "which bounds on the errors and on the order of policies are met"),
    ],
)
def test_help_says_what_an_option_of_this_command_takes(command: str, words: str, run: Run) -> None:
    assert words in " ".join(run(*command.split(), "--help").out.split())


def test_a_name_that_is_none_is_told_with_the_nearest(run: Run) -> None:
    said = run("simulat")
    assert "no command 'simulat': did you mean `draftsim simulate`?" in said.refusal


def test_a_recording_that_the_environment_names_and_is_not_there_names_the_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSIM_TRACE", "no-such-pair")
    assert "draftsim: DRAFTSIM_TRACE=no-such-pair: no such file" in run("simulate").refusal
    monkeypatch.delenv("DRAFTSIM_TRACE")
    assert "draftsim: no-such-pair: no such" in run("simulate", "--trace", "no-such-pair").refusal
