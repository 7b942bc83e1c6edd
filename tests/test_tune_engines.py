"""Searching the settings of SGLang and transformers."""

from __future__ import annotations

import math
from functools import cache

import pytest

from policies.batch.sglang import SGLangAdaptive
from policies.core import Load
from policies.lengths.basic import Autoregressive
from simulator.serving.run import lookahead_of
from simulator.tune.served import check_seed, closed_load, compare_served
from simulator.tune.settings import TUNE_COLUMNS, Tuned
from simulator.tune.sglang import tune_sglang
from simulator.tune.single import HF_DEFAULT, tune_single, values_said
from tests.tuning import CHEAP, batched, iid
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable


@cache
def huggingface() -> Tuned:
    trace = synthetic_trace(
        0.6, requests=20, tokens=40, concentration=2.0, max_gamma=24, seed=5
    )  # fmt: skip
    return tune_single("hf", trace, CHEAP, draws=200)


def test_huggingface_settings_are_found_and_default_gains_nothing() -> None:
    tuned = huggingface()
    (row,) = tuned.rows
    assert row["default"] == "20, constant, 0.4"
    assert row["gain"] > 1
    doc = tuned.document
    assert doc is not None
    assert values_said(doc) == row["setting"]
    trace = synthetic_trace(0.6, requests=6, tokens=30, concentration=2.0, seed=5)
    alone = tune_single("hf", trace, CHEAP, settings=[HF_DEFAULT], draws=50)
    assert alone.rows[0]["default_gain"] == 1
    assert alone.document is not None
    assert alone.document["num_assistant_tokens"] == 20


def test_huggingface_without_signals_searches_no_threshold() -> None:
    tuned = tune_single("hf", iid(0.6, 20, 60), CHEAP, draws=50)
    assert tuned.document is not None
    assert tuned.document["assistant_confidence_threshold"] == 0
    assert any("no threshold was searched" in w for w in tuned.warnings)
    slow = tune_single("hf", iid(0.05, 20, 60), LatencyTable.constant(1.0, 0.9), draws=50)
    assert slow.document is None
    assert isinstance(slow.policy, Autoregressive)
    (row,) = slow.rows
    assert (row["setting"], row["deploy"]) == ("no speculation", "off")
    assert row["decode_tok_s"] == pytest.approx(1)
    assert row["gain_lo"] <= row["gain"] <= row["gain_hi"]
    assert any("pass no assistant model" in w for w in slow.warnings)


@cache
def sglang() -> Tuned:
    return tune_sglang(iid(0.7, 40, 40), batched(), [1, 40], draws=4)


def test_sglang_slots_serve_as_well_as_any_length_set_by_hand() -> None:
    trace, found = iid(0.7, 40, 40), sglang()
    loads = [closed_load(trace, b, seed=check_seed(0)) for b in (1, 40)]
    rows = compare_served(trace, batched(), [found.policy_at(b) for b in (1, 40)], loads)
    assert rows["not_worse"].all(), rows.to_string()


def test_a_prompt_that_cannot_be_resampled_gives_no_interval() -> None:
    (row,) = tune_sglang(iid(0.7, 1, 60), batched(), [1], draws=4).rows
    assert math.isnan(row["gain_lo"])
    assert math.isnan(row["gain_hi"])
    assert "the gain has no interval" in row["warnings"]


def test_where_it_does_not_pay_sglang_is_switched_off() -> None:
    found = tune_sglang(iid(0.05, 20, 40), LatencyTable.constant(1.0, 0.4), draws=4)
    assert found.document is None
    assert [row["setting"] for row in found.rows] == ["no speculation"]


def test_sglang_slots_fit_their_batch() -> None:
    tuned = sglang()
    assert tuned.document is not None
    # A slot begins just above the batch searched before, whatever batches are padded to.
    assert set(tuned.document) == {"1", "2"}
    assert SGLangAdaptive(tuned.document).plan([Load(1, 50)]) > 0
    steps = [max(map(int, row["setting"].split())) for row in tuned.rows]
    assert steps[0] > steps[1]
    assert lookahead_of(tuned.policy, iid(0.7, 40, 40)) == max(steps)
    for row in tuned.rows:
        assert tuple(row) == TUNE_COLUMNS
        assert row["gain_lo"] <= row["gain"] <= row["gain_hi"]
