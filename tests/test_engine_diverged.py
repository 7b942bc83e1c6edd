"""An engine's text that diverged is told from a round or an iteration predicted wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from commands.common.quiet import say_texts
from commands.engine.check import compare_loads
from commands.engine.options import named_loads
from policies import DraftPolicy, DraftToken, Load, Round, parse_serving_policy
from profiler.engines.measure import EngineTable
from profiler.engines.vllm import engine
from simulator.engines import Workload, first_divergence
from tests.serving import arrival_file
from tests.stand_in_engine import GRID, OPTIONS, Clock, Forking, Reordering, StandIn
from tests.test_engine_resumed import Checked, check, folder
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import before
from traces.store.engine_runs import Decoded, EngineStep, LoadRun, PromptRead
from traces.store.files import read_trace

__all__ = ["check", "folder"]  # fixtures

TRACE = synthetic_trace(0.7, requests=5, tokens=24, prompt_length=12, seed=3)
OFF = "autoregressive"
POLICIES = (OFF, "fixed:gamma=3", "batch-table:table=[[1,1,3],[2,64,1]]")
TIMED = "arrivals:times.csv"
LOADS = ("closed:1", "closed:2", TIMED)


def compared(made: type[StandIn], folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of a check by load and policy."""
    with pytest.MonkeyPatch.context() as patch:
        Clock.use(patch)
        own: Any = made(OPTIONS)
        latency: LatencyTable = EngineTable(own, GRID.fitted(own.options)).run()
        chosen = {text: parse_serving_policy(text, max_gamma=OPTIONS.longest) for text in POLICIES}
        # The stand-in's clock goes by ticks, of which these times are whole numbers.
        file = arrival_file(folder / "times.csv", *(f"{i / 4},12,24" for i in range(5)))
        loads = named_loads("closed:1,2", None, file)
        rows = compare_loads(own, latency, Workload(TRACE, chosen, loads, 5, 2))
    return {(row["load"], row["policy"]): row for row in rows}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compared(Forking, tmp_path_factory.mktemp("forked"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compared(StandIn, tmp_path_factory.mktemp("usual"))


def test_nothing_is_left_out_where_no_text_diverged(usual: Any) -> None:
    for (load, _), row in usual.items():
        told = ("texts_diverged", "rounds_differ", "iterations_after", "requests_left_out")
        assert [row[name] for name in told] == [0] * 4
        assert row["rounds_compared"] > 0
        assert row["iterations_differ"] == (None if load == TIMED else 0)
        if load != TIMED:
            # The iterations are the predicted ones, and cost what they were predicted to.
            told_s = sum(kind["predicted_s"] for kind in row["kinds"])
            assert row["busy_s_predicted"] == pytest.approx(told_s)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", LOADS)
def test_a_text_that_diverged_is_not_a_round_that_differs(
    forked: Any, usual: Any, load: str, policy: str
) -> None:
    row, before = forked[load, policy], usual[load, policy]
    assert row["rounds_differ"] == 0
    assert row["requests_left_out"] == 1
    if policy == OFF:
        assert row["texts_diverged"] == row["iterations_after"] == 0
        return
    assert row["texts_diverged"] == 1
    assert {one["position"] for one in row["diverged"]} == {Forking.POSITION}
    assert [one["repeat"] for one in row["diverged"]] == [0, 1]
    assert {one["request"] for one in row["diverged"]} == {TRACE.requests[1].id}
    # Wrong drafts from there on: more iterations than predicted, and none of them counts.
    assert row["iterations"] > before["iterations"]
    if load == TIMED:
        assert row["iterations_differ"] is None
        return
    assert row["iterations_differ"] == 0
    assert 0 < row["iterations_after"] < row["iterations"]
    assert 0 < row["rounds_compared"] < before["rounds_compared"]


@pytest.mark.parametrize("load", ["closed:1", "closed:2"])
def test_seconds_are_those_of_what_ran_or_of_the_other_requests(
    forked: Any, usual: Any, load: str
) -> None:
    for policy in POLICIES:
        row = forked[load, policy]
        # The table is exact but for contexts in between: an error would be of another text.
        assert abs(row["error"]) < 0.02, row
        assert abs(row["busy_error"]) < 0.02
        assert abs(row["tpot_s_predicted"] / row["tpot_s"] - 1) < 0.1
        if load == "closed:1":
            # Of the requests whose texts are the same: as if the other had not been there.
            assert abs(row["speedup_error"]) < 0.02
    drafting = forked[load, POLICIES[1]]
    assert drafting["busy_s"] > usual[load, POLICIES[1]]["busy_s"] * 1.05


def test_a_check_names_what_diverged(
    folder: Path, check: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "VllmEngine", Forking)
    ran = check(folder, 1)
    found = [(row["load"], row["policy"], row["texts_diverged"]) for row in ran.rows]
    assert found == [
        ("closed:1", OFF, 0), ("closed:1", "fixed:gamma=2", 1),
        ("closed:2", OFF, 0), ("closed:2", "fixed:gamma=2", 1),
    ]  # fmt: skip
    assert [row["rounds_differ"] for row in ran.rows] == [0] * 4
    say_texts(ran.rows)
    said = " ".join(capsys.readouterr().err.split())
    name = read_trace(tmp_path / "trace.parquet").requests[1].id
    assert f"2 texts diverged: {name} at position 5 under closed:1 fixed:gamma=2; {name}" in said
    # What is kept of a stopped check tells texts, too.
    again = check(folder, 2)
    assert [row["texts_diverged"] for row in again.rows] == [0, 1, 0, 1]
    assert {one["repeat"] for row in again.rows for one in row["diverged"]} == {0, 1}


class ByLoad(DraftPolicy):
    """Draft three tokens for one or two requests, else one."""

    def __init__(self) -> None:
        self.gamma = 3

    def begin_round(self, load: Load) -> None:
        self.gamma = 3 if load.batch <= 2 else 1

    def longest_draft(self) -> int:
        return 3

    def keep_drafting(self, draft: Sequence[DraftToken]) -> bool:
        return len(draft) < self.gamma


def test_a_policy_that_learns_has_the_places_of_the_simulator_in_any_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that end or begin together take and give up places as they do in simulated time."""
    Clock.use(monkeypatch)
    own: Any = Reordering(replace(OPTIONS, max_batch=4))
    latency: LatencyTable = EngineTable(own, GRID.fitted(own.options)).run()
    text = "ucb:learns_across_requests=true"
    policies = {
        text: parse_serving_policy(text, max_gamma=OPTIONS.longest), "by load": ByLoad(),
    }  # fmt: skip
    trace = synthetic_trace(0.7, requests=12, tokens=24, prompt_length=12, seed=3)
    work = Workload(trace, policies, named_loads("closed:2,4", None), 12)
    rows = compare_loads(own, latency, work)
    for row in rows:
        assert row["rounds_compared"] > 50
        assert row["rounds_differ"] == row["iterations_differ"] == 0, (row["load"], row["policy"])


def step(decoded: list[Decoded], prompts: list[PromptRead]) -> EngineStep:
    return EngineStep(0.0, 1.0, {}, decoded, prompts, {}, [])


def test_a_divergence_falls_into_the_iteration_that_emitted_its_token() -> None:
    steps = [
        step([], [PromptRead("0/0", 4, 0, 9), PromptRead("1/1", 3, 0, 3)]),
        step([Decoded("1/1", 4, 2, 2)], [PromptRead("0/0", 5, 4, 5)]),
        step([Decoded("0/0", 10, 2, 3), Decoded("1/1", 6, 1, 1)], []),
    ]
    run: Any = LoadRun(None, steps, {}, 0.0)  # type: ignore[arg-type]
    for name, position, expected in (
        ("1/1", 0, 0), ("1/1", 1, 1), ("1/1", 2, 1), ("1/1", 3, 2), ("0/0", 0, 1), ("0/0", 3, 2),
    ):  # fmt: skip
        assert first_divergence(run, {name: position}) == expected
    assert first_divergence(run, {"0/0": 3, "1/1": 0}) == 0
    assert first_divergence(run, {}) is None


def test_rounds_compare_up_to_the_token_that_diverged() -> None:
    rounds = [Round(1, 2, 2, 3, 2, 1), Round(4, 3, 1, 2, 3, 2), Round(6, 2, 0, 1, 2, 1)]
    assert before(rounds, 6) == [*rounds[:2], Round(6, 2, 0, 0, 2, 1)]
    assert before(rounds, 5) == [rounds[0], Round(4, 3, 1, 1, 3, 2)]
    assert before(rounds, 4) == [rounds[0], Round(4, 3, 0, 0, 3, 2)]
    assert before(rounds, 0) == []
