"""Loads side by side in one engine: each as if alone, on the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from policies import parse_policy
from profiler.engines import cells, loads
from profiler.engines.drafts import Forced
from profiler.engines.loads import RunningLoad, interleave, planned_loads, run_loads, together
from profiler.engines.measure import EngineTable
from profiler.engines.session import Setup
from profiler.engines.texts import own_texts, prompts_of
from tests.stand_in_engine import GRID, OPTIONS, TICK_S, Clock, Control, StandIn
from traces.acceptance.synthetic import synthetic_trace
from traces.store.engine_runs import Demand, LoadRun, PlannedRequest

TRACE = synthetic_trace(0.7, requests=5, tokens=60, prompt_length=12, seed=3)
JOBS = [PlannedRequest(i, 0.25 * i, r.tokens) for i, r in enumerate(TRACE.requests)]
POLICIES = {name: parse_policy(name) for name in ("autoregressive", "fixed:gamma=3", "gammatune")}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    Clock.use(monkeypatch)
    return StandIn(OPTIONS)


def loads_of(engine: Any, concurrency: int | None, tenants: list[Any]) -> dict[str, RunningLoad]:
    """The loads, begun by nobody yet."""
    prompts = prompts_of(TRACE, engine.vocabulary)
    forced = Forced(TRACE, own_texts(engine, TRACE, prompts), engine.vocabulary)
    return {
        text: RunningLoad(
            engine, Setup(policy, forced), Demand(JOBS, concurrency), prompts, Control(), tenant
        )  # type: ignore[arg-type]
        for (text, policy), tenant in zip(POLICIES.items(), tenants, strict=True)
    }


def side_by_side(engine: Any, *sizes: int | None) -> dict[tuple[int | None, str], LoadRun]:
    """By concurrency and policy."""
    with engine.tenants([100] * len(POLICIES) * len(sizes)) as tenants:
        free = iter(tenants)
        made = {
            (size, text): load
            for size in sizes
            for text, load in loads_of(engine, size, [next(free) for _ in POLICIES]).items()
        }
        interleave([*made.values()], lambda share: None)
        return {policy: load.result() for policy, load in made.items()}


@pytest.mark.parametrize("concurrency", [1, 2, None])
def test_each_runs_as_if_it_were_alone(engine: Any, concurrency: int | None) -> None:
    beside = side_by_side(engine, concurrency)
    for text, load in loads_of(engine, concurrency, [None] * len(POLICIES)).items():
        load.go_on()
        alone, run = load.result(), beside[concurrency, text]
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
    usual = {policy: run.busy_s for policy, run in side_by_side(engine, 1, 2).items()}
    monkeypatch.setattr(loads, "SLICE_S", 0.02)
    step, begun_s, whole_s = engine.step, Clock.now_s, sum(usual.values())

    def slowing() -> Any:
        # Over the whole check it slows down to a third.
        Clock.slower = 1 + 2 * min((Clock.now_s - begun_s) / (2 * whole_s), 1.0)
        return step()

    monkeypatch.setattr(engine, "step", slowing)
    slower = {
        policy: run.busy_s / usual[policy] for policy, run in side_by_side(engine, 1, 2).items()
    }
    assert min(slower.values()) > 1.5
    # Two at once end with one alone, whose tokens take longer.
    assert max(slower.values()) / min(slower.values()) < 1.04
    alone = [by for (size, _), by in slower.items() if size == 1]
    assert max(alone) / min(alone) < 1.02
    Clock.slower, begun_s = 1.0, Clock.now_s
    one_by_one = []
    for text, load in loads_of(engine, 1, [None] * len(POLICIES)).items():
        load.go_on()
        one_by_one.append(load.result().busy_s / usual[1, text])
    assert max(one_by_one) / min(one_by_one) > 1.2


def test_rounds_begin_with_another_each_time_and_tell_the_share(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "SLICE_S", 0.1)
    begun: list[str] = []
    shares: list[float] = []
    with engine.tenants([100] * len(POLICIES)) as tenants:
        made = loads_of(engine, 1, tenants)
        for text, load in made.items():
            own = load.go_on

            def noted(
                seconds: float = float("inf"), share: float = float("inf"), text: str = text,
                own: Any = own,
            ) -> None:  # fmt: skip
                if seconds < float("inf"):
                    begun.append(text)
                own(seconds, share)

            load.go_on = noted  # type: ignore[method-assign]
        slices: list[float] = []
        interleave([*made.values()], shares.append, slices.append)
    assert begun[:4] == [*POLICIES, "autoregressive"]
    assert len(slices) == len(POLICIES) * len(shares)
    assert slices[len(POLICIES) - 1 :: len(POLICIES)] == shares
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] == 1.0


def test_cells_are_measured_all_along(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the slices too, by the engine's own scheduler."""
    prompts = prompts_of(TRACE, engine.vocabulary)
    forced = Forced(TRACE, own_texts(engine, TRACE, prompts), engine.vocabulary)
    between = EngineTable(engine, GRID)
    took: list[tuple[float, bool]] = []
    block, advance = cells.CellTimer.block, between.advance
    monkeypatch.setattr(loads, "SLICE_S", 0.1)
    asked: list[float] = []
    monkeypatch.setattr(between, "advance", lambda sweeps: (asked.append(sweeps), advance(sweeps)))

    def noted(self: cells.CellTimer, *given: Any) -> Any:
        found = block(self, *given)
        took.append((asked[-1], engine._requests is engine._own[0]))
        return found

    monkeypatch.setattr(cells.CellTimer, "block", noted)
    run_loads(engine, POLICIES, {"closed:1": Demand(JOBS, 1)}, prompts, forced, 1, between)
    assert between.done == loads.SWEEPS * len(GRID.blocks()) == len(took)
    assert all(own for _, own in took)
    assert sum(at < loads.SWEEPS for at, _ in took) > len(took) // 2


