"""One name for one thing over all commands; what each prints is in the glossary and in files."""

from __future__ import annotations

import csv
import json
import re
import typing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.table import Table

from commands import acceptance, app, breakeven, sweep, tune
from commands.common import output
from commands.common.columns import COLUMNS
from commands.common.output import OutOption
from commands.common.printed import OFF_TERMINAL, SPAN, heading
from commands.common.written import OUTPUTS, TABLES
from commands.engine import check
from commands.lazy import leaves
from commands.validate import engine, recorded
from policies.registry import POLICIES
from profiler.suite.__main__ import main
from simulator.serving.outcome.metrics import COMPARED
from simulator.serving.outcome.results import ResultsFile, read_results
from simulator.validation import VALIDATE_COLUMNS
from tests.conftest import ROOT, Run
from tests.suite_results import MODES, cells, write_forced, write_latencies
from traces.errors import FileError

pytestmark = pytest.mark.usefixtures("short_chains")

EXAMPLES = ROOT / "docs" / "examples" / "server"
RESULTS = EXAMPLES / "results"
FEW = ("--policy", "fixed:gamma=2", "--policy", "gammatune")
COMMANDS = {name: listed.function() for name, listed in leaves(app.COMMANDS).items()}
PRINT_NO_TABLE = {"profile", "calibrate-memory", "report", "fetch"}
MAKE_SOMETHING = {"demo", "import", "calibrate", "recommend", "tune", "export"}
"""Their --out names what they make, and rows are --json's."""
OWN = {"serve", "sweep grid"}
"""Their --out also holds what an interrupted run goes on from."""
WRITTEN = {"out", "json", "rest", "timeline", "markdown", "plots"}
"""Options that name what a command writes at its end."""
CLAIMED = {"profile", "demo"}
"""Their --out is a run folder, which is claimed while it is written to."""
DIFFER = {
    "sampled",  # a run's own outputs, or those of several runs
    "engine",  # one whose settings are written, or one that is run
    "run",  # a folder, or for a report also a bundled recording's name
}


def hints(name: str) -> dict[str, object]:
    return typing.get_type_hints(COMMANDS[name], include_extras=True)


def test_an_option_is_the_same_thing_in_every_command() -> None:
    kinds: dict[str, set[str]] = {}
    for command in COMMANDS:
        for option, kind in hints(command).items():
            plain = typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
            name = plain.__name__ if isinstance(plain, type) else str(plain)
            # One or several of it are the same thing.
            name = re.sub(r"list\[|\]| \| None|pathlib\.", "", name)
            kinds.setdefault(option, set()).add(name)
    differing = {option: found for option, found in kinds.items() if len(found) > 1}
    assert set(differing) == DIFFER, differing
    assert not {"batches", "contexts", "draws"} & set(kinds)
    for option in ("batch", "context", "verify"):
        assert kinds[option] == {"str"}
    assert kinds["prompts"] == {"Path"}


