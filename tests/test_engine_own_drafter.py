"""vLLM's own drafter under our policies, in a pretended vLLM: how far it drafts, and its cost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies import Round, parse_policy
from policies.batch.base import Policy
from policies.batch.tables import BatchTable
from profiler.engines.cells import SAMPLE, Cell, EngineGrid
from profiler.engines.drafts import EngineDrafts, Forced
from profiler.engines.measure import cells_of_engine
from profiler.engines.session import ENGINE, VARIABLE, Setup, asks_for_engine, setup_from
from profiler.engines.vllm.proposer import OwnDrafter, check_speculative, register
from profiler.engines.vllm.watch import SECOND_RUNNER, Stopwatches
from simulator.engines import kinds, priced
from simulator.serving import ClosedLoop, Scenario, simulate
from simulator.serving.cost import EngineCost
from tests.compiled import ALONG, PLAIN
from tests.pretend_vllm import PretendRunner
from tests.test_engine_proposer import LONGEST, PROMPTS, TEXTS, TRACE, VOCABULARY, rounds
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.store.engine_runs import PARTS, Decoded, EngineStep, LoadRun

WRONG = VOCABULARY - 1
"""No text holds it."""


def test_on_a_gpu_the_drafters_time_begins_when_the_target_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its method is called before the target's pass has ended, and would seem to take that, too."""
    target_s, drafter_s = 5.0, 2.0
    now = {"host": 0.0, "device": 0.0}

    def waits(device: Any) -> None:
        now["host"] = max(now["host"], now["device"])

    def execute(*_: Any) -> None:
        now["device"] = now["host"] + target_s

    def propose(*_: Any) -> None:
        waits(None)
        now["host"] += drafter_s

    clock = SimpleNamespace(perf_counter=lambda: now["host"])
    monkeypatch.setattr("profiler.engines.vllm.watch.time", clock)
    monkeypatch.setattr("torch.accelerator.synchronize", waits)
    plan = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={})
    scheduler = SimpleNamespace(
        schedule=lambda: plan, update_from_output=lambda plan, output: None, requests={}
    )
    for device, seen_s in (("cuda", drafter_s), ("cpu", target_s + drafter_s)):
        executor = SimpleNamespace(execute_model=execute, sample_tokens=lambda: None)
        runner = SimpleNamespace(
            device=SimpleNamespace(type=device), propose_draft_token_ids=propose
        )
        watch = Stopwatches(scheduler, executor, runner)
        watch.begin()
        scheduler.schedule()
        executor.execute_model()
        runner.propose_draft_token_ids()
        step = watch.taken(0.0, now["host"], {}, [])
        assert step is not None
        assert step.parts["propose"] == seen_s


class DraftingRunner(PretendRunner):
    """Has a drafter that finds `right` tokens of each draft, and remembers how many were asked."""

    def __init__(self, right: int, batch: int = 3, chunks: int = 1) -> None:
        super().__init__(None, TEXTS, PROMPTS, batch, chunks)  # type: ignore[arg-type]
        self.right, self.asked = right, list[int]()
        self.unbooked: dict[str, list[int]] = {}
        self.discard_request_mask = SimpleNamespace(np=np.zeros(0, bool))
        self.handed: list[list[list[int]]] = []

    def propose_draft_token_ids(self, output: Any, sampled: Any) -> Any:
        asked = output.num_spec_tokens_to_schedule
        self.asked.append(asked)
        return np.array([self._drafted(name, asked) for name in self.input_batch.req_ids])

    def _sample(self, name: str, draft: Sequence[int]) -> list[int]:
        tokens = super()._sample(name, draft)
        if tokens:  # vLLM books them after it has drafted
            self.unbooked[name] = tokens
            del self.requests[name].output_token_ids[-len(tokens) :]
        return tokens

    def _drafted(self, name: str, asked: int) -> list[int]:
        request = self.requests[name]
        done = len(request.output_token_ids) + len(self.unbooked.get(name, ()))
        text = self.texts[request.sequence]
        ahead = [*text[done:], *[WRONG] * asked][:asked]
        return [token if k < self.right else WRONG for k, token in enumerate(ahead)]

    def propose(self, scheduler_output: Any, sampled: list[list[int]]) -> list[list[int]]:
        widest = max(map(len, sampled))
        padded = np.array([[*row, *[-1] * (widest - len(row))] or [0] for row in sampled])
        self.discard_request_mask.np = np.array([not row for row in sampled])
        drafts: list[list[int]] = self.propose_draft_token_ids(scheduler_output, padded)
        for name, tokens in self.unbooked.items():
            self.requests[name].output_token_ids += tokens
        self.unbooked = {}
        self.handed.append(drafts)
        return drafts


