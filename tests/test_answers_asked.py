"""Every command answers what was asked, or refuses: options without effect, ties, failures."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftsim
from commands.common.written import _best
from commands.serve import _break_even
from policies.batch.sglang import SGLangAdaptive
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive, Fixed
from policies.registry import parse_policy
from policies.rules.registry import parse_rule
from simulator.aggregate.server import ServerRun, calibrate
from simulator.plots.serving import _speedups
from simulator.predict import compare, split_asked, told_apart
from simulator.pricing import always_drafted, autoregressive, price
from simulator.report.data import report_data
from simulator.serving import ClosedLoop, Limits, Scenario, over_batches, simulate
from simulator.serving.outcome.results import ResultsFile, read_results
from simulator.serving.study import sweep
from simulator.tune.breakeven import grid, measured_surface
from simulator.tune.formats import read_settings
from simulator.tune.served import closed_load
from simulator.tune.tensorrt_llm import tune_tensorrt_llm
from simulator.whatif.batching import InBatches
from simulator.whatif.cells import Prices
from simulator.whatif.sweep import Sweep
from tests.conftest import ROOT, Run
from tests.serving import GRID, arrival_file
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.latency.graphs import CUDAGraphs
from traces.latency.table import LatencyTable
from traces.replay.calls import drafting_always, in_one_pass
from traces.replay.run import replay
from traces.store.files import write_latency, write_trace
from traces.store.operators import in_graphs
from traces.store.recordings import find_latency, find_trace, folder_of

CONST = "const:target=0.02,draft=0.01"
GIVEN = ("--latency", CONST, "--acceptance", "0.7,0.5")
ANY_BATCH = (*GIVEN, "--assume-batch-free")
PLAIN = ("--policy", "autoregressive", "--latency", CONST, "--assume-batch-free")
RESULTS = str(ROOT / "docs" / "examples" / "server" / "results")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sweep", "ladder", "--batch", "8", "--alpha", "0.3"),
         "--batch belongs to `draftsim sweep grid`; this is `draftsim sweep ladder`: drop it"),
        (("sweep", "--tune", "--context", "5"),
         "--context belongs to `draftsim sweep grid`; --tune chooses `draftsim sweep tune`"),
        (("serve", *PLAIN, "--max-batch", "2"), "leave out --max-batch"),
        (("serve", *GIVEN, "--mode", "pearl", "--kv-blocks", "9"), "leave out --kv-blocks"),
        (("serve", *GIVEN, "--mode", "static", "--token-budget", "9"), "leave out --token-budget"),
        (("serve", *GIVEN, "--mode", "pearl", "--one-pass"), "drop --one-pass"),
        (("serve", *PLAIN, "--batch", "1", "--kv-blocks", "10000000000000"), "expected 1 to"),
        (("capacity", *ANY_BATCH, "--rate", "1", "--slo", "tpot=1s", "--requests", "0"),
         "--requests is 0"),
        (("tune", *GIVEN, "--engine", "hf", "--requests", "7"),
         "--requests belongs to `draftsim tune engine`"),
        (("breakeven", "bench", RESULTS, "--gpu", "a100"),
         "--gpu belongs to `draftsim breakeven surface`"),
        (("breakeven", "bench", RESULTS, "--trace", "smollm2-cpu"),
         "--trace belongs to `draftsim breakeven surface` or `plan`"),
        (("breakeven", "bench", RESULTS, "--context", "100,100000"),
         "so the cost of 100,000 is not determined"),
        (("breakeven", "--passes", "1"), "belongs to `draftsim breakeven bench` or `plan`"),
        (("breakeven", "plan", "--latency", CONST, "--acceptance", "0.8"),
         "--latency belongs to `draftsim breakeven surface`"),
        (("breakeven", *GIVEN, "--trace", "smollm2-cpu"), "need no recording: drop --trace"),
        (("papers", "--logs", "x"), "--logs x: holds neither"),
        (("simulate", "rounds", "bundled", "--policy", "gammatune"),
         "--policy belongs to `draftsim simulate replay` or `phases` or `robustness`"),
        (("simulate", "--rounds", "bundled", "--robustness"),
         "--rounds belongs to `draftsim simulate rounds`; --robustness chooses"),
        (("doctor", "0.7", "--against", "0.8", "--source", "eagle"), "--source eagle chooses"),
        (("papers", "measured", "--trace", "smollm2-cpu", "--missing"),
         "--trace belongs to `draftsim papers tables`; this is `draftsim papers measured`"),
        (("sweep", *ANY_BATCH, "--verify-ratio", "1.1"), "no --c is given: drop --verify-ratio"),
        (("sweep", *ANY_BATCH, "--tilt", "iid"), "no --alpha is given: drop --tilt"),
        (("sweep", *ANY_BATCH, "--c", "0.1,tilt=iid"), "has no setting 'tilt': choose from verify"),
        (("sweep", *ANY_BATCH, "--c", "0.1,verify=x"), "'x' is no number"),
        (("sweep", *ANY_BATCH, "--c", "verify=1.1"), "has no values: write --c AXIS,verify"),
        (("sweep", *ANY_BATCH, "--alpha", "0.5,tilt=both"), "'both', expected coupled, redraw"),
        (("simulate", "robustness", *GIVEN, "--prefill", "--by-category"),
         "--prefill belongs to `draftsim simulate replay` or `phases` or `rounds`"),
        (("simulate", "--latency", "const:target=1,draft=0.1,catch_up=0.2"), "no time 'catch_up'"),
        (("simulate", *GIVEN, "--verify", 'cm-asd:weights=["a",0,1]'), "rule 'cm-asd'"),
        (("simulate", *GIVEN, "--policy", "rate-optimal:rate=[[1]]"), "policy 'rate-optimal'"),
        (("simulate", *GIVEN, "--policy", 'batch-table:table=[{"a":1,"b":2,"c":3}]'),
         "policy 'batch-table'"),
        (("simulate", *GIVEN, "--policy",
          'sglang-adaptive:config={"1":{"candidate_steps":[1],"update_interval":0}}'),
         "update_interval is 0, expected >= 1"),
        (("simulate", *GIVEN, "--policy",
          'sglang-adaptive:config={"1":{"candidate_steps":[1],"ema_alph":0.5}}'),
         "no setting 'ema_alph'"),
        (("curve", "0.8", "--given", "1,2,3,4,5,6,7,8"), "name others with --k"),
        (("calibrate-memory", "--out", "none.npz", "--split", "0"), "--split is 0"),
        (("calibrate-memory", "--out", "none.npz", "--rest", "none.parquet"), "no prompt is left"),
        (("serve", *PLAIN, "--rate", "1e-15"), "--rate holds 1e-15, expected 1e-06 to 1e+09"),
        (("capacity", *PLAIN, "--rate", "1e308", "--slo", "ttft=1s"), "--rate holds 1e+308"),
        (("simulate", "--latency", "const:target=1e308,draft=1"), "expected at most 1e+09 s"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(words: tuple[str, ...], said: str, run: Run) -> None:
    done = run(*words)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(
    "load",
    [
        ("--policy", "fixed:gamma=2", "--kv-blocks", "1"),  # every request is refused
        ("--policy", "fixed:gamma=0"),  # a tie
    ],
)
def test_where_nothing_is_faster_no_sentence_says_so(load: tuple[str, ...], run: Run) -> None:
    words = ("serve", *ANY_BATCH, "--rate", "0.1,0.2", "--requests", "20")
    done = run(*words, *load).ok()
    assert "at every load tried" not in done.out + done.err
    faster = run(*words, "--policy", "fixed:gamma=1")
    assert "is faster than no speculation at every load tried" in faster.out + faster.err


def test_replicas_are_not_saved_by_a_tie(run: Run) -> None:
    done = run(
        "capacity", *ANY_BATCH, "--policy", "fixed:gamma=0", "--rate", "5",
        "--slo", "ttft=1s,tpot=30ms", "--replications", "1", "--max-batch", "4",
    ).ok()  # fmt: skip
    assert "it saves no replica at any rate tried" in done.err


@pytest.mark.parametrize("batch", [1, 4])
def test_a_drafter_that_runs_along_costs_alike_in_replay_and_in_the_engine(batch: int) -> None:
    """Every second round drafts nothing, and the engine's drafter reads its tokens all the same."""

    class Sometimes(DraftPolicy):
        gamma_max = 3

        def __init__(self) -> None:
            self.rounds = 0

        def begin_round(self, load: Any) -> None:
            self.rounds += 1

        def keep_drafting(self, draft: Any) -> bool:
            return self.rounds % 2 == 0 and len(draft) < 3

    trace, latency = find_trace("qwen-coder-cpu"), find_latency("qwen-coder-vllm-cpu")
    trace = trace.select(range(40))
    assert latency.has("draft", "along")
    # Prompts between the steps of others are the serving loop's alone.
    free = latency.cells["phase"].isin(("prefill", "mixed"))
    latency = LatencyTable(
        latency.cells.assign(median_s=latency.cells["median_s"].where(~free, 0.0)), latency.meta
    )
    policies = {"rests": Sometimes(), "three": Fixed(3)}
    prices = Prices(latencies={"x": latency})
    swept = Sweep(trace, policies, prices, batches=[batch], resamples=2, measure_tilt=False).run()
    scenario = Scenario(ClosedLoop(batch), Limits(max_batch=batch), requests=400, warmup=0.0)

    def rate(policy: DraftPolicy) -> float:
        return float(simulate(trace, latency, policy, scenario).row()["throughput_tok_s"])

    plain = rate(Autoregressive())
    for name, found in zip(swept["policy"], swept["speedup"], strict=True):
        log = replay(trace, policies[name], first=1)
        assert ((log.rounds["draft_forwards"] == 0).mean() > 0.3) == (name == "rests")
        assert found == pytest.approx(rate(policies[name]) / plain, rel=0.005 * batch), name


