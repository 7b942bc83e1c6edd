"""Searching vLLM's table: against closed forms and by properties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.batch.tables import BatchTable
from policies.core import Load
from policies.lengths.basic import Autoregressive, Fixed
from simulator.formulas import leviathan
from simulator.pricing import price
from simulator.serving import simulate
from simulator.targets import Targets
from simulator.tune.costs import fixed_logs, price_grid
from simulator.tune.formats import check_vllm
from simulator.tune.served import closed_load, counted_rate, served_rates, unbeaten
from simulator.tune.settings import TUNE_COLUMNS
from simulator.tune.sglang import tune_sglang
from simulator.tune.single import tune_single
from simulator.tune.vllm import table_rows, tune_vllm
from tests.logs import import_vllm
from tests.tuning import CHEAP, batched, iid
from traces.acceptance.survival import impute
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

FEW = (1, 3, 8)
"""Lengths tried where no test is about those between."""


@pytest.mark.parametrize(("alpha", "c"), [(0.8, 0.1), (0.6, 0.1), (0.5, 0.05)])
def test_the_length_chosen_is_as_good_as_leviathans(alpha: float, c: float) -> None:
    tuned = tune_vllm(iid(alpha), LatencyTable.constant(1.0, c), draws=300)
    assert tuned.document is not None
    k = tuned.document["num_speculative_tokens"]
    optimum = leviathan.optimal_gamma(alpha, c)
    # Near the optimum the curve is flat: a smaller K may be chosen, not a slower one.
    assert 1 <= k <= optimum + 2
    best = max(leviathan.speedup(alpha, g, c) for g in range(9))
    assert leviathan.speedup(alpha, k, c) > 0.97 * best
    (row,) = tuned.rows
    assert row["gain_lo"] - 0.03 < leviathan.speedup(alpha, k, c) < row["gain_hi"] + 0.03


def test_limits_are_exact() -> None:
    always = tune_vllm(iid(1.0, 8, 90), CHEAP, draws=100)
    assert always.document is not None
    assert always.document["num_speculative_tokens_per_batch_size"] == [[1, 1, 8]]
    never = tune_vllm(iid(0.05, 20, 90), LatencyTable.constant(1.0, 0.3), draws=100)
    assert never.document is None
    assert isinstance(never.policy, Autoregressive)
    (row,) = never.rows
    assert tuple(row) == TUNE_COLUMNS
    assert (row["setting"], row["deploy"]) == ("no speculation", "off")
    assert (row["gain"], row["gain_lo"], row["gain_hi"]) == (1, 1, 1)
    assert row["decode_tok_s"] == pytest.approx(1)
    assert any("without --speculative-config" in w for w in never.warnings)


def test_a_length_of_0_costs_the_draft_pass_that_keeps_the_draft_in_step() -> None:
    trace, c = iid(0.5, 10, 60), 0.25
    plain, logs = fixed_logs(trace, (0, 1))
    grid = price_grid([plain, *logs.values()], LatencyTable.constant(1.0, c))
    tokens = grid.tokens[0].sum()
    off_s, resting_s, drafting_s = grid.seconds.sum(axis=1)
    # The last token of a request is decoded without a draft pass: nobody reads it.
    requests = len(trace.requests)
    assert off_s == pytest.approx(tokens)
    assert resting_s == pytest.approx(tokens + c * (tokens - requests))
    assert drafting_s < resting_s


def test_lengths_shrink_with_the_batch_and_rows_say_what_was_priced() -> None:
    trace = iid(0.7, 40, 60)
    tuned = tune_vllm(trace, batched(), draws=200)
    assert tuned.document is not None
    table = tuned.document["num_speculative_tokens_per_batch_size"]
    lengths = [row[2] for row in table]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert table[-1][1] == 64
    _, logs = fixed_logs(trace)
    for row in tuned.rows:
        assert tuple(row) == TUNE_COLUMNS
        k = int(row["setting"].removeprefix("K="))
        one = price(logs[k], batched(), batch=row["batch"])
        expected = row["batch"] * one.log.rounds["emitted"].sum() / one.total_s
        assert row["decode_tok_s"] == pytest.approx(expected)
        assert row["outside"] == 0
        loads = [Load(row["batch"], 50)] * row["batch"]
        assert tuned.policy.plan(loads) == k  # type: ignore[union-attr]


def test_the_context_form_follows_the_context() -> None:
    trace = iid(0.7, 40, 60)
    cells = batched().cells.copy()
    # Checking drafts over a long context is made as slow as decoding them: it cannot pay there.
    far = (cells["model"] == "target") & (cells["context"] == 512) & (cells["new_tokens"] > 1)
    cells.loc[far, "median_s"] *= cells.loc[far, "new_tokens"]
    table = LatencyTable(cells)
    tuned = tune_vllm(trace, table, [1, 4], by_context=True, lengths=FEW, draws=200)
    assert tuned.document is not None
    ranges = tuned.document["num_speculative_tokens_per_batch_size"]
    assert all(len(row) == 5 for row in ranges)
    policy = BatchTable(ranges)
    assert policy.plan([Load(1, 20)]) > 0
    assert policy.plan([Load(1, 500)]) == policy.plan([Load(1, 9000)]) == 0
    assert {row["context"] for row in tuned.rows} == {18, 502}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_ranges_keep_vllms_rules_and_return_what_was_chosen(data: st.DataObject) -> None:
    rising = st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True).map(sorted)
    batches = data.draw(rising)
    contexts: list[Any] = data.draw(st.one_of(st.just([None]), rising))
    table = np.array(
        [[data.draw(st.integers(0, 3)) for _ in contexts] for _ in batches], dtype=np.int64
    )
    ranges = table_rows(table, batches, contexts, [0, 1, 2, 5])
    check_vllm({"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": ranges})
    policy = BatchTable(ranges)
    for i, j in np.ndindex(*table.shape):
        loads = [Load(batches[i], contexts[j] or 7)] * batches[i]
        assert policy.plan(loads) == [0, 1, 2, 5][table[i, j]]


def test_targets_count_only_requests_that_meet_them() -> None:
    trace = iid(0.7, 10, 60)
    plain, drafting = fixed_logs(trace, (4,))
    logs = [plain, *drafting.values()]
    free = price_grid(logs, CHEAP)
    assert (free.within == 1).all()
    middle = float(np.median(free.seconds[1] / free.tokens[1]))
    bound = price_grid(logs, CHEAP, slo=Targets(tpot_s=middle))
    assert bound.within[0] == 0
    assert 0.4 <= bound.within[1] <= 0.6
    assert bound.tokens[1].sum() < free.tokens[1].sum()
    late = price_grid(logs, CHEAP, slo=Targets(ttft_s=0.5))
    assert (late.within == 0).all()
    tuned = tune_vllm(trace, CHEAP, slo=Targets(tpot_s=1e-3), draws=50)
    assert any("no setting meets TPOT 1 ms for 95% of the requests" in w for w in tuned.warnings)


def test_thin_evidence_is_said() -> None:
    tuned = tune_vllm(iid(0.7, 4, 60), batched(), [1, 256], lengths=FEW, draws=50)
    said = " ".join(tuned.warnings)
    assert "only 4 prompts" in said
    assert "batch 256" in said
    assert "no batch between 1 and 256" in said
    assert "outside the measured sizes" in said
    assert "search larger batches with --batch" in said or tuned.rows[-1]["setting"] == "K=0"
    lone = tune_vllm(iid(0.7, 1, 60), CHEAP, lengths=FEW, draws=50)
    assert any("no interval" in w for w in lone.warnings)
    assert batched().usual_batches == [1, 2, 4, 8, 16, 32, 64]
    assert CHEAP.usual_batches == [1]
    noisy = batched().cells.assign(spread_s=batched().cells["median_s"] * 0.4)
    noise = tune_vllm(iid(0.7, 40, 60), LatencyTable(noisy), [1], lengths=FEW, draws=50)
    assert "repeated timings differ by 40%" in " ".join(noise.warnings)


def test_impossible_searches_are_refused() -> None:
    with pytest.raises(DraftsimError, match="draft lengths are"):
        fixed_logs(iid(0.5, 2, 20), (-1,))
    with pytest.raises(DraftsimError, match="draws is 5"):
        tune_sglang(iid(0.5, 2, 20), CHEAP, draws=5)
    with pytest.raises(DraftsimError, match="batches holds 0"):
        tune_vllm(iid(0.5, 2, 20), CHEAP, [0])


def test_other_sources_cells_do_not_bound_the_batches_searched() -> None:
    cells = batched().cells
    lookups = cells[cells["phase"] == "forward"].query("batch == 1 and model == 'target'")
    more = LatencyTable(pd.concat([cells, lookups.head(1).assign(model="pld")]))
    assert more.usual_batches == batched().usual_batches


def alone(trace: Trace, latency: LatencyTable, lengths: list[int], batch: int) -> Any:
    return served_rates(trace, latency, [Fixed(k) for k in lengths], closed_load(trace, batch))


def test_unbeaten_lengths_hold_the_best_and_drop_the_hopeless() -> None:
    trace = iid(0.8, 30, 40)
    kept = unbeaten(alone(trace, CHEAP, [0, 1, 2, 4, 8], 1))
    rates = [
        simulate(
            trace, CHEAP, Fixed(k) if k else Autoregressive(), closed_load(trace, 1)
        ).throughput
        for k in (0, 1, 2, 4, 8)
    ]
    assert kept[int(np.argmax(rates))]
    assert not kept[0]  # half the speed, at an acceptance of 0.8 and a draft that costs little
    slow = LatencyTable.constant(1.0, 0.9)
    assert unbeaten(alone(iid(0.1, 30, 40), slow, [0, 4], 1)).tolist() == [True, False]


@pytest.mark.parametrize("tune", [tune_vllm, tune_sglang])
def test_a_table_that_never_drafts_is_no_table(tune: Any) -> None:
    # Checking a draft costs three target passes: K = 0 is best, and off is better still.
    dear = LatencyTable.constant(0.01, 0.001, 0.03)
    tuned = tune(iid(0.5, 20, 40), dear, draws=4)
    assert tuned.document is None
    assert [row["deploy"] for row in tuned.rows] == ["off"]


def test_targets_that_nobody_meets_load_no_draft_model() -> None:
    tuned = tune_vllm(iid(0.7, 10, 40), batched(), [1, 4], slo=Targets(1e-6, 1e-6), draws=50)
    assert tuned.document is None
    assert any("at batch 1 meets it for 0.0%" in w for w in tuned.warnings)
    assert {row["deploy"] for row in tuned.rows} == {"SLO missed"}


def test_tokens_count_by_the_requests_that_meet_the_targets() -> None:
    # Requests of unlike lengths: a share of requests is not that of their tokens.
    trace = iid(0.7, 12, 60)
    trace = trace.select([*range(12)])
    free = simulate(trace, batched(), Fixed(2), closed_load(trace, 4))
    requests = free.requests
    target = float(requests["tpot_s"].median())
    bound = simulate(trace, batched(), Fixed(2), closed_load(trace, 4, Targets(tpot_s=target)))
    met = requests["tpot_s"] <= target
    kept = requests["index"] >= free.recorder.skip
    share = requests["tokens"][met & kept].sum() / requests["tokens"][kept].sum()
    assert bound.tokens_within_targets == pytest.approx(share)
    assert counted_rate(bound) == pytest.approx(share * counted_rate(free))
    assert free.tokens_within_targets == 1


def test_lengths_that_a_log_never_drafted_are_not_searched(tmp_path: Path) -> None:
    # A server that always drafted one token tells nothing of the second.
    drawn = np.random.default_rng(0).random((30, 40)) < 0.8
    path = tmp_path / "requests.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "id": f"r{i}",
                    "usage": {"prompt_tokens": 20, "completion_tokens": int(41 + row.sum())},
                    "metrics": {
                        "speculative_decoding": {
                            "per_step_drafted": [1] * 40,
                            "per_step_accepted": row.astype(int).tolist(),
                        }
                    },
                }
            )
            for i, row in enumerate(drawn)
        )
    )
    log = impute(import_vllm(path))
    tuned = tune_vllm(log, LatencyTable.constant(0.0195, 0.0008), draws=50)
    assert [row["setting"] for row in tuned.rows] == ["K=1"]
    assert any("has no verified draft longer than 1" in w for w in tuned.warnings)
    hf = tune_single("hf", log, LatencyTable.constant(0.0195, 0.0008), draws=50)
    assert hf.document is not None
    assert hf.document["num_assistant_tokens"] == 1
