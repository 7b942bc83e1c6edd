"""Which cells the calls of a round are read from, and which pass verifies it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulator.pricing import PER, host_at, price
from simulator.serving.cost import EngineCost
from tests.test_pricing import CELLS, LOOKUP, random_log, summed, table
from traces.errors import DraftsimError
from traces.latency.table import PHASES, SERVER, LatencyKind, LatencyTable
from traces.replay.calls import (
    ADAPTER,
    CALL_DTYPE,
    CALL_KINDS,
    DRAFTER,
    DRAFTER_TREE,
    EXIT_HEAD,
    HEAD,
    LAYER,
    PASS,
    TREE,
)
from traces.replay.rounds import RoundLog

ROOT = Path(__file__).parents[1]


def calling(*kinds: int) -> RoundLog:
    """Rounds with one call a round of each kind, one token wide, in drafting and verification."""
    log = random_log(3)
    calls = np.zeros(2 * len(kinds) * len(log), CALL_DTYPE)
    calls["round"] = np.arange(len(calls)) % len(log)
    calls["kind"] = np.repeat(kinds, 2 * len(log))
    calls["verify"] = np.tile(np.repeat([False, True], len(log)), len(kinds))
    calls["new_tokens"] = calls["count"] = 1
    return replace(log, source="early-exit", recorded_calls=calls)


def drafting(log: RoundLog) -> RoundLog:
    """The same rounds without their recorded verification."""
    calls = log.recorded_calls
    return log if calls is None else replace(log, recorded_calls=calls[~calls["verify"]])


def verifying(log: RoundLog) -> str:
    """The phase of the passes that verify drafted tokens."""
    [phase] = {
        calls.phase for calls in log.calls
        if calls.verify and (log.rounds["drafted"][calls.round] > 0).any()
    }  # fmt: skip
    return phase


def costing(**seconds: float) -> LatencyTable:
    """One cell each of ``model_phase``, the same at every context that rounds meet."""
    return table({
        (*name.split("_"), 1, 1, context): value  # type: ignore[misc]
        for name, value in seconds.items() for context in (0, 200)
    })  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "seconds", "first", "then"),
    [
        (LAYER, {"exit_layer": 0.2, "target_layer": 0.3}, 0.2, 0.3),
        (EXIT_HEAD, {"exit_head": 0.4, "target_head": 0.5}, 0.4, 0.5),
        (PASS, {"target_pass": 0.6, "target_forward": 0.7}, 0.6, 0.7),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_what_was_not_measured_by_itself_is_read_where_the_nearest_was(
    kind: int, seconds: dict[str, float], first: float, then: float
) -> None:
    log, (own, nearest) = calling(kind), seconds
    for verify in (False, True):
        for names, wanted in (((own, nearest), first), ((nearest,), then), ((own,), first)):
            latency = costing(**{name: seconds[name] for name in names})
            found, passes = summed(log, latency, verify=verify)
            np.testing.assert_allclose(found, wanted)
            assert passes.passes == len(log)


def test_a_call_that_nothing_stands_for_is_named() -> None:
    remedy = "`draftsim profile sources --exit-layers` measures them"
    for kind, has in ((LAYER, "target_head"), (HEAD, "exit_head"), (LOOKUP, "target_forward")):
        model, phase = CALL_KINDS[kind]
        with pytest.raises(DraftsimError, match=f"no '{phase}' cells of '{model}'.*{remedy}"):
            summed(calling(kind), costing(**{has: 1.0}), verify=True)


def test_calls_are_those_of_their_side_and_kind() -> None:
    log, latency = calling(LAYER, HEAD), costing(target_layer=0.25, target_head=1.0)
    assert log.recorded_calls is not None
    log.recorded_calls["count"] = (
        1 + 2 * log.recorded_calls["verify"] + (log.recorded_calls["kind"] == HEAD)
    )
    drafting, verifying = (summed(log, latency, verify=v)[0] for v in (False, True))
    np.testing.assert_allclose(drafting, 1 * 0.25 + 2 * 1.0)
    np.testing.assert_allclose(verifying, 3 * 0.25 + 4 * 1.0)


def test_behind_no_prompt_a_round_is_read_at_no_context() -> None:
    log = calling(LAYER)
    log = replace(log, requests=[replace(r, prompt_length=0) for r in log.requests])
    log.rounds["position"][0] = 0
    contexts = np.maximum(log.context - 1, 0)
    assert contexts.min() == contexts[0] == 0
    cells = {("target", "layer", 1, 1, at): 1e-3 * (1 + at) for at in (0, 200)}
    found, passes = summed(log, table(cells), verify=False)
    np.testing.assert_allclose(found, 1e-3 * (1 + contexts))
    assert passes.extrapolated == 0


@pytest.mark.parametrize(
    ("kind", "cell", "attends"),
    [
        (LAYER, "exit_layer", True), (LAYER, "target_layer", True), (PASS, "target_pass", True),
        (TREE, "target_tree", True), (DRAFTER, "draft_forward", True),
        (DRAFTER_TREE, "draft_tree", True), (HEAD, "target_head", False),
        (EXIT_HEAD, "exit_head", False), (LOOKUP, "pld_forward", False),
        (ADAPTER, "adapter_forward", False),
    ],
)  # fmt: skip
def test_what_attends_to_the_context_is_read_at_it(kind: int, cell: str, attends: bool) -> None:
    log = calling(kind)
    contexts = np.maximum(log.context - 1, 0)
    assert contexts.max() > 8
    model, phase = cell.split("_")
    cells = {(model, phase, 1, 1, at): 1e-3 * (1 + at) for at in (0, 8)}
    cells |= {("draft", "forward", 1, 1, at): 1e-3 * (1 + at) for at in (0, 8)}
    found, passes = summed(log, table(cells), verify=False)
    inside = contexts <= 8
    np.testing.assert_allclose(found[inside], 1e-3 * (1 + contexts[inside]))
    assert passes.extrapolated == (np.count_nonzero(~inside) if attends else 0)
    if not attends:
        np.testing.assert_allclose(found[~inside], 1e-3 * 9)


def test_passes_behind_light_drafts_are_read_apart_where_they_were_timed_apart() -> None:
    """Heads and lookups leave the target's weights in the caches; layers, which run with every
    adapter, do not."""
    forward = {key: value for key, value in CELLS.items() if key[1] == "forward"}
    light = {("target", "pass", *key[2:]): value / 2 for key, value in forward.items()}
    both, bare = table(forward | light), table(forward)
    by_model = replace(random_log(3), recorded_calls=None)
    for log, phase in (
        (by_model, "forward"), (calling(LOOKUP), "pass"), (calling(EXIT_HEAD), "pass"),
        (calling(LAYER), "forward"), (calling(ADAPTER, LAYER), "forward"),
        (calling(LOOKUP, LAYER), "forward"),
    ):  # fmt: skip
        assert verifying(drafting(log)) == phase
        free = dict.fromkeys((call.model, call.phase) for call in drafting(log).calls[2:])
        rows = {(*cell, 1, 1, 0): 0.0 for cell in free}
        verify_s = price(drafting(log), table(forward | rows)).verify_s
        np.testing.assert_allclose(verify_s, price(by_model, bare).verify_s)
    np.testing.assert_array_equal(price(by_model, both).verify_s, price(by_model, bare).verify_s)


@pytest.mark.parametrize("name", PHASES)
def test_every_kind_of_latency_is_timed_where_its_line_says(name: str) -> None:
    phase = PHASES[name]
    assert phase.per in ("", "step", "request", *PER)
    if phase.timed:
        assert f'"{name}"' in (ROOT / phase.timed).read_text()
    if phase.instead is not None:
        assert phase.instead[2] in PHASES


@pytest.mark.parametrize(
    ("per", "times"),
    [("round", 1), ("drafted", "draft_forwards"), ("read", "draft_forwards"), ("step", 0)],
)
def test_another_kind_of_latency_is_a_line_in_the_table(
    per: str, times: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pricing and serving charge it as its line says; the rounds are not asked for it by name."""
    monkeypatch.setitem(
        PHASES, "detokenized", LatencyKind("one more part of the host's time", per=per)
    )
    model = SERVER if per == "step" else "target"
    forward = {key: value for key, value in CELLS.items() if key[1] == "forward"}
    without, more = table(forward), table(forward | {(model, "detokenized", 1, 1, 0): 0.5})
    log = random_log(3, reads=("prob",))
    added_s = price(log, more).round_s - price(log, without).round_s
    wanted = times if isinstance(times, int) else log.rounds[times]
    np.testing.assert_allclose(added_s, 0.5 * np.broadcast_to(wanted, len(log)), atol=1e-12)
    hosts = [EngineCost(latency, {"signal"}).host(1) for latency in (more, without)]
    round_s, draft_s, *_, step_s, _ = np.subtract(*hosts)
    assert (round_s, draft_s) == ((0.5, 0) if per in ("round", "step") else (0, 0.5))
    assert step_s == (0.5 if per == "step" else 0)


def test_the_host_is_read_from_its_own_cells_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(_latency: LatencyTable, _model: str, phase: str, _batch: int) -> float:
        asked.append(phase)
        return 0.0

    monkeypatch.setattr("simulator.pricing.scalar_seconds", noted)
    host_at(costing(target_forward=1.0), {"signal"}, 1)
    assert {PHASES[phase].per for phase in asked} == {
        "drafted", "read", "round", "step", "request", "rollback",
    }  # fmt: skip
