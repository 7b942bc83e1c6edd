"""Draft lengths predicted from totals and from few runs, held against public measurements."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import outside
from benchmarks.server_left_out import left_out, summary
from commands.imports import _lengths
from docs.server_tables import server_outside
from policies.lengths.basic import Fixed
from simulator.aggregate.acceptance import TwoState, emitted_of_rate, emitted_rows
from simulator.check import recorded_checks
from simulator.formulas.leviathan import expected_tokens
from tests.conftest import Run
from tests.logs import vllm_counters
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import MATCH
from traces.errors import DraftsimError
from traces.importers.totals import Totals
from traces.replay.run import replay
from traces.store.recordings import find_trace


@pytest.mark.parametrize("name", ["bundled", "smollm2-cpu"])
def test_a_recordings_rate_gives_intervals_that_hold_its_rounds(name: str) -> None:
    """Real rounds at every draft length, within four standard errors of the interval.

    Independent positions are outside by more than that somewhere, or the test shows nothing.
    """
    trace = find_trace(name)
    rows = {}
    for formula, where, closed, measured in recorded_checks(trace, gammas=(2, 4, 8)):
        if "two-state" in formula:
            rows[where.split()[0]] = (closed, measured)
    assert len(rows) == 3
    for closed, measured in rows.values():
        assert abs(closed - measured.value) < 4 * measured.standard_error


@pytest.mark.parametrize("tokens", [5, 9])
def test_drafts_as_long_as_the_output_are_not_checked(tokens: int) -> None:
    trace = synthetic_trace(0.7, requests=20, tokens=tokens, seed=1)
    assert {where.split()[0] for _, where, *_ in recorded_checks(trace)} >= {"gamma=1"}


def test_a_made_up_burst_lies_within_and_reading_it_as_even_does_not() -> None:
    """Stretches of twenty tokens, of an unevenness (0.19) that the family spans."""
    trace = synthetic_trace(Bursty(0.9, 0.5, 20, 20), requests=1, tokens=60_000, seed=9)
    rate = float((trace.columns["match"][trace.on_path] == MATCH).mean())
    outside = 0
    for gamma in (3, 6):
        emitted = replay(trace, Fixed(gamma)).rounds["emitted"].astype(float)
        # Neighbouring rounds are alike: blocks of them are not.
        blocks = np.array([block.mean() for block in np.array_split(emitted, 100)])
        error = blocks.std(ddof=1) / np.sqrt(len(blocks))
        span = emitted_of_rate(rate, gamma)
        assert span.low - 4 * error < emitted.mean() < span.high + 4 * error
        outside += abs(expected_tokens(rate, gamma) - emitted.mean()) > 4 * error
    assert outside


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.75, 1.0])
def test_intervals_are_around_the_closed_form_and_exact_where_nothing_is_open(rate: float) -> None:
    for gamma in (1, 4):
        span = emitted_of_rate(rate, gamma)
        assert span.value == pytest.approx(expected_tokens(rate, gamma))
        assert 1 <= span.low <= span.value <= span.high <= gamma + 1 + 1e-9
        if rate in (0.0, 1.0):
            assert span.high - span.low < 1e-9
    with pytest.raises(DraftsimError, match=r"acceptance is 1\.2, expected 0 to 1"):
        emitted_of_rate(1.2, 3)


def test_counts_tell_lengths_only_where_all_drafts_were_as_long() -> None:
    def known(totals: Totals) -> dict[int, float]:
        rows = _lengths(totals)
        return {row["draft_length"]: row["tokens_a_round"] for row in rows if row["known"]}

    assert known(Totals(10, 20, 15, 2, (9, 6))) == pytest.approx({1: 1.9, 2: 2.5})
    assert known(Totals(10, 20, 15, 2)) == {2: 2.5}
    assert _lengths(Totals(10, 16, 15, 2, (9, 6))) == []
    rows = {row["draft_length"]: row for row in emitted_rows({2: 2.2})}
    assert rows[2]["known"]
    assert rows[2]["low"] == rows[2]["high"] == 2.2
    for length in (4, 8):
        assert rows[length]["low"] < rows[length]["high"]
        assert rows[length]["low"] <= rows[length]["independent"] <= rows[length]["high"] + 0.2


def test_imported_totals_are_told_at_other_lengths(run: Run, tmp_path: Path) -> None:
    """A server's counters, of drafts of two: the interval holds what a burst gives at five."""
    made = TwoState(0.7, uneven=0.2, memory=0.9)
    survival = made.survival(2)
    accepted = [round(10_000 * float(s)) for s in survival]
    file = vllm_counters(tmp_path / "metrics.txt", 10_000, accepted)
    document = run("import", "prometheus", file, "--json", "-").document
    rows = {row["draft_length"]: row for row in document["tokens_by_length"]}
    assert rows[1]["known"]
    assert rows[2]["known"]
    assert rows[5]["low"] <= made.emitted(5) <= rows[5]["high"]
    assert rows[5]["low"] < rows[5]["high"]
    shown = run("import", "prometheus", file)
    assert "Tokens per round at other draft lengths" in shown.out


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


@pytest.fixture(scope="module")
def printed() -> str:
    """The text that the benchmark prints."""
    import contextlib
    import io

    from benchmarks import one_pass

    if not one_pass.TABLES.is_dir():
        pytest.skip("needs the public tables in ../shared/tables, next to the checkout")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        one_pass.main()
    return text.getvalue()


def errors(printed: str, title: str) -> list[float]:
    """Return the errors of the rows below a title that were not given."""
    part = printed[printed.index(f"{title}:") :].partition("|error|")[0]
    return [abs(float(error)) for error in re.findall(r"([-+][\d.]+)%$", part, re.MULTILINE)]


def test_both_drafters_runs_are_predicted_from_part_of_them(printed: str) -> None:
    for title, count, median in (
        ("52362, none", 4, 5), ("52362, fixed", 4, 12), ("52362, adaptive", 5, 15),
        ("32628, EAGLE-3", 20, 8),
    ):  # fmt: skip
        found = errors(printed, title)
        assert len(found) == count, title
        assert np.median(found) < median, title


def test_one_pass_gains_as_the_thread_says(printed: str) -> None:
    """Within 6 points at each of four loads; and its time per token hardly depends on K."""
    pairs = re.findall(r"predicted ([-+\d.]+)%, published ([-+\d.]+)%", printed)
    assert len(pairs) == 4
    assert all(abs(float(mine) - float(theirs)) < 6 for mine, theirs in pairs)
    found = re.findall(r"EAGLE-3 ([\d.]+), one pass predicted ([\d.]+)", printed)
    eagle3, at_once = np.array(found, dtype=float).T
    assert len(found) == 6
    assert at_once.max() / at_once.min() < 0.5 * (1 + eagle3.max() / eagle3.min())
