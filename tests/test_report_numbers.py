"""The page's sliders, maps, batches and serving: the numbers of the Python API."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from simulator.pricing import autoregressive, price
from simulator.ratios import (
    OwnRatios,
    RatioSums,
    carried_sums,
    own_ratios,
    speedup_at,
)
from simulator.report.data import (
    carried,
    logs_by_length,
    sliders,
    tilted,
)
from simulator.tune.costs import default_contexts, price_grid
from simulator.tune.costs import fixed_logs as tune_logs
from simulator.tune.served import check_seed, closed_load, compare_served
from simulator.tune.vllm import tune_vllm
from simulator.whatif.tilt import Tilter
from tests.break_even import break_even_ratio, ratio_sums
from tests.report_pages import (
    POLICIES,
    build_report,
    data,
    data_of,
    fixed_two,
    latency,
    lead,
    logs,
    reader,
    recording,
)
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import replay


def test_curves_and_table_meet_at_the_pairs_own_ratios() -> None:
    """Host, signals, catch-up and contexts are carried over, not left out."""
    table, trace = latency(), recording()
    best = data()["about"]["best_fixed"]
    own = own_ratios(trace, table, best)
    by_name = dict(zip(POLICIES, logs(), strict=True))
    plain = price(autoregressive(logs()[0]), table)
    for row in data()["policies"]:
        sums = RatioSums(*row["sums"])
        assert float(speedup_at(sums, own.ratio, own.verify)[0]) == pytest.approx(
            row["speedup"], rel=1e-6
        )
        # Half the drafting seconds at half the ratio, and nothing else.
        run = price(by_name[row["policy"]], table)
        half = plain.total_s / (run.total_s - run.draft_s.sum() / 2)
        assert float(speedup_at(sums, own.ratio / 2, own.verify)[0]) == pytest.approx(half)


@pytest.mark.parametrize(
    ("table", "own"),
    [
        (LatencyTable.constant(0.02, 0.002, 0.026), OwnRatios(0.1, 1.3, 0.02)),
        # Free drafts are carried over by their passes.
        (LatencyTable.constant(0.02, 0.0), OwnRatios(0.0, 1.0, 0.02)),
    ],
)
def test_without_a_host_the_carried_model_is_the_textbooks(
    table: LatencyTable, own: OwnRatios
) -> None:
    plain = price(autoregressive(logs()[0]), table)
    for log in logs():
        found = carried_sums(price(log, table), plain, own)
        np.testing.assert_allclose(found, ratio_sums(log), rtol=1e-9, atol=1e-9)


def test_a_pair_without_a_ratio_cannot_be_carried_over() -> None:
    table = LatencyTable.constant(0.02, 0.002)
    plain = price(autoregressive(logs()[0]), table)
    with pytest.raises(DraftsimError, match="c of this pair is 0"):
        carried_sums(price(logs()[0], table), plain, OwnRatios(0.0, 1.0, 0.02))


def test_sliders_begin_at_this_pair() -> None:
    c, v, _ = own_ratios(recording(), latency(), 4)
    assert c == pytest.approx(1.2e-3 / 1.01e-2)
    assert v == pytest.approx(1.05e-2 / 1.01e-2)
    for key, own in (("c", c), ("v", v)):
        slider = data()["sliders"][key]
        assert slider["values"][slider["start"]] == pytest.approx(own, rel=1e-12)
        assert slider["values"] == sorted(set(slider["values"]))
    # The best fixed length, whose verification v is.
    lengths = data()["sliders"]["gamma"]
    assert lengths == {"values": list(range(1, 13)), "start": 3}


def test_tilted_rounds_are_those_of_the_tilted_recording() -> None:
    trace = recording()
    stops = sliders(trace, 0.1, 1.0, [2, 4], 4)["alpha"]
    own = stops["values"][stops["start"]]
    ratios = own_ratios(trace, latency(), 4)
    found = tilted(trace, latency(), ratios, [0.5, own], [2, 4])
    assert not isinstance(found, str)
    assert found["alphas"] == [0.5, own]
    fixed = logs_by_length(trace)
    # At its own rate the recording speaks for itself.
    sums = carried(trace, latency(), ratios)
    assert found["rounds"][1] == [sums(fixed[g]) for g in (2, 4)]
    shifted = Tilter(trace).to(0.5)
    other = replay(shifted, parse_policy("fixed:gamma=4"))
    assert found["rounds"][0][1] == carried(shifted, latency(), ratios)(other)


def test_a_recording_without_signals_is_tilted_too() -> None:
    trace = synthetic_trace(0.7, requests=12, tokens=60)
    assert not trace.signals
    table = LatencyTable.constant(1.0, 0.1)
    own = own_ratios(trace, table)
    found = tilted(trace, table, own, [0.0, 0.5, 0.9], [2])
    assert not isinstance(found, str)
    assert found["alphas"] == [0.5, 0.9]  # no shift reaches 0
    less, more = (row[0] for row in found["rounds"])
    # The same tokens in fewer rounds where more is accepted.
    assert less[1] == pytest.approx(more[1])
    assert less[3] + less[4] > more[3] + more[4]
    text = build_report(trace, LatencyTable.constant(1.0, 0.1), [fixed_two(trace)],
                             resamples=20)  # fmt: skip
    assert '"tilt":{"alphas":[0.05,' in text
    # Where every draft matches, there is nothing to shift.
    untilted = tilted(synthetic_trace(1.0, requests=3, tokens=20), table, own, [0.5], [2])
    assert untilted == "every draft of the trace has the same outcome"


def test_break_even_and_contexts_come_from_the_api() -> None:
    for log, sums in zip(logs_by_length(recording()).values(), data()["fixed"]["sums"],
                         strict=True):  # fmt: skip
        own = own_ratios(recording(), latency(), data()["about"]["best_fixed"])
        assert sums == carried(recording(), latency(), own)(log)
        even = break_even_ratio(RatioSums(*sums), 1.2)
        assert float(speedup_at(RatioSums(*sums), even.ratio, 1.2)[0]) == pytest.approx(1)
    found = data()["contexts"]
    assert found["contexts"] == default_contexts(latency(), 8)
    plain, priced = tune_logs(recording(), [1, 2, 3, 4, 5, 6, 7, 8])
    for i, j in ((0, 0), (3, 1)):
        grid = price_grid([plain, *priced.values()], latency(), found["batches"][i],
                          found["contexts"][j])  # fmt: skip
        rates = grid.tokens.sum(axis=1) / grid.seconds.sum(axis=1)
        assert found["speedup"][i][j] == pytest.approx(rates[1:].max() / rates[0])
        assert found["length"][i][j] == 1 + int(rates[1:].argmax())
        assert found["low"][i][j] <= found["speedup"][i][j] <= found["high"][i][j]


def test_batches_are_priced_only_where_they_were_measured() -> None:
    batches = data()["batches"]
    assert batches["batches"] == [1, 2, 4, 8]
    log = replay(recording(), parse_policy("fixed:gamma=3"))
    plain = price(autoregressive(log), latency(), batch=8).total_s
    expected = plain / price(log, latency(), batch=8).total_s
    assert batches["speedup"][3][2] == pytest.approx(expected)
    assert {r["policy"] for r in data()["serving"]["rows"]} == {
        "no speculation", "K=1", "K=3", "K=5", "tuned"
    }  # fmt: skip
    low, high = batches["low"][3][2], batches["high"][3][2]
    assert low < batches["speedup"][3][2] < high
    single = build_report(recording(), latency((1,)), logs()[:1], resamples=20)
    assert "nothing can be said about batches" in single


@cache
def losing() -> LatencyTable:
    """At 4 sequences a wide pass costs so much that speculation does not pay."""
    cells = latency((1, 4)).cells.copy()
    wide = (cells["model"] == "target") & (cells["new_tokens"] > 1) & (cells["batch"] == 4)
    cells.loc[wide, "median_s"] *= 4
    return LatencyTable(cells)


def test_serving_is_that_of_the_check_and_says_what_to_deploy() -> None:
    trace = recording().select(range(0, 20, 2))
    text = build_report(trace, losing(), [fixed_two(trace)], resamples=20)
    found = data_of(text)["serving"]
    sizes = [1, 2, 4]
    expected = [r["deploy"] for r in tune_vllm(trace, losing(), sizes, draws=400).rows]
    assert [d["deploy"] for d in found["deploy"]] == expected
    off = [b for b, deploy in zip(sizes, expected, strict=True) if deploy == "off"]
    assert off
    assert off != sizes
    said = " ".join(text.partition('<p id="deploy">')[2].partition("</p>")[0].split())
    assert f"stay at batch {' or '.join(map(str, off))} are served faster" in said
    cells = [c for c in reader(text).cells if c == "off" or c.startswith("tuned, K=")]
    assert cells == ["off" if d["deploy"] == "off" else f"tuned, {d['setting']}"
                     for d in found["deploy"]]  # fmt: skip
    # The same requests as in `tune --check`.
    [row] = compare_served(
        trace, losing(), Fixed(1), [closed_load(trace, 2, None, check_seed(0))]
    ).to_dict("records")  # fmt: skip
    at = {r["policy"]: r["throughput_tok_s"] for r in found["rows"] if r["batch"] == 2}
    assert at["K=1"] == pytest.approx(row["tuned"])
    assert at[row["rival"]] == pytest.approx(row["rival_value"])


def test_where_nothing_pays_no_curve_is_called_tuned() -> None:
    cells = latency((1, 2)).cells.copy()
    cells.loc[cells["model"] == "draft", "median_s"] *= 50
    text = build_report(recording(), LatencyTable(cells), logs()[:1], resamples=20)
    assert data_of(text)["serving"]["policies"] == ["no speculation", "K=1", "K=3", "K=5"]
    assert "Speculation is faster at none of these loads" in text
    assert lead(text).startswith("No policy is faster than no speculation here")
