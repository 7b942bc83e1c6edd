"""Arms of a load side by side in one engine: each as if alone, on the same machine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from commands.engine import turns
from commands.engine.loads import Group, groups
from commands.engine.turns import room_for, run_loads
from policies import parse_policy
from profiler.engines import bench, loads
from profiler.engines.drafts import Forced
from profiler.engines.loads import Job, Load, interleave
from profiler.engines.measure import BetweenTable
from profiler.engines.setup import Setup
from profiler.engines.texts import own_texts, prompts_of
from simulator.serving import ClosedLoop, Limits, Scenario
from tests.stand_in_engine import GRID, OPTIONS, TICK_S, Clock, Control, StandIn
from traces import synthetic_trace

TRACE = synthetic_trace(0.7, requests=5, tokens=60, prompt_length=12, seed=3)
JOBS = [Job(i, 0.25 * i, r.tokens) for i, r in enumerate(TRACE.requests)]
ARMS = {name: parse_policy(name) for name in ("autoregressive", "fixed:gamma=3", "gammatune")}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    Clock.use(monkeypatch)
    return StandIn(OPTIONS)


def loads_of(engine: Any, concurrency: int | None, tenants: list[Any]) -> dict[str, Load]:
    """The arms, begun by nobody yet."""
    prompts = prompts_of(TRACE, engine.vocabulary)
    forced = Forced(TRACE, own_texts(engine, TRACE, prompts), engine.vocabulary)
    return {
        text: Load(engine, Setup(policy, forced), JOBS, prompts, concurrency, Control(), tenant)  # type: ignore[arg-type]
        for (text, policy), tenant in zip(ARMS.items(), tenants, strict=True)
    }


def side_by_side(engine: Any, concurrency: int | None) -> dict[str, loads.LoadRun]:
    with engine.tenants(len(ARMS), 100) as tenants:
        made = loads_of(engine, concurrency, tenants)
        interleave([*made.values()], lambda share: None)
        return {text: load.result() for text, load in made.items()}


@pytest.mark.parametrize("concurrency", [1, 2, None])
def test_each_runs_as_if_it_were_alone(engine: Any, concurrency: int | None) -> None:
    together = side_by_side(engine, concurrency)
    for text, load in loads_of(engine, concurrency, [None] * len(ARMS)).items():
        load.go_on()
        alone, run = load.result(), together[text]
        assert run.rounds == alone.rounds
        assert [s.decoded for s in run.steps] == [s.decoded for s in alone.steps]
        assert [s.prompts for s in run.steps] == [s.prompts for s in alone.steps]
        # What waits for an arrival sleeps to whole ticks, and is paused at other moments.
        assert run.requests["name"].equals(alone.requests["name"])
        late_s = len(alone.steps) * TICK_S
        for column in alone.requests.drop(columns="name"):
            own, other = run.requests[column].tolist(), alone.requests[column].tolist()
            assert own == pytest.approx(other, abs=late_s)


def test_a_machine_that_slows_down_is_as_slow_for_all(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {text: run.busy_s for text, run in side_by_side(engine, 1).items()}
    monkeypatch.setattr(loads, "TURN_S", 0.02)
    step, begun_s, whole_s = engine.step, Clock.now_s, sum(usual.values())

    def slowing() -> Any:
        # Over the whole check it slows down to a third.
        Clock.slower = 1 + 2 * min((Clock.now_s - begun_s) / (2 * whole_s), 1.0)
        return step()

    monkeypatch.setattr(engine, "step", slowing)
    slower = {text: run.busy_s / usual[text] for text, run in side_by_side(engine, 1).items()}
    assert min(slower.values()) > 1.5
    assert max(slower.values()) / min(slower.values()) < 1.02
    Clock.slower, begun_s = 1.0, Clock.now_s
    one_by_one = []
    for text, load in loads_of(engine, 1, [None] * len(ARMS)).items():
        load.go_on()
        one_by_one.append(load.result().busy_s / usual[text])
    assert max(one_by_one) / min(one_by_one) > 1.2


def test_rounds_begin_with_another_each_time_and_tell_the_share(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "TURN_S", 0.1)
    begun: list[str] = []
    shares: list[float] = []
    with engine.tenants(len(ARMS), 100) as tenants:
        made = loads_of(engine, 1, tenants)
        for text, load in made.items():
            own = load.go_on

            def noted(
                seconds: float = float("inf"), tokens: float = float("inf"), text: str = text,
                own: Any = own,
            ) -> None:  # fmt: skip
                if seconds < float("inf"):
                    begun.append(text)
                own(seconds, tokens)

            load.go_on = noted  # type: ignore[method-assign]
        interleave([*made.values()], shares.append)
    assert begun[:4] == [*ARMS, "autoregressive"]
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] == 1.0


def test_cells_are_measured_all_along(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the turns too, by the engine's own scheduler."""
    prompts = prompts_of(TRACE, engine.vocabulary)
    forced = Forced(TRACE, own_texts(engine, TRACE, prompts), engine.vocabulary)
    scenario = Scenario(ClosedLoop(1), Limits(), len(JOBS))
    between = BetweenTable(engine, GRID)
    took: list[tuple[float, bool]] = []
    block, advance = bench.Bench.block, between.advance
    monkeypatch.setattr(loads, "TURN_S", 0.1)
    asked: list[float] = []
    monkeypatch.setattr(between, "advance", lambda sweeps: (asked.append(sweeps), advance(sweeps)))

    def noted(self: bench.Bench, *given: Any) -> Any:
        found = block(self, *given)
        took.append((asked[-1], engine._requests is engine._own[0]))
        return found

    monkeypatch.setattr(bench.Bench, "block", noted)
    run_loads(engine, ARMS, {"closed:1": scenario}, {"closed:1": JOBS}, prompts, forced, 1, between)
    assert between.done == turns.SWEEPS * len(GRID.blocks()) == len(took)
    assert all(own for _, own in took)
    assert sum(at < turns.SWEEPS for at, _ in took) > len(took) // 2


