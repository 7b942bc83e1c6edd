"""Loads for a real engine: what the options name, and what is refused before one is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commands.engine.options import named_loads
from profiler.engines import loads
from profiler.engines.loads import RunningLoad
from simulator.serving import ArrivalTimes, ClosedLoop, Poisson
from tests.conftest import Run
from tests.serving import SMALL, arrival_file
from traces.errors import FileError
from traces.store.engine_runs import Demand, EngineStep, PlannedRequest


def test_loads_are_named_after_their_options(tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", "3,10,20", "4.5,10,20")
    assert list(named_loads(None, None)) == ["closed:1", "closed:4", "closed:8", "closed:16"]
    assert named_loads("closed:2", "0.5") == {"closed:2": ClosedLoop(2), "rate:0.5": Poisson(0.5)}
    assert list(named_loads(None, None, file)) == ["arrivals:a.csv"]
    assert list(named_loads("closed:1", "3", file)) == ["closed:1", "rate:3", "arrivals:a.csv"]


def test_a_file_gives_times_and_the_recording_lengths(tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", "3,999,777", "4.5,999,777", "9,999,777")
    [times] = named_loads(None, None, file).values()
    assert isinstance(times, ArrivalTimes)
    assert times.rate == pytest.approx(2 / 6)
    jobs = list(times.jobs(SMALL, np.random.default_rng(0), 10))
    assert [job.arrival_s for job in jobs] == [0.0, 1.5, 6.0]
    for job in jobs:
        recorded = SMALL.requests[job.sequence]
        assert (job.prompt_tokens, job.output_tokens) == (recorded.prompt_length, recorded.tokens)
    assert len({job.sequence for job in jobs}) == 3


def test_a_file_that_is_none_is_refused_before_an_engine_is_started(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match="does not exist"):
        named_loads(None, None, tmp_path / "no.csv")
    ran = run("validate", "--engine", "vllm", "--run", tmp_path, "--arrivals", tmp_path / "no.csv")
    assert "does not exist" in ran.refusal
    ran = run("validate", "--engine", "vllm", "--run", tmp_path, "--load", "open:3")
    assert "open loads are --rate and --arrivals" in ran.err


class Stepped:
    """An engine of `STEP_S` an iteration, and a control load, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.controls: list[float] = []
        self.running: dict[str, list[int]] = {}
        self.proposer = SimpleNamespace(use=lambda setup: SimpleNamespace(finished={}))

    def enter(self, tenant: Any) -> None:
        assert tenant is None

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, name: str, prompt: Any, tokens: int) -> None:
        self.running[name] = [0, tokens]

    def step(self) -> EngineStep:
        began = self.now
        self.now += STEP_S
        for done in self.running.values():
            done[0] += 1
        emitted = {name: done for name, (done, _) in self.running.items()}
        ended = [name for name, (done, tokens) in self.running.items() if done == tokens]
        for name in ended:
            del self.running[name]
        return EngineStep(began, STEP_S, {}, [], [], emitted, ended)

    def seconds(self) -> float:
        self.now += 7.0
        self.controls.append(float(len(self.controls)))
        return self.controls[-1]


STEP_S = 0.125


@pytest.mark.parametrize("concurrency", [2, None])
def test_the_control_load_runs_all_along_and_takes_none_of_the_requests_time(
    monkeypatch: pytest.MonkeyPatch, concurrency: int | None
) -> None:
    engine: Any = Stepped()
    monkeypatch.setattr(loads, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    jobs = [PlannedRequest(i, 0.0, 20) for i in range(4)]
    setup: Any = None
    load = RunningLoad(engine, setup, Demand(jobs, concurrency), {i: [1] for i in range(4)}, engine)
    load.go_on()
    run = load.result()
    iterations = 40 if concurrency else 20
    assert run.requests["finish_s"].max() == pytest.approx(iterations * STEP_S)
    assert run.busy_s == pytest.approx(iterations * STEP_S)
    # Before and after, and every fifth iteration: the first beyond half a second.
    assert len(engine.controls) == 2 + iterations // 5
    assert run.control_s == np.median(engine.controls)
