"""The papers' tables and ours: where every row comes from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from commands.common.output import emit
from commands.papers import shown_papers
from policies.core import Round
from policies.lengths.basic import Fixed
from policies.registry import describe
from policies.rules.registry import parse_rule
from simulator import published
from simulator.papers.cmasd import CMASD_ROWS
from simulator.papers.compare import REAL_RUNS, side_by_side
from simulator.papers.csd import CSD_ROWS
from simulator.papers.gammatune import APPENDIX, REFERENCE, gammatune_rows
from simulator.papers.ours import EXPERIMENT, QUANTITY, REAL, WEIGHTS, Ours, Row, outcome
from simulator.papers.quantities import quantity_rows
from simulator.papers.specbound import distribution_rows
from simulator.pricing import autoregressive, price
from simulator.published import TABLES
from tests.conftest import Run
from tests.scored import LATENCY, scored_trace, write_scored
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.methods import CMASD_ABLATION, CSD_ABLATION, FIXED_TAUS, METHODS, build, method
from traces.store.outputs import Output, RealRun


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(scored_trace(), LATENCY)


@pytest.fixture(scope="module")
def rows(ours: Ours) -> list[Row]:
    return side_by_side(ours)


def test_every_published_cell_has_a_row(rows: list[Row]) -> None:
    cells = Counter((r.table, r.row, r.column) for r in rows)
    assert max(cells.values()) == 1
    for table in TABLES.values():
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
    assert tok.ours == pytest.approx(log.rounds["accepted"].mean())
    [emitted] = [r for r in rows if r.row == label and r.column == "emitted per round"]
    assert emitted.ours == pytest.approx(log.rounds["emitted"].mean())
    assert "approximate" in tok.note
    [speed] = [r for r in rows if r.row == label and r.column == "Speed"]
    plain = price(autoregressive(log), LATENCY).total_s
    assert speed.ours == pytest.approx(plain / price(log, LATENCY).total_s)
    [base] = [r for r in rows if r.row == "Transformer-base (b=5)" and r.column == "Speed"]
    assert base.ours == pytest.approx(1)
    csd = {r.row: r.ours for r in rows if r.table == "CSD ablation" and r.column == "MATH500_AR"}
    assert list(csd)[: len(CSD_ROWS)] == list(CSD_ROWS.values())
    # The gate alone forgives whatever both together do, and either more than none.
    exact, _, gate, both, _ = (csd[name] or 0 for name in CSD_ROWS.values())
    assert exact <= both <= gate


def test_gammatune_reference_is_one_and_policies_vary_less(ours: Ours) -> None:
    rows = {(r.row, r.column): r.ours or 0 for r in gammatune_rows(ours)}
    assert rows["SpecDecode", "average_mean"] == pytest.approx(1)
    assert rows["GammaTune", "average_sd"] < rows["SpecDecode", "average_sd"]


def test_appendix_a_takes_table_2_apart(ours: Ours) -> None:
    rows = gammatune_rows(ours)
    apart = {(r.row, r.column): r.ours for r in rows if r.table == APPENDIX}
    assert all(
        "no figure of the appendix is at hand" in r.note for r in rows if r.table == APPENDIX
    )
    trace = ours.trace

    def seconds(gamma: int, only: str | None) -> tuple[float, float]:
        """Plain and speculative, at one cost a pass and its drafts."""
        log = replay(trace, Fixed(gamma))
        mine = [i for i, r in enumerate(trace.requests) if only in (None, r.category)]
        rounds = log.rounds[np.isin(log.rounds["request"], mine)]
        verified = np.where(rounds["drafted"] > 0, 0.0150, 0.0143).sum()
        tokens = sum(trace.requests[i].tokens - 1 for i in mine)
        return 0.0143 * tokens, verified + 0.00176 * rounds["draft_forwards"].sum()

    for gamma in (1, 4, 12):
        plain, mine = seconds(gamma, None)
        assert apart[f"initial gamma {gamma}", REFERENCE] == pytest.approx(plain / mine)
    categories = {r.category for r in trace.requests}
    for category in categories:
        # What the means are relative to.
        assert apart[category, REFERENCE] == pytest.approx(1)
    names = {row for row, _ in apart if not row.startswith("initial gamma")}
    assert names == categories


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
        RoundLog.pack(rounds), requests, chosen.policy, verify=chosen.rule,
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
    assert len(REAL_RUNS) == 7 + 2 * len(FIXED_TAUS) + 4


def test_a_recording_without_scores_still_gives_the_other_rows() -> None:
    """An imported log has neither signals nor target scores."""
    bare = synthetic_trace(0.7, requests=4, tokens=40, seed=2)
    rows = side_by_side(Ours(bare, LATENCY))
    said = [r for r in rows if r.row == "our pair"]
    assert {r.table for r in said} >= {"GammaTune Table 2", "CM-ASD Table III", "CSD ablation"}
    assert all("record" in r.note or "several: measure them" in r.note for r in said)
    assert len([r for r in rows if r.kind == QUANTITY]) == len(quantity_rows())


def test_the_command_writes_the_rows(run: Run, rows: list[Row], tmp_path: Path) -> None:
    write_scored(tmp_path)
    short = run("papers", "--trace", tmp_path, "--json", "-")
    compared = [row for row in rows if row.kind != WEIGHTS]
    assert len(short.rows) == len(compared)
    assert f"{len(rows) - len(compared)} of {len(rows)} published cells" in short.err
    ran = run("papers", "--trace", tmp_path, "--missing", "--json", "-")
    found = ran.rows
    assert ran.document["command"] == "papers"
    assert len(found) == len(rows)
    assert list(found[0])[:6] == ["table", "row", "column", "published", "ours", "kind"]
    assert "23 of 24 cells" in ran.said


def test_tables_fit_a_hundred_columns_and_say_each_note_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.common.output.WIDEST", 100)
    long = "without adaptive verification (adaptive k, fixed tau), and longer still"
    rows = [
        Row("T 1", long, "gain over SpecDecode, percent", 12345.678, 0.98765, EXPERIMENT, "a; b"),
        Row("T 1", long, "speed", None, 1.5, EXPERIMENT, "b; " + "many words " * 20, "never fires"),
        Row("T 2", "[red]row", "speed", 2.0, None, EXPERIMENT, ""),
    ]
    emit("papers", [], None, tables=lambda: shown_papers(rows))
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 100
    for number in ("12,346", "0.988", "1.50 *", "2.00", "[red]row"):
        assert number in printed
    assert [line for line in lines if line.strip() == "2  b"] == ["2  b"]
    assert "* never fires" in printed
    assert printed.count("without adaptive") == 1
