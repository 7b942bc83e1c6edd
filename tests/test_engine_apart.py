"""An engine apart: its own defaults as the baseline, and vLLM's synthetic acceptance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from commands.engine.check import chances, engine_options, say_defaults
from commands.engine.profile import default_speeds, plain_load, profile_engine, with_default_speeds
from commands.validate.engine import say_slower
from policies.lengths.basic import Autoregressive, Fixed
from profiler.engines import vllm
from profiler.engines.engine import EngineOptions
from profiler.engines.vllm.apart import arguments_apart, main, timed_load
from profiler.engines.vllm.server import arguments as of_server
from simulator.engines import (
    Workload,
    drawn_trace,
    figures_of,
    synthetic_rows,
    with_defaults,
)
from simulator.serving import ClosedLoop, Limits, simulate
from tests.conftest import Run
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.store.engine_runs import Apart, PlannedRequest, Speed
from traces.store.files import write_latency
from traces.store.recordings import find_latency, find_trace


class Ticking:
    """An engine that emits a token a second for every request."""

    def __init__(self) -> None:
        self.now_s, self.most = 0.0, 0
        self.left: dict[str, int] = {}
        self.outputs: dict[str, int] = {}

    def add(self, name: str, job: PlannedRequest) -> None:
        self.left[name], self.outputs[name] = job.tokens, 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.now_s += 1.0
        self.most = max(self.most, len(self.left))
        told = []
        for name in [*self.left]:
            self.left[name] -= 1
            self.outputs[name] += 1
            done = not self.left[name]
            ids = [0] * self.outputs[name]
            told.append(SimpleNamespace(
                request_id=name, finished=done, outputs=[SimpleNamespace(token_ids=ids)]
            ))  # fmt: skip
            if done:
                del self.left[name]
        return told

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def run_of(jobs: list[PlannedRequest], concurrency: int | None) -> tuple[Ticking, Speed]:
    engine = Ticking()
    speed = timed_load(engine, engine.add, jobs, concurrency, lambda: engine.now_s, engine.sleep)
    return engine, speed


def test_a_closed_loop_keeps_its_concurrency() -> None:
    engine, speed = run_of([PlannedRequest(i, 0.0, 4) for i in range(6)], 2)
    assert (engine.most, speed) == (2, Speed(24, 12.0))
    assert speed.tokens_per_s == 2.0


def test_timed_requests_wait_for_their_times() -> None:
    engine, speed = run_of([PlannedRequest(0, 0.0, 2), PlannedRequest(1, 5.0, 2)], None)
    assert (engine.most, speed) == (1, Speed(4, 7.0))


def test_the_wait_before_the_first_request_is_no_time_of_the_load() -> None:
    """As in the measured engine (`figures_of`) and in the simulator."""
    _, speed = run_of([PlannedRequest(0, 3.0, 2), PlannedRequest(1, 8.0, 2)], None)
    requests = pd.DataFrame(
        {"arrival_s": [3.0, 8.0], "first_s": [4.0, 9.0], "finish_s": [5.0, 10.0], "tokens": [2, 2]}
    )
    assert speed.tokens_per_s == pytest.approx(figures_of(requests)["throughput"])


def test_a_prompt_that_is_sent_again_is_not_read_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's prefix cache is on by default, and the measured engine computes every prompt."""
    sent: list[tuple[tuple[int, ...], str]] = []
    engine = Ticking()

    def add_request(name: str, prompt: Any, params: Any) -> None:
        sent.append((tuple(prompt["prompt_token_ids"]), prompt["cache_salt"]))
        engine.add(name, PlannedRequest(0, 0.0, params.max_tokens))

    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    llm_engine = SimpleNamespace(
        add_request=add_request, step=engine.step, vllm_config=config,
        has_unfinished_requests=engine.has_unfinished_requests,
    )  # fmt: skip
    llm = SimpleNamespace(llm_engine=llm_engine, reset_prefix_cache=lambda: None)
    pretend = SimpleNamespace(LLM=lambda **_: llm, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", pretend)
    monkeypatch.setitem(sys.modules, "vllm.inputs", SimpleNamespace(TokensPrompt=dict))
    asked = {
        "arguments": {}, "repeats": 1, "prompts": {"0": [5, 6], "1": [5, 7]},
        "loads": {"closed:2": {"jobs": [[i, 0.0, 2] for i in (0, 1, 0, 0, 1)], "concurrency": 2}},
    }  # fmt: skip
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    main(tmp_path / "asked.json", tmp_path / "told.json")
    warmed_up, repeat = sent[:5], sent[5:]
    assert warmed_up == repeat
    assert len(set(repeat)) == 5
    # What different prompts have in common is read from it.
    assert repeat[0][1] == repeat[1][1]


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_folder_without_a_tokenizer_is_served_by_token_ids(
    tmp_path: Path, has_tokenizer: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if has_tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")
    given = arguments_apart(EngineOptions(str(tmp_path), longest=4, max_batch=4))
    assert given.get("skip_tokenizer_init") == (None if has_tokenizer else True)


def test_a_target_may_be_named_by_its_hub_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A profile without an engine apart takes one, too; made-up prompts need the vocabulary."""
    config = tmp_path / "config.json"
    for text, size in (
        ({"vocab_size": 97, "model_type": "known to vLLM alone"}, 97),
        ({"text_config": {"vocab_size": 98}}, 98),
        ({"model_type": "llama"}, LlamaConfig().vocab_size),
    ):
        config.write_text(json.dumps(text))
        assert EngineOptions(str(tmp_path)).vocabulary == size
    asked: list[str] = []

    def from_pretrained(name: str) -> LlamaConfig:
        asked.append(name)
        return LlamaConfig(vocab_size=99)

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    assert EngineOptions("someone/model").vocabulary == 99
    assert asked == ["someone/model"]


def test_an_engine_apart_keeps_its_own_defaults() -> None:
    options = EngineOptions("m", eagle="h", more={"enforce_eager": False})
    plain = arguments_apart(options)
    assert not {"enforce_eager", "async_scheduling", "speculative_config"} & set(plain)


def test_an_engine_apart_has_the_threads_of_the_measured_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU vLLM binds its worker to all processors but one, unless it is told not to."""
    told: dict[str, str] = {}

    def ran(command: Sequence[str], env: dict[str, str], **_: Any) -> Any:
        told.update(env)
        Path(command[-1]).write_text('{"speeds": {}, "settings": {}}')
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", ran)
    vllm.run_apart(EngineOptions("m", threads=3), {}, {}, 1)
    assert (told["OMP_NUM_THREADS"], told["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")


def test_a_pairs_latencies_are_not_replaced_by_an_engines(tmp_path: Path) -> None:
    file = tmp_path / "latency.parquet"
    write_latency(LatencyTable.constant(0.01, 0.001), file)
    before = file.read_bytes()
    with pytest.raises(DraftsimError, match="holds no latencies of an engine: name another --out"):
        profile_engine("vllm", EngineOptions("m"), tmp_path, 0.0)
    assert file.read_bytes() == before


def test_synthetic_acceptance_is_asked_of_the_engines_own_drafter() -> None:
    given = arguments_apart(EngineOptions("m", draft="d", longest=5), [0.8, 0.5])
    speculative = given["speculative_config"]
    assert speculative["rejection_sample_method"] == "synthetic"
    assert speculative["synthetic_acceptance_rates"] == [0.8, 0.5]
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("draft_model", 2)
    assert given["async_scheduling"] is False
    with pytest.raises(DraftsimError, match=r"has 2 positions.* up to 1: .* --engine-longest 2"):
        arguments_apart(EngineOptions("m", draft="d", longest=1), [0.8, 0.5])
    with pytest.raises(DraftsimError, match="--draft or --eagle"):
        arguments_apart(EngineOptions("m"), [0.8])


def test_settings_of_a_profile_are_kept_and_used_again() -> None:
    assert vllm.settings(False, None, False) == {}
    chosen = vllm.settings(True, "FULL", True)
    expected = {
        "async_scheduling": True, "enforce_eager": False,
        "compilation_config": {"cudagraph_mode": "FULL"}, "enable_prefix_caching": True,
    }  # fmt: skip
    assert chosen == expected
    flags = of_server(EngineOptions("m", more=chosen))
    assert {"--async-scheduling", "--no-enforce-eager", "--enable-prefix-caching"} <= set(flags)
    table = find_latency("smollm2-vllm-eagle3-cpu")
    trace = find_trace("smollm2-vllm-eagle3-cpu")
    assert dict(engine_options(table, trace, vllm).more) == {}
    engine = {**table.meta["engine"], "async_scheduling": True, "eager": False}
    again = LatencyTable(table.cells, {**table.meta, "engine": engine})
    assert dict(engine_options(again, trace, vllm).more) == {
        "async_scheduling": True, "enforce_eager": False,
        "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "remeasured", "said"), [(1.1, False, False), (1.9, False, True), (1.9, True, False)]
)
def test_a_machine_that_has_become_slower_is_named(
    capsys: pytest.CaptureFixture[str], machine: float, remeasured: bool, said: bool
) -> None:
    """Errors of seconds were 20 to 45% on a GPU whose host had become half as fast."""
    say_slower([{"machine": machine, **({"profile_error": 0.2} if remeasured else {})}] * 2)
    assert ("1.9 times slower than when the engine" in capsys.readouterr().err) == said


def test_both_speedups_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"load": "closed:4", "policy": "autoregressive", "throughput": 100.0, "speedup": 1.0},
        {"load": "closed:4", "policy": "fixed:gamma=3", "throughput": 180.0, "speedup": 1.8},
    ]
    apart = Apart({"closed:4": Speed(1200, 10.0)}, {"async_scheduling": True})
    found = with_defaults(rows, apart)
    assert found[1]["speedup_defaults"] == pytest.approx(1.5)
    say_defaults(found, apart)
    said = capsys.readouterr().err
    assert "1.80x over the same engine" in said
    assert "1.50x over the engine with its defaults" in said


def test_synthetic_acceptance_is_predicted() -> None:
    table, trace = find_latency("smollm2-vllm-eagle3-cpu"), find_trace("smollm2-vllm-eagle3-cpu")
    rates = chances("0.7,0.4")
    drafted = drawn_trace(trace, table, rates)
    drafts = np.asarray(drafted.columns["accepted"])[drafted.on_path]
    assert (drafts >= 1).mean() == pytest.approx(0.7, abs=0.03)
    work = Workload(trace, {}, {"closed:2": ClosedLoop(2)}, 8)
    apart = Apart({"closed:2": Speed(1000, 10.0)}, {})
    [row] = synthetic_rows(table, work, apart, rates)
    assert row["policy"] == "synthetic K=2"
    # All tokens over all of the time, as they are measured.
    scenario = work.scenarios(Limits.of_engine(table), own_drafter=True)["closed:2"]
    ran = simulate(drafted, table, Fixed(2), scenario)
    whole = sum(trace.requests[i].tokens for i in ran.requests["sequence"]) / ran.simulated_s
    assert row["throughput_predicted"] == pytest.approx(whole)
    assert row["error"] == pytest.approx(row["throughput_predicted"] / 100 - 1)


def test_synthetic_acceptance_searches_no_policies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    name = "smollm2-vllm-eagle3-cpu"
    write_latency(find_latency(name), tmp_path / "latency.parquet")

    def searched(*_: Any) -> None:
        raise AssertionError("policies are searched before the options are known to be right")

    def run_apart(kind: Any, options: Any, work: Workload, rates: Sequence[float]) -> Apart:
        return Apart({load: Speed(1000, 10.0) for load in work.loads}, {})

    monkeypatch.setattr("commands.engine.check.policies_predicted", searched)
    monkeypatch.setattr("commands.engine.check.run_apart", run_apart)
    asked = ("validate", "engine", "--run", tmp_path, "--trace", name, "--requests", 4)
    assert "--load closed:99" in run(*asked, "--load", "closed:99").refusal
    assert "--synthetic 0.5,0.6" in run(*asked, "--synthetic", "0.5,0.6").refusal
    ran = run(*asked, "--synthetic", "0.5", "--json", "-").ok()
    assert {row["policy"] for row in ran.rows} == {"synthetic K=1"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("validate", "--run", "x", "--defaults"), "belongs to `draftsim validate engine`"),
        (("validate", "--run", "x", "--engine", "vllm", "--synthetic", "0.5", "--http"), "drop"),
        (("tune", "--engine", "vllm", "--defaults"), "belongs to `draftsim tune engine`"),
        (
            ("profile", "--target", "t", "--out", "x", "--cudagraph-mode", "FULL"),
            "belongs to `draftsim profile engine`",
        ),
    ],
)
def test_options_that_do_not_go_together(run: Run, command: tuple[str, ...], says: str) -> None:
    made = run(*command)
    assert says in made.refusal


