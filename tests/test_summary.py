"""Summaries: identities between the columns, intervals, categories, robustness."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from policies.lengths.basic import Fixed
from simulator.bootstrap import (
    FEW_PROMPTS,
    expanded,
    gain,
    interval,
    intervals,
    ratio_of_sums,
    resamples,
    widened,
)
from simulator.phases import ANSWER, Phase, phase_rows, phases_of
from simulator.pricing import autoregressive, price
from simulator.robustness import robustness, speedup_by_gamma
from simulator.summary import (
    SUMMARY_COLUMNS,
    price_all,
    prompt_speedups,
    speedup_distribution,
    summarize,
    to_rows,
)
from tests.conftest import Run
from tests.outputs import trace_of
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable, as_cells
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source

LATENCY = LatencyTable.constant(0.01, 0.001, 0.012, host_round=0.0005)
ALPHAS = (0.3, 0.5, 0.7, 0.9)


@pytest.mark.parametrize("draws", [2, 8, 20, 30, 99, 200])
def test_intervals_of_few_draws_hold_as_often_as_those_of_many(draws: int) -> None:
    """Estimates about 0, resampled with their own spread; 4 standard errors are 0.014."""
    rng = np.random.default_rng(draws)
    estimates = rng.standard_normal(4000)
    low, high = intervals(estimates + rng.standard_normal((draws, 4000)))
    assert 0.92 < ((low <= 0) & (high >= 0)).mean() < 0.95 + 0.014
    assert np.isnan(intervals(np.ones((1, 3)))).all()


@pytest.mark.parametrize("prompts", [4, 6, 8, 12, 20, 40])
@pytest.mark.parametrize("draws", [60, 1000])
def test_intervals_of_few_prompts_hold_as_often_as_those_of_many(prompts: int, draws: int) -> None:
    """Speedups over prompts of a population, which percentiles alone hold in 78% (4 prompts)."""
    rng = np.random.default_rng(prompts)
    trials, own, base = 500, 1.0, 1.6
    weights = resamples(prompts, draws, 1)
    held = 0
    for _ in range(trials):
        plain = rng.gamma(9, base / 9, prompts)
        mine = rng.gamma(9, own / 9, prompts)
        tokens = np.ones(prompts)
        _, low, high = gain(np.stack([tokens, mine]), np.stack([tokens, plain]), weights)
        held += low <= base / own <= high
    # The range of 4 prompts, the widest percentile interval, holds 88% at most.
    least = 0.80 if prompts < 6 else 0.88
    assert held / trials > least - 4 * math.sqrt(0.1 * 0.9 / trials)
    assert held / trials < 0.95 + 0.03 + 4 * math.sqrt(0.05 * 0.95 / trials)


def test_few_prompts_widen_intervals_as_a_t_interval_is() -> None:
    values = np.random.default_rng(3).standard_normal(8)
    means = resamples(8, 200_000, 2) @ values / 8
    low, high = interval(means, prompts=8)
    expected = stats.t.interval(0.95, 7, values.mean(), stats.sem(values))
    assert high - low == pytest.approx(expected[1] - expected[0], rel=0.05)
    assert interval(means, prompts=FEW_PROMPTS) == interval(means)
    assert widened(0.95, 2) > widened(0.95, 3) > widened(0.95, 49) > widened(0.95, 50) == 1


def test_prompts_that_miss_their_targets_count_as_prompts() -> None:
    """Their tokens do not count, but their seconds do: with one that meets them, it was NaN."""
    tokens = np.zeros(60)
    tokens[7] = 100.0
    own, base = np.stack([tokens, np.full(60, 1.0)]), np.stack([tokens, np.full(60, 1.5)])
    found = gain(own, base, resamples(60, 400, 0))
    assert found.value == pytest.approx(1.5)
    assert found.low == found.high == pytest.approx(1.5)
    without = gain(own * (tokens > 0), base * (tokens > 0), resamples(60, 400, 0))
    assert np.isnan(without.low)


def mixed_trace(requests: int = 24, tokens: int = 80, seed: int = 0) -> Trace:
    """Requests of four categories that differ in acceptance."""
    rng = np.random.default_rng(seed)
    match = [rng.random(tokens) < ALPHAS[i % 4] for i in range(requests)]
    columns = {
        "request": np.repeat(np.arange(requests, dtype=np.int32), tokens),
        "position": np.tile(np.arange(tokens, dtype=np.int32), requests),
        "offset": np.zeros(requests * tokens, dtype=np.int16),
        "match": np.concatenate(match).astype(np.int8),
    }
    table = [
        Request(f"r{i}", f"c{i % 4}", 10 + i, tokens, tokens, "length") for i in range(requests)
    ]
    return Trace(columns, table)


@pytest.fixture(scope="module")
def logs() -> list[RoundLog]:
    trace = mixed_trace()
    return [replay(trace, Fixed(g), name=f"fixed:gamma={g}") for g in (2, 5)]


def test_rows_have_the_documented_fields_and_identities(logs: list[RoundLog]) -> None:
    frame = summarize(logs, LATENCY)
    assert tuple(frame.columns) == SUMMARY_COLUMNS
    assert list(frame["policy"]) == ["autoregressive", "fixed:gamma=2", "fixed:gamma=5"]
    np.testing.assert_allclose(frame["speedup"], frame["wall_s"][0] / frame["wall_s"])
    np.testing.assert_allclose(frame["block_efficiency"], frame["tokens"] / frame["rounds"])
    drafting = frame[1:]
    np.testing.assert_allclose(
        drafting["acceptance_rate"], drafting["accepted"] / drafting["drafted"]
    )
    assert (frame["tokens"] == 24 * 79).all()  # prefill emitted the first of 80
    assert (frame["target_forwards"] == frame["rounds"]).all()
    plain = frame.iloc[0]
    assert plain["speedup"] == plain["speedup_lo"] == plain["speedup_hi"] == 1
    assert (drafting["speedup_lo"] < drafting["speedup"]).all()
    assert (drafting["speedup"] < drafting["speedup_hi"]).all()


def test_intervals_match_scipy(logs: list[RoundLog]) -> None:
    """An independent percentile bootstrap, within the noise of both resamplings."""
    run = price(logs[1], LATENCY)
    plain = price(autoregressive(logs[1]), LATENCY)
    other = stats.bootstrap(
        (plain.decode_s, run.decode_s),
        lambda a, b, axis=-1: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True, vectorized=True, n_resamples=4000, method="percentile",
        confidence_level=expanded(0.95, 24), rng=np.random.default_rng(7),
    )  # fmt: skip
    row = summarize(logs[1:], LATENCY, resamples=4000).iloc[1]
    # A 1.6% quantile of 4000 normal draws has a standard error of about 0.049 sd.
    tolerance = 4 * math.sqrt(2) * 0.049 * float(other.standard_error)
    assert row["speedup_lo"] == pytest.approx(other.confidence_interval.low, abs=tolerance)
    assert row["speedup_hi"] == pytest.approx(other.confidence_interval.high, abs=tolerance)


def test_interval_covers_the_expected_share() -> None:
    """About 95% of the intervals of independent recordings hold the long-run speedup."""
    truth = summarize([replay(mixed_trace(2000, seed=999), Fixed(4))], LATENCY, resamples=1)
    expected, trials = float(truth["speedup"].iloc[1]), 60
    covered = 0
    for seed in range(trials):
        log = replay(mixed_trace(40, seed=seed), Fixed(4))
        row = summarize([log], LATENCY, resamples=300).iloc[1]
        covered += bool(row["speedup_lo"] < expected < row["speedup_hi"])
    assert covered / trials > 0.95 - 4 * math.sqrt(0.95 * 0.05 / trials)


def test_one_prompt_has_no_interval() -> None:
    row = summarize([replay(mixed_trace(1), Fixed(3))], LATENCY).iloc[1]
    assert math.isnan(row["speedup_lo"])
    assert math.isnan(row["speedup_hi"])


def test_prefill_is_in_only_where_asked(logs: list[RoundLog]) -> None:
    rows = [("target", "forward", 1, 1, 0, 0.01), ("draft", "forward", 1, 1, 0, 0.001)]
    rows += [(m, "prefill", 1, n, 0, n * 1e-3) for m in ("target", "draft") for n in (1, 64)]
    frame = as_cells([(*r, 0.0, 1) for r in rows])
    latency = LatencyTable(frame, {"kind": "constant"})
    decode, wall = (summarize(logs, latency, prefill=p) for p in (False, True))
    extra = wall["wall_s"] - decode["wall_s"]
    assert extra[0] > 0
    assert extra[1] > extra[0]  # the draft model reads the prompt too
    assert (wall["speedup"][1:] < decode["speedup"][1:]).all()
    np.testing.assert_allclose(wall["speedup"], wall["wall_s"][0] / wall["wall_s"])


def test_categories_partition_the_whole(logs: list[RoundLog]) -> None:
    whole, parts = (summarize(logs, LATENCY, by_category=each) for each in (False, True))
    assert list(dict.fromkeys(parts["category"])) == ["c0", "c1", "c2", "c3"]
    for name in ("tokens", "rounds", "drafted", "accepted", "wall_s"):
        sums = parts.groupby("policy", sort=False)[name].sum().to_numpy()
        np.testing.assert_allclose(sums, whole[name])
    fixed = parts[parts["policy"] == "fixed:gamma=5"]
    assert fixed["speedup"].is_monotonic_increasing  # as the categories' acceptance is


def test_prompt_speedups_are_each_prompts_own(logs: list[RoundLog]) -> None:
    each = prompt_speedups(logs[1], LATENCY)
    trace = mixed_trace()
    for i in (0, 3, 17):
        alone = summarize([replay(trace.select([i]), Fixed(5))], LATENCY)
        assert each[i] == pytest.approx(alone["speedup"].iloc[1])
    table = speedup_distribution(each, [0, 1, 2, 10])
    assert table["prompts"].sum() == 24
    assert table["share"].sum() == pytest.approx(1)
    assert table.iloc[-1]["share"] == pytest.approx((each < 1).mean())
    assert list(table["low"]) == [2, 1, 0]


def test_distribution_takes_what_lies_outside_its_edges() -> None:
    table = speedup_distribution([0.1, 1.5, 1.0, 9.0, float("nan")], [0.5, 1, 2])
    assert list(table["prompts"]) == [3, 1]


def test_rows_survive_json(logs: list[RoundLog]) -> None:
    rows = to_rows(summarize(logs, LATENCY))
    back = json.loads(json.dumps(rows, allow_nan=False))
    assert back[0]["acceptance_rate"] is None
    assert isinstance(back[1]["rounds"], int)


def test_other_requests_are_refused(logs: list[RoundLog]) -> None:
    with pytest.raises(DraftsimError, match="have other requests"):
        summarize([logs[0], replay(mixed_trace(5), Fixed(2))], LATENCY)
    with pytest.raises(DraftsimError, match="at least one policy"):
        summarize([], LATENCY)
    with pytest.raises(DraftsimError, match="resamples is -1"):
        summarize(logs, LATENCY, resamples=-1)
    with pytest.raises(DraftsimError, match="increasing numbers"):
        speedup_distribution([1.0], [2, 1])


def test_robustness_is_relative_to_the_reference() -> None:
    trace = mixed_trace(8)
    families = {"fixed": Fixed, "always-3": lambda gamma: Fixed(3)}
    speedups = speedup_by_gamma(trace, families, LATENCY, (1, 3, 12))
    table = robustness(speedups).set_index("policy")
    assert table.loc["fixed", "mean"] == pytest.approx(1)
    assert table.loc["always-3", "sd"] == pytest.approx(0, abs=1e-12)
    fixed = speedups[speedups["policy"] == "fixed"]["speedup"].to_numpy()
    assert table.loc["fixed", "sd"] == pytest.approx(np.std(fixed, ddof=1) / fixed.mean())
    assert table.loc["always-3", "mean"] == pytest.approx(fixed[1] / fixed.mean())
    with pytest.raises(DraftsimError, match="'oracle' is not among fixed, always-3"):
        robustness(speedups, "oracle")


def test_ratio_error_is_the_spread_of_repeated_ratios() -> None:
    rng = np.random.default_rng(3)
    under = rng.uniform(1, 3, size=(4000, 50))
    over = 2 * under + rng.normal(0, 1, size=under.shape)
    estimates = [ratio_of_sums(a, b) for a, b in zip(over, under, strict=True)]
    spread = np.std([e.value for e in estimates])
    claimed = np.mean([e.standard_error for e in estimates])
    # The sd of 4000 values has a relative error of 1.1%; the delta method is of order 1/50.
    assert claimed == pytest.approx(spread, rel=4 * 0.011 + 0.02)


TARGET = Path(__file__).parents[1] / "profiler" / "bundled" / "target"
THINK = Phase.parse("thinking=#7..#8")


def test_tokens_are_markers() -> None:
    trace = trace_of([[5, 7, 5, 8, 0], [7, 0], [5, 5, 8, 0]], 9, [[1]] * 3, [0])
    assert phases_of(trace, [THINK]).tolist() == [0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    opened = Phase.parse("thinking=..#8")  # the template holds the opening tag
    assert phases_of(trace, [opened]).tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]


def test_text_is_found_across_tokens() -> None:
    pieces = {2: "ab", 3: "<th", 4: "ink>", 5: "x</th", 6: "ink>y", 9: "<tool>"}
    trace = trace_of([[2, 3, 4, 2, 5, 6, 2, 9, 2]], 9, [[1]], [])
    phases = [Phase.parse("thinking=<think>..</think>"), Phase.parse("tool=<tool>..</tool>")]
    assert phases_of(trace, phases, pieces.__getitem__).tolist() == [0, 1, 1, 1, 1, 1, 0, 2, 2]
    with pytest.raises(DraftsimError, match="--tokenizer"):
        phases_of(trace, phases)


def test_the_phases_make_up_the_whole() -> None:
    rng = np.random.default_rng(1)
    outputs = [[7, *rng.integers(10, 20, 40).tolist(), 8, *rng.integers(10, 20, 60).tolist()]
               for _ in range(6)]  # fmt: skip
    trace = trace_of(outputs, 102, [[1, 2]] * 6, [])
    log = replay_source(trace, parse_source("parallel:acceptance=[0.7,0.4]"), Fixed(2))
    runs = price_all([log], LatencyTable.constant(1.0, 0.2))
    rows = phase_rows(runs, trace, [THINK], phases_of(trace, [THINK]), 50)
    mine = [row for row in rows if row["policy"] == log.policy]
    assert [row["phase"] for row in mine] == [ANSWER, "thinking"]
    assert sum(row["tokens"] for row in mine) == log.rounds["emitted"].sum()
    assert sum(row["wall_s"] for row in mine) == pytest.approx(float(runs[1].decode_s.sum()))
    assert mine[1]["share"] == pytest.approx(42 / 102)


def test_a_phase_of_one_prompt_has_no_interval_and_short_ones_keep_their_rows() -> None:
    """A phase of one token is seldom where a long draft begins, but it is a step of its own."""
    outputs = [[10, 7, 10, 8, *range(20, 59)], *[[10, *range(20, 62)] for _ in range(5)]]
    trace = trace_of(outputs, 43, [[1, 2]] * 6, [])
    logs = [
        replace(replay_source(trace, parse_source("parallel:acceptance=[0.9,0.9]"), Fixed(k)),
                policy=f"K={k}") for k in (1, 2)
    ]  # fmt: skip
    runs = price_all(logs, LatencyTable.constant(1.0, 0.2))
    found = phases_of(trace, [THINK])
    rows = phase_rows(runs, trace, [THINK], found, 200)
    alone = [row for row in rows if row["phase"] == "thinking"]
    assert alone
    assert {row["speedup_lo"] for row in alone if row["policy"] != "autoregressive"} <= {None}
    # Where no round of one policy begins, the others and plain decoding keep their rows.
    found[:] = 0
    begun = {
        log.policy: set(
            (trace.request_starts[log.rounds["request"]] + log.rounds["position"]).tolist()
        )
        for log in logs
    }  # fmt: skip
    place = min(begun["K=1"] - begun["K=2"])
    found[place] = 1
    rows = phase_rows(runs, trace, [THINK], found, 50)
    assert [row["policy"] for row in rows if row["phase"] == "thinking"] == [
        "autoregressive", "K=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [("thinking", "NAME=BEGIN..END"), ("a=x..", "an end"), ("answer=a..b", "name")],
)
def test_wrong_phases_are_refused(run: Run, text: str, says: str) -> None:
    made = run("simulate", "phases", text)
    assert says in made.refusal


def test_the_command_line_prints_a_row_by_phase(run: Run, tmp_path: Path) -> None:
    asked = ("simulate", "--trace", "bundled", "--policy", "fixed:gamma=3", "--phase",
             "bracketed=(..)", "--tokenizer", TARGET)  # fmt: skip
    printed = run(*asked).ok()
    assert "bracketed" in printed.out
    told = run(*asked, "--json", "-").document["phases"]
    assert {row["phase"] for row in told} == {ANSWER, "bracketed"}
    assert all(row["speedup"] > 0 for row in told)
    without = run(*asked[:-2])
    assert "--tokenizer" in without.refusal
    run(*asked, "--out", tmp_path / "table.tex").ok()
    assert "bracketed" in (tmp_path / "table.tex").read_text()
    csv = run(*asked, "--out", tmp_path / "table.csv").ok()
    assert "table.csv holds no rows by phase: .tex, .json and --json have them" in csv.said
