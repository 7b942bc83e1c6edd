"""A server's costs from its own runs: recovered, bounded, named where they cannot be known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.calibrate_recovery import LOADS, recovery
from simulator.aggregate.advice import candidates, next_run, predicted
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
    assert {k for _, k, _ in candidates(runs)} <= {0, 1, 2, 3}
    wide = predicted(found, runs, [(8, 3, 500)])[0].tokens_per_s
    assert wide.high > wide.low  # no run tells the acceptance of three


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
        ("batch,k,tokens_per_s\n1,0,50\n0,1,60\n", "run 2: batch 0"),
        ("batch,k\n1,0\n", "has no tokens_per_s"),
        ("batch,k,tokens_per_s,emitted\n1,2,60,3.5\n", "3.5 tokens a round at k = 2"),
        ("batch,k,tokens_per_s,acceptance\n1,2,60,0.7\n", "acceptance of 1 positions at k = 2"),
        ("batch,k,tokens_per_s\n1,0,fast\n", "expected numbers"),
        ("batch,k,tokens_per_s\n1,0,inf\n", "tokens_per_s is 'inf', expected numbers of at most"),
        ("batch,k,tokens_per_s,context\n1,0,50,1e308\n", "run 1: context is '1e308', expected"),
        ("batch,k,tokens_per_s\n1,0.5,50\n", "k is 0.5, expected a whole number"),
        ("batch,k,tokens_per_s\n1_0,0,50\n", "batch is '1_0', expected numbers"),
        ("batch,k,tokens_per_s,context\n1,0,50\n", "run 1: has not as many values as the head"),
        ("batch,k,tokens_per_s,contex\n1,0,50,9\n", "unknown 'contex': did you mean 'context'"),
        ("batch,k,k,tokens_per_s\n1,0,0,50\n", "names a column twice"),
        (f"batch,k,tokens_per_s\n1,0,{'x' * 200_000}\n", "is not CSV: field larger than"),
        ("batch,k,tokens_per_s,acceptance\n1,2,60,0.7 0.9\n", "chances from 1 to 0 that do not"),
        ("", "holds no runs"),
    ):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        with pytest.raises(DraftsimError, match=message):
            read_runs(path)
    for line, message in (
        ("[" * 100_000, "runs.jsonl line 1: is not JSON .nested deeper"),
        ('{"batch": 1, "k": 0, "tokens_per_s": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        ("[1, 0, 50]", "run 1: is .1, 0, 50., expected an object"),
        ('{"batch": true, "k": 0, "tokens_per_s": 50}', "batch is True, expected numbers"),
    ):
        path = tmp_path / "runs.jsonl"
        path.write_text(line)
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
    assert run("calibrate", path, "--noise", "0.001").code == 0
