"""Cells of a sweep against single runs: prices, contexts, batches, tilts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies import Autoregressive, DraftPolicy, Fixed, HFHeuristic, Oracle, parse_policy
from policies.batch.base import IterationCost, TextbookCost
from policies.core import Load, Round
from policies.registry import PLAIN, supplied
from simulator.chosen import load_policies
from simulator.executors import Local
from simulator.pricing import always_drafted, autoregressive, extras_of, price
from simulator.serving.cost import EngineCost, TableCost
from simulator.summary import prompt_speedups, summarize
from simulator.whatif.batching import InBatches, _dealt, in_steps, step_costs
from simulator.whatif.cells import COLUMNS, Prices, SweepPart, SweepRunner, _at_context, references
from simulator.whatif.sweep import Sweep
from simulator.whatif.tilt import Tilter
from tests.break_even import priced_at
from tests.compiled import TABLES
from tests.serving import table_of
from tests.studies import POLICIES, TABLE, recorded, study
from traces.acceptance.sampling import Sampling
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable, as_cells
from traces.replay import vectorised
from traces.replay.calls import drafting_always, passes_always
from traces.replay.run import replay

SUMMARIZED = (
    "speedup", "speedup_lo", "speedup_hi", "wall_s", "block_efficiency", "tokens", "rounds",
    "drafted", "accepted", "acceptance_rate",
)  # fmt: skip


@pytest.mark.parametrize("always", [0, 4])
@pytest.mark.parametrize("text", ["goodput", "ucb", "sglang-throughput"])
def test_policies_weigh_the_costs_that_price_them(text: str, always: int) -> None:
    trace, ratios = recorded(), (0.02, 2.0)
    prices = Prices(ratios, {"here": TABLE}, verify=1.2, always=always)
    rows = Sweep(trace, {text: parse_policy(text)}, prices, resamples=0).run(Local(1))
    assert list(rows["c"][:2]) == list(ratios)
    assert rows["rounds"].nunique() > 1
    table = drafting_always(TABLE, always or None)

    def at_ratio(c: float) -> IterationCost:
        cost = TextbookCost(draft=c, verify=1.2)
        return lambda batch, passes, *others: cost(batch, max(passes, always), *others)

    costs = [*map(at_ratio, ratios), TableCost(table)]
    for (_, row), cost in zip(rows.iterrows(), costs, strict=True):
        log = replay(trace, parse_policy(text, cost=cost))
        assert row["rounds"] == len(log)
        assert row["draft_forwards"] == always_drafted(log, always).rounds["draft_forwards"].sum()
    [(_, chosen)] = load_policies([text], trace, latency=table)
    assert rows["rounds"].iloc[-1] == len(replay(trace, chosen))
    kept = parse_policy(text, cost=(own := TextbookCost(draft=0.5)))
    assert getattr(supplied(kept, cost=TableCost(TABLE)), "policy", kept).cost is own


def test_policies_read_the_contexts_that_price_them() -> None:
    text = "batch-table:table=[[1,64,0,299,1],[1,64,300,9999,4]]"
    prices = Prices((), {"here": TABLE}, (100, 600))
    rows = Sweep(recorded(), {text: parse_policy(text)}, prices, resamples=0).run(Local(1))
    for (_, row), gamma in zip(rows.iterrows(), (1, 4), strict=True):
        fixed = Sweep(recorded(), {"fixed": Fixed(gamma)}, prices, resamples=0).run(Local(1))
        own = fixed[fixed["context"] == row["context"]].iloc[0]
        assert row["speedup"] == pytest.approx(own["speedup"])


@pytest.mark.invariant(10)
def test_rows_agree_with_single_runs() -> None:
    frame = study().run(Local(1))
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == study().rows == 2 * 5 * 4
    for alpha in (0.4, 0.8):
        tilted = Tilter(recorded()).to(alpha)
        for name, policy in POLICIES.items():
            log = replay(tilted, policy, name=name)
            part = frame[(frame["policy"] == name) & (frame["alpha_asked"] == alpha)]
            by_ratio = part[part["latency"] == "ratio"]
            cost, speedup = priced_at(log, by_ratio["c"], 1.1)
            np.testing.assert_allclose(by_ratio["speedup"], speedup)
            np.testing.assert_allclose(by_ratio["wall_s"], cost)
            own = part[(part["latency"] == "here") & part["context"].isna()].iloc[0]
            summary = summarize([log], TABLE, resamples=40, seed=0).iloc[1]
            for column in SUMMARIZED:
                assert own[column] == pytest.approx(summary[column]), column
            slower = np.nanmean(prompt_speedups(log, TABLE) < 1)
            assert own["share_below_1"] == pytest.approx(slower)
            at_c = autoregressive(log)
            for row in by_ratio.itertuples():
                cost = LatencyTable.constant(1.0, float(row.c), 1.1)
                each = price(at_c, cost).decode_s / price(log, cost).decode_s
                assert row.share_below_1 == pytest.approx((each < 1 - 1e-12).mean())
    assert (frame["fidelity"] == "approximate").all()


def test_contexts_reprice() -> None:
    rows = [("target", "forward", 1, n, k, 0.01 + 1e-5 * k, 0.0, 5)
            for n in (1, 30) for k in (0, 4000)]  # fmt: skip
    rows += [("draft", "forward", 1, 1, k, 0.001 + 1e-6 * k, 0.0, 5) for k in (0, 4000)]
    table = table_of(rows)
    frame = Sweep(
        recorded(), {"fixed": Fixed(3)}, Prices((), {"t": table}, (10, 3000)), resamples=0
    ).run(Local(1))
    longer, shorter = frame[frame["context"] == 3000], frame[frame["context"] == 10]
    tokens = int(longer["tokens"].iloc[0])
    extra = longer["wall_s"].iloc[0] - shorter["wall_s"].iloc[0]
    log = replay(recorded(), Fixed(3))
    forwards = int(log.rounds["draft_forwards"].sum())
    assert extra == pytest.approx(2990 * (1e-5 * len(log) + 1e-6 * forwards))
    assert tokens == log.rounds["emitted"].sum()
    assert frame["speedup_lo"].isna().all()  # no resamples, no interval


def test_a_batch_of_one_is_a_single_stream() -> None:
    log = replay(recorded(), Fixed(4))
    steps = in_steps(log, 1, [np.random.default_rng(0)])
    single = price(log, TABLE)
    seconds, _ = step_costs(steps, TABLE)
    per_token = seconds.sum() / steps.emitted.sum()
    # Only which prompts were drawn differs.
    assert per_token == pytest.approx(single.total_s / log.rounds["emitted"].sum(), rel=0.15)
    plain, _ = step_costs(in_steps(autoregressive(log), 1, [np.random.default_rng(0)]), TABLE)
    assert plain == pytest.approx(np.full(len(plain), 0.0105))


class Uneven(DraftPolicy):
    """Drafts nothing, one token or four in turn, and verifies all, none, or all but one of them."""

    gamma_max = 4

    def begin_request(self) -> None:
        self.rounds = 0

    def begin_round(self, load: Load) -> None:
        self.rounds += 1

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < (0, 1, 4)[self.rounds % 3]

    def submit(self, draft: Sequence[Any]) -> int:
        return (len(draft), 0, max(len(draft) - 1, 0))[self.rounds // 3 % 3]


COSTED: list[DraftPolicy] = [
    Fixed(5), parse_policy("gammatune", max_gamma=20), Autoregressive(), Uneven(),
    parse_policy("svip"),
]  # fmt: skip


# An engine that always drafts: serving takes every iteration to remove unread tokens from a cache.
@pytest.mark.parametrize("name", [n for n, table in TABLES.items() if not passes_always(table)])
@pytest.mark.parametrize("policy", COSTED, ids=lambda policy: type(policy).__name__)
def test_steps_and_rounds_cost_what_iterations_of_serving_do(
    policy: DraftPolicy, name: str
) -> None:
    more = [
        ("draft", "signal", 1, 1, 0, 2e-4, 0.0, 5), ("draft", "draw", 1, 1, 0, 1e-4, 0.0, 5),
        *(("target", "toss", 1, n, 0, 3e-4 + 5e-5 * n, 0.0, 5) for n in (0, 4)),
    ]  # fmt: skip
    table = TABLES[name]
    table = LatencyTable(pd.concat([table.cells, table_of(more).cells]), table.meta)
    speculates = not isinstance(policy, Autoregressive)
    drafted = replay(recorded(), policy, name=type(policy).__name__ if speculates else PLAIN)
    drafted = replace(drafted, sampling=Sampling(1.0))
    extras = extras_of(drafted.reads, sampling=drafted.sampling)
    cost = EngineCost(table, extras, speculates, longest=24)
    log, context = drafted, drafted.context
    rows = [Round(*row) for row in drafted.rounds[list(Round._fields)].tolist()]

    def served_s(indices: Any) -> float:
        slots: list[Any] = [SimpleNamespace(context=int(context[i])) for i in indices]
        return cost(slots, [rows[i] for i in indices], []).total_s

    for i, round_s in enumerate(price(log, table).round_s):
        assert round_s == pytest.approx(served_s([i]), rel=1e-9), rows[i]
    found, _ = step_costs(in_steps(log, 4, [np.random.default_rng(3)]), table)
    bounds = np.searchsorted(log.rounds["request"], np.arange(len(log.requests) + 1))
    dealt = _dealt(bounds, 4, np.random.default_rng(3))
    for step in range(0, len(found), 7):
        assert found[step] == pytest.approx(served_s(dealt[step]), rel=1e-9)


def grid_to(context: int, batch: int) -> LatencyTable:
    """Passes measured up to this context and batch, and no further."""
    rows = [
        (model, "forward", b, n, k, each * (1 + 0.01 * b * n + 1e-3 * k), 0.0, 5)
        for model, each in (("target", 0.01), ("draft", 0.001))
        for b in (1, batch) for n in (1, 9) for k in (0, context)
    ]  # fmt: skip
    return table_of(rows)


@pytest.mark.parametrize("batch", [1, 4])
def test_passes_outside_the_measured_cells_are_counted(batch: int) -> None:
    prices = Prices((0.1,), {"t": grid_to(600, 4)}, (10, 590, 100_000))
    policies = {"fixed": Fixed(3)}
    frame = Sweep(recorded(), policies, prices, (), (batch,), resamples=2).run(Local(1))
    outside = dict(zip(frame["context"].fillna(-1), frame["outside"], strict=True))
    assert outside[-1] == outside[10] == 0  # a cost ratio is assumed, and 10 tokens are measured
    assert outside[100_000] == 1
    if batch == 1:
        # Of prompts of 590 tokens, only what is decoded beyond the 600th is a guess.
        assert 0 < outside[590] < 1
        log = _at_context(replay(recorded(), Fixed(3)), 590)
        sides = [price(one, prices.latencies["t"]).passes for one in (log, autoregressive(log))]
        assert outside[590] == max(p.extrapolated / p.passes for p in sides)
    larger = Sweep(recorded(), policies, prices, (), (64,), resamples=2).run(Local(1))
    assert (larger.loc[larger["latency"] == "t", "outside"] == 1).all()


def test_prompts_read_outside_are_no_passes_of_decoding() -> None:
    cells = pd.concat(
        [
            grid_to(600, 4).cells,
            as_cells([("target", "prefill", 1, 8, 0, 0.02, 0.0, 5)]),
        ]
    )
    run = price(replay(recorded(), Fixed(3)), LatencyTable(cells))
    assert run.prefill_passes.passes == len(recorded().requests)
    assert run.passes.extrapolated == run.prefill_passes.extrapolated > 0
    assert run.outside == 0


@pytest.mark.parametrize("batch", [2, 6])
def test_times_and_slow_prompts_in_a_batch(batch: int) -> None:
    ratios = (0.01, 0.3, 0.9)
    prices = Prices(ratios, {"t": TABLE}, (None,))
    frame = Sweep(recorded(), {"fixed": Fixed(3)}, prices, (), (1, batch)).run(Local(1))
    alone, together = (frame[frame["batch"] == b].reset_index(drop=True) for b in (1, batch))
    assert frame["wall_s"].notna().all()
    assert frame["share_below_1"].between(0, 1).all()
    # With passes that cost the same in any batch, a prompt's rounds do; wall time is shared.
    np.testing.assert_allclose(together["wall_s"], alone["wall_s"] / batch, rtol=0.1)
    np.testing.assert_allclose(together["share_below_1"], alone["share_below_1"], atol=0.2)
    assert together["share_below_1"].iloc[0] < together["share_below_1"].iloc[2]
    # Among drafts that differ, all wait for the longest: more prompts lose than by themselves.
    ragged = Sweep(recorded(), {"oracle": Oracle()}, Prices((0.3,)), (), (1, 16)).run(Local(1))
    assert ragged["share_below_1"].tolist() == sorted(ragged["share_below_1"])
    assert ragged["share_below_1"].iloc[1] > 0


@pytest.mark.parametrize("batch", [2, 8])
def test_fixed_lengths_in_batches_cost_the_closed_form(batch: int) -> None:
    trace = synthetic_trace(0.7, requests=40, tokens=200, seed=1)
    log = replay(trace, Fixed(3))
    found = InBatches(log, batch, resamples=30).at_ratios(np.array([0.1]), 1.0)
    single = priced_at(log, [0.1])[1][0]
    # All slots draft alike, but for the ends of outputs, so that a batch changes nothing.
    assert found.speedup_lo[0] - 0.05 < single < found.speedup_hi[0] + 0.05
    # The value is of all prompts once: no draw of prompts changes it.
    each = log.rounds["emitted"].mean() / 1.3
    for seed in (1, 2):
        again = InBatches(log, batch, resamples=2, seed=seed).at_ratios(np.array([0.1]), 1.0)
        assert again.speedup[0] == pytest.approx(each, rel=1e-3)


def test_ragged_drafts_pay_for_the_longest() -> None:
    log = replay(recorded(), Oracle())
    speedups = [
        InBatches(log, b, resamples=5).at_ratios(np.array([0.2]), 1.0).speedup[0]
        for b in (1, 4, 16)
    ]
    assert speedups[0] > speedups[1] > speedups[2]


def test_batches_agree_with_the_serving_simulator() -> None:
    from simulator.serving import ClosedLoop, Limits, Scenario, simulate

    trace = synthetic_trace(0.75, requests=30, tokens=120, seed=6, prompt_length=1)
    table = LatencyTable.constant(1.0, 0.1, 1.2)
    scenario = Scenario(ClosedLoop(4), Limits(max_batch=4), requests=150)
    own, plain = (simulate(trace, table, one, scenario) for one in (Fixed(3), Autoregressive()))
    served = own.throughput / plain.throughput
    frame = Sweep(trace, {"p": Fixed(3)}, Prices((), {"t": table}), (), (4,)).run(Local(1))
    assert frame["speedup"].iloc[0] == pytest.approx(served, rel=0.05)


class Aware(DraftPolicy):
    """Drafts nothing in a batch."""

    def __init__(self) -> None:
        self.batch = 1

    def begin_round(self, load: Load) -> None:
        self.batch = load.batch

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return self.batch == 1 and len(draft) < 2


def test_policies_are_told_the_batch() -> None:
    frame = Sweep(recorded(), {"aware": Aware()}, Prices((0.1,)), (), (1, 8)).run(Local(1))
    assert frame["drafted"].tolist() == [pytest.approx(frame["drafted"].iloc[0]), 0]
    assert frame["drafted"].iloc[0] > 0
    assert frame["speedup"].iloc[1] == pytest.approx(1.0)


def test_iid_is_labelled_and_its_error_unknown() -> None:
    frame = study(method="iid").run(Local(1))
    assert set(frame["source"]) == {"iid"}
    assert frame["tilt_error"].isna().all()
    assert not frame["tilt_tried"].any()


def test_error_of_the_tilt_comes_with_every_row() -> None:
    sweep = study(measure_tilt=True)
    assert sweep.error is not None
    frame = sweep.run(Local(1))
    own = sweep.runner.trace.columns["match"][sweep.runner.trace.on_path].mean()
    for row in frame.itertuples():
        error = sweep.error.of(False).at(float(row.alpha), float(own))
        assert row.tilt_error == pytest.approx(error)
    as_recorded = study(alphas=()).run(Local(1))
    assert set(as_recorded["source"]) == {"recorded"}
    assert (as_recorded["tilt_error"] == 0).all()
    assert as_recorded["tilt_tried"].all()
    assert (as_recorded["fidelity"] == "exact").all()


def test_a_sweeps_part_is_the_same_with_and_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded()
    names = ("fixed:gamma=3", "gammatune", "adaedl", "cm-asd", "hf-heuristic", "rate-optimal")
    policies = {n: parse_policy(n, max_gamma=trace.max_gamma) for n in names}
    bench = SweepRunner(trace, policies, Prices((0.05, 0.4)), resamples=20)
    quick = bench.run(SweepPart(None, 1, names))
    monkeypatch.setattr(vectorised, "plan_of", lambda *_: None)
    usual = bench.run(SweepPart(None, 1, names))
    for name, values in usual.items():
        np.testing.assert_array_equal(quick[name], values, err_msg=name)


ADAPTIVE: dict[str, DraftPolicy] = {"hf-heuristic": HFHeuristic(gamma_max=20)}
REGRETS = ["best_fixed", "best_gamma", "oracle", "regret_fixed", "regret_oracle", "adapting"]


def swept(policies: dict[str, DraftPolicy], **changes: Any) -> Any:
    given: dict[str, Any] = {
        "alphas": (0.5, 0.8), "batches": (1, 3), "resamples": 4, "measure_tilt": False,
    } | changes  # fmt: skip
    prices = Prices((0.02, 0.3), {"here": TABLE}, (None, 500))
    return Sweep(recorded(), policies, prices, **given).run(Local(1))


def test_regrets_do_not_hang_on_the_policies_asked_for() -> None:
    ladder: dict[str, DraftPolicy] = {f"fixed:gamma={g}": Fixed(g) for g in range(1, 13)}
    bound = Oracle(gamma_max=recorded().max_gamma)
    alone, among = swept(ADAPTIVE), swept({**ladder, **ADAPTIVE, "oracle": bound})
    assert set(alone["policy"]) == {"hf-heuristic"}
    own = among[among["policy"] == "hf-heuristic"].reset_index(drop=True)
    assert len(alone) == 2 * 2 * 4 == len(own)
    for column in REGRETS:
        np.testing.assert_allclose(alone[column], own[column], err_msg=column)
    point = ["alpha_asked", "c", "latency", "batch", "context"]
    fixed = among[among["family"] == "fixed"].fillna({"c": -1.0, "context": -1.0})
    best = fixed.groupby(point, observed=True)["speedup"].max().clip(lower=1.0)
    keys = own.fillna({"c": -1.0, "context": -1.0}).set_index(point).index
    np.testing.assert_allclose(own["best_fixed"], best.loc[keys])
    np.testing.assert_allclose(own["regret_fixed"], 1 - own["speedup"] / own["best_fixed"])
    # One fixed length is not the best of those there are.
    single = swept({"fixed:gamma=5": Fixed(5)})
    assert (single["regret_fixed"] > 0).any()
    assert (single["regret_fixed"] >= 0).all()


def test_what_is_asked_for_is_not_replayed_twice() -> None:
    trace = recorded()
    names = {f"fixed:gamma={g}" for g in range(1, 13)} | {"oracle"}
    assert set(references(trace, ADAPTIVE)) == names
    bound = Oracle(gamma_max=trace.max_gamma)
    given: dict[str, DraftPolicy] = {"fixed": Fixed(5), "oracle:gamma_max=24": bound}
    assert set(references(trace, given)) == names - {"fixed:gamma=5", "oracle"}
    # A policy of that name which is another one keeps it.
    assert "oracle" not in references(trace, {"oracle": Oracle("run+1")})


def test_references_end_where_the_recording_does() -> None:
    short = synthetic_trace(0.6, requests=4, tokens=40, concentration=8.0, max_gamma=5)
    found = references(short, {})
    assert list(found) == [*(f"fixed:gamma={g}" for g in range(1, 6)), "oracle"]
    frame = Sweep(short, {"hf": HFHeuristic(gamma_max=5)}, Prices((0.1,))).run(Local(1))
    assert frame["best_fixed"].notna().all()
    assert frame["adapting"].notna().all()