def test_a_table_of_the_runs_own_time_leaves_out_no_sample(engine: Any) -> None:
    """Not even where the control load was disturbed: what ran beside it was as often."""
    between = BetweenTable(engine, GRID)
    between.advance(1)
    usual = between.table()
    Clock.slower = 1.5
    between.advance(4)
    cell: dict[str, Any] = {"batch": 2, "new_tokens": 3, "context": 32}
    slow, fast = (t.seconds("target", "forward", **cell) for t in (between.table(), usual))
    assert float(slow) == pytest.approx(1.5 * float(fast), rel=0.01)


def test_a_small_cache_has_them_one_after_another(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_of(TRACE, engine.vocabulary)
    scenario = Scenario(ClosedLoop(2), Limits(), len(JOBS))
    with room_for(engine, scenario, JOBS, prompts, 3, None) as tenants:
        assert None not in tenants
    assert capsys.readouterr().err == ""
    # Two requests of 12 and 60 tokens, a draft of 4 and what is sampled: 5 blocks, one begun.
    engine.blocks = 3 * 2 * 6
    with room_for(engine, scenario, JOBS, prompts, 3, None) as tenants:
        assert tenants == [None] * 3
    said = " ".join(capsys.readouterr().err.split())
    assert "one after the other: side by side they need a cache of 592 tokens" in said
    engine.blocks += 1
    with room_for(engine, scenario, JOBS, prompts, 3, None) as tenants:
        assert None not in tenants


def test_arms_rotate_with_the_repeat() -> None:
    found = list(groups(["closed:1", "closed:2"], ["off", "a", "b"], 2))
    assert found[1] == Group("closed:2", ["off", "a", "b"], 0, "000-01")
    assert found[2] == Group("closed:1", ["a", "b", "off"], 1, "001-00")
