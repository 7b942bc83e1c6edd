"""The papers' own pairs on their GPUs, priced from operators."""

from __future__ import annotations

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from simulator.bootstrap import ratio_of_sums
from simulator.papers.ours import Ours
from simulator.papers.settings import (
    TABLE,
    Costs,
    break_even_interval,
    costs_of,
    setting_rows,
    speedups,
)
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable
from traces.replay.vectorised import replay_many
from traces.store.recordings import find_latency, find_trace


def test_rounds_at_break_even_take_what_plain_decoding_takes() -> None:
    trace = synthetic_trace(0.7, requests=40, tokens=300, max_gamma=8, seed=1)
    [log] = replay_many(trace, [("fixed", Fixed(4))])
    costs = Costs(0.1, 1.2)
    c = costs.break_even_c(4, float(log.rounds["emitted"].mean()))
    table = LatencyTable.constant(0.01, c * 0.01, 0.012)
    # The last round of a request drafts less than four tokens.
    assert speedups([log], table)[0] == pytest.approx(1, abs=0.02)
    alpha = costs.break_even_alpha(4)
    assert (1 - alpha**5) / (1 - alpha) == pytest.approx(4 * 0.1 + 1.2, abs=2e-3)
    assert np.isnan(Costs(1.0, 1.5).break_even_alpha(4))
    assert costs_of(table, 4, 100).verify == pytest.approx(1.2)


def test_the_interval_of_a_break_even_is_that_of_tokens_per_round() -> None:
    # Prompts alike in distribution: the standard error of a ratio of sums, by the delta method.
    trace = synthetic_trace(0.7, requests=80, tokens=100, max_gamma=8, concentration=4.0, seed=3)
    [log] = replay_many(trace, [("fixed", Fixed(4))])
    costs, rounds = Costs(0.1, 1.2), log.rounds
    low, high = break_even_interval(log, costs, 4)
    tokens = np.bincount(rounds["request"], rounds["emitted"])
    error = ratio_of_sums(tokens, np.bincount(rounds["request"]))
    middle = costs.break_even_c(4, error.value)
    assert low < middle < high
    assert (high - low) / 2 == pytest.approx(1.96 * error.standard_error / 4, rel=0.15)
    assert all(np.isnan(break_even_interval(one, costs, 4)).all() for one in replay_many(
        trace.select([0]), [("fixed", Fixed(4))]
    ))  # fmt: skip


def test_every_setting_has_rows_and_says_what_agrees() -> None:
    trace = find_trace("qwen-coder-cpu")
    rows = setting_rows(Ours(trace, find_latency("a100/llama-2-7b+vicuna-68m")))
    assert {row.table for row in rows} == {TABLE}
    labels = {row.row for row in rows}
    for part in ("Vicuna-7B + 68M", "13B + 160M", "70B + 8B", "Vicuna-7B, H800", "batch 16"):
        assert any(part in label for label in labels)
    found = {(row.row, row.column): row for row in rows}
    for row in rows:
        if row.published is not None and row.ours is not None:
            assert row.note.startswith(("agrees: ", "differs: "))
        if row.column == "break-even c":
            assert 0 < (row.ours or 0) < 1.1
    # A draft of 8B costs more of a 70B's pass on four GPUs than 68M of a 7B's on one.
    c = [found[label, "c"].ours for label in labels if "H100" in label and "70B" in label]
    small = found["Vicuna-7B + 68M, H100", "c"].ours
    assert small is not None
    assert c[0] is not None
    assert c[0] > 5 * small
    assert 1 < (found["Vicuna-7B + 68M, H100", "GammaTune over fixed lengths"].ours or 0) < 1.3
