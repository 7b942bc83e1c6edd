"""Capacity: the answer against queueing theory, what is kept and refused."""

from __future__ import annotations

import json
import math
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands.capacity import headline, remarks, shown
from policies.lengths.basic import Autoregressive, Fixed
from simulator.bootstrap import Interval
from simulator.capacity import (
    Point,
    PointRunner,
    PointVerdict,
    costs,
    fewest,
    find_answer,
    find_curve,
    highest,
    plan,
)
from simulator.executors import Local
from simulator.plots import serving as plots
from simulator.serving import (
    ArrivalFile,
    LeastRequests,
    Limits,
    Poisson,
    RandomSplit,
    RoundRobin,
    Scenario,
    read_results,
)
from simulator.targets import Targets, parse_targets
from tests import queues
from tests.compiled import same
from tests.conftest import Run
from tests.queues import PER_TOKEN_S, SERVICE, exponential, one_token_jobs
from tests.serving import arrival_file, bernoulli
from tests.studies import Failing
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.store.text import plain as as_json


@pytest.fixture(autouse=True)
def few_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests for where to begin to look, and for comparisons that no test is about."""
    monkeypatch.setattr("simulator.capacity.FEW", 60)


PAIR: Any = {"autoregressive": Autoregressive(), "fixed": Fixed(3)}
TRACE = bernoulli(0.8, 20, 40, seed=3)
LATENCY = LatencyTable.constant(0.02, 0.002, 0.022)

# --- against theory -----------------------------------------------------------------------


@pytest.mark.invariant(7)
@pytest.mark.parametrize("rate", [2.0, 3.4])
def test_the_fewest_replicas_are_those_of_queueing_theory(rate: float) -> None:
    """Exponential jobs, one at a time, split at random: every replica is M/M/1."""
    jobs = exponential(np.random.default_rng(5), 4000)
    trace = one_token_jobs(np.rint(jobs / jobs.mean() / PER_TOKEN_S).astype(int))
    targets = Targets(ttft_s=6.0, share=0.9)
    base = Scenario(
        Poisson(1.0), Limits(max_batch=1, token_budget=1 << 30), warmup=0.2, replications=6,
        router=RandomSplit(), targets=targets,
    )  # fmt: skip
    [row] = plan(trace, SERVICE, {"autoregressive": Autoregressive()}, base, rate, requests=3000)
    each = queues.rate_within(6.0, 0.9, 1.0)
    # The share is known to about 2 points, and falls by 0.6 for one more request a second.
    assert row["rate_per_replica"] == pytest.approx(each, rel=0.15)
    assert abs(row["replicas"] - math.ceil(rate / each)) <= 1
    assert row["replicas_lo"] <= row["replicas"] <= row["replicas_hi"]
    assert row["rate_limit"] >= rate
    assert row["within_targets"] >= 0.9


def test_the_share_within_a_target_has_the_standard_error_that_it_claims() -> None:
    """M/M/1 at a rate where 90% are in time: |z| < 4 over replications, and they have power."""
    each = queues.rate_within(6.0, 0.9, 1.0)
    jobs = exponential(np.random.default_rng(6), 4000)
    trace = one_token_jobs(np.rint(jobs / jobs.mean() / PER_TOKEN_S).astype(int))
    base = Scenario(
        Poisson(1.0), Limits(1, token_budget=1 << 30), warmup=0.2, router=RandomSplit(),
        targets=Targets(ttft_s=6.0, share=0.9),
    )  # fmt: skip
    bench = PointRunner(trace, SERVICE, {"a": Autoregressive()}, base)
    shares = [bench.run(Point("a", 3, 3 * each, 4000, r))["within"] for r in range(12)]
    error = float(np.std(shares, ddof=1) / math.sqrt(len(shares)))
    assert error < 0.02
    assert abs(np.mean(shares) - 0.9) < 4 * error


@pytest.mark.parametrize("requests", [None, 100])
def test_loose_targets_end_at_what_is_served_at_once(requests: int | None) -> None:
    """Batches that cost no more than one; where one takes in every request, no rate is too much."""
    at_once, alone_s = 100, 40 * 0.02
    base = Scenario(Poisson(1.0), Limits(max_batch=at_once, token_budget=1 << 30), warmup=0.2,
                    replications=2, targets=Targets(tpot_s=9.0))  # fmt: skip
    plain = {"autoregressive": Autoregressive()}
    rows = plan(TRACE, LATENCY, plain, base, 10.0, requests=requests,
                curve=True)  # fmt: skip
    said = " ".join(remarks(rows))
    assert rows[0]["replicas"] == 1
    if requests is None:
        # Overloaded is where a tenth of the requests still queue when the last one comes.
        assert 0.9 * at_once / alone_s < rows[0]["rate_limit"] < 4 * at_once / alone_s
    else:
        assert (rows[0]["rate_limit"], rows[0]["curve"]) == (math.inf, [])
    assert ("raise --requests to find the limit" in said) == (requests is not None)
    printed = shown(rows)[0]["add one above, /s"]
    assert (printed == "never") == (requests is not None)


# --- the plan -----------------------------------------------------------------------------


def planned(rate: float = 24.0, slo: str = "ttft=0.4,tpot=0.05,p=0.9", **options: Any) -> Any:
    base = Scenario(
        Poisson(1.0), Limits(4), warmup=0.2, replications=2,
        router=options.pop("router", RoundRobin()), targets=parse_targets(slo),
    )  # fmt: skip
    options = {"latency": LATENCY, "policies": PAIR, "requests": 240, **options}
    return plan(TRACE, base=base, rate=rate, **options)


with_curves = cache(lambda: planned(curve=True))


def test_speculation_that_halves_the_work_halves_the_replicas() -> None:
    plain, fixed = with_curves()
    assert plain["saved"] == 0
    assert fixed["saved"] == plain["replicas"] - fixed["replicas"] > 0
    for row in (plain, fixed):
        assert row["replicas_lo"] <= row["replicas"] <= row["replicas_hi"]
        assert row["rate_limit"] >= 24
        assert row["within_targets"] >= 0.9
        assert row["within_alone"] == 1
        assert row["router"] == "round-robin"
        counts = [count for count, _ in row["curve"]]
        assert counts == sorted(set(counts))
        assert row["replicas"] in counts
        # One replica more takes more, about as much each.
        rates = [rate for _, rate in row["curve"]]
        assert all(b > 0.95 * a for a, b in pairwise(rates))
    # A pass is as long for any batch here, so drafting pays at every load.
    assert fixed["stops_saving"] == math.inf
    assert plain["stops_saving"] is None
    assert (fixed["saves_at"], plain["saves_at"]) == ("every rate", None)
    # What is found is so: fewer do not keep the targets.
    bench = PointRunner(
        TRACE, LATENCY, PAIR,
        Scenario(
            Poisson(1.0), Limits(4), warmup=0.2, router=RoundRobin(),
            targets=parse_targets("ttft=0.4,tpot=0.05,p=0.9"),
        ),
    )  # fmt: skip
    fewer = [
        bench.run(Point("fixed", fixed["replicas"] - 1, 24.0, fixed["requests"], r))
        for r in range(2)
    ]
    assert not PointVerdict(fewer, 0.9).kept


def test_files_tell_saving_nowhere_from_saving_everywhere() -> None:
    """JSON has null for the NaN of the one and the infinity of the other."""
    dear = LatencyTable.constant(0.02, 0.05, 0.022)
    _, slower = planned(6.0, "ttft=2,tpot=0.5,p=0.9", latency=dear)
    rows = [json.loads(json.dumps(as_json(row))) for row in (slower, with_curves()[1])]
    assert [row["stops_saving"] for row in rows] == [None, None]
    assert [row["saves_at"] for row in rows] == ["no rate", "every rate"]


def test_a_better_router_needs_no_more() -> None:
    turn = with_curves()[1]
    [least] = planned(policies={"fixed": Fixed(3)}, router=LeastRequests())
    assert least["replicas"] <= turn["replicas"]
    assert least["rate_per_replica"] > 0.95 * turn["rate_per_replica"]


def test_targets_that_nobody_meets_alone_are_met_by_no_number() -> None:
    # A token takes 20 ms: plain decoding never meets 15, speculation does.
    plain, fixed = planned(slo="tpot=0.015,p=0.9", gpus=2, price=1.5)
    assert plain["replicas"] is None
    assert plain["saved"] is None
    assert plain["within_alone"] < 0.9
    assert fixed["replicas"] is not None
    assert fixed["stops_saving"] == math.inf
    [neither] = planned(slo="tpot=0.001", policies={"fixed": Fixed(3)})
    assert neither["replicas"] is None
    assert math.isnan(plain["cost_per_hour"])
    assert (plain["gpus"], fixed["gpus"]) == (None, 2 * fixed["replicas"])
    assert fixed["cost_per_hour"] == 1.5 * fixed["gpus"]


def test_too_few_replicas_allowed_is_said() -> None:
    [row] = planned(600.0, policies={"fixed": Fixed(3)}, most=2)
    assert row["replicas"] is None
    assert row["within_alone"] == 1


def test_a_horizon_that_is_too_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = planned(policies={"fixed": Fixed(3)}, requests=30)
    assert "requests arrive over" in row["too_short"]
    monkeypatch.undo()
    [row] = planned(6.0, policies={"fixed": Fixed(3)}, requests=None)
    assert row["requests"] >= 200
    assert not row["too_short"]


def test_a_queue_that_still_grows_is_no_judgement() -> None:
    outcome = {
        "within": 0.96, "within_late": 0.9, "span_s": 100.0, "e2e_s": {"p95": 1.0},
        "overloaded": False,
    }  # fmt: skip
    growing = PointVerdict([outcome, outcome], 0.95)
    assert growing.kept
    assert "the queue still grows" in growing.too_short
    assert not PointVerdict([{**outcome, "within_late": 0.95}] * 2, 0.95).too_short
    endless = PointVerdict([{**outcome, "e2e_s": {"p95": None}}], 0.95)
    assert "none of those that count finishes" in endless.too_short
    swamped = {**outcome, "overloaded": True}
    assert not PointVerdict([swamped, outcome], 0.95).kept
    assert PointVerdict([swamped, outcome, outcome], 0.95).kept


def test_a_file_that_spans_no_time_has_no_rate_to_give(tmp_path: Path) -> None:
    at_once = ArrivalFile(arrival_file(tmp_path / "a.csv", *(["0,30,20"] * 5)))
    base = Scenario(at_once, Limits(4), requests=None, targets=parse_targets("ttft=1"))
    for rate in (None, 2.0):
        with pytest.raises(DraftsimError, match="spans no time: its rate cannot be scaled"):
            plan(TRACE, LATENCY, PAIR, base, rate)


def test_a_replica_has_the_gpus_that_share_its_model() -> None:
    meta = {**LATENCY.meta, "tensor_parallel": {"target": 4, "draft": 1}}
    shared = LatencyTable(LATENCY.cells, meta)
    asked: Any = {"latency": shared, "policies": {"fixed": Fixed(3)}, "price": 2.0}
    [own] = planned(6.0, **asked)
    assert own["gpus"] == 4 * own["replicas"]
    assert own["cost_per_hour"] == 2 * own["gpus"]
    [more] = planned(6.0, **asked, gpus=8)
    assert more["gpus"] == 8 * own["replicas"]
    with pytest.raises(DraftsimError, match="--gpus is 2, and 4 GPUs share a model"):
        planned(6.0, **asked, gpus=2)


def test_costs_are_those_of_the_fleet() -> None:
    priced = costs(3, 500.0, gpus=2, price=2.0)
    assert (priced["gpus"], priced["cost_per_hour"]) == (6, 12.0)
    assert priced["tok_s_per_gpu"] == pytest.approx(500 / 6)
    assert priced["cost_per_million_tokens"] == pytest.approx(12 / 3600 / 500 * 1e6)
    assert math.isnan(costs(3, 500.0, gpus=2, price=None)["cost_per_hour"])
    for wrong in ({"gpus": 0}, {"price": -1.0}, {"price": math.inf}):
        with pytest.raises(DraftsimError, match="expected"):
            planned(**wrong)


def test_a_stopped_plan_goes_on_and_processes_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    short = partial(planned, 9.0, requests=60)
    rows = short()
    first = Failing(3)
    with pytest.raises(KeyboardInterrupt):
        short(path=path, executor=first)
    kept = len(read_results(path).rows)
    assert kept >= 2
    every = Failing(10**6)
    again = short(path=path, executor=every)
    done = len(read_results(path).rows)
    assert every.ran == done - kept
    for found in (again, short(executor=Local(2))):
        for row, expected in zip(found, rows, strict=True):
            same(row, expected, "row")


def test_arrivals_of_a_file_are_planned_as_a_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.05, 400))
    file = ArrivalFile(arrival_file(tmp_path / "a.csv", *(f"{t},30,{20}" for t in times)))
    base = Scenario(file, Limits(4), warmup=0.2, replications=2, targets=parse_targets("ttft=0.3"))
    [row] = plan(TRACE, LATENCY, {"fixed": Fixed(3)}, base, file.rate or 1.0)
    assert row["requests"] is None
    assert row["fidelity"] == "approximate"
    assert row["replicas"] >= 1


class Lenient:
    """Verdicts of a fleet that keeps 4 requests/s by six replicas over all replications, and
    each replica a little less over fewer of them."""

    share = 0.9
    within = Interval(0.9, 0.85, 0.95)

    def __init__(self, point: Any) -> None:
        count, rate, _, most = point
        self.kept = count >= 6 if most is None else rate <= 0.63 * count


def driven(search: Any) -> Any:
    """Return the result of a search whose points are judged by `Lenient`."""
    try:
        point = next(search)
        while True:
            point = search.send(Lenient(point))
    except StopIteration as end:
        return end.value


def test_replicas_limit_curve_and_line_are_one_answer() -> None:
    def ask(*point: Any) -> Any:
        return point

    found = driven(find_answer(ask, 4.0, 0.67, 64, lambda n: 100 * n))
    assert found.replicas == 6
    assert found.limit >= 4.0  # of three replications alone it would be 3.78
    pairs = driven(find_curve(ask, found, 4.0, [1, 2, 4, 8], lambda n: 100 * n))
    assert [count for count, _ in pairs] == [1, 2, 4, 5, 6, 8]
    assert all((limit >= 4.0) == (count >= 6) for count, limit in pairs)
    assert [limit for _, limit in pairs] == sorted(limit for _, limit in pairs)
    row = with_curves()[0] | {"curve": pairs, "rate": 4.0, "replicas": 6, "replicas_lo": None}
    steps = plots.needed(row)
    assert int(steps.searchsorted(4.0)) + 1 == 6
    [axes] = plots.plot_replicas([row | {"replicas_hi": None}]).axes
    x, y = next(line.get_data() for line in axes.lines if line.get_label() == row["policy"])
    assert round(y[np.searchsorted(x, 4.0, side="right") - 1]) == 6


# --- the figure ---------------------------------------------------------------------------


def test_lines_cross_where_the_better_one_changes() -> None:
    pairs = [(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0)]
    assert plots.limits(pairs).tolist() == pytest.approx([10.0 * k for k in range(1, 9)])
    bent = [(1, 12.0), (2, 22.0), (4, 38.0), (8, 70.0)]
    [crossing] = plots.crossings(bent, pairs)
    assert 20 < crossing[0] < 40
    assert 2 < crossing[1] < 4
    assert plots.crossings(pairs, [(n, 1.01 * r) for n, r in pairs]) == []
    assert plots.crossings(pairs, [(n, 2 * r) for n, r in pairs]) == []


def test_the_figure_shows_the_fewest_replicas_at_every_rate() -> None:
    rows = with_curves()
    figure = plots.plot_replicas(rows)
    [axes] = figure.axes
    lines = {line.get_label(): line.get_data() for line in axes.lines}
    for row in rows:
        x, y = lines[row["policy"]]
        steps = plots.limits(row["curve"])
        for rate in np.linspace(0.5, 24, 23):
            drawn = y[np.searchsorted(x, rate) - 1]
            assert round(drawn) == np.searchsorted(steps, rate) + 1
    # What meets the SLO nowhere is named, and an interval is inside the axes.
    wide, never = {**rows[0], "replicas_lo": 1, "replicas_hi": 40}, {**rows[1], "curve": []}
    figure = plots.plot_replicas([wide, never])
    assert figure.axes[0].get_ylim()[1] > 40
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert f"{never['policy']}: meets the SLO nowhere" in named
    with pytest.raises(DraftsimError, match="no row has a curve"):
        plots.plot_replicas([{**row, "curve": []} for row in rows])


def answered(search: Any, answer: Any) -> tuple[Any, list[Any]]:
    """Return the result of a search, and the points that it asked for."""
    asked = []
    value = next(search)
    while True:
        asked.append(value)
        try:
            value = search.send(answer(value))
        except StopIteration as end:
            return end.value, asked


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_the_fewest_are_found_from_any_guess(needed: int, guess: int, most: int) -> None:
    found, asked = answered(fewest(guess, most), lambda count: count >= needed)
    assert found == (needed if needed <= most else None)
    assert all(1 <= count <= most for count in asked)
    distance = abs(needed - min(guess, most)) + 1
    assert len(asked) <= 2 * math.log2(distance) + 5
    # Nobody is believed who was not checked: both sides of the step were asked for.
    if found is not None:
        assert needed == 1 or needed - 1 in asked
        assert needed == most or needed + 1 in asked


@given(st.sets(st.integers(1, 30)), st.integers(1, 30))
def test_an_answer_that_is_chance_is_passed_over(bad: set[int], guess: int) -> None:
    """Whatever fails, what is found passes, and one more does too."""
    found, _ = answered(fewest(guess, 30), lambda count: count not in bad)
    if found is None:
        assert 30 in bad
    else:
        assert found not in bad
        assert found == 30 or found + 1 not in bad


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1.05, 4))
def test_the_highest_rate_is_found_from_any_start(limit: float, start: float, step: float) -> None:
    found, _ = answered(highest(start, step, 0.01, 1e-6, 1e6), lambda rate: rate <= limit)
    assert limit / 1.01 <= found <= limit
    assert answered(highest(start, step, 0.01, start / 50, 1e6), lambda rate: False)[0] == 0
    least, most = start / 50, start * 50
    found, asked = answered(highest(start, step, 0.01, least, most), lambda rate: True)
    assert (math.isinf(found), max(asked) < most * step) == (True, True)


def test_the_command_answers_in_words_and_rows(
    synthetic_run: Path, run: Run, tmp_path: Path
) -> None:
    command = [
        "capacity", "--trace", synthetic_run, "--rate", 12, "--slo", "ttft=0.5,tpot=0.05",
        "--policy", "fixed:gamma=3", "--max-batch", 4, "--replications", 2, "--jobs", 1,
        "--assume-batch-free", "--price", 3, "--requests", 100,
    ]  # fmt: skip
    rows = run(*command, "--json", "-", "--plots", tmp_path).rows
    assert [r["policy"] for r in rows] == ["autoregressive", "fixed:gamma=3"]
    assert (tmp_path / "replicas.png").read_bytes().startswith(b"\x89PNG")
    for row in rows:
        assert row["share"] == 0.95
        assert row["cost_per_hour"] == pytest.approx(3 * row["replicas"])
    out = tmp_path / "plan.csv"
    ran = run(*command, "--out", out)
    assert f"takes {rows[1]['replicas']} replica" in ran.err
    assert "saves" in ran.out  # the heading takes several lines
    assert synthetic_run.name not in ran.out  # the first line names the recording
    assert out.exists()
    assert not (tmp_path / "plan.csv.jsonl").exists()

    assert "no policy" not in headline(rows[:1])
    assert headline(rows[:1]).endswith("name a policy to compare it with.")
    unmet = {**rows[0], "replicas": None}
    assert headline([unmet, rows[1]]).endswith("; no number tried is enough without speculation.")
    assert not remarks(rows[:1])[0].endswith(":")
    assert "at most 4 requests at a time in each (--max-batch)" in remarks(rows[:1])[0]
    # Where both take as many, a policy that meets the SLO more often saves none.
    plain, own = ({**row, "replicas": 2, "stops_saving": math.inf} for row in rows)
    said = " ".join(remarks([plain, own]))
    assert "takes 2 replicas, no speculation 2; it saves none here, though more requests" in said
    assert "saves replicas" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slo", "ttft=0.5"), "give --rate or --arrivals"),
        (("--slo", "ttft=0.5", "--rate", 0), "--rate holds 0, expected 1e-06 to"),
        (("--slo", "ttft=0.5", "--rate", "1,2"), "--rate is 1,2: a plan is for one rate"),
        (("--slo", "ttft=0.5", "--rate", "2x"), "speeds up a file of arrivals: give --arrivals"),
        (("--slo", "latency=1", "--rate", 1), "no target 'latency': choose from ttft, tpot, p"),
        (("--slo", "ttft=1", "--rate", 1, "--gpus", 0), "gpus is 0"),
        (("--slo", "ttft=1", "--rate", 1, "--router", "best"), "router is 'best'"),
        (("--slo", "ttft=1", "--rate", 1, "--max-replicas", 0), "max-replicas is 0"),
        (("--slo", "ttft=1", "--rate", 1, "--max-replicas", 10**8), "expected at most 65536"),
        (("--slo", "ttft=1", "--rate", 1, "--requests", 10**20), "expected at most 10000000"),
    ],
)
def test_bad_questions_are_one_line(
    synthetic_run: Path, run: Run, arguments: tuple[Any, ...], message: str
) -> None:
    ran = run("capacity", "--trace", synthetic_run, "--assume-batch-free", *arguments)
    assert message in ran.refusal


def test_a_file_is_planned_at_a_multiple_of_its_rate(
    synthetic_run: Path, run: Run, tmp_path: Path
) -> None:
    path = arrival_file(tmp_path / "a.csv", *(f"{i},20,{5 + i % 3}" for i in range(40)))
    asked = ("capacity", "--trace", synthetic_run, "--assume-batch-free", "--arrivals", path,
             "--slo", "ttft=5", "--policy", "autoregressive", "--replications", 2)  # fmt: skip
    twice, named = (
        run(*asked, "--rate", rate, "--jobs", 1, "--json", "-").rows[0] for rate in ("2x", "2")
    )
    assert twice["rate"] == pytest.approx(named["rate"]) == 2
    assert twice["replicas"] == named["replicas"]
    assert twice["ttft_s"]["mean"] == pytest.approx(named["ttft_s"]["mean"])


def test_a_plan_takes_gaps_and_lengths_of_requests(synthetic_run: Path, run: Run) -> None:
    asked = ("capacity", "--trace", synthetic_run, "--assume-batch-free", "--slo", "ttft=5",
             "--policy", "autoregressive", "--requests", 40, "--replications", 2, "--jobs", 1,
             "--json", "-")  # fmt: skip
    former = run(*asked, "--rate", 2, "--process", "deterministic").rows
    now = run(*asked, "--rate", "deterministic:2").rows
    assert [row["e2e_s"] for row in former] == [row["e2e_s"] for row in now]
    [short] = run(*asked, "--rate", "deterministic:2", "--prompt", 5, "--output", 2).rows
    assert short["e2e_s"]["mean"] < now[0]["e2e_s"]["mean"]
    assert short["fidelity"] == "approximate"


def test_requests_that_are_all_refused_are_said_so(synthetic_run: Path, run: Run) -> None:
    ran = run(
        "capacity", "--trace", synthetic_run, "--assume-batch-free", "--slo", "ttft=1,tpot=1",
        "--rate", 1, "--kv-blocks", 1, "--requests", 20, "--replications", 1,
    ).ok()  # fmt: skip
    assert "nan" not in ran.said
    assert (
        "autoregressive: every request that counts is refused, because a replica's KV" in ran.said
    )
