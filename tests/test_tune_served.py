"""A table of lengths served as a whole: against fixed lengths, and mended where they win."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.arrays import Floats, Ints
from policies.batch.tables import BatchTable
from policies.core import Load
from policies.lengths.basic import Autoregressive, Fixed
from simulator.serving import Limits
from simulator.targets import Targets
from simulator.tune.costs import RESTING
from simulator.tune.served import (
    Serve,
    check_seed,
    closed_load,
    compare_served,
    held,
    mended,
    served_rates,
    smoothed,
)
from simulator.tune.settings import about_rising
from simulator.tune.sglang import tune_sglang
from simulator.tune.single import tune_single
from simulator.tune.vllm import about_every_length, tune_vllm
from tests.tuning import batched, iid, loads
from traces.latency.table import LatencyTable

SEEDS = (0, 1)
LENGTHS = range(6)
"""As long as any that people set by hand."""


@cache
def dear_prompts(draft_s: float) -> LatencyTable:
    """`batched`, and prompts that cost the draft model `draft_s` each, the target almost nothing.

    Rounds alone do not show it: by them, drafting pays.
    """
    cells = [("target", "prefill", 1, n, 0, 1e-3, 0.0, 10) for n in (1, 512)]
    cells += [("draft", "prefill", 1, n, 0, draft_s, 0.0, 10) for n in (1, 512)]
    kept = batched().cells
    return LatencyTable(pd.concat([kept, pd.DataFrame(cells, columns=list(kept.columns))]))


def test_a_prompt_in_the_iteration_before_counts_as_a_running_request() -> None:
    table = BatchTable([[1, 1, 5], [2, 2, 1]])
    assert table.plan([Load(1, 40)]) == 5
    assert table.plan([Load(1, 40, None, 2)]) == 1


@pytest.mark.parametrize("batch", [2, 5])
def test_a_full_engine_reads_no_row_of_a_smaller_batch(batch: int) -> None:
    # While one of them prefills, one fewer decodes: read by that, rows below would slow it.
    trace = iid(0.6, 30, 30)
    table = BatchTable([[1, batch - 1, 8], [batch, batch, 1]])
    own, fixed = served_rates(trace, batched(), [table, Fixed(1)], closed_load(trace, batch), 2)
    assert own == pytest.approx(fixed, rel=1e-9)


def test_lengths_that_lose_when_served_are_changed_and_the_row_says_so() -> None:
    trace, latency = iid(0.8, 30, 30), dear_prompts(0.2)
    # By context, lengths are chosen by rounds alone, which do not show what prompts cost.
    tuned, naive = (
        tune_vllm(trace, table, [1, 4], lengths=LENGTHS, by_context=True, draws=50)
        for table in (latency, batched())
    )
    loads = [closed_load(trace, b, seed=check_seed(0)) for b in (1, 4)]
    before = compare_served(trace, latency, naive.policy, loads)
    after = compare_served(trace, latency, tuned.policy, loads)
    assert not before["not_worse"].any()
    assert after["not_worse"].all()
    for row in tuned.rows:
        assert (row["setting"], row["deploy"]) == ("no speculation", "off")
    assert any("no setting is faster than no speculation at any batch" in w for w in tuned.warnings)


def dear_above(batch: int, factor: float, draft_s: float = 2e-2) -> LatencyTable:
    """`dear_prompts`, and drafts that cost `factor` as much to check at `batch`."""
    cells = dear_prompts(draft_s).cells.copy()
    wide = (cells["phase"] == "forward") & (cells["batch"] == batch) & (cells["new_tokens"] > 1)
    cells.loc[wide, "median_s"] *= factor
    return LatencyTable(cells)


def test_where_no_table_can_be_as_fast_as_no_draft_model_the_row_says_off() -> None:
    # One at a time drafting pays well.  At 64 it does not, but an engine that drafts at all
    # prefills the draft model too, which `off` does not.
    trace, latency = iid(0.8, 40, 60), dear_above(64, 4)
    tuned = tune_vllm(trace, latency, [1, 64], lengths=LENGTHS, draws=50)
    one, many = tuned.rows
    assert (one["deploy"], many["deploy"]) == ("on", "off")
    assert one["setting"] != "K=0"
    assert many["setting"] == "K=0"
    assert many["gain_hi"] < 1 - 1e-3
    assert any("the setting is slower than no speculation" in w for w in tuned.warnings)
    [said] = [w for w in tuned.warnings if "every K is slower than no speculation" in w]
    assert said.startswith("from batch 64 on every K is slower than no speculation, the best by ")
    assert "% at batch 64: K = 0 still runs the drafter (slower by " in said
    assert isinstance(tuned.policy_at(1), BatchTable)
    assert isinstance(tuned.policy_at(64), Autoregressive)
    loads = [closed_load(trace, b, seed=check_seed(0)) for b in (1, 64)]
    table = compare_served(trace, latency, tuned.policy, loads)
    assert table["not_worse"].tolist() == [True, False]
    deployed = compare_served(trace, latency, [tuned.policy_at(b) for b in (1, 64)], loads)
    assert deployed["not_worse"].all()


def test_lengths_beaten_at_every_later_batch_are_said() -> None:
    options, table = [0, 1, 3], np.array([[2], [1], [1]])
    alone = [np.array([[8.0], [9.0], [12.0]]), np.array([[6.0], [9.0], [7.0]])] * 2

    def said(plain: list[float | None]) -> list[str]:
        return about_every_length([1, 8, 64], options, table, alone[:3], plain)

    # Faster at the last batch, or no speculation is not to be deployed there.
    assert said([10.0, 10.0, 10.0]) == []
    assert said([10.0, 10.0, None]) == []
    assert said([10.0, 10.0, 15.0]) == [
        "from batch 8 on every K is slower than no speculation, the best by 10.0% at batch 8, "
        "20.0% at batch 64: the table keeps K=1, because K = 0 still runs the drafter (slower by "
        "40.0% at batch 8, 46.7% at batch 64)"
    ]
    table[1:] = 0
    assert ": K = 0 still runs" in said([10.0, 10.0, 15.0])[0]


def test_off_in_a_table_is_not_priced_as_an_engine_without_a_draft_model() -> None:
    # At 16 speculation gains less than the draft model's prompts cost: alone, off is best.  As
    # drafting pays at 1, they are paid anyhow, and then it is better to draft at 16 too.
    trace, latency = iid(0.8, 30, 60), dear_above(16, 0.5, 5e-2)
    prompts = replace(closed_load(trace, 16), limits=Limits(max_batch=16, lookahead=8))
    idle, drafting = served_rates(trace, latency, [RESTING, Fixed(2)], prompts, 2).mean(axis=1)
    bare = served_rates(trace, latency, [Fixed(0)], closed_load(trace, 16), 2).mean()
    assert idle < drafting < bare
    tuned = tune_vllm(trace, latency, [1, 16], lengths=LENGTHS, draws=50)
    [said] = [w for w in tuned.warnings if "every K is slower than no speculation" in w]
    found = re.fullmatch(
        r"from batch 16 on .*, the best by ([\d.]+)% at batch 16: the table keeps K=\d, because "
        r"K = 0 still runs the drafter \(slower by ([\d.]+)% at batch 16\)",
        said,
    )
    assert found is not None
    assert 1 - float(found[2]) / 100 == pytest.approx(idle / bare, abs=0.02)
    assert 0 < float(found[1]) < float(found[2])
    assert "K=0" not in [row["setting"] for row in tuned.rows]
    assert tuned.rows[1]["deploy"] == "off"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("by_context", [False, True])
def test_what_is_written_passes_a_check_on_other_random_numbers(
    seed: int, by_context: bool
) -> None:
    trace, latency, slo = iid(0.7, 20, 30), batched(), Targets(tpot_s=0.02)
    for targets in (None, slo):
        tuned = tune_vllm(
            trace, latency, [1, 4, 16], lengths=LENGTHS, by_context=by_context, slo=targets,
            draws=20, seed=seed,
        )  # fmt: skip
        loads = [closed_load(trace, b, targets, check_seed(seed)) for b in (1, 4, 16)]
        found = compare_served(trace, latency, tuned.policy, loads)
        assert found["not_worse"].all(), found.to_string()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf", "llamacpp"])
@pytest.mark.parametrize("tpot_s", [4e-3, 8e-3, 1.1e-2, 1.4e-2])
def test_targets_never_deploy_a_loss(engine: str, tpot_s: float) -> None:
    """From targets that nothing meets to targets that only small batches meet."""
    trace, slo = iid(0.6, 16, 30), Targets(tpot_s=tpot_s)
    search: Any = {
        "vllm": partial(tune_vllm, batches=[1, 16], lengths=(0, 1, 3), draws=20),
        "sglang": partial(tune_sglang, batches=[1, 16], lengths=(0, 1, 3), draws=4),
        "hf": partial(tune_single, "hf", draws=20),
        "llamacpp": partial(tune_single, "llamacpp", draws=20),
    }  # fmt: skip
    tuned = search[engine](trace, batched(), slo=slo)
    for row in tuned.rows:
        if row["deploy"] == "on":
            assert row["within_slo"] >= slo.share
            # NaN: no speculation serves no request within the targets.
            assert math.isnan(row["gain"]) or row["gain"] > 1
        elif row["deploy"] == "SLO missed":
            assert row["within_slo"] < slo.share
    deployed = {row["deploy"] for row in tuned.rows}
    assert (tuned.document is None) == ("on" not in deployed)
    said = [w for w in tuned.warnings if w.startswith(f"no setting meets TPOT {tpot_s * 1e3:g} ms")]
    assert bool(said) == ("SLO missed" in deployed)
    if tpot_s == 4e-3:
        assert deployed == {"SLO missed"}


def test_a_batch_beyond_the_targets_keeps_the_length_that_gives_most_tokens() -> None:
    trace, slo = iid(0.8, 20, 30), Targets(tpot_s=1e-2)
    bound = tune_vllm(trace, batched(), [1, 64], lengths=(0, 1, 2), slo=slo, draws=20)
    free = tune_vllm(trace, batched(), [1, 64], lengths=(0, 1, 2), draws=20)
    assert [row["deploy"] for row in bound.rows] == ["on", "SLO missed"]
    assert bound.rows[1]["setting"] == free.rows[1]["setting"]
    assert bound.rows[1]["served_tok_s"] == pytest.approx(free.rows[1]["served_tok_s"])
    assert isinstance(bound.policy_at(64), BatchTable)


def test_a_gain_is_one_number_and_the_warning_says_the_same() -> None:
    trace, latency = iid(0.8, 40, 60), dear_above(64, 4)
    tuned = tune_vllm(trace, latency, [1, 64], lengths=LENGTHS, draws=50)
    one, many = tuned.rows
    for row in (one, many):
        assert row["default_gain"] == row["gain"]
    assert one["decode_tok_s"] > one["served_tok_s"]  # which reads the prompts as well
    assert any(f"({many['gain']:.3g}x at batch 64)" in w for w in tuned.warnings)


def test_a_check_meets_other_requests_than_the_search() -> None:
    assert len({check_seed(s) for s in range(100)} | set(range(100))) == 200
    trace = iid(0.7, 30, 40)
    loads = [closed_load(trace, 1, seed=s) for s in (0, check_seed(0))]
    one, other = (served_rates(trace, batched(), [Fixed(2)], load, 2)[0] for load in loads)
    assert not np.isclose(one, other).any()


def mixed(alone: Floats, share: float) -> tuple[list[Floats], Serve]:
    """Rates of tables that spend `share` of their time in the row below the batch's own."""
    # (batches, options): constants in both replications, with a spread of a thousandth.
    spread = np.array([0.999, 1.001])

    def serve(table: Ints) -> Floats:
        at = np.arange(len(table))
        own, below = alone[at, table[:, 0]], alone[at, table[np.maximum(at - 1, 0), 0]]
        return np.asarray(np.outer((1 - share) * own + share * below, spread))

    batches, options = alone.shape
    every = np.array([serve(np.full((batches, 1), k)) for k in range(options)])
    return list(np.swapaxes(every, 0, 1)), serve


