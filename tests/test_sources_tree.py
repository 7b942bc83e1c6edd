"""EAGLE-2's draft tree: recorded once, cut to any budget and depth, and grown for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.training.unroll import target_features
from policies.core import DraftPolicy, speculate
from policies.lengths.basic import Fixed, Oracle
from policies.lengths.huggingface import Confidence
from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import DrafterRunner
from profiler.models.stack import LayerRunner
from profiler.sources.run import SourceRunner, measure_sources, record_sources
from profiler.sources.start_record import GrownTrees, RecordOptions, TreeRecorder, record_along
from simulator.pricing import price
from tests.few_cells import untimed_none
from tests.outputs import trace_of
from tests.replayed import run_as_replayed
from tests.test_sources_eagle import OFFSETS, TARGET, Case, Moody
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.latency.table import LatencyTable
from traces.replay.calls import DRAFTER, DRAFTER_TREE, TREE
from traces.sources.found import read_recordings, write_recordings
from traces.sources.recording import Recordings
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source
from traces.sources.starts.parallel import Eagle
from traces.sources.starts.trees import Eagle2, TreeRecording, candidates

KINDS = ("eagle", "eagle3")
TOPK, LAYERS = 4, 5


class Grown(Case):
    """The miniature with trees of its drafters recorded once each."""

    def __init__(self) -> None:
        super().__init__((*KINDS, "mtp-several"))
        self.trees = {
            f"eagle2.{kind}": record_trees(self.target, self.trace, self.made(kind), TOPK, LAYERS)
            for kind in KINDS
        }
        self.grown: Recordings = self.trees
        shape = {"topk": TOPK, "layers": LAYERS, "budget": 12}
        self.growing = {f"eagle2.{kind}": GrownTrees(self.made(kind), **shape) for kind in KINDS}
        self.runner = SourceRunner(self.target, self.trace, self.growing)

    def made(self, kind: str) -> FeatureDrafter:
        drafter: FeatureDrafter = self.modules[f"eagle.{kind}"]
        return drafter


def record_trees(
    target: Any, trace: Trace, drafter: FeatureDrafter, topk: int, layers: int
) -> TreeRecording:
    grown = GrownTrees(drafter, topk, layers)
    recorder = TreeRecorder(target, trace, grown, RecordOptions())
    recording: TreeRecording = record_along(recorder, trace)
    return recording


@pytest.fixture(scope="module")
def case() -> Grown:
    return Grown()


CUTS: list[tuple[int, int, DraftPolicy]] = [
    (1, 5, Fixed(3)), (3, 2, Fixed(5)), (7, 5, Moody()), (12, 4, Confidence(5, 0.3)),
    (30, 5, Fixed(5)), (1000, 3, Moody()), (1000, 5, Fixed(4)),
]  # fmt: skip


@pytest.mark.invariant(1)
@pytest.mark.parametrize(("budget", "depth", "policy"), CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_cut_from_one_recording_are_the_real_ones(
    case: Grown, kind: str, budget: int, depth: int, policy: DraftPolicy
) -> None:
    source = Eagle2(kind, budget, depth, TOPK)
    _, log = run_as_replayed(case.runner, source, policy, case.trace, case.grown)
    assert log.rounds["accepted"].sum() > 0
    assert log.fidelity == "exact"
    assert log.source == f"eagle2:model={kind},budget={budget},depth={depth}"


def built(case: Grown, drafter: FeatureDrafter, request: int, start: int) -> list[list[Any]]:
    """Return layers of (score, path) of the tree after one start, node by node, as in the paper."""
    prompt = torch.tensor(case.trace.requests[request].prompt_ids)
    text = torch.cat([prompt, torch.tensor(case.outputs[request][:start])])
    fused = drafter.fuse(target_features(case.target, text[None], drafter.feature_layers)[0, :-1])

    @torch.inference_mode()
    def children(path: tuple[int, ...]) -> list[tuple[float, int]]:
        """Return the likeliest tokens after a path, each in a pass of its own."""
        runner = DrafterRunner(drafter, 96)
        states, out = runner.run(text[1:], fused, 0)
        for depth, token in enumerate(path):
            states, out = runner.run(torch.tensor([token]), out[-1:], len(text) - 1 + depth)
        best = drafter.logits(states[-1]).log_softmax(-1).topk(TOPK)
        ids = drafter.target_ids(best.indices).tolist()
        return list(zip(best.values.tolist(), ids, strict=True))

    layers: list[list[Any]] = [[(score, (token,)) for score, token in children(())]]
    for _ in range(LAYERS - 1):
        chosen = sorted(layers[-1], key=lambda n: -n[0])[:TOPK]
        layers.append([
            (score + more, (*path, token)) for score, path in chosen
            for more, token in children(path)
        ])  # fmt: skip
    return layers


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_those_in_the_tree_itself(case: Grown, kind: str) -> None:
    recording, followed = case.trees[f"eagle2.{kind}"], 0
    places = [(i, start) for i, o in enumerate(case.outputs) for start in range(1, len(o), 5)]
    for request, start in places:
        layers = built(case, case.made(kind), request, start)
        row = recording.request_starts[request] + start
        true = tuple(case.outputs[request][start:])
        for depth in range(1, LAYERS + 1):
            ordered = [n for layer in layers[:depth] for n in layer]
            assert len(ordered) == candidates(TOPK, depth)
            ordered = [path for _, path in sorted(ordered, key=lambda n: -n[0])]
            for layer in range(1, depth + 1):
                path = true[:layer]
                place = ordered.index(path) if len(path) == layer and path in ordered else -1
                assert recording.rank[row, layer - 1, depth - 1] == place
                followed += place >= 0
            for budget in (1, 2, 5, 9, 100):
                kept = set(ordered[:budget])
                right = sum(true[:n] in kept for n in range(1, min(depth, len(true)) + 1))
                assert recording.accepted(row, depth, budget) == right
        first = max(layers[1], key=lambda n: n[0])
        assert recording.columns[row, 1, 0] == pytest.approx(np.exp(first[0]), rel=1e-5)
    assert followed > 20


@pytest.mark.parametrize("policy", [Fixed(4), Moody()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_one_child_each_is_the_chain(case: Grown, kind: str, policy: DraftPolicy) -> None:
    # Where no token ends a draft: a tree does not stop for one.
    limit = sorted(map(len, case.outputs))[-2]
    long = [i for i, o in enumerate(case.outputs) if len(o) >= limit]
    prompts = [list(case.trace.requests[i].prompt_ids or ()) for i in long]
    trace = trace_of([case.outputs[i][:limit] for i in long], limit, prompts, [])
    chains = record_sources(
        case.target,
        trace,
        case.modules,
        RecordOptions(offsets=OFFSETS),
        only=[f"eagle.{kind}"],
    )
    trees = {"eagle2.one": record_trees(case.target, trace, case.made(kind), 1, OFFSETS)}
    chain = replay_source(trace, Eagle(kind), policy, recordings=chains)
    tree = replay_source(trace, Eagle2(budget=999), policy, recordings=trees)
    np.testing.assert_array_equal(tree.rounds, chain.rounds)
    assert chain.rounds["accepted"].sum() > 0
    # Passes as wide as the chain's: one first pass over what was verified, others over a token.
    calls = tree.recorded_calls
    assert calls is not None
    first, rest, verified = (calls[calls["kind"] == k] for k in (DRAFTER, DRAFTER_TREE, TREE))
    assert set(rest["new_tokens"]) == {1}
    drafted = chain.rounds["drafted"]
    np.testing.assert_array_equal(verified["new_tokens"], drafted + 1)
    np.testing.assert_array_equal(first["new_tokens"], chain.rounds["catch_up"][drafted > 0])


@pytest.mark.parametrize("kind", KINDS)
def test_more_budget_never_accepts_less(case: Grown, kind: str) -> None:
    recording = case.trees[f"eagle2.{kind}"]
    for depth in range(1, LAYERS + 1):
        found = np.array([
            [recording.accepted(row, depth, budget) for budget in range(1, 90)]
            for row in range(len(recording.rank))
        ])  # fmt: skip
        assert (np.diff(found) >= 0).all()
        assert found[:, 0].max() <= 1
        assert (found[:, -1] > found[:, 0]).any()
    # A node's place falls back as the tree grows, and it precedes those below it.
    rank = np.where(recording.rank < 0, 10**6, recording.rank)
    for layer in range(LAYERS):
        assert (np.diff(rank[:, layer, layer:], axis=1) >= 0).all()
    for depth in range(1, LAYERS):
        own = recording.rank[:, : depth + 1, depth]
        below = own[:, 1:] >= 0
        assert (own[:, :-1][below] < own[:, 1:][below]).all()
        assert (own[:, :-1][below] >= 0).all()


def test_the_oracle_accepts_as_many_as_any_depth(case: Grown) -> None:
    source = Eagle2("eagle", 6)
    decoder = source.open(case.trace, case.grown, 1)(0)
    recording = case.trees["eagle2.eagle"]
    best = max(recording.accepted(1, depth, 6) for depth in range(1, LAYERS + 1))
    assert decoder.load.run_length == best
    rounds = list(speculate(decoder, Oracle(gamma_max=LAYERS)))
    assert [r.accepted for r in rounds] == [r.drafted for r in rounds]


def test_recordings_survive_their_files(case: Grown, tmp_path: Path) -> None:
    write_recordings(case.grown, tmp_path)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        f"trees-eagle2.{kind}.parquet" for kind in KINDS
    ]
    again = read_recordings(tmp_path)
    assert read_recordings(tmp_path, sampled=True) == {}
    for name, ours in case.trees.items():
        theirs: Any = again[name]
        np.testing.assert_array_equal(ours.rank, theirs.rank)
        np.testing.assert_array_equal(ours.columns, theirs.columns)
        assert (theirs.topk, theirs.layers) == (TOPK, LAYERS)
    with pytest.raises(DraftsimError, match="expected"):
        TreeRecording({**ours.arrays, "rank": ours["rank"][1:]}, ours.request_starts, ours.meta)


def test_every_pass_has_a_measured_cell_and_a_price(
    case: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    untimed_none(monkeypatch)
    runner = LayerRunner(case.target, 128)
    cells = measure_sources(runner, case.growing, widths=(1, 2), contexts=(8, 32), repeats=1)
    table = LatencyTable(pd.concat([cells, TARGET], ignore_index=True), {})
    verified = cells[(cells["model"] == "target") & (cells["phase"] == "tree")]
    assert set(verified["new_tokens"]) == {1, 2, 6, 11, 13, 21, 40}  # of 52 candidates
    for kind in KINDS:
        source = Eagle2(kind, 12)
        log = replay_source(case.trace, source, Moody(), recordings=case.grown)
        own = cells[(cells["model"] == f"eagle2.{kind}") & (cells["phase"] == "tree")]
        assert set(own["new_tokens"]) == {TOPK}
        priced = price(log, table)
        drafting = log.rounds["drafted"] > 0
        assert (priced.draft_s[drafting] > 0).all()
        assert (priced.draft_s[~drafting] == 0).all()
        assert (priced.verify_s > 0).all()
        assert priced.prefill_passes.passes == len(case.outputs)
        with pytest.raises(
            DraftsimError, match=rf"no passes of the drafter 'eagle2.{kind}'.*eagle2:"
        ):
            price(log, LatencyTable(TARGET, {}))
    # The textbook's passes cost alike, whatever they carry.
    plain = price(log, LatencyTable.constant(0.01, 0.002))
    assert plain.draft_s.sum() == pytest.approx(0.002 * log.rounds["draft_forwards"].sum())
    assert plain.verify_s.sum() == pytest.approx(0.01 * len(log))


@pytest.mark.invariant(12)
def test_what_was_not_recorded_is_refused(case: Grown) -> None:
    def replayed(text: str, policy: DraftPolicy, recordings: Recordings = case.grown) -> Any:
        return replay_source(case.trace, parse_source(text), policy, recordings=recordings)

    with pytest.raises(TailError, match=f"{LAYERS} were recorded"):
        replayed("eagle2:model=eagle", Fixed(LAYERS + 1))
    log = replayed(f"eagle2:model=eagle,depth={LAYERS}", Fixed(LAYERS + 1))
    assert log.rounds["drafted"].max() == LAYERS
    for text, message in (
        ("eagle2:model=eagle,topk=3", "were recorded with topk=4, not 3"),
        ("eagle2:model=eagle,depth=6", "5 layers deep, not 6"),
        ("eagle2", "several recorded drafters fit eagle2 "),
        ("eagle2:model=mtp", "has the name or kind mtp .*sources --source eagle2:model=DIR"),
    ):  # fmt: skip
        with pytest.raises(DraftsimError, match=message):
            replayed(text, Fixed(2))
    with pytest.raises(ValueError, match="budget is 0"):
        parse_source("eagle2:budget=0")
    with pytest.raises(ValueError, match="topk is 0"):
        parse_source("eagle2:topk=0")
    with pytest.raises(ValueError, match="depth is 0"):
        parse_source("eagle2:depth=0")
    other = case.trees["eagle2.eagle"]
    fewer = TreeRecording(
        {n: v[: other.request_starts[1]] for n, v in other.arrays.items()},
        other.request_starts[:2], other.meta,
    )  # fmt: skip
    with pytest.raises(DraftsimError, match="of other requests than the trace"):
        replayed("eagle2", Fixed(2), {"eagle2.eagle": fewer})
    with pytest.raises(DraftsimError, match="3 modules that run in turn"):
        record_trees(case.target, case.trace, case.made("mtp-several"), TOPK, LAYERS)
    with pytest.raises(DraftsimError, match="topk is 97, and the drafter knows 96"):
        record_trees(case.target, case.trace, case.made("eagle"), 97, 2)
    with pytest.raises(DraftsimError, match="grown to a depth"):
        case.runner.decoder(Eagle2("eagle"), 0)
    drawn = Trace(case.trace.columns, case.trace.requests, None, {"sampling": {"temperature": 1.0}})
    with pytest.raises(DraftsimError, match="replayed along greedy output"):
        record_trees(case.target, drawn, case.made("eagle"), TOPK, LAYERS)
