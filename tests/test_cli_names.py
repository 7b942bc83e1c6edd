"""Names on the command line: all that can be given, and all stay text wherever they come from."""

from __future__ import annotations

import csv
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest

from commands.app import COMMANDS
from commands.common.configured import check_most
from commands.common.printed import cell_text, is_number_column, print_table
from commands.common.written import write_rows
from commands.lazy import leaves
from policies.registry import POLICIES, parse_policy
from policies.rules.registry import RULES
from tests.conftest import SMALL_PROFILE, Run
from traces.errors import DraftsimError
from traces.importers.registry import IMPORTERS
from traces.sources.registry import SOURCES, SYSTEMS


@pytest.mark.parametrize("command", leaves(COMMANDS))
def test_no_whole_number_is_without_a_bound(command: str) -> None:
    """Every command, and every option of it: a number that no machine holds is one line."""
    function = leaves(COMMANDS)[command].function()
    hints = inspect.signature(function, eval_str=True).parameters
    whole = [
        name for name, parameter in hints.items()
        if int in (own := get_args(parameter.annotation) or (parameter.annotation,))
        or (own and int in get_args(own[0]))
    ]  # fmt: skip
    for name in whole:
        with pytest.raises(DraftsimError) as error:
            check_most({name: 10**20})
        said = str(error.value)
        assert said.startswith(f"--{name.replace('_', '-')} is {10**20}, expected at most ")
        assert "\n" not in said
    if command in (
        "serve",
        "capacity",
        "tune",
        "sweep",
        "simulate",
        "validate run",
        "profile pair",
    ):
        assert whole


def test_every_name_is_listed_with_its_parameters(run: Run) -> None:
    for verb, names in (
        ("policies", POLICIES), ("rules", RULES), ("sources", {**SOURCES, **SYSTEMS}),
        ("formats", IMPORTERS),
    ):  # fmt: skip
        rows = {row["name"]: row for row in run("list", verb, "--json", "-").rows}
        assert set(names) <= set(rows)
        assert all(row["what"] for row in rows.values())
    listed = {r["name"]: r for r in run("list", "policies", "--json", "-").rows}
    for name, row in listed.items():
        made = parse_policy(name)
        for parameter in row["parameters"]:
            held = getattr(getattr(made, "policy", made), parameter["name"])
            if isinstance(held, int | float | str):
                assert held == parameter["default"], (name, parameter)
    assert listed["svip"]["reads"] == "entropy"
    assert run("list", "policies").out.count("gamma_max=") > 5


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("verb", ["policies", "rules", "sources"])
def test_no_parameter_is_broken_on_any_terminal(
    verb: str, width: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run("list", verb, "--json", "-").rows
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", run("list", verb).out).splitlines()
    assert max(map(len, shown)) <= width
    begins = [i for i, line in enumerate(shown) if line and not line.startswith(" ")]
    assert [shown[i] for i in begins] == [row["name"] for row in rows]
    for row, begin, end in zip(rows, begins, [*begins[1:], None], strict=True):
        entry = shown[begin:end]
        values = dict(re.findall(r"(?:^| )(\w+)=(\S*?)(?=, |,\n|\n)", "\n".join(entry) + "\n"))
        for parameter in row["parameters"]:
            value, default = values[parameter["name"]], parameter["default"]
            if isinstance(default, int | float | list):
                assert json.loads(value) == default
            elif default is None:
                assert value == "none"
            else:
                assert value == default
        # Nor is what a system consists of.
        assert row["what"] in " ".join(" ".join(entry).split())


def test_help_and_version(run: Run) -> None:
    assert run("-h").code == run("simulate", "-h").code == 0
    assert run("--version").out.startswith("draftsim ")


def test_names_are_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["[bold]a[/bold]", "[/nothing]", "$x_$", "\x1b[31mred", ":smile:", "a & b_c"]
    print_table([{"category": name, "speedup": 1.0} for name in names], title="of \x1b[31mred")
    shown = capsys.readouterr().out
    for name in ("[bold]a[/bold]", "[/nothing]", "$x_$", "\\x1b[31mred", ":smile:"):
        assert name in shown
    assert "\x1b" not in shown
    write_rows(tmp_path / "t.csv", [{"category": name, "speedup": 1.0} for name in names])
    assert [r["category"] for r in csv.DictReader((tmp_path / "t.csv").open())] == names
    write_rows(tmp_path / "t.tex", [{"category": "a & b_c", "speedup": 1.0}])
    assert r"a \& b\_c & 1.00 \\" in (tmp_path / "t.tex").read_text()


def test_what_a_person_names_reaches_no_terminal_raw(synthetic_run: Path, run: Run) -> None:
    for arguments in (
        ("simulate", "--trace", "a\x1b]0;title\x07b"),
        ("serve", "--trace", synthetic_run, "--policy", "fixed:gamma=\x1b[31m"),
        ("sweep", "--trace", synthetic_run, "--policy", "\x1b[31mred.py:Mine"),
    ):
        ran = run(*arguments)
        assert "\x1b" not in ran.refusal
        assert "\\x1b" in ran.err
        assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "--batch", 32), "`draftsim serve --batch`"),
        (("simulate", "--rate", 2), "`draftsim serve --rate`"),
        (("simulate", "--gpu", "a100"), "`draftsim sweep --policy P --gpu NAME`"),
        (("simulate", "--weights", "awq-int4"), "`draftsim sweep --policy P --weights FORMAT`"),
        (("sweep", "--verify", "csd"), "`draftsim simulate --verify`"),
        (("tune", "--policy", "svip"), "`draftsim serve`"),
        (("simulate", "--concurrency", 4), "`draftsim serve --batch`"),
    ],
)
def test_an_option_of_another_command_says_of_which(
    arguments: tuple[object, ...], said: str, run: Run
) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.err.startswith(f"draftsim: {arguments[0]} has no option {arguments[1]}: it ")
    assert said in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("serve", "--concurency", 4),
            "serve has no option --concurency: did you mean --concurrency?",
        ),
        (
            ("serve", "--max-num-sqs", 4),
            "serve has no option --max-num-sqs: did you mean --max-num-seqs?",
        ),
        (
            ("validate", "--polcy", "x"),
            "validate run has no option --polcy: did you mean --policy?",
        ),
        (
            ("tune", "--xyzzy"),
            "tune search has no option --xyzzy: `draftsim tune search --help` lists its options",
        ),
        (
            ("tune", "--max-num-seqs", 4),
            "tune search has no option --max-num-seqs: `draftsim tune search --help` lists its "
            "options",
        ),
        (
            ("demo", "--slo", "ttft=1"),
            "demo has no option --slo: `draftsim demo --help` lists its options",
        ),
        (("--xyzzy",), "draftsim has no option --xyzzy: `draftsim --help` lists its options"),
        (("serve", "--batch"), "Option '--batch' requires an argument."),
    ],
)
def test_a_misspelt_option_is_told_from_the_one_meant(
    arguments: tuple[object, ...], said: str, run: Run
) -> None:
    """Also where the option meant is another program's name for one of ours."""
    ran = run(*arguments)
    assert (ran.code, ran.err) == (2, f"draftsim: {said}\n")