def test_a_length_that_suits_its_own_batch_but_not_the_next_gives_way() -> None:
    # Alone at batch 1 both are about equal; at batch 2, whose engine is now and then at 1,
    # option 1 costs a quarter.
    alone = np.array([[1.0, 1.0], [2.0, 1.5]])
    fixed, serve = mixed(alone, 0.2)
    naive = np.array([[1], [0]])
    before, after = held(naive, fixed, serve), mended(naive, fixed, serve)
    assert before.worse.tolist() == [False, True]
    assert not after.worse.any()
    assert after.table.tolist() == [[0], [0]]
    assert after.gains == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("third", "table"),
    [
        ([0.998, 1.0], [[1], [0], [0]]),  # no more than noise: lowered
        ([0.9, 1.0], [[1], [0], [1]]),  # a real gain: kept, and said
    ],
)
def test_a_length_that_rises_with_the_batch_is_noise_or_a_remark(
    third: list[float], table: list[list[int]]
) -> None:
    alone = np.array([[0.8, 1.0], [1.0, 0.8], third])
    fixed, serve = mixed(alone, 0.0)
    noise = 1 + 0.01 * np.array([-1, 1.0])

    def noisy(chosen: Ints) -> Floats:
        # Replications that spread by a hundredth, and not in step.
        swapped = np.where(chosen[:, :1] > 0, noise, noise[::-1])
        return np.asarray(serve(chosen) * swapped)

    found = smoothed(held(np.array([[1], [0], [1]]), fixed, noisy), fixed, noisy)
    assert found.table.tolist() == table
    said = about_rising("K", [1, 4, 16], [0, 3], found.table, fixed)
    kept = table[2] == [1]
    assert said == (
        ["K rises again at batch 16, from 0 to 3: served there, K = 3 gives +11.1% over K = 0"]
        if kept else []
    )  # fmt: skip


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_mending_never_makes_a_table_worse_and_ends(data: st.DataObject) -> None:
    shape = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    values = st.lists(st.floats(0.5, 2), min_size=shape[1], max_size=shape[1])
    alone = np.array([data.draw(values) for _ in range(shape[0])])
    fixed, serve = mixed(alone, data.draw(st.floats(0, 0.5)))
    table = np.array([[data.draw(st.integers(0, shape[1] - 1))] for _ in range(shape[0])])
    before, after = held(table, fixed, serve), mended(table, fixed, serve)
    assert after.rank <= before.rank
    assert held(after.table, fixed, serve).rank == after.rank


def test_served_at_any_load_it_is_not_worse_than_a_length_set_by_hand() -> None:
    trace = iid(0.7, 40, 40)
    tuned = tune_vllm(trace, batched(), lengths=LENGTHS, draws=50)
    found = compare_served(trace, batched(), tuned.policy, loads(trace), replications=3)
    assert found["not_worse"].all(), found.to_string()
    assert found["tuned"].min() > 0


def test_a_bad_table_is_caught_when_served() -> None:
    trace = iid(0.3, 40, 40)
    bad = BatchTable([[1, 64, 8]])
    found = compare_served(trace, batched(), bad, loads(trace)[1:2], replications=3)
    assert not found["not_worse"].any()
    assert (found["margin"] < 0).all()


def test_what_is_tuned_for_vllm_is_not_worse_when_served() -> None:
    trace, latency = iid(0.7, 40, 40), batched()
    tuned = tune_vllm(trace, latency, [1, 8, 64], lengths=LENGTHS, draws=50)
    loads = [closed_load(trace, b, seed=check_seed(0)) for b in (1, 8, 64)]
    found = compare_served(trace, latency, [tuned.policy_at(b) for b in (1, 8, 64)], loads)
    assert found["not_worse"].all()
