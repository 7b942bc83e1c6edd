"""Drafters on features along sampled outputs: the draws' law, and replay against decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import Confidence
from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import DrawnDrafts
from profiler.models.sampling import draw, probs
from profiler.sources.exits import Modules
from profiler.sources.run import SourceRunner, record_sources
from profiler.sources.start_record import RecordOptions
from tests.features import drafters, miniature
from tests.outputs import drawn_trace
from tests.recorded_draws import RecordedStarts
from tests.replayed import run_as_replayed, run_source, same_means
from tests.test_sources_sampled import counts_fit
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.decoder import ReplayDecoder
from traces.replay.run import replay
from traces.sources.as_draft import drafted_trace
from traces.sources.base import DRAFTER_SIGNALS
from traces.sources.found import read_recordings, write_recordings
from traces.sources.recording import Recordings
from traces.sources.replay import replay_source
from traces.sources.starts.parallel import Eagle

HOT, CUT = Sampling(1.5), Sampling(1.5, 0.9)
SAMPLINGS = pytest.mark.parametrize("sampling", [HOT, CUT], ids=["all", "top-p"])
KINDS = ("eagle", "eagle3", "mtp-several")
LIMIT, EOS, OFFSETS = 14, 7, 5
POLICIES: list[DraftPolicy] = [Fixed(3), Confidence(5, 0.05)]


@cache
def model() -> Any:
    torch.set_num_threads(1)
    return miniature()


@cache
def modules() -> Modules:
    made = drafters(model())
    return {f"eagle.{kind}": made[kind] for kind in KINDS}


def sampled_trace(requests: int, seed: int, sampling: Sampling) -> Trace:
    prompts = [[3 + i % 5, 11, 2][: 1 + i % 3] for i in range(requests)]
    return drawn_trace(model(), prompts, sampling, seed, LIMIT, EOS)


def record(trace: Trace, seed: int, only: tuple[str, ...] = KINDS) -> Recordings:
    return record_sources(
        model(), trace, modules(), RecordOptions(offsets=OFFSETS, seed=seed),
        only=[f"eagle.{kind}" for kind in only],
    )  # fmt: skip


@cache
def case(sampling: Sampling) -> tuple[Trace, Recordings]:
    trace = sampled_trace(8, 0, sampling)
    return trace, record(trace, 1)


def runner(kind: str, sampling: Sampling) -> SourceRunner:
    """A runner whose draws are those of the recording."""
    trace, recordings = case(sampling)
    starts = recordings[f"eagle.{kind}"]
    made = SourceRunner(model(), trace, modules())
    made.drawn = lambda i: RecordedStarts(starts, trace, i, "cpu")  # type: ignore[method-assign]
    return made


@pytest.mark.invariant(1)
@SAMPLINGS
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_recorded_draws_real_rounds_are_the_replayed_ones(
    kind: str, sampling: Sampling
) -> None:
    trace, recordings = case(sampling)
    accepted, several = 0, kind == "mtp-several"
    for policy in POLICIES:
        _, log = run_as_replayed(
            runner(kind, sampling), Eagle(kind), policy, trace, recordings, several
        )
        assert (log.fidelity, log.verify) == ("exact in distribution", "rejection-sampling")
        assert log.rounds["accepted"].sum() < log.rounds["drafted"].sum()
        accepted += log.rounds["accepted"].sum()
        if not several:
            stood = replay(drafted_trace(trace, Eagle(kind), recordings), policy)
            np.testing.assert_array_equal(stood.rounds, log.rounds)
            assert (stood.fidelity, stood.verify) == (log.fidelity, log.verify)
    assert accepted > 0


@SAMPLINGS
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_token_says_is_what_the_real_one_says(kind: str, sampling: Sampling) -> None:
    trace, recordings = case(sampling)
    real = runner(kind, sampling).decoder(Eagle(kind), 0)
    stood = Eagle(kind).drafts_along(trace, recordings)
    replayed = ReplayDecoder(stood, 0, 1)
    mine: list[Any] = []
    theirs: list[Any] = []
    for _ in range(3):  # off the path as well
        mine.append(real.draft(mine))
        theirs.append(replayed.draft(theirs))
    for ours, other in zip(mine, theirs, strict=True):
        assert ours.token_id == other.token_id
        for field in DRAFTER_SIGNALS:
            assert getattr(ours, field) == pytest.approx(getattr(other, field), rel=1e-3, abs=1e-5)


class Plain(FeatureDrafter):
    """A drafter reduced to what a draw asks for: the target's own vocabulary."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def step(self, *args: Any) -> Any:
        raise NotImplementedError


