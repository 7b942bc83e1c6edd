"""Early exit: the arithmetic of its rounds, and replay against real decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed, Oracle
from policies.lengths.huggingface import Confidence
from simulator.formulas.specbound import expected_tokens, round_cost, worst_case
from tests.outputs import decoded, trace_of
from traces.errors import DraftsimError, FileError, TailError
from traces.replay.calls import CALL_DTYPE, EXIT_HEAD, HEAD, LAYER, CallCounter, LayerCounter
from traces.sources.early_exit import EarlyExit
from traces.sources.exit_recording import NODE_COLUMNS, OMEGAS, ExitRecording, temperature
from traces.sources.recording import LOGITS
from traces.sources.replay import replay_source


def layer_tokens(calls: list[tuple[bool, int, int, int]], verify: bool) -> dict[int, int]:
    """Layer calls by width."""
    found = [c for c in calls if c[1] == LAYER and c[0] == verify]
    return {width: count for _, _, width, count in found}


def test_the_papers_worked_example() -> None:
    # Exits 2, 4, 6, 2 of eight layers at width 4: the last token is aligned to layer 6
    # before the four go through the remaining two layers together (SpecBound, Fig. 2).
    counter = CallCounter()
    layers = LayerCounter(8, counter)
    segments = []
    for depth in (2, 4, 6, 2):
        layers.enter()
        segments.append(layers.deepen(depth))
    assert segments == [
        [(0, 2, 1)],
        [(0, 2, 1), (2, 4, 2)],
        [(0, 4, 1), (4, 6, 3)],
        [(0, 2, 1)],
    ]
    assert layers.finish(4) == [(2, 6, 1), (6, 8, 4)]
    counter.end_round()
    (calls,) = counter.rounds
    assert layer_tokens(calls, verify=False) == {1: 2 + 2 + 4 + 2, 2: 2, 3: 2}
    assert layer_tokens(calls, verify=True) == {1: 4, 4: 2}
    assert (True, HEAD, 4, 1) in calls
    in_order = sum(count for _, kind, _, count in calls if kind == LAYER)
    assert in_order == (2 + 4 + 6 + 2) + (6 - 2) + (8 - 6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=10), st.integers(0, 9))
def test_every_verified_position_passes_every_layer_once(depths: list[int], drop: int) -> None:
    counter = CallCounter()
    layers = LayerCounter(8, counter)
    for depth in depths:
        layers.enter()
        layers.deepen(depth)
        assert layers.depths == sorted(layers.depths, reverse=True)
    reached = layers.depths.copy()
    positions = max(1, len(depths) - drop)
    layers.finish(positions)
    counter.end_round()
    rows = [c for c in counter.rounds[0] if c[1] == LAYER]
    drafted = sum(width * count for verify, _, width, count in rows if not verify)
    verified = sum(width * count for verify, _, width, count in rows if verify)
    assert drafted == sum(reached)
    assert verified == sum(8 - depth for depth in reached[:positions])


def recording(
    true: list[list[int]], argmax: list[Any], confidence: list[Any], layers: int,
    exits: tuple[int, ...],
) -> ExitRecording:  # fmt: skip
    """A recording of path nodes only; rows of (exits,) tokens and confidences."""
    count = len(argmax)
    starts = np.cumsum([0, *(len(t) for t in true)])
    position = np.concatenate([np.arange(len(t)) for t in true])
    nodes = {
        "request": np.repeat(np.arange(len(true)), np.diff(starts)).astype(np.int32),
        "parent": np.full(count, -1, np.int32),
        "position": position.astype(np.int32),
        "token": np.zeros(count, np.int32),
    }
    log = np.log(np.asarray(confidence, np.float32))[:, :, None].repeat(len(OMEGAS), 2)
    zeros = np.zeros((count, len(exits)), np.float32)
    arrays = {
        **nodes, "argmax": np.asarray(argmax, np.int32), "log_confidence": log,
        **dict.fromkeys(LOGITS, zeros),
    }  # fmt: skip
    return ExitRecording(arrays, tuple(starts.tolist()), {}, exits, layers, OMEGAS)


def relative_cost(log: Any, layers: int, rounds: int) -> float:
    """Layer calls of the first rounds in plain steps, whatever their width (eq. 3)."""
    calls = log.recorded_calls[
        (log.recorded_calls["kind"] == LAYER) & (log.recorded_calls["round"] < rounds)
    ]
    return float(calls["count"].sum()) / layers


@pytest.mark.parametrize(("right", "gamma"), [(True, 5), (False, 5), (True, 1), (False, 3)])
def test_rounds_meet_the_limits_of_equations_3_to_5(right: bool, gamma: int) -> None:
    # Every token exits at layer 3 of 10; acceptance is 1 or 0.
    tokens, depth = 5 * gamma + 1, 0.3
    output = list(range(100, 100 + tokens))
    drafts = output if right else [1] * tokens
    record = recording([output], [[d] for d in drafts], [[1.0]] * tokens, 10, (3,))
    trace = trace_of([output], tokens)
    source = EarlyExit(tau=0.5, omega=0, depth=depth)
    if not right and gamma > 1:
        with pytest.raises(TailError, match="past what was recorded after its wrong exit"):
            replay_source(trace, source, Fixed(gamma), recordings={"early-exit": record})
        # After each wrong token the trie holds nodes that exit at the same layer.
        record = with_tails(record, gamma - 1)
    log = replay_source(trace, source, Fixed(gamma), recordings={"early-exit": record})
    # Up to where the output limit cuts the drafts.
    full = log.rounds[tokens - log.rounds["position"] > gamma]
    assert len(full) >= 4
    assert (full["emitted"] == expected_tokens(float(right), gamma)).all()
    cost = relative_cost(log, 10, len(full))
    assert cost / len(full) == pytest.approx(round_cost(gamma, depth))
    if not right:
        assert full["emitted"].sum() / cost == pytest.approx(worst_case(gamma, depth))


def with_tails(record: ExitRecording, length: int) -> ExitRecording:
    """Return `record` with `length` further wrong tokens after each path node."""
    path = len(record["argmax"])
    nodes = {name: [record[name]] for name in NODE_COLUMNS}
    parent = np.arange(path, dtype=np.int32)
    for step in range(length):
        nodes["parent"].append(parent)
        nodes["token"].append(np.ones(path, np.int32))
        nodes["position"].append(record["position"] + np.int32(step + 1))
        nodes["request"].append(record["request"])
        parent = parent + np.int32(path)
    times = length + 1
    arrays = {
        name: np.concatenate(nodes.get(name, [values] * times))
        for name, values in record.arrays.items()
    }
    return replace(record, arrays=arrays)


def test_a_difficult_token_gives_one_token_more_than_was_drafted() -> None:
    output = [10, 11, 12, 13, 14]
    confidence = [[1.0], [1.0], [1.0], [0.1], [1.0]]
    record = recording([output], [[t] for t in output], confidence, 8, (4,))
    trace = trace_of([output], 5)
    source = EarlyExit(tau=0.5, omega=0, depth=0.75)
    log = replay_source(trace, source, Fixed(4), recordings={"early-exit": record})
    # From position 1: two exits, then one that reaches layer 6 undecided; its position is
    # verified as well and gives a third token.
    assert log.rounds["drafted"].tolist()[0] == 2
    assert log.rounds["emitted"].tolist()[0] == 3
    assert log.recorded_calls is not None
    calls = [tuple(c)[1:] for c in log.recorded_calls[log.recorded_calls["round"] == 0]]
    assert (False, LAYER, 1, 4 + 4 + 4) in calls
    assert (False, LAYER, 3, 2) in calls  # layers 5 and 6 for all three
    assert (True, LAYER, 3, 2) in calls
    assert (False, EXIT_HEAD, 1, 3) in calls
    assert (True, HEAD, 3, 1) in calls


def test_annealing_is_equation_1() -> None:
    assert temperature(0.5, 8, 8) == 1.0
    assert temperature(0.5, 2, 8) == pytest.approx(1.375)
    assert temperature(0.0, 2, 8) == 1.0


def test_what_was_not_recorded_is_refused(tmp_path: Path) -> None:
    output = [10, 11, 12]
    record = recording([output], [[t] for t in output], [[1.0]] * 3, 8, (4,))
    trace = trace_of([output], 3)
    held = {"early-exit": record}
    with pytest.raises(DraftsimError, match=r"omega=0.25 was not recorded \(recorded: 0, 0.1"):
        replay_source(trace, EarlyExit(omega=0.25), Fixed(2), recordings=held)
    with pytest.raises(DraftsimError, match="no exit head at layer 3"):
        replay_source(trace, EarlyExit(layers=[3]), Fixed(2), recordings=held)
    with pytest.raises(DraftsimError, match="no recording of 'early-exit' drafts"):
        replay_source(trace, EarlyExit(), Fixed(2))
    with pytest.raises(DraftsimError, match="other requests"):
        replay_source(trace_of([output, output], 3), EarlyExit(), Fixed(2), recordings=held)
    with pytest.raises(ValueError, match=r"tau is 1\.5, expected between 0 and 1"):
        EarlyExit(tau=1.5)
    path = tmp_path / "exits.parquet"
    record.write(path)
    again = ExitRecording.read(path)
    assert again.exit_layers == (4,)
    np.testing.assert_array_equal(again["log_confidence"], record["log_confidence"])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FileError, match="truncated"):
        ExitRecording.read(path)
    object.__setattr__(record, "layers", 2)
    record.write(path)
    with pytest.raises(FileError, match=rf"^{path}: header and columns .* not ascending within 1"):
        ExitRecording.read(path)


class Case:
    """A bundled target, untrained exit heads (the logit lens), outputs and their recording."""

    def __init__(self) -> None:
        pair, target, _, self.outputs, self.trace = decoded(512)
        from profiler.features.heads import ExitHeads
        from profiler.models.stack import LayerRunner
        from profiler.sources.exit_record import ExitRecorder
        from profiler.sources.run import SourceRunner
        from profiler.sources.start_record import record_along

        exits = tuple(range(2, target.layers, 2))
        norm = pair.target.model.norm.weight.detach()
        heads = ExitHeads(exits, norm.shape[0]).start_from(norm)
        # Thresholds that some tokens reach and some do not, whatever the target's weights.
        plain = record_along(ExitRecorder(target, heads, ()), self.trace)
        path = plain["log_confidence"][: plain.request_starts[-1], :, 2]
        low, high = np.exp(np.quantile(path.max(1), [0.3, 0.7])).tolist()
        self.arms: dict[str, tuple[EarlyExit, DraftPolicy]] = {
            "specbound": (EarlyExit(high, 0.2, 0.75), Fixed(4)),
            "low threshold": (EarlyExit(low, 0.2, 0.75), Fixed(6)),
            "no annealing": (EarlyExit(low, 0.0, 0.5), Fixed(4)),
            "adadecode": (EarlyExit(low, 0.0, 1.0), Fixed(24)),
            "kangaroo": (EarlyExit(0, 0, 1.0, bonus=True), Confidence(5, low)),
            "one layer": (EarlyExit(low, 0.0, 1.0, layers=[4]), Confidence(5, low)),
        }
        widths = {"specbound": 4, "low threshold": 6, "no annealing": 4, "adadecode": 24}
        chosen = [s.setting(widths.get(n, 5)) for n, (s, _) in self.arms.items()]
        wide = LayerRunner(pair.target, ExitRecorder.slots_needed(200, 24))
        recorder = ExitRecorder(wide, heads, chosen)
        self.recordings = {"early-exit": record_along(recorder, self.trace)}
        self.runner = SourceRunner(pair.target, self.trace, {"early-exit": heads})


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.mark.invariant(1)
@pytest.mark.parametrize(
    "name",
    ["specbound", "low threshold", "no annealing", "adadecode", "kangaroo", "one layer"],
)
def test_replayed_rounds_are_the_real_ones(case: Case, name: str) -> None:
    from tests.replayed import run_as_replayed

    source, policy = case.arms[name]
    run_layers = case.runner.target.run_layers
    ran: list[tuple[int, int]] = []

    def spy(hidden: Any, start: int, which: Any, **kwargs: Any) -> Any:
        ran.append((hidden.shape[0], len(which)))
        return run_layers(hidden, start, which, **kwargs)

    case.runner.target.run_layers = spy  # type: ignore[method-assign]
    try:
        _, log = run_as_replayed(case.runner, source, policy, case.trace, case.recordings)
    finally:
        case.runner.target.run_layers = run_layers  # type: ignore[method-assign]
    assert log.recorded_calls is not None
    assert log.recorded_calls.dtype == CALL_DTYPE
    layers = log.recorded_calls[log.recorded_calls["kind"] == LAYER]
    # What is counted is what was run, call by call.
    assert int((layers["count"] * layers["new_tokens"]).sum()) == sum(w * n for w, n in ran)
    assert int(layers["count"].sum()) == sum(n for _, n in ran)
    assert log.rounds["drafted"].max() > 0


def test_the_cases_are_not_trivial(case: Case) -> None:
    rejected = 0
    for source, policy in case.arms.values():
        log = replay_source(case.trace, source, policy, recordings=case.recordings)
        rejected += int((log.rounds["accepted"] < log.rounds["drafted"]).sum())
    assert rejected > 0
    exits = case.recordings["early-exit"]
    assert exits.rows > exits.request_starts[-1]


def test_the_oracle_wastes_nothing(case: Case) -> None:
    source, _ = case.arms["low threshold"]
    log = replay_source(case.trace, source, Oracle(gamma_max=6), recordings=case.recordings)
    assert (log.rounds["accepted"] == log.rounds["drafted"]).all()
