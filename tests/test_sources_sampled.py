"""Early exit along sampled outputs: the draws' laws, and replay against real decoding."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import Confidence
from policies.rules.base import ExactMatch, RejectionSampling
from profiler.features.heads import ExitHeads
from profiler.models.sampling import draw, probs
from profiler.models.stack import LayerRunner
from profiler.sources.exit_record import ExitRecorder, SharedDraws
from profiler.sources.exits import Draws
from profiler.sources.run import SourceRunner, record_sources
from profiler.sources.start_record import RecordOptions, record_along
from tests.outputs import drawn_trace
from tests.recorded_draws import RecordedDraws
from tests.replayed import run_as_replayed, run_source, same_means
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.sources.base import DRAFTER_SIGNALS
from traces.sources.early_exit import EarlyExit
from traces.sources.exit_recording import ExitRecording
from traces.sources.found import read_recordings, write_recordings
from traces.sources.lookups.sources import PLD
from traces.sources.recording import Recordings
from traces.sources.replay import replay_source

HOT, CUT = Sampling(0.8), Sampling(0.8, 0.7)
SAMPLINGS = pytest.mark.parametrize("sampling", [HOT, CUT], ids=["all", "top-p"])
LIMIT, EOS = 14, 7
ARMS: dict[str, tuple[EarlyExit, DraftPolicy, int]] = {
    "specbound": (EarlyExit(0.45, 0.3, 0.75), Fixed(4), 4),
    "no bound": (EarlyExit(0.45, 0.0, 1.0), Fixed(6), 6),
    "bonus": (EarlyExit(0, 0, 1.0, bonus=True), Confidence(5, 0.3), 5),
    "margins": (EarlyExit(0.3, 0.2, 0.75), Confidence(5, 0.5), 5),
}


@cache
def model() -> LlamaForCausalLM:
    """A random target of 23 tokens with sharp, varied distributions."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).float().eval()


@cache
def heads() -> ExitHeads:
    return ExitHeads((1, 2, 3), 16).start_from(model().model.norm.weight.detach()).eval()


def sampled_trace(requests: int, seed: int, sampling: Sampling) -> Trace:
    prompts = [[3 + i % 5, 11, 2] for i in range(requests)]
    return drawn_trace(model(), prompts, sampling, seed, LIMIT, EOS)


def record(trace: Trace, seed: int, names: Collection[str] = ARMS.keys()) -> Recordings:
    settings = [source.setting(gamma) for source, _, gamma in (ARMS[name] for name in names)]
    how = RecordOptions(settings, seed=seed)
    return record_sources(model(), trace, {"early-exit": heads()}, how)


@cache
def case(sampling: Sampling = HOT) -> tuple[Trace, Recordings]:
    trace = sampled_trace(12, 0, sampling)
    return trace, record(trace, 1)


def as_recorded(exits: ExitRecording, trace: Trace) -> SourceRunner:
    """Return a runner whose draws are those of the recording."""
    runner = SourceRunner(model(), trace, {"early-exit": heads()})
    runner.drawn = lambda i: RecordedDraws(exits, trace, i, "cpu")  # type: ignore[method-assign]
    return runner


@pytest.mark.invariant(1)
@SAMPLINGS
@pytest.mark.parametrize("name", list(ARMS))
def test_with_the_recorded_draws_real_rounds_are_the_replayed_ones(
    name: str, sampling: Sampling
) -> None:
    trace, recordings = case(sampling)
    exits = EarlyExit().recording(recordings)
    source, policy, _ = ARMS[name]
    runner = as_recorded(exits, trace)
    _, log = run_as_replayed(runner, source, policy, trace, recordings)
    assert (log.fidelity, log.verify) == ("exact in distribution", "rejection-sampling")
    # Neither trivially right nor trivially wrong.
    accepted, drafted = log.rounds["accepted"].sum(), log.rounds["drafted"].sum()
    assert 0 < accepted < drafted


@SAMPLINGS
def test_what_a_token_says_is_what_the_real_one_says(sampling: Sampling) -> None:
    trace, recordings = case(sampling)
    exits = EarlyExit().recording(recordings)
    source = ARMS["no bound"][0]
    real = as_recorded(exits, trace).decoder(source, 0)
    replayed: Any = source.open(trace, recordings, 1)(0)
    mine, theirs = real.draft([]), replayed.draft([])
    while mine is None or theirs is None:  # difficult in both
        assert (mine, theirs) == (None, None)
        real.verify([])
        replayed.verify([])
        mine, theirs = real.draft([]), replayed.draft([])
    assert mine.token_id == theirs.token_id
    places = replayed.exits.places
    node = places.node[places.rows[trace.request_starts[0] + replayed.position]]
    assert real._layers_run.depths == [replayed.exits.depths[node]]
    assert source.held(recordings) == DRAFTER_SIGNALS
    for field in DRAFTER_SIGNALS:
        assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=1e-4)


