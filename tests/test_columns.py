"""Every column that a command prints is in the glossary (`commands.common.columns`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from commands import breakeven, curve, sweep, tune
from commands.common.columns import COLUMNS, meaning
from commands.common.printed import OFF_TERMINAL, heading
from commands.engine import apart, http, trial
from commands.validate import engine, recorded
from policies.registry import POLICIES
from simulator.serving.arrivals import QUANTILES
from simulator.validation import VALIDATE_COLUMNS
from tests.conftest import ROOT, Run

EXAMPLES = ROOT / "docs" / "examples" / "server"
SERVED = EXAMPLES / "results"
FEW = ("--policy", "fixed:gamma=2", "--policy", "gammatune")
COMMANDS = {
    "simulate": ("simulate", *FEW, "--policy", "gammatune+csd", "--against", "fixed:gamma=2"),
    "simulate-all": ("simulate", "--by-category"),
    "simulate-category": ("simulate", "--by-category", *FEW),
    "robustness": ("simulate", "--robustness", *FEW),
    "serve": ("serve", "--batch", "1,4", "--requests", 20, *FEW, "--slo", "ttft=2s,tpot=90ms"),
    "serve-rate": ("serve", "--rate", "0.5,2", "--requests", 20, *FEW, "--replications", 2),
    "capacity": ("capacity", "--rate", 20, "--slo", "ttft=5s,tpot=1s", "--requests", 100, *FEW),
    "tune": ("tune", "--engine", "vllm", "--batch", "1,8", "--check"),
    "sweep": ("sweep", "--c", "0.05,0.2", "--alpha", "0.5,0.7", *FEW, "--jobs", 1),
    "ladder": ("sweep", "--ladder", *FEW),
    "search": ("sweep", "--tune", "--policy", "fixed:gamma={1,2}"),
    "breakeven": ("breakeven", "--batch", "1,8"),
    "breakeven-plan": ("breakeven", "--plan", "--batch", "1,4", "--k", "1,2"),
    "import": ("import", "prometheus", EXAMPLES / "metrics-before.txt",
               EXAMPLES / "metrics-after.txt"),
    "recommend": ("recommend", "--bench", SERVED),
    "recommend-llamacpp": ("recommend", "--engine", "llamacpp", "--bench", SERVED),
    "calibrate": ("calibrate", SERVED, "--batch", "1,2,4", "--k", "0,1,3"),
    "doctor": ("doctor", "0.7,0.4,0.2", "--against", "0.76,0.60,0.43"),
    "curve": ("curve", "0.8,0.6,0.5,0.4"),
    "check": ("check", "--tokens", 2000),
    "papers": ("papers", "--table", "Table 2"),
    **{kind: ("list", f"--{kind}") for kind in ("devices", "formats", "published", "columns",
                                                "weight-formats")},
    "list": ("list",),
}  # fmt: skip


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


@pytest.mark.parametrize("name", COMMANDS)
def test_every_printed_column_is_in_the_glossary(name: str, headings: list[str], run: Run) -> None:
    ran = run(*COMMANDS[name])
    assert ran.code in (0, 1), ran.err
    assert headings, "nothing was printed"
    policies = {text.partition(":")[0] for text in POLICIES}  # columns of a category table
    unknown = {
        text for text in headings
        if meaning(text) is None and text.replace("\n", "").partition(":")[0] not in policies
    }  # fmt: skip
    assert unknown == set()
    widest = max(ran.out.splitlines(), key=len)
    assert len(widest) <= OFF_TERMINAL, widest


def test_columns_of_commands_that_need_an_engine_are_in_the_glossary() -> None:
    named = {
        *breakeven.SHOWN, *curve.SHOWN, *tune.SHOWN, *tune.CARRIED, *tune.CHECKED, *engine.SHOWN,
        *http.SHOWN, *trial.TRIED, *apart.SHOWN, *recorded.SHOWN, *sweep.SHOWN, *sweep.RUNGS,
        *sweep.SEARCHED, *VALIDATE_COLUMNS, *recorded.BOUNDS, "the file's requests", "mean",
        *(f"p{q}" for q in QUANTILES),
    }  # fmt: skip
    bounds = {n for n in named if n.removesuffix("_lo").removesuffix("_hi") in named - {n}}
    assert {n for n in named - bounds - {"left_out"} if meaning(n) is None} == set()


def test_a_folded_heading_is_the_same_column() -> None:
    for column in COLUMNS:
        assert meaning(heading(column, 6)) == COLUMNS[column], column


def test_the_glossary_is_listed(run: Run) -> None:
    rows = json.loads(run("list", "--columns", "--json", "-").out)["results"]
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
