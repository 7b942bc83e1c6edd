"""Draft lengths from a rate or totals: intervals that cover bursty acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from simulator.aggregate.acceptance import TwoState, emitted_of_rate, emitted_rows, known_totals
from simulator.check import recorded_checks
from simulator.formulas.leviathan import expected_tokens
from tests.conftest import Run
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import MATCH
from traces.errors import DraftsimError
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
    assert known_totals(1.5, 2, [0.9, 0.6], fixed=True) == {1: 1.9, 2: 2.5}
    assert known_totals(1.5, 2, None, fixed=True) == {2: 2.5}
    assert known_totals(1.5, 2, [0.9, 0.6], fixed=False) == {}
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
    counts = [round(10_000 * float(s)) for s in survival]
    text = "\n".join([
        "vllm:spec_decode_num_drafts_total 10000.0",
        "vllm:spec_decode_num_draft_tokens_total 20000.0",
        f"vllm:spec_decode_num_accepted_tokens_total {sum(counts)}.0",
        *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {count}.0'
          for i, count in enumerate(counts)),
    ])  # fmt: skip
    file = tmp_path / "metrics.txt"
    file.write_text(text + "\n")
    ran = run("import", "prometheus", file, "--json", "-")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out[ran.out.index("{") :])
    rows = {row["draft_length"]: row for row in document["tokens_by_length"]}
    assert rows[1]["known"]
    assert rows[2]["known"]
    assert rows[5]["low"] <= made.emitted(5) <= rows[5]["high"]
    assert rows[5]["low"] < rows[5]["high"]
    shown = run("import", "prometheus", file)
    assert "Tokens per round at other draft lengths" in shown.out