def counts_fit(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Return True if every count is within 4 standard errors of its expectation."""
    total = counts.sum()
    error = np.sqrt(total * probs * (1 - probs))
    return bool((np.abs(counts - total * probs) <= 4 * np.maximum(error, 1e-9)).all())


def test_coupled_draws_follow_the_head_and_match_as_often_as_rejection_sampling() -> None:
    rows, target = 60_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    heads_probs = [
        torch.tensor([0.2, 0.5, 0.1, 0.2]), torch.tensor([0.55, 0.2, 0.2, 0.05]),
        torch.tensor([0.0, 0.6, 0.0, 0.4]), target,
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    emitted = draw(target.expand(rows, 4), generator)
    shared = SharedDraws(rows, 4, generator, "cpu")
    for head in heads_probs:
        truth = emitted, target.expand(rows, 4)
        tokens = shared.tokens(head.expand(rows, 4), truth)
        assert counts_fit(np.bincount(tokens.numpy(), minlength=4), head.numpy())
        overlap = float(torch.minimum(head, target).sum())
        matches = int((tokens == emitted).sum())
        assert abs(matches - rows * overlap) <= 4 * np.sqrt(rows * overlap * (1 - overlap))
        free = shared.tokens(head.expand(rows, 4), None)
        assert counts_fit(np.bincount(free.numpy(), minlength=4), head.numpy())


@pytest.mark.invariant(8)
@pytest.mark.parametrize(
    ("bonus", "sampling"), [(False, Sampling(1.3, 0.7)), (True, Sampling(1.3))]
)
def test_random_draws_emit_the_targets_distribution(bonus: bool, sampling: Sampling) -> None:
    trials, head = 1_500, torch.tensor([[1.0, 0.2, -0.5], [0.0, 0.8, 0.1]])
    target = torch.tensor([[0.1, 0.9, 0.0], [0.7, -0.3, 0.2], [0.0, 1.0, 0.4]])
    torch.set_num_threads(1)
    draws = Draws(sampling, torch.Generator().manual_seed(8))
    first, second, lengths = np.zeros(3), np.zeros(3), []
    for _ in range(trials):
        drafted = torch.cat([draws.propose(row[None], 0, 0, []) for row in head])
        accepted, emitted, tokens = draws.settle(drafted, head, target[: 2 + bonus], 0)
        assert emitted.tolist() == tokens
        assert len(tokens) == min(accepted + 1, 2 + bonus)
        assert tokens[:accepted] == drafted[:accepted].tolist()
        lengths.append(accepted)
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    want = probs(target, sampling).numpy()
    assert counts_fit(first, want[0])
    # The rows do not depend on the tokens here, so neither does the second emitted one.
    assert counts_fit(second, want[1])
    overlap = np.minimum(probs(head, sampling).numpy(), want[:2]).sum(-1)
    mean = overlap[0] * (1 + overlap[1])
    error = np.std(lengths) / np.sqrt(trials)
    assert abs(np.mean(lengths) - mean) < 4 * error


@SAMPLINGS
def test_real_and_replayed_rounds_have_one_distribution(sampling: Sampling) -> None:
    source, policy, _ = ARMS["specbound"]
    count = 50
    trace = sampled_trace(count, 21, sampling)
    log = replay_source(trace, source, policy, recordings=record(trace, 22, ["specbound"]))
    torch.manual_seed(23)
    runner = SourceRunner(model(), trace, {"early-exit": heads()})
    same_means(run_source(runner, source, policy).log, log)


@SAMPLINGS
def test_a_sampled_recording_survives_its_file(tmp_path: Path, sampling: Sampling) -> None:
    trace, recordings = case(sampling)
    write_recordings(recordings, tmp_path)
    assert not read_recordings(tmp_path)
    again = read_recordings(tmp_path, sampled=True)
    assert again["early-exit"].sampling == trace.sampling == sampling
    source, policy, _ = ARMS["specbound"]
    np.testing.assert_array_equal(
        replay_source(trace, source, policy, recordings=again).rounds,
        replay_source(trace, source, policy, RejectionSampling(), recordings=recordings).rounds,
    )


def test_a_sampled_recording_fits_its_trace_alone() -> None:
    trace, recordings = case()
    source, policy, _ = ARMS["specbound"]
    for wrong, shown in ((GREEDY, "greedy"), (CUT, r"T=0\.8, top-p 0\.7")):
        other = Trace(trace.columns, trace.requests, None, {"sampling": wrong.meta})
        with pytest.raises(DraftsimError, match=rf"decoded T=0\.8, and the trace's were {shown}"):
            replay_source(other, source, policy, recordings=recordings)
        with pytest.raises(DraftsimError, match=rf"are {shown}, and this source .* along T=0\.8"):
            record_along(ExitRecorder(LayerRunner(model(), 64), heads(), (), sampling=HOT), other)
    with pytest.raises(
        DraftsimError, match="record them with `draftsim profile sources --exit-layers`"
    ):
        replay_source(trace, source, policy)
    with pytest.raises(DraftsimError, match="use RejectionSampling"):
        replay_source(trace, source, policy, ExactMatch(), recordings=recordings)
    with pytest.raises(DraftsimError, match="was sampled"):
        replay_source(trace, PLD(), policy)
    runner = SourceRunner(model(), trace, {"early-exit": heads()})
    with pytest.raises(DraftsimError, match="'pld' is decoded greedily alone"):
        runner.decoder(PLD(), 0)
    with pytest.raises(ValueError, match="temperature is 0"):
        Draws(GREEDY)
