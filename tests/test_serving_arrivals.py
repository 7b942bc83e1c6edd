"""Arrivals from files: lengths, rates, and what is wrong with a file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Scenario, over_rates, simulate
from simulator.serving.arrivals import arrivals_of
from tests.serving import CONSTANT, GRID, SMALL, arrival_file, bernoulli
from traces.acceptance.trace import Trace
from traces.errors import FileError


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_vllms_burstiness(burstiness):
    times = arrivals_of(4.0, None, f"burstiness={burstiness}").times(np.random.default_rng(1))
    gaps = np.diff([0.0, *(next(times) for _ in range(20_000))])
    spread_s = 0.25 / np.sqrt(burstiness)  # a gamma distribution's, of mean 1/4 s
    assert abs(gaps.mean() - 0.25) < 4 * spread_s / np.sqrt(len(gaps))
    assert gaps.std() == pytest.approx(spread_s, rel=0.1)


def test_file_lengths_hold_and_sequences_match_by_length(tmp_path):
    path = arrival_file(tmp_path / "a.csv", "0,500,10", "1.5,20,40", "2,7,1", "2,9,90")
    run = simulate(SMALL, GRID, Fixed(3), Scenario(ArrivalFile(path), requests=None, warmup=0.0))
    frame = run.requests.sort_values("index")
    assert frame["prompt_tokens"].tolist() == [500, 20, 7, 9]
    assert frame["tokens"].tolist() == [10, 40, 1, 90], "cut, whole, one token, begun again"
    assert frame["arrival_s"].tolist() == [0, 1.5, 2, 2]
    assert run.fidelity == "approximate"
    faster = simulate(SMALL, GRID, Fixed(3), Scenario(ArrivalFile(path, scale=2), requests=3))
    assert faster.requests.sort_values("index")["arrival_s"].tolist() == [0, 0.75, 1]


def synthetic_lengths(lengths: list[int]) -> Trace:
    parts = [bernoulli(0.7, 1, n, seed=n) for n in lengths]
    columns = {
        name: np.concatenate([p.columns[name] for p in parts])
        for name in ("position", "offset", "match")
    }
    columns["request"] = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return Trace(columns, [p.requests[0] for p in parts])


def test_matching_prefers_the_nearest_length(tmp_path, monkeypatch):
    monkeypatch.setattr("simulator.serving.arrivals.NEAREST", 1)
    mixed = synthetic_lengths([5, 50, 500])
    path = arrival_file(
        tmp_path / "a.csv", *(f"{i},10,{n}" for i, n in enumerate((4, 60, 400, 900)))
    )
    arrivals = ArrivalFile(path)
    jobs = list(arrivals.jobs(mixed, np.random.default_rng(0), None))
    assert [mixed.requests[j.sequence].tokens for j in jobs] == [5, 50, 500, 500]


def test_file_rates_scale_to_what_was_asked(tmp_path):
    path = arrival_file(tmp_path / "a.csv", *(f"{i * 0.5},10,5" for i in range(21)))
    base = Scenario(ArrivalFile(path), requests=None)
    for scenario in over_rates(base, [1.0, 8.0]):
        times = list(scenario.arrivals.times(np.random.default_rng(0)))
        assert 20 / times[-1] == pytest.approx(scenario.arrivals.rate)
    assert [s.arrivals.rate for s in over_rates(base, [1.0, 8.0])] == pytest.approx([1.0, 8.0])


def test_azure_conversations_are_served(shared_data):
    trace = bernoulli(0.7, 40, 200, seed=9)
    base = ArrivalFile(shared_data / "arrivals" / "AzureLLMInferenceTrace_conv.csv")
    assert base.rate == pytest.approx(19366 / 3500, rel=0.02)
    scenario = Scenario(base, Limits(max_batch=64), requests=300)
    row = simulate(trace, CONSTANT, Fixed(3), scenario).row()
    assert row["requests"] == 300
    assert row["simulated_tokens"] == base.read.output[:300].sum()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no request, only a header"),
        (["2,10,5", "1,10,5"], "row 2: TIMESTAMP goes back"),
        (["-1,10,5"], "row 1: TIMESTAMP is -1"),
        (["0,10,5", "x,10,5"], "row 2: TIMESTAMP is x"),
        (["0,10,0"], "GeneratedTokens is 0"),
        (["0,1.5,3"], "ContextTokens is 1.5"),
        (["0,,3"], "ContextTokens is nan"),
    ],
)
def test_bad_arrivals_files_are_named(tmp_path, rows, message):
    path = arrival_file(tmp_path / "bad.csv", *rows)
    with pytest.raises(FileError, match=message):
        simulate(SMALL, CONSTANT, Fixed(2), Scenario(ArrivalFile(path), requests=None))


def test_missing_or_foreign_files(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        _ = ArrivalFile(tmp_path / "none.csv").read
    (tmp_path / "zero.csv").write_text("")
    with pytest.raises(FileError, match="cannot be read"):
        _ = ArrivalFile(tmp_path / "zero.csv").read
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FileError, match="lacks the column"):
        _ = ArrivalFile(tmp_path / "other.csv").read


@pytest.mark.parametrize("mode", ["continuous", "static"])
def test_prompts_that_a_log_does_not_know_count_as_one_token(mode):
    unknown = bernoulli(0.7, 6, 20, prompt=0)
    one = bernoulli(0.7, 6, 20, prompt=1)
    scenario = Scenario(ClosedLoop(3), Limits(max_batch=3), 6, mode)
    rows = [simulate(t, GRID, Fixed(2), scenario).row() for t in (unknown, one)]
    assert rows[0]["requests"] == 6
    assert rows[0]["throughput_tok_s"] == pytest.approx(rows[1]["throughput_tok_s"], rel=1e-12)


def test_requests_that_come_at_once_take_the_rate_of_the_whole_file(tmp_path):
    path = arrival_file(tmp_path / "a.csv", *(f"{60 * (i // 30)},20,5" for i in range(90)))
    base = Scenario(ArrivalFile(path), requests=10)
    assert base.rate is None
    [scaled] = over_rates(base, [10.0])
    assert replace(scaled, requests=None).rate == pytest.approx(10.0)
