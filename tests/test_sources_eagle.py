"""EAGLE, EAGLE-3 and MTP as a draft source: recorded, replayed, and real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.training.unroll import target_features, unroll
from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import Confidence
from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import DrafterRunner
from profiler.models.stack import LayerRunner
from profiler.sources.latency import AFTER_DRAFTER, measure_drafters
from profiler.sources.run import (
    REAL,
    SourceLatency,
    SourceRunner,
    measure_sources,
    record_sources,
)
from profiler.sources.start_record import RecordOptions
from simulator.pricing import price
from tests.features import drafters, miniature
from tests.few_cells import untimed_none
from tests.outputs import greedy, trace_of
from tests.replayed import run_as_replayed, run_source
from tests.shared import made_once
from traces.errors import DraftsimError, TailError
from traces.latency.table import CELL_COLUMNS, LatencyTable
from traces.replay.calls import DRAFTER, Calls, pack_counted
from traces.sources.found import read_recordings, write_recordings
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source
from traces.sources.starts.parallel import Eagle

KINDS = ("eagle", "eagle3", "eagle3-variant", "mtp", "mtp-several")
OFFSETS = 6
LIMIT = 30


def _trained(kind: str, drafter: FeatureDrafter, target: Any, texts: list[torch.Tensor]) -> None:
    """A moment of training, once for all tests, so that some drafts are accepted, some are not."""

    def make(folder: Path) -> None:
        drafter.train()
        optimiser = torch.optim.Adam(drafter.parameters(), lr=0.01)
        steps = drafter.modules_in_turn if drafter.modules_in_turn > 1 else 3
        for turn in range(60):
            ids = texts[turn % len(texts)][None]
            features = target_features(target, ids, drafter.feature_layers)
            loss = torch.zeros(())
            for step, out in enumerate(unroll(drafter, ids, features, steps)):
                labels = drafter.draft_ids(ids)[:, 2 + step :].flatten()
                logits = drafter.logits(out)[:, : len(labels)].flatten(0, 1)
                loss = loss + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        torch.save(drafter.state_dict(), folder / "weights.pt")

    drafter.load_state_dict(torch.load(made_once(f"drafter-{kind}", make) / "weights.pt"))
    drafter.eval().requires_grad_(False)


class Case:
    """A miniature target of four layers, its outputs, and drafters with a moment of training."""

    def __init__(self, kinds: Sequence[str] = KINDS) -> None:
        torch.set_num_threads(1)
        self.target = miniature()
        generator = torch.Generator().manual_seed(4)
        prompts = [torch.randint(96, (n,), generator=generator) for n in (9, 1, 2, 17)]
        runner = LayerRunner(self.target, 64)
        self.outputs = [greedy(runner, p, LIMIT, frozenset()) for p in prompts]
        # A token of one output ends it.
        self.eos = [self.outputs[3][-1]]
        for i, output in enumerate(self.outputs):
            if self.eos[0] in output:
                self.outputs[i] = output[: output.index(self.eos[0]) + 1]
        self.trace = trace_of(self.outputs, LIMIT, [p.tolist() for p in prompts], self.eos)
        texts = [
            torch.cat([p, torch.tensor(o)]) for p, o in zip(prompts, self.outputs, strict=True)
        ]
        made = drafters(self.target)
        for kind in kinds:
            _trained(kind, made[kind], self.target, texts)
        self.modules = {f"eagle.{kind}": made[kind] for kind in kinds}
        self.recordings = record_sources(
            self.target, self.trace, self.modules, RecordOptions(offsets=OFFSETS),
            only=list(self.modules),
        )  # fmt: skip
        self.runner = SourceRunner(self.target, self.trace, self.modules)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


class Moody(DraftPolicy):
    """Drafts one to five tokens, or none, by turns: first passes of every width."""

    def __init__(self) -> None:
        self.turn = 0

    def keep_drafting(self, draft: Any) -> bool:
        return len(draft) < (3, 0, 1, 0, 0, 5, 2)[self.turn % 7]

    def observe(self, outcome: Any, draft: Any) -> None:
        self.turn += 1


POLICIES: list[DraftPolicy] = [Fixed(4), Fixed(1), Confidence(5, 0.4), Moody()]


def replayed_calls(case: Case, source: Eagle, policy: DraftPolicy) -> Any:
    """Return the calls that a replay counts, whether or not they are priced."""
    log = replay_source(case.trace, source, policy, recordings=case.recordings)
    counted = source.counted(log, source.recording(case.recordings))
    if source.by_passes(case.recordings):  # later passes read one token each
        later = np.maximum(log.rounds["draft_forwards"].astype(np.int64) - 1, 0)
        counted.append(Calls.of(DRAFTER, np.arange(len(later)), 1, later))
    return pack_counted(counted)


@pytest.mark.invariant(1)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_rounds_are_the_real_ones(case: Case, kind: str, policy: DraftPolicy) -> None:
    source = Eagle(kind)
    several = kind == "mtp-several"
    real, log = run_as_replayed(case.runner, source, policy, case.trace, case.recordings, several)
    np.testing.assert_array_equal(real.log.recorded_calls, replayed_calls(case, source, policy))
    drafted, accepted = log.rounds["drafted"].sum(), log.rounds["accepted"].sum()
    assert 0 < accepted < drafted
    assert log.fidelity == "exact"


@pytest.mark.parametrize("policy", [Fixed(4), Moody()], ids=lambda p: type(p).__name__)
def test_first_passes_take_in_what_was_verified(case: Case, policy: DraftPolicy) -> None:
    rounds = replay_source(case.trace, Eagle("eagle"), policy, recordings=case.recordings).rounds
    calls = run_source(case.runner, Eagle("eagle"), policy).log.recorded_calls
    assert calls is not None
    assert set(calls["kind"].tolist()) == {DRAFTER}
    for i in range(len(rounds)):
        if not rounds["drafted"][i]:
            continue
        began = rounds["position"][i] - rounds["catch_up"][i]  # where it last drafted
        assert began in {0, *rounds["position"][rounds["request"] == rounds["request"][i]]}
        widths = calls[calls["round"] == i]
        total = int((widths["new_tokens"] * widths["count"]).sum())
        assert total == int(rounds["catch_up"][i] + rounds["drafted"][i]) - 1


def test_recordings_survive_their_files(case: Case, tmp_path: Path) -> None:
    write_recordings(case.recordings, tmp_path)
    again = read_recordings(tmp_path)
    assert set(again) == {f"eagle.{kind}" for kind in KINDS}
    for source in (Eagle("eagle3"), Eagle("some/where/mtp-several")):
        ours = replay_source(case.trace, source, Fixed(2), recordings=case.recordings)
        theirs = replay_source(case.trace, source, Fixed(2), recordings=again)
        np.testing.assert_array_equal(ours.rounds, theirs.rounds)


def test_a_drafter_is_named_by_folder_or_kind(case: Case) -> None:
    one = {"eagle.mine": case.recordings["eagle.eagle3"]}
    for text in ("eagle", "eagle:model=eagle3", "eagle:model=drafters/mine"):
        log = replay_source(case.trace, parse_source(text), Fixed(2), recordings=one)
        assert log.source == "eagle:model=mine"
        assert log.drafter == "eagle.mine"
    with pytest.raises(
        DraftsimError, match=r"no recorded drafter has the name or kind mtp .*mine \(eagle3\)"
    ):
        replay_source(case.trace, Eagle("mtp"), Fixed(2), recordings=one)
    with pytest.raises(DraftsimError, match="several recorded drafters fit eagle "):
        replay_source(case.trace, Eagle(), Fixed(2), recordings=case.recordings)
    with pytest.raises(
        DraftsimError, match=r"no drafter of the source eagle is recorded.*sources --source eagle"
    ):
        replay_source(case.trace, Eagle(), Fixed(2))
    with pytest.raises(DraftsimError, match="no drafter 'other' for this target"):
        REAL["eagle"].module(case.modules, Eagle("other"))
    assert REAL["eagle"].module(case.modules, Eagle("mtp")).modules_in_turn == 1


@pytest.mark.invariant(12)
def test_drafting_past_the_recording_is_refused(case: Case) -> None:
    with pytest.raises(TailError, match=f"{OFFSETS} were recorded"):
        replay_source(case.trace, Eagle("eagle"), Fixed(OFFSETS + 1), recordings=case.recordings)
    log = replay_source(case.trace, Eagle("mtp-several"), Fixed(9), recordings=case.recordings)
    assert log.rounds["drafted"].max() == 3  # modules in turn end a draft


def test_ranks_are_those_under_the_drafters_own_vocabulary(case: Case) -> None:
    recording = case.recordings["eagle.eagle3"]
    drafter = case.modules["eagle.eagle3"]
    true = torch.tensor([token for output in case.outputs for token in output])
    lacking = (drafter.draft_ids(true) < 0).numpy()
    first = recording["rank"][:, 0]
    starts = np.array(recording.request_starts[:-1])
    rows = np.setdiff1d(np.arange(len(first)), starts)
    assert (first[rows][lacking[rows]] == 64).all()
    right = recording["token"][rows, 0] == true.numpy()[rows]
    np.testing.assert_array_equal(first[rows] == 0, right)
    assert lacking[rows].any()
    assert right.any()


def test_every_pass_has_a_measured_cell_and_a_price(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    untimed_none(monkeypatch)
    runner = LayerRunner(case.target, 64)
    cells = measure_sources(runner, case.modules, widths=(1, 2, 5), contexts=(8, 32), repeats=1)
    for kind in KINDS:
        table = LatencyTable(pd.concat([cells, TARGET], ignore_index=True), {})
        log = replay_source(case.trace, Eagle(kind), Fixed(3), recordings=case.recordings)
        priced = price(log, table)
        assert (priced.draft_s[log.rounds["drafted"] > 0] > 0).all()
        assert table.has(log.drafter, "prefill")


def test_a_one_pass_drafter_is_timed_up_to_its_masks_after_as_many_tokens(case: Case) -> None:
    drafter = drafters(case.target)["p-eagle"]
    chosen: list[int] = []
    logits = drafter.logits

    def counted(states: torch.Tensor) -> torch.Tensor:
        chosen.append(states.shape[1])
        return logits(states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "logits", counted)
        cells = measure_drafters(
            LayerRunner(case.target, 64), {"p": drafter}, 1, widths=(1, 2, 5), contexts=(8,)
        )
    assert set(cells["model"]) == {"p"}
    passes = cells[cells["phase"] == "forward"]
    # Four masks at most: a pass over five verified tokens and four masks has nine.
    assert set(passes["new_tokens"]) == {1, 2, 5, 9}
    assert set(chosen) == {1, 2, 4}


def test_passes_of_the_target_after_a_drafter_are_no_passes_by_themselves(case: Case) -> None:
    one = {"eagle.eagle": case.modules["eagle.eagle"]}
    latency = SourceLatency(LayerRunner(case.target, 64), one, widths=(1, 2), contexts=(8,))
    latency.advance(1)
    cells = latency.cells()
    passes = cells[(cells["model"] == "target") & (cells["phase"] == "pass")]
    assert set(passes["new_tokens"]) == {1, 2}
    assert AFTER_DRAFTER not in set(cells["phase"])


TARGET = pd.DataFrame(
    [("target", "forward", 1, n, c, 0.01 + 1e-4 * n, 0.0, 1) for n in (1, 9) for c in (8, 64)],
    columns=list(CELL_COLUMNS),
)


def test_two_drafters_of_a_kind_cost_what_each_costs(case: Case) -> None:
    starts = case.recordings["eagle.eagle"]
    both = {"eagle.quick": starts, "eagle.slow": starts}
    rows = [
        (f"eagle.{name}", "forward", 1, n, c, s * (1e-3 + 1e-4 * n + 1e-6 * c), 0.0, 1)
        for name, s in (("quick", 1.0), ("slow", 3.0)) for n in (1, 2, 9) for c in (8, 64)
    ]  # fmt: skip
    own = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    table = LatencyTable(pd.concat([TARGET, own], ignore_index=True), {})
    quick, slow = (
        price(replay_source(case.trace, Eagle(name), Fixed(3), recordings=both), table)
        for name in ("quick", "slow")
    )
    assert (quick.log.source, slow.log.source) == ("eagle:model=quick", "eagle:model=slow")
    np.testing.assert_array_equal(quick.log.rounds, slow.log.rounds)
    np.testing.assert_allclose(slow.draft_s, 3 * quick.draft_s)
    np.testing.assert_allclose(slow.verify_s, quick.verify_s)
    # One by one, by hand: the first pass over what was verified, the others over one token.
    at, seconds = quick.log.context, np.zeros(len(quick.log))
    for i, row in enumerate(quick.log.rounds):
        for step in range(int(row["draft_forwards"])):
            width, seen = (1, at[i] + step - 1) if step else (row["catch_up"], at[i])
            seconds[i] += 1e-3 + 1e-4 * width + 1e-6 * (seen - (0 if step else width))
    np.testing.assert_allclose(quick.draft_s, seconds)
    with pytest.raises(DraftsimError, match=r"no passes of the drafter 'eagle.slow'.* --source"):
        price(slow.log, LatencyTable(TARGET, {}))
    assert price(slow.log, LatencyTable.constant(0.01, 0.002)).draft_s.sum() == pytest.approx(
        0.002 * slow.log.rounds["draft_forwards"].sum()
    )


def test_batched_passes_of_a_drafter_are_those_of_its_rows(case: Case) -> None:
    generator = torch.Generator().manual_seed(5)
    for kind, drafter in case.modules.items():
        width = int(drafter.config.hidden_size)
        tokens = torch.randint(96, (3, 12), generator=generator)
        fused = torch.randn(3, 12, width, generator=generator)
        together = DrafterRunner(drafter, 16, 3)
        parts = [together.run(tokens[:, a:b], fused[:, a:b], a) for a, b in ((0, 7), (7, 12))]
        for row in range(3):
            alone = DrafterRunner(drafter, 16)
            for (a, b), part in zip(((0, 7), (7, 12)), parts, strict=True):
                expected = alone.run(tokens[row, a:b], fused[row, a:b], a)
                for ours, theirs in zip(part, expected, strict=True):
                    torch.testing.assert_close(ours[row], theirs, msg=kind)


def test_drafters_are_timed_at_every_batch(case: Case) -> None:
    drafters = {k: case.modules[f"eagle.{k}"] for k in ("eagle3", "mtp-several")}
    cells = measure_drafters(
        LayerRunner(case.target, 64), drafters, 2, widths=(1, 2), contexts=(8,), batches=(1, 2)
    )
    assert set(cells["model"]) == {*drafters}
    for _, own in cells.groupby("model"):
        passes = own[own["phase"] == "forward"]
        sizes = {*zip(passes["batch"], passes["new_tokens"], passes["context"], strict=True)}
        assert sizes == {(b, n, 8) for b in (1, 2) for n in (1, 2)}
        prompts = own[own["phase"] == "prefill"]
        assert {*zip(prompts["batch"], prompts["new_tokens"], strict=True)} == {
            (b, n) for b in (1, 2) for n in (32, 64)
        }