def test_a_drafter_that_takes_verified_tokens_reads_them_all_in_every_round() -> None:
    """It drafted four all along, so an engine that always drafts four costs what it did."""
    trace = synthetic_trace(0.8, requests=6, tokens=40, max_gamma=8)
    trace = replace(trace, meta={**trace.meta, "takes_verified": True})
    log = replay(trace, Fixed(4))
    full = log.rounds["draft_forwards"] == 4
    assert (log.rounds["catch_up"][full] > 2).any()
    always = drafting_always(GRID, 4)
    np.testing.assert_array_equal(price(log, always).draft_s[full], price(log, GRID).draft_s[full])
    scenario = Scenario(ClosedLoop(1), Limits(max_batch=1), requests=6, warmup=0.0)
    seconds = [simulate(trace, t, Fixed(4), scenario).simulated_s for t in (GRID, always)]
    # Only the last round of a request has room for fewer.
    assert seconds[0] <= seconds[1] < 1.03 * seconds[0]


def test_latencies_carried_over_are_not_composed_anew() -> None:
    table = find_latency("a100/llama-3.1-8b+llama-3.2-1b")
    slower = table.scaled({"target": 2.0, "draft": 2.0}, "half as fast")
    assert in_graphs(slower, None, 8) is slower
    with pytest.raises(DraftsimError, match="carried over to another device in vLLM's graphs"):
        in_graphs(slower, CUDAGraphs((4, 8)), 8)