def test_a_table_of_the_runs_own_time_leaves_out_no_sample(engine: Any) -> None:
    """Not even where the control load was disturbed: the runs were disturbed as often."""
    between = EngineTable(engine, GRID)
    between.advance(1)
    usual = between.table()
    Clock.slower = 1.5
    between.advance(4)
    cell: dict[str, Any] = {"batch": 2, "new_tokens": 3, "context": 32}
    slow, fast = (t.seconds("target", "forward", **cell) for t in (between.table(), usual))
    # A mean of four sweeps, three of them slow.
    assert float(slow) == pytest.approx((1 + 3 * 1.5) / 4 * float(fast), rel=0.01)


def test_a_gpu_runs_the_beginning_of_each_load_before_it_is_timed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "Control", lambda device: Control())
    prompts = prompts_of(TRACE, engine.vocabulary)
    forced = Forced(TRACE, own_texts(engine, TRACE, prompts), engine.vocabulary)
    demands = {"closed:2": Demand(JOBS, 2), "rate:1": Demand(JOBS, None)}
    steps, step = [], engine.step
    monkeypatch.setattr(engine, "step", lambda: steps.append(step()) or steps[-1])
    told: dict[str, tuple[list[str], int, dict[str, int]]] = {}
    for device in ("cpu", "NVIDIA H200"):
        monkeypatch.setitem(engine.meta, "device", device)
        notes: list[str] = []
        steps.clear()
        found = run_loads(engine, POLICIES, demands, prompts, forced, 1, say=notes.append)
        tokens = {text: int(run.requests["tokens"].sum()) for (_, text), [run] in found.items()}
        told[device] = (notes, len(steps), tokens)
    assert told["cpu"][2] == told["NVIDIA H200"][2]
    assert not any("warm up" in note for note in told["cpu"][0])
    assert any("warm up" in note for note in told["NVIDIA H200"][0])
    # Without drafts each load's 16 tokens take 16 steps, with drafts fewer.
    assert 2 * 16 < told["NVIDIA H200"][1] - told["cpu"][1] <= len(POLICIES) * 2 * 16


def test_what_has_no_room_in_the_cache_runs_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(TRACE, engine.vocabulary)
    forced = Forced(TRACE, own_texts(engine, TRACE, prompts), engine.vocabulary)
    demands = {f"closed:{n}": Demand(JOBS, n) for n in (1, 2)}
    made, tenants = [], engine.tenants

    def noted(blocks: Sequence[int]) -> Any:
        made.append([*blocks])
        return tenants(blocks)

    monkeypatch.setattr(engine, "tenants", noted)

    def said() -> str:
        notes: list[str] = []
        run_loads(engine, POLICIES, demands, prompts, forced, 1, say=notes.append)
        return " ".join(notes)

    # A request of 12 and 60 tokens, a draft of 4 and what is sampled: 5 blocks, one begun.
    assert "not all" not in said()
    assert made.pop() == [6] * 3 + [12] * 3
    engine.blocks = 1 + 3 * (6 + 12) - 1
    assert "they need a cache of 880 tokens, the engine's has 864" in said()
    assert made == [[6] * 3, [12] * 3]
    made.clear()
    engine.blocks = 1 + 3 * 12 - 1
    said()
    assert made == [[6] * 3, [12], [12], [12]]
    made.clear()
    engine.blocks = 1 + 11
    said()
    assert made == [[6], [6], [6]]


def test_policies_rotate_with_the_repeat() -> None:
    planned = list(planned_loads(["closed:1", "closed:2"], ["off", "a", "b"], 2))
    assert [(t.load, t.policy, t.name) for t in planned[3:7]] == [
        ("closed:2", "off", "000-01-00"), ("closed:2", "a", "000-01-01"),
        ("closed:2", "b", "000-01-02"), ("closed:1", "a", "001-00-01"),
    ]  # fmt: skip


def test_repeats_are_apart() -> None:
    planned = list(planned_loads(["closed:1", "closed:2"], ["off", "a"], 2))
    assert list(together(planned, {"closed:1": 1, "closed:2": 2}, 100)) == [
        planned[:4],
        planned[4:],
    ]