def test_names_of_vllms_benchmarks_are_understood(synthetic_run: Path, run: Run) -> None:
    asked = ("serve", "--trace", synthetic_run, "--policy", "fixed:gamma=2", "--requests", 6)
    shown = [
        [
            (r["concurrency"], r["throughput_tok_s"])
            for r in run(*asked, option, 2, "--json", "-").rows
        ]
        for option in ("--batch", "--concurrency", "--max-concurrency")
    ]
    assert shown[0] == shown[1] == shown[2]
    assert run(*asked, "--request-rate", 2, "--json", "-").rows[0]["rate"] == 2


@pytest.mark.parametrize("width", [60, 80, 132])
def test_no_number_is_cut_on_any_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many columns as `serve` and `sweep` have: what does not fit stands below.
    names = [f"a_long_name_{i}" for i in range(14)]
    rows = [
        {"policy": f"hf-heuristic:gamma_max={g},persist=persistent", "batch": 10 * g}
        | {name: 1234.5 + i * g for i, name in enumerate(names)}
        for g in (2, 4)
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(rows, title="What is served")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.count("What is served") == 1
    for row in rows:
        for name in names:
            assert cell_text(name, row[name]) in shown.split()
        # Every block says which rows it is of.
        assert shown.split().count(str(row["batch"])) == shown.count("policy") > (width < 132)


def test_every_block_of_a_table_names_the_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"policy": f"fixed:gamma={r}", "rate": r} | {f"column_{i}": i + r for i in range(14)}
            for r in (0.05, 0.15)]  # fmt: skip
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(rows)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).split()
    assert shown.count("policy") > 1
    assert shown.count("rate") == shown.count("policy")