def served(setup: Setup, right: int = 2, batch: int = 3) -> tuple[OwnDrafter, DraftingRunner]:
    runner = DraftingRunner(right, batch)
    drafter = OwnDrafter(runner, LONGEST, VOCABULARY)
    drafter.use(setup)
    outputs = runner.run()
    assert {int(n.partition("/")[0]): t for n, t in outputs.items()} == TEXTS
    return drafter, runner


@pytest.mark.invariant(1)
@pytest.mark.parametrize("name", ["autoregressive", "fixed:gamma=3", "gammatune", "svip"])
@pytest.mark.parametrize("batch", [1, 3])
def test_dictated_drafts_take_the_replays_rounds(name: str, batch: int) -> None:
    policy = parse_policy(name, max_gamma=LONGEST)
    forced = Forced(TRACE, TEXTS, VOCABULARY)
    drafter, runner = served(Setup(policy, forced), batch=batch)
    log = replay(TRACE, policy)
    assert {n: s.rounds for n, s in drafter.finished.items()} == {
        f"{i}/0": rounds(log, i) for i in TEXTS
    }
    assert runner.asked == [max(map(len, drafts), default=0) for drafts in runner.handed]


@pytest.mark.parametrize("right", [0, 2, 9])
def test_its_own_tokens_are_cut_to_the_policys_length(right: int) -> None:
    drafter, runner = served(Setup(parse_policy("gammatune"), EngineDrafts()), right)
    lengths = {len(draft) for drafts in runner.handed for draft in drafts}
    assert len(lengths) > 2  # GammaTune's own lengths, not all that the drafter can
    found = [r for s in drafter.finished.values() for r in s.rounds]
    assert max(r.accepted for r in found) == min(right, max(r.drafted for r in found))
    if right:
        tokens = {t for drafts in runner.handed for draft in drafts for t in draft[:right]}
        assert tokens & {t for text in TEXTS.values() for t in text}


def test_a_batch_policy_asks_for_one_length() -> None:
    policy: Policy = BatchTable([[1, 1, 4], [2, 9, 0]])
    _, runner = served(Setup(policy, EngineDrafts()))
    assert {0, 4} <= set(runner.asked) <= {0, 1, 2, 3, 4}


def test_a_policy_that_reads_what_the_engine_keeps_is_refused() -> None:
    with pytest.raises(DraftsimError, match="reads entropy"):
        Setup(parse_policy("svip"), EngineDrafts())


def test_the_environment_may_name_the_engines_drafter() -> None:
    given = json.dumps({"policy": "gammatune", "source": ENGINE})
    assert asks_for_engine(given)
    assert isinstance(setup_from(given, longest=4).source, EngineDrafts)
    assert not asks_for_engine("")
    assert not asks_for_engine('{"policy": "gammatune", "source": "pld"}')


def own(cell: Cell) -> tuple[Any, ...]:
    """2 ms for a pass of the drafter along, 3 for the first of a draft and 1 for each other.

    A token more in a first pass takes 0.01 ms.
    """
    asked = max(cell.width - 1, 0)
    drafting_s = 3e-3 + 1e-3 * (asked - 1) if asked else 2e-3
    drafting_s += 1e-5 * (cell.batch * asked + cell.prompts * cell.tokens)
    parts = {**dict.fromkeys(PARTS, 1e-3), "propose": drafting_s}
    return (*cell, cell.context, 0.02, *parts.values(), 0.01, 1e-3)


def test_the_drafters_passes_are_read_from_iterations_that_ask_for_more_and_more() -> None:
    grid = EngineGrid(
        (1, 4), (1, 2, 5), (64, 256), ((1, 16), (1, 64)), (1, 3), (1, 5), (16, 64), 1, 3
    )
    rows = [own(cell) for block in grid.blocks() for cell in block for _ in range(3)]
    table = LatencyTable(cells_of_engine(pd.DataFrame(rows, columns=SAMPLE), own_passes=True))

    def read(phase: str, batch: int, width: int) -> float:
        return float(table.seconds("draft", phase, batch=batch, new_tokens=width, context=100))

    assert read("along", 4, 1) == pytest.approx(2e-3)
    assert read("catch_up", 4, 1) == pytest.approx(3e-3)
    assert read("forward", 4, 1) == pytest.approx(1e-3)
    assert read("catch_up", 4, 3) == pytest.approx(3e-3 + 1e-5 * 4 * 2)
    assert table.seconds("draft", "prefill", batch=1, new_tokens=16) == pytest.approx(2.16e-3)
    # Neither the host nor the target is charged for them.
    assert table.seconds("target", "host_round", batch=4, new_tokens=1) == pytest.approx(3e-3)
    idle = [SimpleNamespace(context=65)], [Round(0, 0, 0, 1, 0, 1)], []
    assert EngineCost(table)(*idle).draft_s == pytest.approx(2e-3)
    assert EngineCost(table, speculates=False)(*idle).draft_s == 0  # an engine without one


