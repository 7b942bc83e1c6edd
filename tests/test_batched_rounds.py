"""Batched decoding: outputs of each sequence alone, rounds of the replay and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from policies import (
    SVIP,
    AdaptiveVerification,
    Autoregressive,
    BatchTable,
    Confidence,
    ConfidenceFreeze,
    DraftPolicy,
    Fixed,
    GammaTune,
    HFHeuristic,
    LlamaCppDraft,
    Oracle,
    Round,
    SGLangAdaptive,
    UCBSpec,
)
from policies.batch.base import BatchPolicy
from policies.together import TruncateToMinimum, together_of
from profiler.checks.differences import output_of
from profiler.checks.spot_check import groups_of
from profiler.decoding.batch import BatchedDecoder, Stream, speculate_batch
from profiler.models.runner import Runner
from simulator.serving.arrivals import Job
from simulator.serving.sequence import EngineState, ServedSequence, Slot, step
from tests.batched import (
    END,
    GAMMA,
    LENGTHS,
    NEW,
    SLOTS,
    pair,
    prompts,
    replayed,
    run_lengths,
    runners,
    trace,
)
from tests.batched_decoding import decode_batch
from tests.outputs import greedy
from traces.acceptance.trace import MATCH, Trace


def test_the_recording_exercises_what_the_tests_are_about() -> None:
    """Acceptance is ragged, some outputs end early and at different times, others do not."""
    assert 0.2 < (trace().run_lengths > 0).mean() < 0.95
    assert len({r.tokens for r in trace().requests}) > 2
    assert {r.ended for r in trace().requests} == {"eos", "length"}


@cache
def alone() -> list[list[int]]:
    """The output of every prompt, decoded by itself."""
    runner = Runner(pair().target, SLOTS)
    return [greedy(runner, prompt, NEW, END) for prompt in prompts()]


@pytest.mark.invariant(8)
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 9, 16])
def test_outputs_are_those_of_each_sequence_alone(batch: int, continuous: bool) -> None:
    done = decode_batch(*runners(batch), prompts(), NEW, END, Fixed(3), continuous=continuous)
    assert done.outputs == alone()
    assert done.outputs == [output_of(trace(), i) for i in range(len(prompts()))]


POLICIES = [
    Autoregressive(), Fixed(1), Fixed(8), GammaTune(gamma_max=GAMMA), HFHeuristic(gamma_max=GAMMA),
    Oracle(gamma_max=GAMMA), Oracle("run+1", gamma_max=GAMMA), SVIP(gamma_max=GAMMA),
    Confidence(gamma=GAMMA, confidence_threshold=0.6, roc_update="in_call"),
    UCBSpec(gammas=(1, 3, 6)),
]  # fmt: skip


@pytest.mark.invariant(1)
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_rounds_are_the_replays(policy: DraftPolicy, continuous: bool) -> None:
    """Work included: draft passes and catch-up agree, too."""
    done = decode_batch(
        *runners(4), prompts(), NEW, END, policy, continuous=continuous,
        run_lengths=run_lengths(trace()),
    )  # fmt: skip
    assert done.rounds == replayed(trace(), policy)


def test_the_ten_likeliest_tokens_of_every_row() -> None:
    """Half of the drafted tokens are unsure, and a pass gives those of the whole batch."""
    policy = LlamaCppDraft(GAMMA, p_min=float(np.median(trace().signal("top10_prob"))))
    done = decode_batch(*runners(4), prompts(), NEW, END, policy)
    assert done.rounds == replayed(trace(), policy)
    dropped = [r.draft_forwards - r.drafted for rounds in done.rounds for r in rounds]
    assert set(dropped) == {0, 1}


def test_a_learner_has_one_copy_per_place_in_the_batch() -> None:
    policy = UCBSpec(gammas=(1, 3, 6), learns_across_requests=True)
    done = decode_batch(*runners(3), prompts(), NEW, END, policy)
    for seat in range(3):
        own = range(seat, len(prompts()), 3)
        fresh = UCBSpec(gammas=(1, 3, 6), learns_across_requests=True)
        assert [done.rounds[i] for i in own] == replayed(trace().select(own), fresh)


def test_iterations_of_a_static_batch_are_those_of_its_slowest() -> None:
    own = [len(rounds) for rounds in replayed(trace(), Fixed(2))]
    done = decode_batch(*runners(4), prompts(), NEW, END, Fixed(2))
    assert done.iterations == sum(max(own[i] for i in g) for g in groups_of(len(own), 4))
    flowing = decode_batch(*runners(4), prompts(), NEW, END, Fixed(2), continuous=True)
    # Places are never idle while someone waits (list scheduling, Graham 1969).
    assert -(-sum(own) // 4) <= flowing.iterations <= sum(own) / 4 + max(own)


class Alone(DraftPolicy):
    """Notes the batch sizes it is told."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def begin_round(self, load: Any) -> None:
        self.batches.append(load.batch)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return not draft