@pytest.mark.parametrize(
    ("given", "apart"), [((), False), (("--defaults",), True), (("--cudagraph-mode", "FULL"), True)]
)
def test_with_graphs_the_engine_without_a_drafter_is_always_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run, given: Sequence[str], apart: bool
) -> None:
    """Nine tokens in a full graph took half as long as one in a piecewise one, on an H200."""
    asked = []
    monkeypatch.setattr(vllm, "check_installed", lambda server=False: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "commands.engine.profile.profile_engine",
        lambda name, options, out, minutes, defaults: asked.append(defaults),
    )
    run("profile", "engine", "--target", "t", "--out", tmp_path / "run", *given)
    assert asked == [apart]


@pytest.mark.parametrize(
    ("mode", "says"),
    [("full", "--cudagraph-mode FULL: no CUDA device"), ("half", "--cudagraph-mode is 'half'")],
)
def test_graphs_that_cannot_be_are_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run, mode: str, says: str
) -> None:
    monkeypatch.setattr(vllm, "check_installed", lambda server=False: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = run(
        "profile", "engine", "--target", "t", "--out", tmp_path / "run", "--cudagraph-mode", mode
    )
    assert says in made.refusal
    assert not (tmp_path / "run").exists()


def test_rising_chances_are_refused() -> None:
    with pytest.raises(DraftsimError, match=r"--synthetic 0\.5,0\.6"):
        chances("0.5,0.6")


class Told:
    """An engine's folder whose engines with defaults decode at given speeds."""

    def __init__(self) -> None:
        self.loads: dict[str, Any] = {}

    def run_apart(
        self, options: Any, demands: Any, prompts: Any, repeats: int, synthetic: Any = None
    ) -> Apart:
        assert synthetic is None
        self.loads |= demands
        speeds = {
            load: Speed(sum(job.tokens for job in own.jobs), 10.0) for load, own in demands.items()
        }
        return Apart(speeds, {"prefix_caching": True})


def test_a_profile_keeps_what_the_defaults_decode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    monkeypatch.setattr(EngineOptions, "vocabulary", 1000)
    told = Told()
    plain = default_speeds(told, EngineOptions("T", max_batch=4))  # type: ignore[arg-type]
    assert [(load, own.concurrency) for load, own in told.loads.items()] == [
        ("closed:1", 1), ("closed:4", 4)
    ]  # fmt: skip
    table = with_default_speeds(find_latency("smollm2-vllm-eagle3-cpu"), plain)
    loads = table.meta["defaults"]["loads"]
    assert loads["closed:1"]["tokens_per_s"] == pytest.approx(4 * 64 / 10)
    own = loads["closed:1"]["own_tokens_per_s"]
    assert loads["closed:4"]["own_tokens_per_s"] > own
    # As in `serve`, no speculation has no drafter: one that is loaded reads every token.
    work = plain_load("closed:1")
    loaded = work.scenarios(Limits.of_engine(table), own_drafter=True)["closed:1"]
    slower = simulate(work.trace, table, Autoregressive(), loaded).row()["throughput_tok_s"]
    assert slower < own
    write_latency(table, tmp_path / "latency.parquet")
    ran = run("serve", "--trace", "smollm2-vllm-eagle3-cpu", "--latency", tmp_path, "--batch", "1",
              "--policy", "fixed:gamma=1", "--requests", "8")  # fmt: skip
    share = loads["closed:1"]["own_tokens_per_s"] / loads["closed:1"]["tokens_per_s"]
    assert f"multiply speedups by {share:.2f} at closed:1" in ran.said
    graphs = {"engine": {**table.meta["engine"], "eager": False, "longest": 5}}
    captured = with_default_speeds(replace(table, meta={**table.meta, **graphs}), plain)
    assert "graphs" not in table.meta["remark"]
    assert "those of num_speculative_tokens=5" in captured.meta["remark"]
