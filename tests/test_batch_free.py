"""Latencies that know one batch size say nothing of others, unless somebody assumes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.lengths.basic import Autoregressive, Fixed
from simulator.pricing import autoregressive, price
from simulator.serving import ClosedLoop, Limits, Scenario, simulate
from simulator.whatif.batching import InBatches
from tests.conftest import Run
from tests.serving import table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import BATCH_FREE_SAID, LatencyTable
from traces.replay.run import replay
from traces.store.files import write_latency, write_trace
from traces.store.recordings import parse_latency

CONSTANT = "const:target=0.02,draft=0.002,verify=0.025"


def trace() -> Trace:
    return synthetic_trace(0.7, requests=6, tokens=30)


def measured(batches: tuple[int, ...] = (1,), widths: tuple[int, ...] = (1, 5)) -> LatencyTable:
    rows = [
        (model, "forward", b, n, c, s * (1 + 0.01 * b * n), 0.0, 9)
        for b in batches for n in widths for c in (8, 400)
        for model, s in (("target", 0.02), ("draft", 0.002))
    ]  # fmt: skip
    return table_of(rows)


@pytest.mark.invariant(5)
@pytest.mark.parametrize("table", [parse_latency(CONSTANT), measured()])
def test_every_way_of_asking_for_a_batch_is_refused(table: LatencyTable) -> None:
    log = replay(trace(), Fixed(3))
    scenario = Scenario(ClosedLoop(4), Limits(max_batch=4), 6)
    with pytest.raises(DraftsimError, match="--assume-batch-free"):
        price(log, table, batch=4)
    with pytest.raises(DraftsimError, match="batch 1 alone"):
        InBatches(log, 4, resamples=2).at_latency(table)
    with pytest.raises(DraftsimError, match="profile --batch"):
        simulate(trace(), table, Fixed(3), scenario)
    assert price(log, table).total_s > 0
    # One sequence at a time is known.
    alone = Scenario(ClosedLoop(1), Limits(max_batch=1), 6)
    row = simulate(trace(), table, Fixed(3), alone).row()
    assert row["fidelity"] == "exact"


@pytest.mark.invariant(5)
@pytest.mark.parametrize("table", [parse_latency(CONSTANT), measured()])
def test_an_assumption_is_answered_and_named(table: LatencyTable) -> None:
    free = table.assumed_batch_free()
    log = replay(trace(), Fixed(3))
    assert price(log, free, batch=4).total_s == pytest.approx(price(log, free).total_s)
    scenario = Scenario(ClosedLoop(4), Limits(max_batch=4), 6)
    row = simulate(trace(), free, Autoregressive(), scenario).row()
    assert BATCH_FREE_SAID in row["unpriced"]
    assert row["fidelity"] == "approximate"
    # What was measured at batches is never called assumed.
    several = measured((1, 8))
    assert several.assumed_batch_free() is several
    assert several.said_batch_free(8) == ""
    row = simulate(trace(), several, Autoregressive(), scenario).row()
    assert BATCH_FREE_SAID not in row["unpriced"]


def test_widths_that_nobody_measured_are_refused_too() -> None:
    narrow = measured(widths=(1,))
    log = replay(trace(), Fixed(3))
    with pytest.raises(DraftsimError, match="over 1 token"):
        price(log, narrow)
    assert price(autoregressive(log), narrow).total_s > 0


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_trace(trace(), tmp_path / "t.parquet")
    write_latency(measured(), tmp_path / "l.parquet")
    return ["--trace", str(tmp_path / "t.parquet"), "--latency", str(tmp_path / "l.parquet")]


def test_every_command_says_what_to_do(run: Run, files: list[str], tmp_path: Path) -> None:
    serving = ["serve", *files, "--policy", "fixed:gamma=2", "--batch", "1,4", "--requests", "8"]
    swept = ["--policy", "fixed:gamma=2", "--jobs", "1"]
    sweeping = ["sweep", *files, *swept, "--batch", "1,4", "--resamples", "0"]
    ratios = ["sweep", *files[:2], *swept, "--c", "0.1", "--batch", "4"]
    tuning = [
        ["tune", "--engine", engine, *files, "--batch", "1,4", "--resamples", "4"]
        for engine in ("vllm", "sglang")
    ]
    for command in (serving, sweeping, ratios, *tuning):
        result = run(*command)
        assert "--assume-batch-free" in result.refusal
        assert "Traceback" not in result.err
    result = run(*serving, "--assume-batch-free", "--json", "-", "--plots", tmp_path / "p").ok()
    rows = result.rows
    by_batch = {row["batch"]: row for row in rows}
    assert BATCH_FREE_SAID in by_batch[4]["unpriced"]
    assert BATCH_FREE_SAID not in by_batch[1]["unpriced"]
    assert BATCH_FREE_SAID in result.err
    for command in (sweeping, ratios):
        result = run(*command, "--assume-batch-free", "--json", "-").ok()
        rows = result.rows
        assert {row["assumed"] for row in rows} == {BATCH_FREE_SAID}
    for command in tuning:
        document = run(*command, "--assume-batch-free", "--json", "-").document
        assert [row["assumed"] for row in document["results"]] == ["", BATCH_FREE_SAID]
        assert any(f"batch 4: assumed to cost nothing: {BATCH_FREE_SAID}" in w
                   for w in document["warnings"])  # fmt: skip