def test_padding_beyond_what_was_measured_is_refused() -> None:
    table = find_latency("smollm2-vllm-draft-cpu")
    with pytest.raises(DraftsimError, match="pass over 5 tokens would run over 64"):
        in_graphs(table, CUDAGraphs((4, 64)), 8)


def test_a_run_folder_may_be_the_one_worked_in(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(synthetic_trace(0.7, requests=4, tokens=30), tmp_path / "trace.parquet")
    write_latency(LatencyTable.constant(0.01, 0.001), tmp_path / "latency.parquet")
    monkeypatch.chdir(tmp_path)
    run("simulate", "--trace", ".", "--policy", "fixed:gamma=2").ok()
    assert folder_of(".") == Path()
    assert folder_of("trace.parquet") is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('4,2,a\n4,1,"it\n' + "4,4,a\n" * 9, "is not CSV"),
        ('4,2,a\n4,1,"it\n' + "4,4,a\n" * 40_000, "is not CSV"),
        ("4,2\n", "line 2: has not as many values"),
    ],
)
def test_a_stray_quote_loses_no_rounds(rows: str, said: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text("drafted,accepted,category\n" + rows)
    done = run("import", "rounds", path, "--out", tmp_path / "t.parquet")
    assert said in done.refusal


def test_a_context_in_batches_is_that_of_the_prompts() -> None:
    """All prompts have 64 tokens, and the steps go on from there as recorded."""
    trace = synthetic_trace(0.7, requests=8, tokens=40, prompt_length=64)
    batches = InBatches(replay(trace, Fixed(3)), 4, 4)
    told, recorded = batches.at_latency(GRID, 64), batches.at_latency(GRID)
    np.testing.assert_allclose(told.wall_s, recorded.wall_s)
    assert batches.at_latency(GRID, 200).wall_s > recorded.wall_s


def test_one_prompt_has_no_interval_in_batches() -> None:
    alone = synthetic_trace(0.7, requests=1, tokens=60)
    found = InBatches(replay(alone, Fixed(3)), 4, 10).at_latency(GRID)
    assert np.isnan([found.speedup_lo, found.speedup_hi]).all()


def test_gains_with_prompts_are_the_ratio_of_speedups_with_prompts() -> None:
    trace = synthetic_trace(0.7, requests=8, tokens=40, prompt_length=90)
    ranking = draftsim.predict(
        trace, GRID, ["fixed:gamma=1", "fixed:gamma=4"], against="fixed:gamma=1", prefill=True
    )
    one, four = (ranking.table.set_index("policy").loc[f"fixed:gamma={g}"] for g in (1, 4))
    assert four["gain"] == pytest.approx(four["speedup"] / one["speedup"])


def test_other_sources_are_left_out_where_their_passes_are_not_carried_over() -> None:
    from commands.common.drafted import load_recording

    said: list[str] = []
    recording = load_recording("bundled", None)
    table = recording.priced()
    carried = LatencyTable(table.cells, {**table.meta, "scaled": {"to": "another device"}})
    found = compare(recording, carried, split_asked(None), say=said.append)
    assert not found.more
    assert any("other sources are left out" in line for line in said)
    with pytest.raises(DraftsimError, match="pld: latencies carried over"):
        compare(recording, carried, split_asked(["pld"]))


def test_the_best_fixed_length_may_have_another_note() -> None:
    trace = synthetic_trace(0.7, requests=4, tokens=40)
    log = replay(trace, Fixed(2), name="fixed:gamma=2")
    note = "best fixed; 1.10 to 1.30 if the extrapolation has its past errors"
    page = report_data(trace, GRID, [log], notes={"fixed:gamma=2": note}, serve=False, resamples=20)
    assert [row["note"] for row in page["policies"] if row["policy"] == "fixed:gamma=2"] == [note]


def test_a_resumed_sweep_has_one_engine(tmp_path: Path) -> None:
    trace = synthetic_trace(0.7, requests=8, tokens=40)

    class Once:
        def run(self, bench: Any, parts: Any) -> Iterator[tuple[int, Any]]:
            yield 0, bench.run(next(iter(parts)))
            raise KeyboardInterrupt

    def study(always: int) -> Sweep:
        prices = Prices(ratios=[0.5], always=always)
        return Sweep(
            trace, {"fixed:gamma=1": Fixed(1)}, prices, alphas=[0.5, 0.8], resamples=0,
            measure_tilt=False,
        )  # fmt: skip

    out = tmp_path / "s.parquet"
    with pytest.raises(KeyboardInterrupt):
        study(0).run(Once(), out=out)  # type: ignore[arg-type]
    resumed, clean = study(4).run(out=out), study(4).run()
    np.testing.assert_allclose(resumed["speedup"], clean["speedup"])


def test_a_search_that_finds_nothing_is_paid_in_batches_too() -> None:
    """`sweep` at two requests charges it as the serving loop does."""
    from commands.common.drafted import load_recording

    recording = load_recording(
        "qwen-coder-vllm-lookups-cpu", "const:target=1,draft=0.3", "ngram", assume_batch_free=True
    )
    latency = recording.priced(8)
    prices = Prices(latencies={"x": latency})
    study = Sweep(recording.trace, {"fixed:gamma=3": Fixed(3)}, prices, batches=[1, 2], resamples=2)
    frame = study.run()
    for batch, found in zip(frame["batch"], frame["speedup"], strict=True):
        scenario = Scenario(ClosedLoop(int(batch)), Limits(max_batch=int(batch)), requests=400)
        plain, drafted = (
            simulate(recording.trace, latency, p, scenario).row()["throughput_tok_s"]
            for p in (Autoregressive(), Fixed(3))
        )
        assert found == pytest.approx(drafted / plain, rel=0.03)


def test_a_map_is_under_one_rule() -> None:
    trace, latency = find_trace("bundled"), find_latency("bundled")
    rule, policies = parse_rule("lossy-global"), {"off": Autoregressive(), "four": Fixed(4)}
    scenarios = [Scenario(ClosedLoop(1), Limits(max_batch=1), requests=20)]
    rows = sweep(trace, latency, policies, scenarios, rule=rule)
    maps = _speedups(rows, trace, latency, policies, scenarios, rule)
    requests = [replace(r, prompt_length=16, prompt_ids=None) for r in trace.requests]
    small = over_batches(replace(scenarios[0], requests=64, replications=1), [1])
    lossless = sweep(replace(trace, requests=requests), latency, policies, small)[1]["speedup"]
    assert (maps["four"] > 1.1 * lossless).all()


def test_a_schedule_that_rises_with_the_batch_ends_the_search() -> None:
    """Nothing pays at one request, drafts do at eight: TensorRT-LLM's table cannot say that."""
    cells = LatencyTable.constant(1.0, 0.01).cells
    wide = [
        {**cells.iloc[0].to_dict(), "model": model, "phase": "forward", "batch": batch,
         "new_tokens": width, "context": 64, "median_s": seconds}
        for model, batch, width, seconds in (
            ("target", 1, 1, 1.0), ("target", 1, 9, 40.0), ("target", 8, 1, 1.0),
            ("target", 8, 9, 1.01), ("draft", 1, 1, 0.01), ("draft", 8, 1, 0.01),
        )
    ]  # fmt: skip
    latency = LatencyTable(type(cells)(wide))
    trace = synthetic_trace(0.8, requests=8, tokens=40, max_gamma=8)
    assert tune_tensorrt_llm(trace, latency, [1, 8], draws=20).document is None


@pytest.mark.parametrize("extra", [("--check",), ()])
def test_rivals_draft_no_more_than_was_recorded(
    extra: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    run(
        "tune", "--engine", "vllm", *ANY_BATCH, "--batch", "1", "--resamples",
        "20", "--out", tmp_path / "s.json", *extra,
    ).ok()  # fmt: skip
    served = run("serve", "--settings", tmp_path / "s.json", *GIVEN, "--batch", "1",
                 "--requests", "10").ok()  # fmt: skip
    assert "K=1" in served.out
    assert "K=3" not in served.out
    assert "no speculation 1.00x" not in served.err


def test_slots_with_sglangs_strategy_are_read(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"strategy": "ema", "1": {"candidate_steps": [1, 3]}}))
    assert read_settings(path)[0] == "sglang"


