"""``draftsim serve`` as a contract: its rows, under the names given."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from commands.serve.rows import headline
from simulator.chosen import PLAIN, load_serving_policies
from tests.conftest import Run, Serve
from tests.serving import PAIR, arrival_file
from traces.acceptance.synthetic import synthetic_trace
from traces.store.files import write_trace

SERVE_FIELDS = {
    "policy", "verify", "batch", "rate", "throughput_tok_s", "ttft_s", "tpot_s", "e2e_s",
    "simulated_tokens", "elapsed_s",
}  # fmt: skip
QUANTILES = {"mean", "p50", "p95", "p99"}


def test_a_row_for_every_batch_and_policy_under_the_names_given(serve: Serve) -> None:
    # fixed:gamma=5 spells out a default: the row must say what was asked for all the same.
    ran = serve("--batch", "1,3", "--requests", 24, *PAIR, "--json", "-")
    found = ran.rows
    assert json.loads(ran.out)["command"] == "serve"
    assert [(r["batch"], r["policy"]) for r in found] == [
        (b, p) for b in (1, 3) for p in ("autoregressive", "fixed:gamma=5")
    ]
    for row in found:
        assert set(row) >= SERVE_FIELDS
        assert all(set(row[name]) == QUANTILES for name in ("ttft_s", "tpot_s", "e2e_s"))
        assert row["requests"] == 24
        assert row["simulated_tokens"] == 24 * 30
        assert row["status"] == "complete"
    alone = found[0]
    # Plain decoding of one stream at constant latency: one pass and the host a token.
    assert alone["tpot_s"]["mean"] == pytest.approx(0.0143 + 0.0003)


def test_rates_and_replications_give_intervals_that_hold_the_mean(serve: Serve) -> None:
    found = serve(
        "--rate", "0.5,2", "--requests", 20, "--replications", 3, *PAIR, "--json", "-"
    ).rows  # fmt: skip
    assert [r["rate"] for r in found] == [0.5, 0.5, 2.0, 2.0]
    for row in found:
        assert row["replications"] == 3
        assert row["e2e_s_lo"] <= row["e2e_s"]["mean"] <= row["e2e_s_hi"]


def test_a_file_is_served_at_every_scale(serve: Serve, tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", *(f"{i},20,{5 + i}" for i in range(12)))
    found = serve("--arrivals", file, "--scale", "0.5,2", *PAIR, "--json", "-").rows
    assert [(r["scale"], r["rate"]) for r in found] == [(0.5, 0.5)] * 2 + [(2.0, 2.0)] * 2
    assert {r["simulated_tokens"] for r in found} == {sum(5 + i for i in range(12))}
    assert {r["fidelity"] for r in found} == {"approximate"}


@pytest.mark.parametrize("mode", ["static", "static-minimum", "static-mean", "pearl", "dsi"])
def test_every_mode_serves_every_request(serve: Serve, mode: str) -> None:
    found = serve("--mode", mode, "--rate", 1, "--requests", 10, *PAIR, "--json", "-").rows
    assert [(r["mode"], r["requests"]) for r in found] == [(mode, 10)] * 2


def test_all_serves_policies_per_request_and_per_batch(serve: Serve) -> None:
    found = serve("--batch", 4, "--requests", 16, "--policy", "all", "--json", "-").rows
    names = [r["policy"] for r in found]
    assert {"autoregressive", "cm-asd", "gammatune", "goodput", "sglang-adaptive"} <= set(names)
    assert len(names) == len(set(names))
    assert all(r["requests"] == 16 for r in found)


def test_policies_get_cost_and_estimates_from_the_recording(synthetic_run: Path) -> None:
    from traces.store.recordings import find_latency, find_trace

    trace, latency = find_trace(synthetic_run), find_latency(synthetic_run)
    texts = ["adaptive-verification", "goodput:gamma_max=4", "rate-optimal"]
    made: dict[str, Any] = load_serving_policies(texts, trace, latency)
    assert list(made) == ["autoregressive", *texts]
    assert made["goodput:gamma_max=4"].gamma_max == 4
    cost = made["goodput:gamma_max=4"].cost
    assert cost(1, 2, 3, 50.0) == pytest.approx(2 * 0.00176 + 0.015 + 0.0003)
    # Calibrated on the recording: the estimates' mean is the share of matches.
    estimator = made["adaptive-verification"].estimator
    on_path = trace.on_path
    prob = trace.signal("prob")[on_path]
    estimates = [estimator(type("T", (), {"prob": value}), 0) for value in prob]
    assert sum(estimates) / len(estimates) == pytest.approx(
        (trace.columns["match"][on_path] == 1).mean(), abs=0.02
    )


def test_one_token_outputs_have_no_time_per_token(serve: Serve, tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", *(f"{i},20,1" for i in range(4)))
    for row in serve("--arrivals", file, *PAIR, "--json", "-").rows:
        assert row["tpot_s"]["mean"] is None
        assert row["ttft_s"]["mean"] is not None
        assert row["simulated_tokens"] == 4


def test_batch_and_memory_over_time_add_up(serve: Serve) -> None:
    for row in serve("--rate", 4, "--requests", 40, *PAIR, "--json", "-").rows:
        times, sizes = row["over_time"]["time_s"], row["over_time"]["batch"]
        assert len(times) == len(sizes) == len(row["over_time"]["kv_blocks"])
        widths = [b - a for a, b in itertools.pairwise([*times, row["simulated_s"]])]
        area = sum(w * n for w, n in zip(widths, sizes, strict=True))
        assert area / row["simulated_s"] == pytest.approx(row["mean_batch"])


def test_speedup_is_of_tokens_a_second_and_latency_has_a_ratio_of_its_own(serve: Serve) -> None:
    ran = serve("--policy", "fixed:gamma=2", "--batch", "1,4", "--requests", "24", "--json", "-")
    rows = ran.rows
    for batch in (1, 4):
        own = {r["policy"]: r for r in rows if r["batch"] == batch}
        plain = own.pop("autoregressive")
        assert plain["speedup"] == 1
        [row] = own.values()
        expected = row["throughput_tok_s"] / plain["throughput_tok_s"]
        assert row["speedup"] == pytest.approx(expected)
        assert row["latency_ratio"] == pytest.approx(row["e2e_s"]["mean"] / plain["e2e_s"]["mean"])
    loaded = serve("--policy", "fixed:gamma=2", "--rate", "2", "--requests", "24", "--json", "-")
    plain, row = loaded.rows
    assert row["speedup"] == pytest.approx(row["throughput_tok_s"] / plain["throughput_tok_s"])
    assert row["latency_ratio"] == pytest.approx(row["e2e_s"]["mean"] / plain["e2e_s"]["mean"])
    shown = serve("--policy", "fixed:gamma=2", "--rate", "2", "--requests", "8").out
    for word in ("speedup", "latency", "ratio"):  # a heading may take two lines
        assert word in shown


def test_targets_are_written_as_in_capacity_and_tune(serve: Serve) -> None:
    load = ("--rate", 2, "--requests", 24, *PAIR, "--json", "-")
    for given in (("--slo", "ttft=500ms,tpot=30ms"), ("--ttft", "500ms", "--tpot", "0.03")):
        for row in serve(*load, *given).rows:
            assert (row["ttft_target_s"], row["tpot_target_s"]) == (0.5, 0.03)


def test_the_first_sentence_names_no_bound(serve: Serve) -> None:
    load = ("--batch", 1, "--requests", 12)
    both = serve("--policy", "oracle", "--policy", "fixed:gamma=2", *load).err
    alone = serve("--policy", "fixed:gamma=2", *load).err
    first = [next(x for x in said.splitlines() if "no speculation" in x) for said in (both, alone)]
    assert "oracle" not in first[0]
    assert first[0] == first[1]


def test_the_first_sentence_has_an_interval_over_prompts(serve: Serve) -> None:
    for load in (("--batch", "1,4"), ("--rate", "1,2")):
        asked = ("--policy", "fixed:gamma=2", *load, "--requests", 40)
        ran = serve(*asked)
        [line] = [line for line in ran.err.splitlines() if "over no speculation: at " in line]
        found = re.findall(r"fixed:gamma=2 ([\d.]+)x \(([\d.]+) to ([\d.]+)\)", line)
        assert len(found) == 2, line
        rows = [row for row in serve(*asked, "--json", "-").rows if row["policy"] != PLAIN]
        for told, row in zip(found, rows, strict=True):
            value, low, high = map(float, told)
            ratio = row["speedup"] if load[0] == "--batch" else 1 / row["latency_ratio"]
            assert value == pytest.approx(ratio, rel=5e-3)
            assert low < value < high


def test_the_sentence_says_where_nothing_is_faster_and_how_many_loads_there_are() -> None:
    def told(speeds: dict[int, float]) -> str:
        rows = [
            {"policy": name, "concurrency": batch, "rate": None, "speedup": speedup}
            for batch, own in speeds.items() for name, speedup in ((PLAIN, 1.0), ("svip", own))
        ]  # fmt: skip
        return headline(rows, lambda leader: (leader.ratio - 0.1, leader.ratio + 0.1))

    assert told({1: 1.2, 8: 0.9}) == (
        "tokens/s over no speculation: at 1 request svip 1.20x (1.10 to 1.30); at 8 requests no "
        "policy is faster, svip 0.900x (0.800 to 1.00)."
    )
    assert told({1: 0.9, 8: 0.5}) == (
        "no policy is faster than no speculation at any of these loads; the closest is at 1 "
        "request svip 0.900x (0.800 to 1.00) in tokens/s."
    )
    plain = {"policy": PLAIN, "concurrency": 1, "rate": None, "speedup": 1.0}
    assert headline([plain], lambda _: None).startswith("only no speculation was served")
    assert told(dict.fromkeys((1, 2, 4, 8, 16, 32), 1.2)).endswith("; 2 more loads below.")


def test_one_prompt_has_no_interval_over_prompts(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    write_trace(synthetic_trace(0.7, tokens=30, requests=1), folder / "trace.parquet")
    load = ("--batch", 1, "--requests", 8, "--policy", "fixed:gamma=2")
    ran = run("serve", "--trace", folder, *load, "--latency", "const:target=1,draft=0.1")
    assert ran.code == 0, ran.err
    assert re.search(r"fixed:gamma=2 [\d.]+x[.;]", ran.err)