def test_off_is_an_engine_without_a_drafter_unless_it_is_loaded() -> None:
    policy, closed = parse_policy("autoregressive"), ClosedLoop(2)
    off = simulate(PLAIN, ALONG, policy, Scenario(closed, requests=6))
    loaded = simulate(PLAIN, ALONG, policy, Scenario(closed, requests=6, drafter_loaded=True))
    assert off.recorder.iterations == loaded.recorder.iterations
    assert loaded.recorder.busy_s > 1.05 * off.recorder.busy_s


@pytest.mark.parametrize(
    ("method", "padded", "asynchronous", "said"),
    [
        ("ngram", True, False, "by 'ngram'"),
        ("eagle", False, False, "padded"),
        ("draft_model", True, True, "--no-async-scheduling"),
    ],
)
def test_an_engine_that_cannot_be_told_is_refused(
    method: str, padded: bool, asynchronous: bool, said: str
) -> None:
    config = SimpleNamespace(
        method=method, disable_padded_drafter_batch=not padded,
        use_eagle=lambda: method == "eagle", uses_draft_model=lambda: method == "draft_model",
    )  # fmt: skip
    with pytest.raises(DraftsimError, match=said):
        check_speculative(config, asynchronous)
    if method != "ngram":
        config.disable_padded_drafter_batch = False
        check_speculative(config, asynchronous=False)


class PluggedRunner(DraftingRunner):
    """A runner as vLLM builds it, which loads its model in its own way (the one for CPUs does)."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(right=9)
        self.vllm_config, self.use_async_scheduling = vllm_config, False
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)


@pytest.mark.parametrize("source", [ENGINE, "pld", None])
def test_vllms_plugin_takes_over_where_the_environment_says_so(
    source: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("vllm.v1.worker.gpu_model_runner")
    plugged = type("GPUModelRunner", (PluggedRunner,), {})
    module.GPUModelRunner = plugged  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(SECOND_RUNNER, "1")
    if source is not None:
        given = {"policy": "fixed:gamma=3", "source": source}
        monkeypatch.setenv(VARIABLE, json.dumps(given))
    register()
    # Else a GPU would run another model runner, and the policy would decide nothing.
    assert os.environ[SECOND_RUNNER] == ("0" if source == ENGINE else "1")
    speculative = SimpleNamespace(
        use_eagle=lambda: True, disable_padded_drafter_batch=False, num_speculative_tokens=LONGEST
    )
    runner = type("CPUModelRunner", (plugged,), {})(SimpleNamespace(speculative_config=speculative))
    if source != ENGINE:
        assert runner.propose_draft_token_ids.__self__ is runner
        return
    outputs = runner.run()
    assert {int(n.partition("/")[0]): t for n, t in outputs.items()} == TEXTS
    assert max(runner.asked) == 3


def test_drafts_are_priced_apart_from_the_iterations_that_make_them() -> None:
    """An iteration drafts for the next one; the simulator charges who verifies."""
    table = LatencyTable.constant(0.01, 0.002, host_round=0.001)
    latency = LatencyTable(table.cells, {**table.meta, "engine": {"own_drafter": True}})
    cost = EngineCost(latency)
    sizes = [Decoded("0/0", 5, 0, 1), Decoded("0/0", 6, 3, 2), Decoded("0/0", 8, 1, 1)]
    steps = [EngineStep(0.0, 0.0, {}, [own], [], {}, []) for own in sizes]
    prices = [priced(step, cost) for step in steps]
    made_s = [*(price.draft_s for price in prices[1:]), 0.0]
    assert made_s[0] > made_s[1] > 0
    ran = [
        replace(step, seconds=price.total_s - price.draft_s + s, parts={"propose": s})
        for step, price, s in zip(steps, prices, made_s, strict=True)
    ]
    run = LoadRun(pd.DataFrame(), ran, {}, 1e-3)
    found = {row["kind"]: row for row in kinds([run], latency)}
    assert set(found) == {"decode", "drafts"}
    assert [row["error"] for row in found.values()] == pytest.approx([0.0] * 2)
    assert sum(row["measured_s"] for row in found.values()) == pytest.approx(run.busy_s)
    assert [row["kind"] for row in kinds([run], table)] == ["decode"]
    # A server's engine runs in another process, which does not tell the drafter's time.
    untold = replace(run, steps=[replace(step, parts={"propose": 0.0}) for step in ran])
    assert [row["kind"] for row in kinds([untold], latency)] == ["decode"]