@pytest.mark.parametrize(
    ("command", "option"),
    [(c, o) for c in COMMANDS for o in sorted(WRITTEN & set(hints(c))) if (c, o) not in
     {(c, "out") for c in COMMANDS if c.partition(" ")[0] in CLAIMED}],
)  # fmt: skip
def test_a_place_that_cannot_be_written_to_is_refused_as_options_are_read(
    command: str, option: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    refuses = typing.get_args(hints(command)[option])[1].callback
    with pytest.raises(FileError, match=r"file/x\.csv: cannot be written .*file is no folder"):
        refuses(tmp_path / "file" / "x.csv")
    assert refuses(tmp_path / "x.csv") == tmp_path / "x.csv"


@pytest.mark.parametrize("old", ["batches", "contexts"])
def test_older_names_are_understood(old: str, synthetic_run: Path, run: Run) -> None:
    [new] = app.NAMES[old]
    command = (
        "sweep", "--trace", synthetic_run, "--c", "0.1", "--policy", "fixed:gamma=2",
        "--jobs", 1, "--resamples", 2,
    )  # fmt: skip
    said = [run(*command, f"--{name}", "x").err for name in (old, new)]
    assert f"(--{old} 'x')" in said[0]
    assert said[0].replace(old, new) == said[1]
    assert old not in run("sweep", "--help").out


@pytest.mark.parametrize(
    ("command", "name", "own"),
    [
        ("serve", "max-num-seqs", "max-batch"), ("capacity", "max-num-seqs", "max-batch"),
        ("profile engine", "max-num-seqs", "engine-batch"),
        ("serve", "max-num-batched-tokens", "token-budget"),
        ("serve", "num-gpu-blocks", "kv-blocks"), ("sweep", "num-speculative-tokens", "gamma"),
        ("breakeven", "num-speculative-tokens", "k"),
        ("export", "num-speculative-tokens", "draft-length"),
    ],
)  # fmt: skip
def test_names_of_engines_are_understood(command: str, name: str, own: str, run: Run) -> None:
    said = [run(*command.split(), f"--{option}") for option in (name, own)]
    assert [one.code for one in said] == [2, 2]
    assert "requires an argument" in said[0].err
    assert said[0].err.replace(name, own) == said[1].err


def test_a_file_of_options_takes_names_of_engines(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("max_num_seqs: none\n")
    said = run("serve", "--config", config)
    assert "run.yaml: --max-batch: expected a whole number" in said.refusal


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("serve --max-batch many", "--max-batch: expected a whole number"),
        ("serve --max-num-seqs many", "--max-num-seqs: expected a whole number"),
        (
            "profile engine --target t --out x --minutes -1",
            "--minutes: expected a value greater than or equal to 0",
        ),
        ("profile engine --target t --out x --minutes q", "--minutes: expected a number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_option(
    command: str, says: str, run: Run
) -> None:
    said = run(*command.split())
    assert said.code == 2
    assert said.err == f"draftsim: {says}\n"


def test_shared_options_stand_under_a_heading(run: Run) -> None:
    said = run("serve", "--help").out
    at = [said.index(f"\n{name}:\n") for name in (
        "Options", "Acceptance and costs", "Policies", "Load", "Engine",
    )]  # fmt: skip
    assert at == sorted(at)
    assert at[1] < said.index("--trace T") < at[2] < said.index("--policy P") < at[3]


def test_every_command_writes_what_it_prints() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").replace("\n", " ")
    assert "Commands that print a table take `--json -` and `--out FILE`" in page
    for name in COMMANDS:
        has = hints(name)
        if name.partition(" ")[0] in PRINT_NO_TABLE:
            assert "json" not in has
            continue
        assert "json" in has, name
        if name.partition(" ")[0] in MAKE_SOMETHING or name in OWN:
            assert has["out"] != OutOption
        else:
            assert has["out"] == OutOption, name
    made = r"For ([^.;]*) `--out` is the product[^.;]*; [^.;]*\. ([^.;]*) print none"
    told = re.search(made, page)
    assert told is not None
    assert set(re.findall(r"`([\w-]+)`", told[1])) == MAKE_SOMETHING
    assert set(re.findall(r"`([\w-]+)`", told[2])) == PRINT_NO_TABLE


PRINT_ALONE = {
    "simulate-all": ("simulate", "--by-category"),
    "simulate-category": ("simulate", "--by-category", *FEW),
    "serve-rate": ("serve", "--rate", "0.5,2", "--requests", 20, *FEW, "--replications", 2),
    "capacity": ("capacity", "--rate", 20, "--slo", "ttft=5s,tpot=1s", "--requests", 100, *FEW),
    "tune": ("tune", "--engine", "vllm", "--batch", "1,8", "--check"),
    "search": ("sweep", "tune", "--policy", "fixed:gamma={1,2}"),
    "breakeven": ("breakeven", "--batch", "1,8"),
    "breakeven-plan": ("breakeven", "plan", "--batch", "1,4", "--k", "1,2"),
    "import": ("import", "prometheus", EXAMPLES / "metrics-before.txt",
               EXAMPLES / "metrics-after.txt"),
    "recommend": ("recommend", "--bench", RESULTS),
    "recommend-llamacpp": ("recommend", "--engine", "llamacpp", "--bench", RESULTS),
    "calibrate": ("calibrate", RESULTS, "--batch", "1,2,4", "--k", "0,1,3"),
    "doctor": ("doctor", "0.7,0.4,0.2", "--against", "0.76,0.60,0.43"),
    "curve": ("curve", "0.8,0.6,0.5,0.4"),
    **{kind: ("list", f"--{kind}") for kind in ("devices", "formats", "published", "columns",
                                                "weight-formats")},
    "list": ("list",),
}  # fmt: skip
"""Commands whose printed columns no test of their files sees."""


@pytest.fixture
def headings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Headings of the tables that are printed."""
    found: list[str] = []
    add = Table.add_column

    def added(self: Table, header: Any = "", *values: Any, **options: Any) -> None:
        found.append(str(header))
        add(self, header, *values, **options)

    monkeypatch.setattr(Table, "add_column", added)
    return found


def meaning(column: str) -> str | None:
    """Return what a printed column means; None if the glossary does not hold it."""

    def unfolded(name: str) -> str:
        return "".join(name.split())  # a heading folds at blanks and at other marks

    known = {unfolded(own): said for own, said in COLUMNS.items()}
    name = unfolded(column)
    return known.get(name) or known.get(name.removesuffix(unfolded(SPAN)))


def check_printed(out: str, headings: list[str]) -> None:
    """Check that every printed column is in the glossary, and that no line is too wide."""
    assert headings, "nothing was printed"
    policies = {text.partition(":")[0] for text in POLICIES}  # columns of a category table
    unknown = {
        text for text in headings
        if meaning(text) is None and text.replace("\n", "").partition(":")[0] not in policies
    }  # fmt: skip
    assert unknown == set()
    widest = max(out.splitlines(), key=len)
    assert len(widest) <= OFF_TERMINAL, widest


@pytest.mark.parametrize("name", PRINT_ALONE)
def test_every_printed_column_is_in_the_glossary(name: str, headings: list[str], run: Run) -> None:
    check_printed(run(*PRINT_ALONE[name]).ok().out, headings)


def commands(folder: Path) -> dict[str, tuple[object, ...]]:
    """Commands that print a table and write it; their recording is of a few requests."""
    lossy = ("--policy", "gammatune+csd", "--against", "fixed:gamma=2")
    return {
        "simulate": ("simulate", *FEW, *lossy, "--resamples", 10),
        "robustness": ("simulate", "robustness", "--trace", folder, *FEW),
        "check": ("check", "--trace", folder, "--tokens", 1000),
        "serve": (
            "serve", "--trace", folder, *FEW, "--batch", "1,4", "--requests", 8,
            "--slo", "ttft=2s,tpot=90ms", "--assume-batch-free",
        ),
        "sweep": (
            "sweep", "--trace", folder, *FEW, "--c", "0.1,0.2", "--alpha", "0.5,0.7", "--jobs", 1,
            "--resamples", 2,
        ),
        "ladder": ("sweep", "ladder", "--trace", folder, *FEW, "--resamples", 10),
        "list": ("list", "rules"),
        "recorded": ("validate", "recorded", folder / "unpacked"),
        "papers": ("papers", "--trace", folder, "--table", "Table 2", "--no-missing"),
    }  # fmt: skip


@pytest.mark.parametrize("name", commands(Path()))
def test_tables_by_suffix(
    name: str, headings: list[str], synthetic_run: Path, tmp_path: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The table is printed and written as LaTeX; its rows are written in every other form."""
    if name == "recorded":
        suite = tmp_path / "suite"
        write_latencies(suite, [row for mode in MODES for row in cells("pair", mode)])
        write_forced(suite, ["pair"])
        unpack = ("unpack", "--out", str(suite), "--into", str(synthetic_run / "unpacked"))
        assert main(list(unpack)) == 0
    command = commands(synthetic_run)[name]
    out = {suffix: tmp_path / f"t{suffix}" for suffix in TABLES}
    real = output.write_rows

    def in_every_form(path: Path, *given: Any) -> None:
        for suffix in TABLES:
            real(path.with_suffix(suffix), *given)

    monkeypatch.setattr(output, "write_rows", in_every_form)
    for path in sorted(out.values(), key=lambda path: path.suffix != ".tex"):
        if not path.exists():
            rows = () if path.suffix == ".tex" else ("--json", "-")
            ran = run(*command, "--out", path, *rows)
            assert ran.code in (0, 1), ran.err  # 1: a formula that disagrees
            assert str(path) in ran.err
            if not rows and name != "list":  # which prints lines, not a table
                check_printed(ran.out, headings)
    results = json.loads(out[".json"].read_text())["results"]
    with out[".csv"].open() as file:
        assert len(list(csv.DictReader(file))) == len(results) > 0
    assert len(pd.read_parquet(out[".parquet"])) == len(results)
    written = out[".tex"].read_text()
    assert written.startswith("\\begin{table}")
    assert written.count("\\toprule") == written.count("\\caption{") > 0
    assert written.count(r" \\") > written.count("\\midrule")
    assert r"\caption{}" not in written
    for align, body in re.findall(
        r"\\begin{tabular}{(\w+)}(.*?)\\end{tabular}", written, re.DOTALL
    ):
        for line in body.strip().splitlines():
            if not line.endswith(r"\\"):
                assert line in (r"\toprule", r"\midrule", r"\bottomrule")
                continue
            assert len(re.split(r"(?<!\\)&", line)) == len(align), line
            assert not re.search(r"(?<!\\)[%#_~^]", line), line
            assert line.count("{") == line.count("}")


@pytest.mark.parametrize(("out", "said"), [("t.xyz", "the suffix"), ("no/t.csv", "no folder")])
@pytest.mark.parametrize("command", ["simulate", "sweep ladder", "sweep tune"])
def test_a_place_that_cannot_be_is_refused_at_once(
    command: str, out: str, said: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worked(*_: object, **__: object) -> None:
        raise AssertionError("it worked first")

    monkeypatch.setattr("commands.common.options.load_recording", worked)
    ran = run(*command.split(), "--out", tmp_path / out)
    assert said in ran.refusal


OTHERS = {
    "notes.txt": b"my notes\n",
    "my.csv": b"name,phone\n",
    "lap.csv": b"caf\xe9,k\n",  # in Latin-1
    "tab.parquet": b"PAR1",
    "log.jsonl": b'{"question_id": 1}\n',
}
"""Files of somebody else."""


@pytest.mark.parametrize(
    "line",
    [
        "calibrate {results} --out {results}/k0-c1.json", "calibrate {results} --out notes.txt",
        "calibrate-memory --out m.npz --rest notes.txt", "simulate --out my.csv",
        "serve --out lap.csv", "sweep --out notes.txt", "sweep --out tab.csv",
        "import specbench log.jsonl --draft-lengths fixed:5 --out log.jsonl",
        "import specbench my.csv --baseline log.jsonl --out log.jsonl",
    ],
)  # fmt: skip
def test_files_of_others_are_not_overwritten(
    line: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in OTHERS.items():
        (tmp_path / name).write_bytes(content)
    before = (RESULTS / "k0-c1.json").read_bytes()
    assert "holds something else" in run(*line.format(results=RESULTS).split()).refusal
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == OTHERS
    assert (RESULTS / "k0-c1.json").read_bytes() == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tune --engine vllm --out s.json --json ./s.json", "--out and --json would both write"),
        ("export speculation-profile --out p.json --json p.json", "--out and --json would both"),
        ("serve --out r.jsonl --timeline r.jsonl", "--out and --timeline would both"),
        ("calibrate-memory --out m.npz --rest m.npz", "--out and --rest would both"),
        ("serve --settings in.json --json in.json", "in.json: this command reads it, so --json"),
        ("doctor 0.7 --against in.json#a --json in.json", "in.json: this command reads it"),
        ("calibrate in.json@3 --json in.json", "in.json: this command reads it"),
        ("calibrate-memory --trace . --out m.npz --rest trace.parquet", "trace.parquet: this"),
    ],
)
def test_a_file_is_written_once_and_is_no_input(
    line: str, said: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held = {"in.json": b"{}\n", "trace.parquet": b"PAR1"}
    for name, content in held.items():
        (tmp_path / name).write_bytes(content)
    assert said in run(*line.split()).refusal
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == held


def test_every_option_that_is_written_is_known() -> None:
    for name in COMMANDS:
        for option, kind in hints(name).items():
            callback = getattr([*typing.get_args(kind), None, None][1], "callback", None)
            if getattr(callback, "__module__", "") == output.__name__:
                assert option in OUTPUTS, (name, option)


def test_our_own_tables_are_overwritten(synthetic_run: Path, tmp_path: Path, run: Run) -> None:
    for name in ("serve", "sweep"):
        for _ in range(2):
            run(*commands(synthetic_run)[name], "--out", tmp_path / f"{name}.csv").ok()


def test_a_sweep_writes_nothing_next_to_a_device(
    synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    device = tmp_path / "nowhere"
    device.symlink_to("/dev/zero")
    run(*commands(synthetic_run)["sweep"], "--out", device).ok()
    assert list(tmp_path.iterdir()) == [device]


def test_finished_results_are_not_taken_for_rows_of_a_table(
    synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    served = commands(synthetic_run)["serve"]
    rows, table = tmp_path / "t.csv.jsonl", tmp_path / "t.csv"
    run(*served, "--out", rows).ok()
    before = rows.read_bytes()
    assert "holds finished results" in run(*served, "--seed", 1, "--out", table).refusal
    assert rows.read_bytes() == before
    rows.unlink()
    with ResultsFile(rows, command="capacity") as file:
        file.add({"policy": "autoregressive"})
    before = rows.read_bytes()
    planned = ("capacity", *SERVED["capacity"], "--latency", "const:target=0.001,draft=0.0001")
    ran = run(*planned, "--assume-batch-free", "--out", table)
    assert "holds finished results" in ran.refusal
    assert rows.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "last"),
    [("capacity", "commands.capacity.emit"), ("serve", "commands.serve.write_as")],
)  # fmt: skip
def test_rows_without_their_table_are_taken_over(
    command: str, last: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row is on disk, and the table is not: the same command writes it."""
    table, rows = tmp_path / "t.csv", tmp_path / "t.csv.jsonl"
    asked = (
        command, *SERVED[command], "--policy", "fixed:gamma=1", "--assume-batch-free",
        "--latency", "const:target=0.001,draft=0.0001", "--out", table,
    )  # fmt: skip

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(last, stopped)
        assert run(*asked).code == 130
    assert not table.exists()
    before = read_results(rows)
    assert before.rows
    assert not before.complete
    runs: list[object] = []
    add = ResultsFile.add

    def added(file: ResultsFile, row: dict[str, Any], number: int | None = None) -> None:
        runs.append(row)
        add(file, row, number)

    monkeypatch.setattr(ResultsFile, "add", added)
    run(*asked).ok()
    assert not runs
    assert not rows.exists()
    again = tmp_path / "again.csv"
    run(*asked[:-1], again).ok()
    assert len(runs) == len(before.rows)
    frames = [
        pd.read_csv(path).drop(columns="elapsed_s", errors="ignore") for path in (table, again)
    ]
    pd.testing.assert_frame_equal(*frames)


SERVED = {
    "serve": ("--batch", 1, "--requests", 2),
    "capacity": ("--rate", 1, "--slo", "ttft=2s,tpot=9", "--requests", 20),
    "tune": ("--engine", "llamacpp", "--resamples", 4),
}


@pytest.mark.parametrize("command", SERVED)
def test_tables_name_what_they_are_of(command: str, run: Run) -> None:
    policy = () if command == "tune" else ("--policy", "fixed:gamma=1")
    latency = "const:target=0.001,draft=0.0001"
    ran = run(command, *SERVED[command], *policy, "--latency", latency, "--assume-batch-free")
    named = "bundled (bundled 2.81M + draft model 0.638M)"
    [first] = [line for line in ran.err.splitlines() if line.startswith(named)]
    assert f", at the costs of {latency}" in first, first


def test_columns_of_commands_that_need_an_engine_are_in_the_glossary() -> None:
    named = {
        *breakeven.SHOWN, *acceptance.CURVES, *tune.SHOWN, *tune.CARRIED, *tune.CHECKED,
        *engine.SHOWN, *engine.SHOWN_HTTP, *check.TRIED, *check.WITH_DEFAULTS, *recorded.SHOWN,
        *sweep.SHOWN, *sweep.RUNGS, *sweep.SEARCHED, *VALIDATE_COLUMNS, *recorded.BOUNDS,
        "metric", "statistic", "mean", *COMPARED,
    }  # fmt: skip
    bounds = {n for n in named if n.removesuffix("_lo").removesuffix("_hi") in named - {n}}
    assert {n for n in named - bounds - {"left_out"} if meaning(n) is None} == set()


def test_a_folded_heading_is_the_same_column() -> None:
    for column in COLUMNS:
        assert meaning(heading(column, 6)) == COLUMNS[column], column


def test_the_glossary_is_listed(run: Run) -> None:
    rows = run("list", "columns", "--json", "-").rows
    assert {row["name"] for row in rows} == {*COLUMNS}


def test_the_printed_table_is_written_as_latex(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "table.tex"
    ran = run("simulate", *FEW, "--policy", "oracle", "--out", out)
    text = out.read_text()
    assert "\\caption{bundled (" in text
    best = next(line for line in text.splitlines() if "textbf" in line)
    assert "oracle" not in best  # a bound is not the best
    name = best.partition("}")[0].removeprefix("\\textbf{").removesuffix(" *")
    assert ran.out.splitlines()[0].split(": ")[1].startswith(name.replace("\\", ""))
    # The figures are those of the screen, an interval next to each.
    line = next(line for line in ran.out.splitlines()[1:] if line.startswith("gammatune"))
    for part in line.split()[1:3]:
        assert part.replace("-", "--") in text