def test_a_drafter_of_one_pass_has_no_overlapped_mode() -> None:
    latency = in_one_pass(LatencyTable.constant(0.02, 0.05))
    scenario = Scenario(ClosedLoop(1), Limits(max_batch=1), requests=4, mode="pearl")
    with pytest.raises(DraftsimError, match="drop --one-pass"):
        simulate(synthetic_trace(0.7, requests=4, tokens=20), latency, Fixed(2), scenario)


BURST = [f"{100 * t},64,8" for t in range(12) for _ in range(10)]


def test_requests_of_one_timestamp_are_met_by_more_replicas(run: Run, tmp_path: Path) -> None:
    path = arrival_file(tmp_path / "burst.csv", *BURST)
    done = run(
        "capacity", "--policy", "autoregressive", "--latency", "const:target=0.1,draft=0.01",
        "--assume-batch-free", "--arrivals", path, "--slo", "ttft=1s", "--replications", "1",
        "--max-batch", "1", "--max-replicas", "16", "--json", "-",
    ).ok()  # fmt: skip
    assert 1 < done.rows[0]["replicas"] <= 10


def bench_of(outputs: list[int], ttfts: list[float]) -> str:
    count = len(outputs)
    return json.dumps({
        "start_times": [float(i) for i in range(count)], "ttfts": ttfts, "input_lens": [5] * count,
        "output_lens": outputs, "itls": [[0.1] * max(n - 1, 0) for n in outputs],
    })  # fmt: skip