def test_policies_are_told_how_many_decode() -> None:
    decoder, style = BatchedDecoder(*runners(9)), together_of(Alone())
    streams = [Stream(i, prompt, NEW, END) for i, prompt in enumerate(prompts())]
    sizes = [len(iteration) for iteration in speculate_batch(decoder, style, streams)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    for stream in streams:
        told = stream.policy.batches
        assert told == sizes[: len(told)]


STYLES: list[tuple[Any, Any]] = [
    (SVIP(gamma_max=GAMMA), "ragged"),
    (GammaTune(gamma_max=GAMMA), "minimum"),
    (SVIP(gamma_max=GAMMA), "mean"),
    (ConfidenceFreeze(stop_early=True), "ragged"),
    (AdaptiveVerification(budget=12), "ragged"),
    (BatchTable([[1, 2, 3], [3, 4, 0]]), "ragged"),
    (SGLangAdaptive({"1": {"candidate_steps": [0, 2]}}), "ragged"),
]


@pytest.mark.invariant(9)
@pytest.mark.parametrize(("policy", "style"), STYLES)
def test_rounds_are_those_the_simulator_serves(policy: Any, style: Any) -> None:
    done = decode_batch(*runners(4), prompts(), NEW, END, policy, synchronise=style)
    together, engine = together_of(policy, style, guarded=True), EngineState()
    served: list[list[Round]] = [[] for _ in prompts()]
    for group in groups_of(len(prompts()), 4):
        slots = []
        for i in group:
            request = trace().requests[i]
            job = Job(0.0, i, request.prompt_length, request.tokens)
            slots.append(Slot(i, job, 0.0, ServedSequence(trace(), job, NEW, engine)))
        for slot in slots:
            together.join(slot)
            slot.decoder.declare(together.reads)
        while slots := [slot for slot in slots if not slot.decoder.ended]:
            engine.batch = len(slots)
            for slot, outcome in zip(slots, step(together, slots), strict=True):
                served[slot.index].append(outcome)
    assert done.rounds == served


@pytest.mark.parametrize(
    "policy",
    [ConfidenceFreeze(), AdaptiveVerification(), BatchTable([[1, 1, 0], [2, 2, 3]])],
)
def test_batch_policies_of_one_are_the_single_stream_ones(policy: BatchPolicy) -> None:
    from policies.batch.base import SingleStream

    done = decode_batch(*runners(1), prompts(), NEW, END, policy)
    assert done.rounds == replayed(trace(), SingleStream(policy.fresh()))


def synchronised(
    trace: Trace, group: Sequence[int], gamma: int, style: str
) -> list[list[tuple[int, int]]]:
    """(drafted, accepted) of a fixed-length policy, looked up in the recording row by row."""
    names = ("request", "position", "offset", "draft_token", "match")
    rows = zip(*(trace.columns[n].tolist() for n in names), strict=True)
    proposals = {(i, at, k): (token, match == MATCH) for i, at, k, token, match in rows}
    position = dict.fromkeys(group, 1)
    tokens = [r.tokens for r in trace.requests]
    out: dict[int, list[tuple[int, int]]] = {i: [] for i in group}
    while going := [i for i in group if position[i] < tokens[i]]:
        drafted, accepted = {}, {}
        for i in going:
            matched, count, wrong = 0, 0, None
            while count < min(gamma, NEW - position[i] - 1):
                on_path = (i, position[i] + count, 0)
                token, match = proposals[on_path if wrong is None else (i, wrong, count - matched)]
                if wrong is None and not match:
                    wrong = position[i] + count
                matched, count = matched + (wrong is None), count + 1
                if token in END:
                    break
            drafted[i], accepted[i] = count, matched
        if style == "minimum":
            on = [a for i, a in accepted.items() if position[i] + a + 1 < tokens[i]]
            floor = min(on) if on else max(accepted.values())
            accepted = {i: min(a, floor) for i, a in accepted.items()}
        for i in going:
            out[i].append((drafted[i], accepted[i]))
            position[i] += accepted[i] + 1
    return [out[i] for i in group]


@pytest.mark.parametrize("style", ["ragged", "minimum"])
def test_truncation_against_matches_alone(style: Any) -> None:
    done = decode_batch(*runners(5), prompts(), NEW, END, Fixed(4), synchronise=style)
    assert done.outputs == [output_of(trace(), i) for i in range(len(prompts()))]
    for group in groups_of(len(prompts()), 5):
        real = [[(r.drafted, r.accepted) for r in done.rounds[i]] for i in group]
        assert real == synchronised(trace(), group, 4, style)


class Alternate(DraftPolicy):
    """Wants one token, and `more` in all if its context is even: votes that disagree."""

    def __init__(self, more: int) -> None:
        self.more = more
        self._even = False

    def begin_round(self, load: Any) -> None:
        self._even = load.context % 2 == 0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < (self.more if self._even else 1)


@pytest.mark.parametrize("chosen", [range(len(LENGTHS)), (0, 6)])
def test_stopping_at_the_mean_is_a_vote(chosen: Sequence[int]) -> None:
    decoder, style = BatchedDecoder(*runners(9)), together_of(Alternate(5), "mean")
    streams = [Stream(i, prompts()[i], NEW) for i in chosen]
    outcomes, ties = set(), 0
    for iteration in speculate_batch(decoder, style, streams):
        if any(NEW - r.position - 1 <= 5 for _, r in iteration):
            continue
        # Everybody has room and nothing is EOS: all draft alike, so all votes are one vote.
        even = [(int(s.prompt.shape[0]) + r.position) % 2 == 0 for s, r in iteration]
        expected = 5 if 2 * sum(even) >= len(even) else 1
        assert [r.drafted for _, r in iteration] == [expected] * len(iteration)
        outcomes.add(expected)
        ties += 2 * sum(even) == len(even)
    assert outcomes == {1, 5}
    assert ties or len(chosen) % 2
    alone = Runner(pair().target, SLOTS)
    none: frozenset[int] = frozenset()
    assert [s.output for s in streams] == [greedy(alone, prompts()[i], NEW, none) for i in chosen]


def test_a_sequence_that_ends_holds_nobody_back() -> None:
    """The minimum is over those that go on; if all end, each keeps its own."""
    keep = TruncateToMinimum(Fixed(4)).keep
    assert keep([3, 1, 2], [False, True, False]) == [2, 1, 2]
    assert keep([3, 1], [True, True]) == [3, 1]
