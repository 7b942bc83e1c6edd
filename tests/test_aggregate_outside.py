"""Servers and passes that others measured: their sources, and the errors found."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks import outside
from benchmarks.server_left_out import left_out, summary
from docs.server_tables import server_outside

FOLDER = Path(outside.__file__).parent
TABLES = {"servers": 12, "steps": 8, "loops": 2}


@pytest.mark.parametrize("name", TABLES)
def test_every_study_has_a_source(name: str) -> None:
    path = FOLDER / f"outside_{name}.csv"
    head = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    sources = {line.split(":")[0] for line in head if ":" in line}
    studies = list(pd.read_csv(path, comment="#")["study"].unique())
    assert len(studies) == TABLES[name]
    for study in studies:
        assert any(study.startswith(source) for source in sources), study


def test_the_errors_kept_are_those_of_every_study_and_design() -> None:
    found = pd.read_csv(FOLDER / "outside_found.csv")
    kept = {(row.study, row.terms) for row in found.itertuples() if row.study != outside.ALL}
    assert kept == {(name, design) for name, design, _ in outside.servers()}
    lines = server_outside().splitlines()
    assert len(lines) == 2 + TABLES["servers"] + 1
    assert lines[-1].startswith("| all studies | ")


@pytest.mark.parametrize("study", ["v100, llama.cpp", "apertus DSpark, chat"])
def test_the_errors_kept_are_found_again(study: str) -> None:
    found = pd.read_csv(FOLDER / "outside_found.csv").set_index(["study", "terms"])
    parts = next(p for _, design, p in outside.servers(study) if design == outside.FEW_RUNS)
    again = summary(left_out(parts[0]))
    kept = found.loc[(study, outside.FEW_RUNS)]
    assert again["median_error"] == pytest.approx(kept["median_error"], abs=0.003)
    assert again["coverage"] == pytest.approx(kept["coverage"], abs=0.1)