def test_failed_requests_of_a_benchmark_are_said(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(bench_of([9, 0, 9, 0], [0.1, 0.0, 0.1, 0.0]))
    done = run("serve", *PLAIN, "--arrivals", path).ok()
    assert "2 requests failed and are left out" in done.err


def test_a_limit_without_effect_is_refused_in_python_too() -> None:
    with pytest.raises(DraftsimError, match=r"leave out num_gpu_blocks$"):
        draftsim.serve("bundled", mode="pearl", concurrency=[1], num_gpu_blocks=9)
    with pytest.raises(DraftsimError, match="leave out max_num_seqs"):
        draftsim.serve("bundled", concurrency=[1], max_num_seqs=4)


def test_outputs_of_one_token_have_no_time_between_tokens(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(bench_of([1, 1, 1], [0.1, 0.1, 0.1]))
    run("serve", *PLAIN, "--arrivals", path).ok()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.csv.gz", gzip.compress("\n".join(BURST * 50).encode())[:200]),
        ("bad.csv.zip", b"PK nonsense"),
        ("bad.csv.xz", b"nonsense" * 50),
    ],
)
def test_damaged_archives_of_arrivals_are_one_line(
    name: str, content: bytes, run: Run, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    done = run("serve", *PLAIN, "--arrivals", tmp_path / name)
    assert f"{name} cannot be read as CSV" in done.refusal


def test_dates_over_a_change_of_the_clock_are_read(run: Run, tmp_path: Path) -> None:
    dates = ("2024-03-31T01:59:59+01:00,64,8", "2024-03-31T03:00:00+02:00,64,8")
    path = arrival_file(tmp_path / "tz.csv", *dates)
    done = run("serve", *PLAIN, "--arrivals", path, "--json", "-").ok()
    assert done.rows[0]["rate"] == pytest.approx(1.0)


def test_a_row_after_a_damaged_one_has_a_number_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with ResultsFile(path, command="capacity", key="k") as file:
        for i in range(4):
            file.add({"value": i})
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"value": 1', b'"value": 7')  # its checksum is another now
    path.write_bytes(b"".join(lines[:-1]))
    with ResultsFile(path, command="capacity", key="k", say=lambda _: None) as file:
        file.add({"value": 9})
    assert sorted(row["value"] for row in read_results(path).rows) == [0, 2, 3, 9]


def test_outputs_too_short_for_a_round_are_not_swept() -> None:
    trace = synthetic_trace(0.7, requests=4, tokens=1)
    study = Sweep(trace, {"one": Fixed(1)}, Prices(ratios=[0.5]), resamples=0, measure_tilt=False)
    with pytest.raises(DraftsimError, match="too short"):
        study.run()


def test_any_rate_can_be_planned_for(run: Run) -> None:
    done = run(
        "capacity", *PLAIN, "--rate", "1e9", "--slo", "tpot=1s", "--replications", "1",
        "--max-batch", "1", "--max-replicas", "2", "--requests", "50",
    ).ok()  # fmt: skip
    assert "with the most replicas tried" in done.err


@pytest.mark.parametrize(
    "command",
    [
        ("capacity", "--slo", "ttft=60s,p=0.7", "--replications", "1", "--max-replicas", "4"),
        ("serve", "--slo", "ttft=60s"),
    ],
)
def test_refused_requests_miss_the_targets_and_those_of_the_warm_up_do_not_count(
    command: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    """Every fourth request is too large for the cache: a quarter is late, warm-up or not."""
    rows = [f"{10 * i},{4000 if i % 4 == 3 else 64},8" for i in range(400)]
    done = run(
        *command, *PLAIN, "--arrivals", arrival_file(tmp_path / "sizes.csv", *rows),
        "--max-batch", "1", "--kv-blocks", "100", "--json", "-",
    ).ok()  # fmt: skip
    assert done.rows[0]["within_targets"] == pytest.approx(0.75, abs=0.005)


@pytest.mark.parametrize("mode", ["pearl", "dsi"])
def test_overlapped_modes_take_the_hosts_time(mode: str) -> None:
    """A draft model that is never right costs nothing where it has a device of its own."""
    trace = synthetic_trace(0.01, requests=6, tokens=40)
    latency = LatencyTable.constant(0.02, 0.0, host_round=0.01)

    def seconds(policy: DraftPolicy, mode: str) -> float:
        scenario = Scenario(ClosedLoop(1), Limits(max_batch=1), requests=6, warmup=0.0, mode=mode)  # type: ignore[arg-type]
        return simulate(trace, latency, policy, scenario).simulated_s

    assert seconds(Fixed(2), mode) == pytest.approx(seconds(Autoregressive(), "continuous"), 0.05)


def test_an_overlapped_mode_says_what_is_free(run: Run) -> None:
    asked = ("--mode", "pearl", "--policy", "fixed:gamma=1", "--requests", 5)
    done = run("serve", *GIVEN, *asked).ok()
    assert "counted as 0 s: draft prefill" in done.err
    assert "host_round (speedups are too low" in done.err


@pytest.mark.parametrize(
    ("words", "free"),
    [
        (("sweep", "--policy", "confidence"), ["host_round", "signal"]),
        (("sweep", "--policy", "fixed:gamma=1"), ["host_round"]),
        (("sweep", "ladder", "--policy", "confidence"), ["host_round", "signal"]),
        (("sweep", "tune", "--policy", "confidence:confidence_threshold={0.3,0.4}"),
         ["host_round", "signal"]),
        (("simulate", "robustness", "--policy", "confidence"), ["host_round", "signal"]),
        (("simulate", "--policy", "confidence"), ["host_round", "signal"]),
        (("breakeven", "--batch", "1", "--k", "1"), ["host_round"]),
        (("tune", "--engine", "vllm", "--batch", "1"),
         ["draft prefill", "host_round", "target prefill"]),
    ],
)  # fmt: skip
def test_what_cost_nothing_is_said(words: tuple[str, ...], free: list[str], run: Run) -> None:
    done = run(*words, "--latency", CONST).ok()
    _, found, said = " ".join(done.err.split()).partition("counted as 0 s: ")
    assert found
    assert [name for name in ("draft prefill", "host_round", "signal", "target prefill")
            if name in said] == free  # fmt: skip


def test_a_policy_without_a_longest_draft_is_left_out_or_refused(tmp_path: Path, run: Run) -> None:
    """Recordings of a server's rounds have none, either."""
    trace = synthetic_trace(0.7, requests=4, tokens=30)
    assert trace.max_gamma is None
    write_trace(trace, path := tmp_path / "trace.parquet")
    common = ("serve", "--trace", path, "--latency", CONST, "--batch", 1, "--requests", 8)
    every = run(*common, "--policy", "all", "--json", "-")
    assert "left out: hf-heuristic, which sets no longest draft" in every.err
    assert "hf-heuristic" not in {row["policy"] for row in every.rows}
    named = run(*common, "--policy", "hf-heuristic:gamma=3")
    assert "write hf-heuristic:gamma=3,gamma_max=8" in named.refusal
    assert run(*common, "--policy", "hf-heuristic:gamma=3,gamma_max=8").code == 0


def test_notes_say_what_cost_nothing_and_what_was_not_measured() -> None:
    few = {"requests": 10, "policies": ["confidence"]}
    for found in (
        draftsim.predict(policies=["confidence"], resamples=10),
        draftsim.sweep(policies=["confidence"], resamples=10),
        draftsim.serve(concurrency=[1], **few),
        draftsim.plan(rate=0.01, slo="ttft=60s", replications=2, **few),
    ):
        said = " ".join(found.notes)
        assert "counted as 0 s: signal" in said
        assert "outside the measured sizes" in said


def test_the_rate_of_a_file_is_that_of_what_arrives(run: Run, tmp_path: Path) -> None:
    """A hundred requests at ten a second, then as many at one in a hundred seconds."""
    times = [*(0.1 * i for i in range(100)), *(10 + 100.0 * i for i in range(1, 101))]
    path = arrival_file(tmp_path / "arrivals.csv", *(f"{t},64,8" for t in times))
    words = ("serve", *PLAIN, "--arrivals", path, "--requests", "100", "--json", "-")
    done = run(*words).ok()
    assert done.rows[0]["rate"] == pytest.approx(10, rel=0.02)
    slower = run(*words, "--rate", "1")
    assert slower.rows[0]["rate"] == pytest.approx(1)
    took_s = done.rows[0]["simulated_s"]
    assert slower.rows[0]["simulated_s"] == pytest.approx(10 * took_s, rel=0.05)


def test_a_policy_that_is_faster_only_under_load_is_said_to_be() -> None:
    def row(policy: str, rate: float, mean: float) -> dict[str, Any]:
        return {"policy": policy, "rate": rate, "e2e_s": {"mean": mean}}

    rows = [
        row("autoregressive", 1.0, 1.0), row("autoregressive", 4.0, 10.0),
        row("fixed:gamma=2", 1.0, 1.1), row("fixed:gamma=2", 4.0, 5.0),
    ]  # fmt: skip
    [said] = _break_even(rows)
    assert "fixed:gamma=2 is faster than no speculation only at 4 requests/s" in said


def test_a_policy_that_never_drafts_is_no_speculation_everywhere() -> None:
    trace, latency = find_trace("qwen-coder-vllm-cpu"), find_latency("qwen-coder-vllm-cpu")
    assert latency.has("draft", "along")
    plain, never = (replay(trace, policy, name=name) for name, policy in (
        ("autoregressive", Autoregressive()), ("fixed:gamma=0", Fixed(0))))  # fmt: skip
    assert price(never, latency).total_s == pytest.approx(price(plain, latency).total_s)


def test_steps_without_drafts_verify_nothing() -> None:
    """At cost ratios a step costs v only where it verifies drafts, in batches as alone."""
    trace = synthetic_trace(0.7, requests=6, tokens=40)
    log = always_drafted(replay(trace, parse_policy("batch-table:table=[[1,64,0]]")), 1)
    for batch in (1, 4):
        found = InBatches(log, batch, 3).at_ratios(np.array([0.1]), 2.0)
        assert found.speedup == pytest.approx(1 / 1.1)


@pytest.mark.parametrize("mode", [("ladder",), ("tune", "--policy", "gammatune:eta={0.1,0.5}")])
def test_without_resamples_there_is_no_interval(mode: tuple[str, ...], run: Run) -> None:
    done = run("sweep", *mode, "--trace", "bundled", "--resamples", "0", "--json", "-").ok()
    drafting = [row for row in done.rows if row["speedup"] != 1]
    assert drafting
    assert {row["speedup_lo"] for row in drafting} == {None}


def test_prices_of_one_table_are_kept_apart_by_what_the_drafter_reads() -> None:
    latency = drafting_always(GRID, 4)
    trace = synthetic_trace(0.7, requests=6, tokens=40)
    verified = replace(trace, meta={**trace.meta, "takes_verified": True})
    scenario = Scenario(ClosedLoop(2), Limits(max_batch=2), requests=6, warmup=0.0)
    for own in (trace, verified):
        fast = simulate(own, latency, Fixed(3), scenario)
        slow = simulate(own, latency, Fixed(3), scenario, by_iteration=True)
        assert fast.simulated_s == pytest.approx(slow.simulated_s, rel=1e-9)


def test_an_engine_without_a_drafter_pays_for_none(run: Run) -> None:
    """K = 0 costs what the drafter runs along for; the speedup is over an engine without it."""
    name = "qwen-coder-vllm-cpu"
    latency = find_latency(name)
    done = run(
        "breakeven", "--trace", name, "--batch", "1", "--context", "256", "--k", "1,3",
        "--json", "-",
    ).ok()  # fmt: skip
    rows = {row["k"]: row for row in done.rows}
    cells = {"batch": 1, "context": 255, "new_tokens": 1}
    target_s = float(latency.seconds("target", "forward", **cells))
    along_s = float(latency.seconds("draft", "along", **cells))
    assert rows[0]["speedup"] < target_s / (target_s + 0.9 * along_s)
    [log] = [replay(find_trace(name), Fixed(3), name="three")]
    plain, three = (price(one, latency).total_s for one in (autoregressive(log), log))
    assert rows[3]["speedup"] == pytest.approx(plain / three, rel=0.05)


def test_a_surface_outside_the_measured_sizes_says_so(run: Run) -> None:
    inside = run("breakeven", "--batch", "1", "--context", "256", "--k", "3")
    beyond = run("breakeven", "--batch", "1", "--context", "100000", "--k", "3")
    assert "outside the measured sizes" not in inside.err
    assert "outside the measured sizes, priced by a fitted roofline" in beyond.err


def test_no_speculation_in_an_engine_of_runs_pays_for_its_drafter() -> None:
    measured = ((1, 0, 60.0), (1, 3, 110.0), (8, 0, 30.0), (8, 3, 40.0))
    runs = [ServerRun(b, k, b * speed, emitted=2.5 if k else None) for b, k, speed in measured]
    surface = measured_surface(calibrate(runs), None, grid([1, 8], [0], [0, 3]))
    idle = surface[surface["k"] == 0]
    assert (idle["speedup"] < 0.99).all()
    assert (idle["needed"] > 1.01).all()


def test_a_file_that_every_replica_serves_in_time_needs_no_more_requests(
    run: Run, tmp_path: Path
) -> None:
    path = arrival_file(tmp_path / "few.csv", *(f"{t},100,50" for t in range(3)))
    done = run(
        "capacity", *PLAIN, "--arrivals", path, "--slo", "tpot=60s", "--replications", "1"
    ).ok()  # fmt: skip
    assert "at every rate of these requests of the file" in done.err


def test_batches_whose_cache_does_not_fit_are_not_recommended_in_python() -> None:
    asked = ("qwen-coder-cpu", "rtx-3090/llama-3.1-8b+llama-3.2-1b", ["fixed:gamma={1..2}"])
    found = draftsim.sweep(*asked, concurrency=[1, 512], resamples=0, jobs=1)
    assert set(found.best["batch"]) == {1}
    assert any("left out from batch 512" in note for note in found.notes)


def test_python_takes_the_graphs_that_the_command_takes(run: Run) -> None:
    latency = "a100/llama-2-7b+vicuna-68m"
    done = run(
        "serve", "--trace", "qwen-coder-cpu", "--latency", latency, "--batch", "6",
        "--policy", "fixed:gamma=3", "--requests", "12", "--json", "-",
    )  # fmt: skip
    served = draftsim.serve(
        "qwen-coder-cpu", latency, ["fixed:gamma=3"], concurrency=[6], requests=12
    )  # fmt: skip
    ours = served.table.set_index("policy")["throughput_tok_s"]["fixed:gamma=3"]
    theirs = {row["policy"]: row["throughput_tok_s"] for row in done.rows}["fixed:gamma=3"]
    assert ours == pytest.approx(theirs)


def test_an_engine_of_a_search_has_the_measured_limits() -> None:
    engine = {"token_budget": 512, "max_batch": 4}
    table = LatencyTable(GRID.cells, {**GRID.meta, "engine": engine})
    load = closed_load(synthetic_trace(0.7, requests=4, tokens=20), 2, latency=table)
    assert (load.limits.max_batch, load.limits.token_budget) == (2, 512)


def test_drafters_of_one_kind_have_names_of_their_own() -> None:
    trace = find_trace("smollm2-drafters-cpu")
    log = replay(trace, Fixed(1), name="mtp")
    own = [replace(log, source=source) for source in ("eagle:model=mtp", "eagle:model=mtp3")]
    names = [one.policy for one in told_apart([*own, replay(trace, Fixed(2), name="two")])]
    assert names == ["mtp (eagle:model=mtp)", "mtp (eagle:model=mtp3)", "two"]


def test_integers_name_slots_as_texts_do() -> None:
    slots = {"candidate_steps": [1, 2]}
    assert SGLangAdaptive(config={1: slots}).config == {1: slots}


def test_the_oracle_is_never_the_best_row_of_a_paper() -> None:
    rows = [{"policy": "oracle ~", "speedup": "3.0"}, {"policy": "gammatune *", "speedup": "1.2"}]
    assert _best(rows, ["policy", "speedup"]) == 1
