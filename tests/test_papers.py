"""The papers' tables: transcription, recomputation, and the rows of the comparison."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import draftsim
from policies.core import Round
from policies.registry import describe
from policies.rule_registry import describe_rule, parse_rule
from simulator.papers import Ours, Row, published, quantity_rows, side_by_side
from simulator.papers.compare import TABLES
from simulator.papers.experiments import (
    CMASD_ROWS,
    CSD_ROWS,
    REAL_RUNS,
    distribution_rows,
    gammatune_rows,
)
from simulator.papers.notes import CONTRADICTIONS, notes_on
from simulator.papers.ours import REAL, outcome
from simulator.papers.quantities import SPECBOUND
from simulator.papers.rows import EXPERIMENT, QUANTITY, WEIGHTS, PaperTable
from simulator.papers.specbound_table1 import SPECBOUND_1, TASKS
from simulator.pricing import autoregressive, price
from traces.errors import DraftsimError
from traces.files import write_latency, write_trace
from traces.latency import LatencyTable
from traces.methods import CMASD_ABLATION, CSD_ABLATION, METHODS, build, method
from traces.outputs import Output, RealRun
from traces.replay import replay
from traces.rounds import RoundLog
from traces.synthetic import synthetic_trace
from traces.trace import COLUMNS, Trace

LATENCY = LatencyTable.constant(0.0143, 0.00176, 0.0150)
FILES = {
    "cmasd_table1": published.CMASD_1, "cmasd_table2": published.CMASD_2,
    "cmasd_table3": published.CMASD_3, "cmasd_table4": published.CMASD_4,
    "cmasd_table5": published.CMASD_5, "csd_ablation": published.CSD_ABLATION,
    "gammatune_table1": published.GAMMATUNE_1, "gammatune_table2": published.GAMMATUNE_2,
    "specbound_table2": published.SPECBOUND_2, "specbound_table3": published.SPECBOUND_3,
    "specbound_table4": published.SPECBOUND_4,
}  # fmt: skip


def scored_trace(requests: int = 8, seed: int = 1) -> Trace:
    """A synthetic recording with target scores made up to agree with its matches."""
    trace = synthetic_trace(
        0.7, requests=requests, tokens=60, max_gamma=24, concentration=4.0, seed=seed
    )
    rng = np.random.default_rng(seed)
    count = len(trace)
    tail = trace.columns["offset"] > 0
    match = np.where(tail, rng.random(count) < 0.5, trace.columns["match"] == 1)
    draft = rng.integers(0, 50, count)
    gap = np.where(match, 0.0, rng.exponential(2.0, count))
    columns = {
        **trace.columns,
        "match": match,
        "draft_token": draft,
        "token": np.where(trace.columns["offset"] == 0, np.where(match, draft, draft + 50), -1),
        "target_token": np.where(match, draft, draft + 50),
        "target_top1": np.full(count, 5.0),
        "target_top2": np.where(match, 3.0, 5.0 - gap * rng.random(count)),
        "target_draft_logit": 5.0 - gap,
        "target_draft_rank": np.where(match, 0, rng.integers(1, 8, count)),
    }
    typed = {name: np.asarray(v).astype(COLUMNS[name][0]) for name, v in columns.items()}
    meta = {**trace.meta, "target": {"vocab_size": 100}}
    return Trace(typed, trace.requests, trace.max_gamma, meta)


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(scored_trace(), LATENCY)


@pytest.fixture(scope="module")
def rows(ours: Ours) -> list[Row]:
    return side_by_side(ours)


@pytest.mark.parametrize("name", FILES)
def test_tables_are_transcribed_value_for_value(shared_tables: Path, name: str) -> None:
    table = FILES[name]
    with (shared_tables / f"{name}.csv").open(encoding="utf-8") as file:
        assert next(file).startswith("# source:")
        printed = list(csv.reader(file))[1:]
    assert len(printed) == len(table.cells)
    for line, values in zip(printed, table.cells.values(), strict=True):
        numbers = [float(v) for v in line[1:] if v.replace(".", "", 1).isdigit()]
        assert numbers == [v for v in values if v is not None], line[0]


def test_specbound_and_csd_are_transcribed_value_for_value(shared_tables: Path) -> None:
    with (shared_tables / "specbound_table1.csv").open() as file:
        next(file)
        cells = {(r["model"], r["method"], r["task"]): r for r in csv.DictReader(file)}
    assert len(cells) == len(SPECBOUND_1) * (len(TASKS) + 1)
    for (model, name), line in SPECBOUND_1.items():
        for task, rate, speed in zip(TASKS, line.compression, line.speedup, strict=True):
            cell = cells[model, name, task]
            assert (float(cell["CR"]), float(cell["SD"])) == (rate, speed)
        assert float(cells[model, name, "Overall"]["SD"]) == line.overall
    with (shared_tables / "csd_main.csv").open() as file:
        next(file)
        for r in csv.DictReader(file):
            key = f"{r['family']} {r['dataset']} {r['metric']}"
            values = tuple(float(r[c]) for c in ("CSD", "SpecDecode", "Vanilla"))
            assert published.CSD_MAIN.cells[key] == values
            assert published.CSD_GAINS[key] == float(r["gain_vs_baseline"].split()[0].strip("+%"))
    with (shared_tables / "specbound_table5.csv").open() as file:
        next(file)
        printed = [(float(r["num_prompts"]), float(r["percentage"])) for r in csv.DictReader(file)]
    assert list(published.SPECBOUND_5.cells.values()) == printed


def found(rows: list[Row], table: str, column: str, row: str = "") -> list[Row]:
    return [r for r in rows if r.table == table and column in r.column and row in r.row]


def test_eq5_reproduces_specbounds_cells() -> None:
    """Every cell but the named outlier within 16 %, most within 10 %; an independent fit."""
    rows = quantity_rows()
    cells = [r for r in found(rows, SPECBOUND, " SD", " SpecBound") if r.column.split()[0] in TASKS]
    assert len(cells) == 24
    errors = []
    for row in cells:
        assert row.published is not None
        assert row.ours is not None
        error = row.ours / row.published - 1
        assert f"{error:+.1%}" in row.note
        assert ("within" in row.note) == (abs(error) <= 0.10)
        if "13B-Instruct" in row.row and row.column == "RAG SD":
            assert abs(error) > 0.25
        else:
            errors.append(abs(error))
    assert max(errors) < 0.16
    count = [r for r in rows if r.column.startswith("cells within")]
    assert [r.ours for r in count] == [sum(e <= 0.10 for e in errors)]
    # The fitted depth of one model, by scanning instead of minimising.
    line = SPECBOUND_1["Vicuna-7B", "SpecBound"]
    rate, speed = np.array(line.compression), np.array(line.speedup)
    depths = np.linspace(0.01, 0.99, 981)
    losses = [((rate / (1 + (rate - 1) * d) - speed) ** 2).sum() for d in depths]
    [fit] = [
        r for r in rows
        if r.row == "Vicuna-7B SpecBound" and r.column == "depth fraction, gamma = CR"
    ]  # fmt: skip
    assert fit.ours == pytest.approx(depths[int(np.argmin(losses))], abs=1e-3)


def rounds_to(value: float, printed: float, digits: int) -> bool:
    """Whether `value` may have been printed as `printed`, a half rounding either way."""
    return abs(value - printed) <= 0.5 * 10**-digits + 1e-9


def test_averages_and_gains_recompute_where_the_notes_do_not_say_otherwise() -> None:
    rows = quantity_rows()
    for row in found(rows, "GammaTune Table 2", "of its pairs"):
        assert rounds_to(row.ours or 0, row.published or 0, 2), row
    for row in found(rows, "CSD main results", "gain"):
        assert rounds_to(row.ours or 0, row.published or 0, 1), row
    for row in found(rows, SPECBOUND, "Overall", " SpecBound"):
        assert rounds_to(row.ours or 0, row.published or 0, 2), row
    differing = [
        r.row for r in found(rows, "SpecBound Table 2", "Overall")
        + found(rows, "SpecBound Table 4", "Overall")
        if abs((r.ours or 0) - (r.published or 0)) > 0.01
    ]  # fmt: skip
    assert differing == [
        "temperature sampling (T=0.3)", "temperature sampling (T=1.0)",
        "top-p sampling (p=0.9)", "RTX 3090",
    ]  # fmt: skip


def test_stated_contradictions_follow_from_the_tables() -> None:
    medusa = [line for (_, name), line in SPECBOUND_1.items() if name == "Medusa"]
    above = [s > c for line in medusa for c, s in zip(line.compression, line.speedup, strict=True)]
    assert (sum(above), len(above)) == (23, 24)
    line = SPECBOUND_1["Codellama-13B-Instruct", "SpecBound"]
    costs = dict(zip(TASKS, np.divide(line.compression, line.speedup), strict=True))
    assert round(costs.pop("RAG"), 2) == 1.18
    assert (round(min(costs.values()), 2), round(max(costs.values()), 2)) == (1.41, 1.59)
    others = [s for t, s in zip(TASKS, line.speedup, strict=True) if t != "RAG"]
    assert round(float(np.mean(others)), 2) == 2.14
    table = published.CMASD_3
    ratios = {v: table.number(v, "Speed") / table.number(v, "Tok") for v in list(table.cells)[1:]}
    assert round(ratios.pop("CM-ASD (full)"), 2) == 1.10
    assert (round(min(ratios.values()), 2), round(max(ratios.values()), 2)) == (0.99, 1.13)
    for name in TASKS[:0] + tuple(published.CMASD_1.columns):
        fast = published.CMASD_1.number("SpecDec(k=25)", name)
        assert fast > published.CMASD_1.number("CM-ASD", name)
    gt = [r.ours for r in quantity_rows() if r.column == "c = T_target / T_draft"]
    assert sorted(round(c or 0, 1) for c in gt) == [1.9, 3.6, 8.1, 55.6]
    assert len({text for _, text in CONTRADICTIONS}) == len(CONTRADICTIONS)
    assert len(notes_on(SPECBOUND)) == 3


def test_every_published_cell_has_a_row(rows: list[Row]) -> None:
    cells = Counter((r.table, r.row, r.column) for r in rows)
    assert max(cells.values()) == 1
    for table in TABLES:
        for name, values in table.cells.items():
            for column, value in zip(table.columns, values, strict=True):
                if value is None or (table.name, column) == ("CSD main results", "gain"):
                    continue
                assert (table.name, name, column) in cells
    for row in rows:
        assert (row.kind == WEIGHTS) == (row.ours is None and row.kind not in (EXPERIMENT,))
        assert row.kind in (QUANTITY, EXPERIMENT, WEIGHTS)
    assert {r.table for r in rows if r.kind == EXPERIMENT} >= {
        "GammaTune Table 2", "CM-ASD Table III", "CSD ablation", "SpecBound Table 5"
    }  # fmt: skip


def test_experiment_rows_come_from_the_named_methods(ours: Ours, rows: list[Row]) -> None:
    policy, rule = build(METHODS["cm-asd-fixed-window"], ours.trace)
    log = replay(ours.trace, policy, rule)
    label = CMASD_ROWS["cm-asd-fixed-window"]
    [tok] = [r for r in rows if r.row == label and r.column == "Tok"]
    assert tok.ours == pytest.approx(log.rounds["emitted"].mean())
    assert "approximate" in tok.note
    [speed] = [r for r in rows if r.row == label and r.column == "Speed"]
    plain = price(autoregressive(log), LATENCY).total_s
    assert speed.ours == pytest.approx(plain / price(log, LATENCY).total_s)
    [base] = [r for r in rows if r.row == "Transformer-base (b=5)" and r.column == "Speed"]
    assert base.ours == pytest.approx(1)
    csd = {r.row: r.ours for r in rows if r.table == "CSD ablation" and r.column == "MATH500_AR"}
    assert list(csd) == list(CSD_ROWS.values())
    # The gate alone forgives whatever both together do, and either more than none.
    exact, _, gate, both, _ = (csd[name] or 0 for name in CSD_ROWS.values())
    assert exact <= both <= gate


def test_gammatune_reference_is_one_and_policies_vary_less(ours: Ours) -> None:
    rows = {(r.row, r.column): r.ours or 0 for r in gammatune_rows(ours)}
    assert rows["SpecDecode", "average_mean"] == pytest.approx(1)
    assert rows["GammaTune", "average_sd"] < rows["SpecDecode", "average_sd"]


def test_distribution_covers_all_prompts(ours: Ours) -> None:
    policy, _ = build(METHODS["gammatune"], ours.trace)
    rows = distribution_rows(replay(ours.trace, policy), ours, "here")
    assert len(rows) == 5
    assert sum(r.ours or 0 for r in rows) == pytest.approx(100)


def test_a_real_run_is_preferred_to_a_replay(ours: Ours) -> None:
    chosen = METHODS["cm-asd"]
    policy, rule = build(chosen, ours.trace)
    rounds = [[Round(1, 2, 2, 3, 2, 1)] for _ in ours.trace.requests]
    requests = [r.__class__(r.id, r.category, r.prompt_length, 4, 60, "eos")
                for r in ours.trace.requests]  # fmt: skip
    log = RoundLog(
        RoundLog.pack(rounds), requests, describe(policy), verify=describe_rule(rule),
        mismatched=np.zeros(len(rounds), np.int32),
    )  # fmt: skip
    with_column = Trace(
        {**ours.trace.columns, "target_path_logprob": np.full(len(ours.trace), -1, np.float32)},
        ours.trace.requests, ours.trace.max_gamma, ours.trace.meta,
    )  # fmt: skip
    outputs = [Output(r.id, [1, 2, 3, 4], "a b", "a b", -2.0) for r in requests]
    mine = Ours(with_column, LATENCY, [RealRun(log, outputs, {})])
    seen = outcome(mine, policy, rule)
    assert seen.how == REAL
    assert seen.tokens_per_round == 3
    assert seen.quality is not None
    assert seen.quality.log_likelihood == pytest.approx(-0.5)
    assert outcome(mine, policy, parse_rule("lossy-global")).how != REAL


def test_methods_are_complete_and_buildable(ours: Ours) -> None:
    assert len(CMASD_ABLATION) == len(published.CMASD_3.cells) == 8
    assert len(CSD_ABLATION) == 5
    for name, chosen in METHODS.items():
        policy, rule = build(chosen, ours.trace)
        assert describe(policy), name
        assert rule.lossless == (chosen.rule == "exact")
    with pytest.raises(DraftsimError, match="did you mean 'cm-asd'"):
        method("cm-asdd")
    assert all(rule != "exact" for _, rule, _ in REAL_RUNS)
    assert len(REAL_RUNS) == 7 + 4


def test_missing_cells_need_the_papers_weights() -> None:
    table = PaperTable("T", "source", ("a", "b"), {"x": (1.0, None), "y": (2.0, 3.0)})
    done = [Row("T", "y", "a", 2.0, 2.5, EXPERIMENT)]
    assert table.missing(done) == [
        Row("T", "x", "a", 1.0, None, WEIGHTS), Row("T", "y", "b", 3.0, None, WEIGHTS)
    ]  # fmt: skip
    assert table.number("y", "b") == 3
    assert np.isnan(table.number("x", "b"))


def test_a_recording_without_scores_still_gives_the_other_rows() -> None:
    """An imported log has neither signals nor target scores."""
    bare = synthetic_trace(0.7, requests=4, tokens=40, seed=2)
    rows = side_by_side(Ours(bare, LATENCY))
    said = [r for r in rows if r.row == "our pair"]
    assert {r.table for r in said} >= {"GammaTune Table 2", "CM-ASD Table III", "CSD ablation"}
    assert all("record" in r.note for r in said)
    assert len([r for r in rows if r.kind == QUANTITY]) == len(quantity_rows())


def test_the_command_writes_the_rows(
    ours: Ours, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_trace(ours.trace, tmp_path / "trace.parquet")
    write_latency(LATENCY, tmp_path / "latency.parquet")
    monkeypatch.setattr(
        sys, "argv", ["draftsim", "papers", "--trace", str(tmp_path), "--json", "-"]
    )
    with pytest.raises(SystemExit) as stop:
        draftsim.main()
    assert not stop.value.code
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["schema"], document["command"]) == (1, "papers")
    assert len(document["results"]) == len(rows)
    fields = ["table", "row", "column", "published", "ours", "kind"]
    assert list(document["results"][0])[:6] == fields
    assert "23 of 24 cells" in " ".join(captured.err.split())
