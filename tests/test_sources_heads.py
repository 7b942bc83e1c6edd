"""Parallel heads, mask tokens and skipped layers: trained, recorded, replayed, and real."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import Confidence
from simulator.pricing import price
from tests.outputs import decoded, trace_of
from tests.serving import table_of
from traces.errors import DraftsimError, TailError
from traces.latency.table import LatencyTable
from traces.replay.calls import CALL_KINDS, LAYER
from traces.replay.rounds import RoundLog
from traces.sources.base import Source
from traces.sources.found import read_recordings, write_recordings
from traces.sources.recording import LOGITS
from traces.sources.registry import SOURCES as SOURCES_BY_NAME
from traces.sources.registry import SYSTEMS, describe_source, parse_source
from traces.sources.replay import replay_source
from traces.sources.starts.sources import (
    Blockwise,
    Hydra,
    LayerSkip,
    Medusa,
    MedusaTree,
    Space,
    SpecDec,
    StartRecording,
)


class Case:
    """The bundled target with modules trained for a moment on its own output."""

    def __init__(self) -> None:
        pair, target, prompts, self.outputs, self.trace = decoded(256)
        import torch

        from profiler.sources.run import SourceRunner, record_sources
        from profiler.sources.start_record import RecordOptions
        from profiler.train.heads import train_exit_heads, train_masks, train_parallel_heads

        self.target = target
        text = torch.full((4, 200), -1)
        for i, (ids, output) in enumerate(zip(prompts, self.outputs, strict=True)):
            whole = torch.cat([ids, torch.tensor(output)])
            text[i, : len(whole)] = whole
        short = {"steps": 8, "seconds": 3.0, "batch": 96}
        self.modules: dict[str, Any] = {
            "early-exit": train_exit_heads(target, text, (4,), rank=4, **short),  # type: ignore[arg-type]
            **{
                kind: train_parallel_heads(target, text, kind, 3, rank=16, **short)  # type: ignore[arg-type]
                for kind in ("blockwise", "medusa", "specdec", "hydra")
            },
            "space": train_masks(target, text, 2, steps=2, batch=1, starts=6),
        }
        skip = [3, 5, 6]
        self.told: list[str] = []
        self.recordings = record_sources(
            pair.target,
            self.trace,
            self.modules,
            RecordOptions(skip=skip, offsets=6),
            advance=self.told.append,
        )
        self.runner = SourceRunner(pair.target, self.trace, self.modules)
        self.skip = LayerSkip(skip)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


SOURCES: list[tuple[Source, DraftPolicy]] = [
    (Blockwise(), Fixed(3)),
    (Blockwise(2), Fixed(3)),
    (Medusa(), Confidence(3, 0.2)),
    (SpecDec(), Fixed(2)),
    (Hydra(), Fixed(3)),
    (Hydra(2), Fixed(3)),
    (Hydra(), Confidence(3, 0.2)),
    (Space(), Fixed(2)),
    (Space(1), Fixed(3)),
    (LayerSkip(), Fixed(5)),
    (LayerSkip(), Confidence(6, 0.2)),
]


def test_progress_is_told_after_every_request_of_every_source(case: Case) -> None:
    assert Counter(case.told) == dict.fromkeys(case.recordings, len(case.trace.requests))


@pytest.mark.invariant(1)
@pytest.mark.parametrize(("source", "policy"), SOURCES)
def test_replayed_rounds_are_the_real_ones(case: Case, source: Source, policy: DraftPolicy) -> None:
    from tests.replayed import run_as_replayed

    source = case.skip if isinstance(source, LayerSkip) else source
    _, log = run_as_replayed(case.runner, source, policy, case.trace, case.recordings)
    assert log.rounds["drafted"].max() > 0
    assert log.fidelity == "exact"


def test_every_recorded_source_has_a_real_side() -> None:
    from profiler.sources.run import REAL, TRAINED

    recorded = {name for name, source in SOURCES_BY_NAME.items() if source.recorded_as is not None}
    assert recorded - set(REAL) == {"medusa-tree"}
    assert set(TRAINED) <= set(REAL) <= recorded
    assert all(real.recorded_sampled or not real.sampled for real in REAL.values())


def test_recordings_survive_their_files(case: Case, tmp_path: Path) -> None:
    write_recordings(case.recordings, tmp_path)
    again = read_recordings(tmp_path)
    named = {"early-exit", "blockwise", "medusa", "specdec", "hydra", "space", "layer-skip"}
    assert set(again) == set(case.recordings) == named
    for source, policy in ((Medusa(), Fixed(3)), (case.skip, Fixed(4))):
        ours = replay_source(case.trace, source, policy, recordings=case.recordings)
        theirs = replay_source(case.trace, source, policy, recordings=again)
        np.testing.assert_array_equal(ours.rounds, theirs.rounds)


def test_modules_survive_their_files_and_know_their_target(case: Case, tmp_path: Path) -> None:
    import torch

    from profiler.features.heads import ExitHeads, load_module, save_module

    exits = case.modules["early-exit"]
    path = tmp_path / "exit.safetensors"
    save_module(exits, case.target.model, path)
    again = load_module(path, case.target.model, ExitHeads)
    for name, weights in exits.state_dict().items():
        assert torch.allclose(again.state_dict()[name], weights, atol=1e-3, rtol=1e-2)
    weight = case.target.model.model.norm.weight
    before = weight.data.clone()
    weight.data += 1
    try:
        with pytest.raises(DraftsimError, match="was trained for another target"):
            load_module(path, case.target.model, ExitHeads)
    finally:
        weight.data.copy_(before)
    path.write_bytes(b"broken")
    with pytest.raises(DraftsimError, match="train them again"):
        load_module(path, case.target.model, ExitHeads)


def starts(tokens: list[list[int]], ranks: list[list[int]]) -> StartRecording:
    """A recording of one request."""
    shape = np.shape(tokens)
    arrays = {"token": np.array(tokens, np.int32), "rank": np.array(ranks, np.int32)}
    logits = dict.fromkeys(LOGITS, np.zeros(shape, np.float32))
    return StartRecording({**arrays, **logits}, (0, len(tokens)))


def test_a_tree_level_is_right_where_it_holds_the_true_token() -> None:
    trace = trace_of([[10, 11, 12, 13, 14, 15]], 6, [(1,)], [])
    tokens, ranks = [[7, 7]] * 6, [[9, 9], [1, 1], [9, 9], [9, 9], [2, 0], [9, 9]]
    held = {"medusa": starts(tokens, ranks)}
    log = replay_source(trace, MedusaTree(tops=[2, 2]), Fixed(2), recordings=held)
    # From 1 both levels hold the true token, from 4 the first level does not.
    assert log.rounds["position"].tolist() == [1, 4, 5]
    assert log.rounds["emitted"].tolist() == [3, 1, 1]
    assert log.fidelity == "approximate"
    assert log.recorded_calls is not None
    verify = log.recorded_calls[log.recorded_calls["verify"]]
    assert verify["new_tokens"].tolist() == [1 + 2 + 4, 1 + 2, 1]


@pytest.mark.invariant(12)
def test_drafting_past_the_recorded_chain_is_an_error() -> None:
    trace = trace_of([[10, 11, 12, 13, 14, 15]], 6, [(1,)], [])
    record = starts([[7, 7]] * 6, [[9, 9]] * 6)
    record = StartRecording(record.arrays, record.request_starts, {"layers": 4, "skip": [2]})
    held = {"layer-skip": record}
    with pytest.raises(TailError, match="and 2 were recorded"):
        replay_source(trace, LayerSkip(), Fixed(3), recordings=held)
    with pytest.raises(DraftsimError, match=r"layers \[3\] were to be skipped"):
        replay_source(trace, LayerSkip([3]), Fixed(2), recordings=held)
    with pytest.raises(DraftsimError, match="no recording of 'medusa' drafts"):
        replay_source(trace, Medusa(), Fixed(2), recordings=held)
    with pytest.raises(DraftsimError, match="3 heads were asked for and 2 recorded"):
        replay_source(trace, Medusa(3), Fixed(2), recordings={"medusa": record})


def cells(*rows: tuple[str, str, int, float]) -> LatencyTable:
    """A table of (model, phase, new tokens, seconds), the same at two contexts."""
    frame = [(m, p, 1, n, c, s, 0.0, 1) for m, p, n, s in rows for c in (0, 500)]
    return table_of(frame)


def test_rounds_cost_their_calls() -> None:
    trace = trace_of([[10, 11, 12, 13, 14, 15]], 6, [(1,)], [])
    held = {"medusa": starts([[7, 7]] * 6, [[9, 9]] * 6)}
    log = replay_source(trace, Medusa(), Fixed(2), recordings=held)
    table = cells(
        ("target", "forward", 1, 1.0), ("target", "forward", 3, 2.0), ("heads", "forward", 1, 0.25)
    )
    priced = price(log, table)
    drafted = log.rounds["drafted"]
    np.testing.assert_allclose(priced.draft_s, np.where(drafted > 0, 0.25, 0.0))
    np.testing.assert_allclose(priced.verify_s, 1.0 + 0.5 * drafted)
    # Heads leave the target's weights where they are: their passes are timed apart.
    # A round without drafts is a step of plain decoding, and costs as much.
    alone = pd.concat([table.cells, cells(("target", "pass", 1, 0.75)).cells])
    assert {0, 2} <= set(drafted.tolist())
    np.testing.assert_allclose(
        price(log, LatencyTable(alone)).verify_s, np.where(drafted > 0, 0.75, 1.0)
    )
    assert log.recorded_calls is not None
    layered = log.recorded_calls.copy()
    layered["kind"] = LAYER
    drafting = RoundLog(log.rounds, log.requests, "x", source="layer-skip", recorded_calls=layered)
    assert [calls.phase for calls in drafting.calls if calls.verify and len(calls.round)] == [
        "forward"
    ]
    with pytest.raises(DraftsimError, match="no 'forward' cells of 'heads'"):
        price(log, cells(("target", "forward", 1, 1.0), ("target", "forward", 3, 2.0)))
    bare = RoundLog(log.rounds, log.requests, "x", source="medusa")
    with pytest.raises(DraftsimError, match="does not hold their calls"):
        price(bare, table)


def test_a_round_of_hydra_costs_a_head_for_every_drafted_token() -> None:
    trace = trace_of([[10, 11, 12, 13, 14, 15]], 6, [(1,)], [])
    held = {"hydra": starts([[11, 7], [12, 13], [7, 7], [7, 7], [7, 7], [7, 7]], [[0, 0]] * 6)}
    log = replay_source(trace, Hydra(), Fixed(2), recordings=held)
    table = cells(
        ("target", "forward", 1, 1.0), ("target", "forward", 3, 2.0), ("hydra", "forward", 1, 0.25)
    )
    priced = price(log, table)
    drafted = log.rounds["drafted"]
    assert {0, 2} <= set(drafted.tolist())
    np.testing.assert_allclose(priced.draft_s, 0.25 * drafted)
    with pytest.raises(DraftsimError, match="no 'forward' cells of 'hydra'"):
        price(log, cells(("target", "forward", 1, 1.0), ("target", "forward", 3, 2.0)))


def test_a_head_of_hydra_depends_on_the_tokens_before_it(case: Case) -> None:
    import torch

    from profiler.sources.start_record import hydra_logits

    heads, target = case.modules["hydra"], case.target
    state = target.embed(torch.tensor([5]))
    one, other = (hydra_logits(target, heads, state, torch.tensor([[7, t]])) for t in (8, 9))
    assert not torch.equal(one, other)
    # All at once, as in training, are the heads one by one.
    known = torch.tensor([7, 8, 9])
    every = target.project(heads.states(state.float(), target.embed(known).float()[None]))[0]
    for at in range(3):
        own = hydra_logits(target, heads, state, known[None, : at + 1])[0]
        torch.testing.assert_close(own, every[at])


def test_every_named_system_parses_and_sources_describe_themselves() -> None:
    from policies.registry import parse_policy

    for system in SYSTEMS.values():
        source, policy = parse_source(system.source), parse_policy(system.policy)
        assert set(policy.reads) <= source.signals
        assert describe_source(parse_source(describe_source(source))) == describe_source(source)
        kinds = {model for model, _ in CALL_KINDS}
        assert kinds >= {"target", "exit", "heads"}
    for text in ("medusa-tree:tops=[3,2]", "layer-skip:skip=[2,4]", "early-exit:layers=[2]"):
        assert describe_source(parse_source(text)) == text