def test_drafts_follow_the_drafter_and_match_as_often_as_rejection_sampling() -> None:
    rows, sampling = 40_000, Sampling(0.8)
    target, head = torch.tensor([0.9, 0.4, -0.5, -1.0]), torch.tensor([0.0, 1.0, -1.0, 0.5])
    generator = torch.Generator().manual_seed(5)
    wanted, drafting = (probs(x[None], sampling)[0] for x in (target, head))
    output = draw(wanted.expand(rows + 1, 4), generator)
    pick = DrawnDrafts(Plain(), output.tolist(), wanted.expand(rows + 1, 4), sampling, generator)
    starts = torch.arange(rows)
    first = pick(head.expand(rows, 4), starts, 0)
    assert counts_fit(np.bincount(first.numpy(), minlength=4), drafting.numpy())
    overlap = float(torch.minimum(wanted, drafting).sum())
    right = first == output[:rows]
    assert abs(int(right.sum()) - rows * overlap) <= 4 * np.sqrt(rows * overlap * (1 - overlap))
    second = pick(head.expand(rows, 4), starts, 1)
    # After a right token the next is coupled to the output again, after a wrong one it is free.
    for some, chance in ((right, overlap), (~right, float((wanted * drafting).sum()))):
        count, hits = int(some.sum()), int((second == output[1:])[some].sum())
        assert abs(hits - count * chance) <= 4 * np.sqrt(count * chance * (1 - chance))
        assert counts_fit(np.bincount(second[some].numpy(), minlength=4), drafting.numpy())


@SAMPLINGS
def test_real_and_replayed_rounds_have_one_distribution(sampling: Sampling) -> None:
    count, source, policy = 40, Eagle("eagle3"), Fixed(3)
    trace = sampled_trace(count, 21, sampling)
    log = replay_source(trace, source, policy, recordings=record(trace, 22, ("eagle3",)))
    torch.manual_seed(23)
    same_means(run_source(SourceRunner(model(), trace, modules()), source, policy).log, log)


@SAMPLINGS
def test_a_sampled_recording_survives_its_file(tmp_path: Path, sampling: Sampling) -> None:
    trace, recordings = case(sampling)
    write_recordings(recordings, tmp_path)
    assert not read_recordings(tmp_path)
    again = read_recordings(tmp_path, sampled=True)
    assert set(again) == set(recordings)
    assert again["eagle.eagle3"].sampling == sampling
    np.testing.assert_array_equal(
        replay_source(trace, Eagle("eagle3"), POLICIES[1], recordings=again).rounds,
        replay_source(trace, Eagle("eagle3"), POLICIES[1], recordings=recordings).rounds,
    )


def test_a_sampled_recording_fits_its_trace_alone() -> None:
    trace, recordings = case(HOT)
    for wrong, shown in ((GREEDY, "greedy"), (CUT, r"T=1\.5, top-p 0\.9")):
        other = Trace(trace.columns, trace.requests, None, {"sampling": wrong.meta})
        with pytest.raises(DraftsimError, match=rf"decoded T=1\.5, and the trace's were {shown}"):
            replay_source(other, Eagle("eagle"), Fixed(2), recordings=recordings)
    starts = recordings["eagle.eagle"]
    with pytest.raises(DraftsimError, match="raw_log_prob has shape"):
        replace(starts, arrays={**starts.arrays, "raw_log_prob": starts["raw_log_prob"][:, :2]})
    everything = record_sources(model(), trace, modules(), RecordOptions(offsets=2))
    assert set(everything) == set(modules())  # skipped layers are greedy alone