def test_a_terminal_too_narrow_for_a_number_wraps_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "12")
    ranked = [{"policy": f"fixed:gamma={k}", "speedup": "1.23456789"} for k in (1, 2)]
    print_table(ranked, ["policy", "speedup"], "t")
    print_table([{"policy": f"fixed:gamma={k}", "tokens": 123456789 + k} for k in (1, 2)])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("1.23456789", "123,456,790", "123,456,791"))


def test_a_standard_error_is_no_percentage(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"standard_error": 0.0265, "tilt_error": 0.0265, "error": -0.1}])
    assert "0.026" in (shown := capsys.readouterr().out)
    assert "+2.6%" in shown
    assert "-10.0%" in shown
    assert shown.count("%") == 2


@pytest.mark.parametrize(
    "text",
    ["-", "1.23", "1,234-2,345", "1.00e-05-2.00e-05", "-0.50--0.10", "+1.2%-+3.4%", "inf"],
)
def test_figures_and_their_intervals_are_numbers(text: str) -> None:
    assert is_number_column([text])
    assert not is_number_column([text, "eager"])


def test_dollars_are_no_formulas(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from simulator.plots.look import save

    figure = Figure()
    figure.subplots().set_title(r"$\nonsense{$ of 5 $")
    assert save(figure, tmp_path / "f.png").is_file()


def test_a_target_of_no_seconds_is_refused(synthetic_run: Path, run: Run) -> None:
    latency = "const:target=0,draft=0.001"
    ran = run("simulate", "--trace", synthetic_run, "--latency", latency)
    assert "target=0, expected > 0 seconds" in ran.refusal


def test_tables_by_suffix(synthetic_run: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "rules.csv"
    assert run("list", "rules", "--out", out).code == 0
    assert [r["name"] for r in csv.DictReader(out.open())] == list(RULES)
    ran = run("list", "rules", "--out", tmp_path / "rules.xyz")
    assert "the suffix is not one of .csv" in ran.refusal
    ran = run("list", "rules", "--json", tmp_path / "none" / "x.json")
    assert "cannot be written" in ran.refusal
    del synthetic_run


def test_a_full_disk_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr("traces.store.recordings.recordings", full)
    ran = run("list")
    assert ran.code == 2
    assert ran.err.startswith("draftsim: /somewhere: No space left on device")
    assert ran.err.count("\n") == 1


def test_ctrl_c_says_how_to_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("profiler.profile.profile_latency", stopped)
        ran = run(*SMALL_PROFILE, "--out", tmp_path / "run")
    assert ran.code == 130
    assert "the same command continues" in ran.err
    before = (tmp_path / "run" / "trace.parquet").read_bytes()
    assert not list((tmp_path / "run").glob(".lock"))

    def again(*_: object, **__: object) -> None:
        raise AssertionError("a finished stage was recorded again")

    with monkeypatch.context() as patch:
        patch.setattr("profiler.profile.profile_trace", again)
        assert run(*SMALL_PROFILE, "--out", tmp_path / "run").code == 0
    assert (tmp_path / "run" / "trace.parquet").read_bytes() == before


def test_serve_and_sweep_write_tables_too(synthetic_run: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "served.csv"
    run(
        "serve", "--trace", synthetic_run, "--policy", "fixed:gamma=2", "--batch", "1,2",
        "--requests", "8", "--out", out,
    ).ok()  # fmt: skip
    rows = list(csv.DictReader(out.open()))
    assert {"policy", "batch", "ttft_s_mean"} <= set(rows[0])
    assert not list(tmp_path.glob("*.jsonl"))
    out = tmp_path / "study.csv"
    run(
        "sweep", "--trace", synthetic_run, "--c", "0.1,0.2", "--policy", "fixed:gamma=2",
        "--jobs", 1, "--resamples", 4, "--out", out,
    ).ok()  # fmt: skip
    assert len(list(csv.DictReader(out.open()))) == 2
    assert out.with_suffix(".parquet").is_file()


@pytest.mark.parametrize("command", ["simulate", "serve", "check"])
def test_a_trace_by_itself_asks_for_latencies(
    command: str, synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    alone = shutil.copy(synthetic_run / "trace.parquet", tmp_path / "log.parquet")
    ran = run(command, "--trace", alone)
    assert (ran.code, ran.out) == (2, "")
    assert "log.parquet says nothing of what passes cost: give --latency: a run folder" in ran.err
