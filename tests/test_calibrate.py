"""A server's costs from its own runs: recovered, bounded, named where they cannot be known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.calibrate_recovery import LOADS, recovery
from simulator.aggregate.advice import (
    best_lengths,
    candidates,
    loads_of,
    next_run,
    predicted,
)
from simulator.aggregate.fit import ACCEPTANCE, calibrate
from simulator.aggregate.server import COSTS, Server, ServerRun
from simulator.aggregate.table import read_runs
from tests.conftest import Run
from traces.errors import DraftsimError
from traces.store.files import read_latency

TRUTH = Server(
    fixed_s=0.012, token_s=4e-5, context_s=2e-7, draft_s=1.5e-3, draft_token_s=1e-5,
    step_s=0.003, threshold=32,
)  # fmt: skip
EMITTED = {0: 1.0, 1: 1.7, 2: 2.2, 4: 2.8}


def measured(
    truth: Server = TRUTH, loads: tuple[tuple[int, int, int], ...] = LOADS, told: bool = True
) -> list[ServerRun]:
    return [
        ServerRun(b, k, truth.tokens_per_s(b, k, c, EMITTED[k]), c, EMITTED[k] if told else None)
        for b, k, c in loads
    ]


@pytest.mark.parametrize("threshold", [32, None])
def test_exact_runs_give_the_costs_back(threshold: int | None) -> None:
    """With the step named, and found."""
    found = calibrate(measured(), noise=1e-3, threshold=threshold)
    assert found.server.threshold == 32
    assert found.server.costs == pytest.approx(TRUTH.costs, rel=1e-4)
    assert not found.undetermined
    assert max(map(abs, found.misses)) < 1e-6


def test_no_step_is_seen_where_there_is_none() -> None:
    random = np.random.default_rng(3)
    smooth = Server(*TRUTH.costs[:5])
    for _ in range(5):
        runs = [
            replace(run, tokens_per_s=run.tokens_per_s * float(np.exp(random.normal(0, 0.01))))
            for run in measured(smooth)
        ]
        assert calibrate(runs).server.threshold is None


@pytest.mark.parametrize("step", [False, True])
def test_intervals_hold_as_often_as_they_claim(step: bool) -> None:
    """All costs at once, in 95 % of trials: within four standard errors of that."""
    found = recovery(60, step=step, seed=1)
    error = np.sqrt(0.95 * 0.05 / found.trials)
    assert found.recovered / found.trials > 0.95 - 4 * error


def test_what_runs_do_not_tell_is_named() -> None:
    alone = ((1, 0, 500), (1, 2, 500), (1, 4, 500), (1, 1, 500), (1, 0, 500))
    found = calibrate(measured(loads=alone))
    assert {"context_s", "draft_token_s"} <= set(found.undetermined)
    assert not set(found.undetermined) & set(found.intervals)
    best = next_run(found, measured(loads=alone))
    assert best.batch > 1 or best.context != 500
    assert 0 < best.narrows <= 1


def test_acceptance_is_fitted_where_it_is_not_told() -> None:
    smooth = Server(*TRUTH.costs[:5], acceptance=0.7)
    runs = [
        ServerRun(b, k, smooth.tokens_per_s(b, k, c), c) for b, k, c in LOADS
    ]  # fmt: skip
    found = calibrate(runs, noise=1e-3)
    assert found.intervals[ACCEPTANCE].holds(0.7)
    assert found.server.acceptance == pytest.approx(0.7, abs=0.01)
    assert found.server.costs[:4] == pytest.approx(smooth.costs[:4], rel=0.02)


def test_predictions_hold_what_made_the_runs() -> None:
    runs = measured()
    found = calibrate(runs, noise=0.002)
    for load in predicted(found, runs, [(2, 0, 500), (16, 2, 3000), (24, 4, 1000)]):
        emitted = EMITTED[load.k]
        assert load.tokens_per_s.holds(
            TRUTH.tokens_per_s(load.batch, load.k, load.context, emitted)
        )
    assert {k for _, k, _ in candidates(runs)} == {0, 1, 2, 3, 4}
    wide = predicted(found, runs, [(8, 3, 500)])[0].tokens_per_s
    assert wide.high > wide.low  # no run tells the acceptance of three


def beside(truth: Server, loads: tuple[tuple[int, int, int], ...], off: float) -> list[ServerRun]:
    """Runs of which the fastest large ones are faster than any cost explains, by a factor."""
    return [
        replace(run, tokens_per_s=run.tokens_per_s * (off if run.batch * (run.k + 1) > 60 else 1))
        for run in measured(truth, loads)
    ]


def test_no_cost_is_negative_and_no_context_is_faster_for_being_longer() -> None:
    truth = replace(TRUTH, context_s=0.0, step_s=0.0, threshold=None)
    loads = tuple((b, k, 350 if k else 400) for b in (1, 4, 16, 32, 64) for k in (0, 1, 2))
    runs = beside(truth, loads, 1.15)
    found = calibrate(runs, find_step=False)
    names = list(found.intervals)
    assert (found.server.costs[:5] >= 0).all()
    assert 0.0 in found.server.costs[:5]  # which would be negative
    for name in names:
        interval = found.intervals[name]
        assert 0 <= interval.low <= interval.value <= interval.high
        assert interval.value == getattr(found.server, name)
    for batch in (1, 64, 128):
        for k in (0, 2):
            at = [(batch, k, float(c)) for c in (350, 1400, 5600)]
            speeds = [load.tokens_per_s for load in predicted(found, runs, at)]
            for shorter, longer in pairwise(speeds):
                assert longer.value <= shorter.value
                assert longer.high <= shorter.high * (1 + 1e-9)
                assert longer.low <= longer.value <= longer.high


def test_an_acceptance_is_a_chance_and_so_are_its_bounds() -> None:
    smooth = Server(*TRUTH.costs[:5], acceptance=0.85)
    loads = ((1, 0, 500), (1, 1, 500), (1, 2, 500), (4, 0, 500), (4, 2, 500), (8, 0, 500))
    random = np.random.default_rng(2)
    runs = [
        ServerRun(b, k, smooth.tokens_per_s(b, k, c) * float(np.exp(random.normal(0, 0.1))), c)
        for b, k, c in loads
    ]
    acceptance = calibrate(runs, noise=0.2).intervals[ACCEPTANCE]
    assert 0 <= acceptance.low <= acceptance.value <= acceptance.high <= 1
    assert acceptance.high - acceptance.low > 0.3


def test_what_was_measured_is_in_the_answer_and_nothing_else_is_predicted() -> None:
    runs = measured(loads=((1, 0, 500), (1, 2, 500), (1, 4, 500), (6, 0, 500), (6, 1, 500)))
    loads = loads_of(runs)
    assert {(r.batch, r.k, r.context) for r in runs} <= set(loads)
    assert {k for _, k, _ in loads} == {0, 1, 2, 3, 4}
    assert {c for *_, c in loads} == {500}
    rows = predicted(calibrate(runs, noise=0.01), runs, loads)
    best = best_lengths(rows)
    assert [load.batch for load in best] == sorted({b for b, _, _ in loads})
    for load in best:
        rivals = [r.tokens_per_s.value for r in rows if r.batch == load.batch]
        assert load.tokens_per_s.value == max(rivals)
    plain = [run for run in runs if run.k == 0]
    assert {k for _, k, _ in loads_of(plain)} == {0}


def test_vllms_own_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "max_concurrency,num_speculative_tokens,output_throughput,mean_acceptance_length,mean_ttft\n"
        "8,,900.5,,12\n8,3,1500,2.7,11\n"
    )
    assert read_runs(path) == [ServerRun(8, 0, 900.5), ServerRun(8, 3, 1500.0, emitted=2.7)]
    path.write_text("max_concurrency,k\n8,0\n")
    with pytest.raises(DraftsimError, match=r"no tokens_per_s \(or output_throughput"):
        read_runs(path)
    path.write_text("batch,max_concurrency,k,tokens_per_s\n8,8,0,50\n")
    with pytest.raises(DraftsimError, match="has batch and max_concurrency, which are one"):
        read_runs(path)
    for name, value in (("batch", "1000000000"), ("tokens_per_s", "inf"), ("k", "100000")):
        row = {"batch": "1", "k": "0", "tokens_per_s": "50"} | {name: value}
        path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
        with pytest.raises(DraftsimError, match=f"{name} is .*, expected"):
            read_runs(path)


def test_an_engine_that_always_drafts_pays_for_it() -> None:
    always = Server(*TRUTH.costs[:5], always=4)
    assert always.iteration_s(1, 1) - Server(*TRUTH.costs[:5]).iteration_s(1, 1) == pytest.approx(
        3 * (TRUTH.draft_s + TRUTH.draft_token_s)
    )
    runs = [
        ServerRun(b, k, b * EMITTED[k] / float(always.iteration_s(b, k, c)), c, EMITTED[k])
        for b, k, c in LOADS
    ]  # fmt: skip
    # Drafting in every iteration cannot be told from its fixed cost.
    found = calibrate(runs, noise=1e-3, always=4)
    assert "draft_s" in found.undetermined
    assert float(found.server.iteration_s(8, 2, 500)) == pytest.approx(
        float(always.iteration_s(8, 2, 500)), rel=1e-3
    )


def test_impossible_runs_are_refused(tmp_path: Path) -> None:
    for text, message in (
        ("batch,k,tokens_per_s\n1,0,50\n0,1,60\n", "run 2: batch is 0, expected 1 to 65536"),
        ("batch,k\n1,0\n", "has no tokens_per_s"),
        ("batch,k,tokens_per_s,emitted\n1,2,60,3.5\n", "3.5 tokens a round at k = 2"),
        ("batch,k,tokens_per_s,acceptance\n1,2,60,0.7\n", "acceptance of 1 positions at k = 2"),
        ("batch,k,tokens_per_s\n1,0,fast\n", "expected numbers"),
        ("", "holds no runs"),
    ):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        with pytest.raises(DraftsimError, match=message):
            read_runs(path)
    with pytest.raises(DraftsimError, match="no run with speculation off"):
        calibrate([ServerRun(1, 2, 80.0, emitted=2.0)])
    with pytest.raises(DraftsimError, match="1 runs for 1 costs"):
        calibrate([ServerRun(1, 0, 80.0)])


def test_a_file_of_runs_is_calibrated_and_kept(tmp_path: Path, run: Run) -> None:
    lines = ["# a server of ours", "batch,k,tokens_per_s,context,acceptance"]
    chances = {1: "0.7", 2: "0.7 0.5", 4: "0.7 0.5 0.35 0.25"}
    for b, k, c in LOADS:
        speed = TRUTH.tokens_per_s(b, k, c, EMITTED[k])
        lines.append(f"{b},{k},{speed:.6f},{c},{chances.get(k, '')}")
    path, table = tmp_path / "runs.csv", tmp_path / "latency.parquet"
    path.write_text("\n".join(lines))
    ran = run(
        "calibrate", path, "--noise", "0.001", "--threshold", 32, "--out", table, "--json", "-"
    )
    assert ran.code == 0, ran.err
    document = json.loads(ran.out[ran.out.index("{") :])
    found = {row["cost"]: row for row in document["results"]}
    for name, value in zip(COSTS, TRUTH.costs, strict=True):
        assert found[name]["low"] <= value <= found[name]["high"]
    assert document["next_run"]["narrows"] > 0
    assert "measure next: batch" in ran.err
    latency = read_latency(table)
    step = float(latency.seconds("target", "forward", batch=8, new_tokens=3, context=500))
    columns = TRUTH.columns(8, 2, 500)
    verified = float(columns @ TRUTH.costs) - float(columns[3:5] @ TRUTH.costs[3:5])
    assert step == pytest.approx(verified, rel=1e-3)
    draft = float(latency.seconds("draft", "forward", batch=8, new_tokens=1, context=500))
    assert draft == pytest.approx(found["draft_s"]["value"] + 8 * found["draft_token_s"]["value"])
    shown = run("calibrate", path, "--noise", "0.001")
    assert shown.code == 0
    first, *_ = shown.out.splitlines()
    assert first.startswith("Fastest by concurrency at context 500: K = ")
    assert next(load["k"] for load in document["best"] if load["batch"] == 1) > 0
    assert "predicted at the runs' own context 500 and 3000 only" in shown.err
