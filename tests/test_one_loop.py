"""The loop for one sequence, for several, and over arrays: all go through the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import DraftPolicy, Load, Round, speculate
from policies.registry import parse_policy, policy_names
from policies.together import PerRequest
from simulator.serving.arrivals import Job
from simulator.serving.sequence import EngineState, ServedSequence, Slot, step
from tests.random_traces import recordings
from tests.test_policies_checks import VARIANTS
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay import vectorised
from traces.replay.decoder import ReplayDecoder
from traces.replay.rounds import RoundLog
from traces.replay.run import own_policy, replay
from traces.replay.vectorised import replay_many

PLANNED = (
    "fixed:gamma=0", "fixed:gamma=1", "fixed:gamma=24", "confidence:gamma=3",
    "confidence:confidence_threshold=0", "hf-heuristic:full_accept_means=budget",
    "hf-heuristic:persist=persistent", "hf-heuristic:confidence_threshold=0.5,gamma=2",
    "gammatune:delta=0,eta=1", "gammatune-plus:threshold=0.8,full_accept_means=budget",
    "svip:threshold=0.1", "svip:gamma_max=1", "cm-asd:gamma_max=5,gamma_min=2",
    "cm-asd:alpha=1.6,entropy_sign=literal", "llama-cpp:p_min=0.75,gamma_min=2,gamma=6",
)  # fmt: skip
NAMES = sorted({*policy_names(), *VARIANTS, *PLANNED})
UNRESERVED = 10**6
"""Slots that no draft fills."""


def parsed(name: str, trace: Trace) -> DraftPolicy:
    return parse_policy(name, max_gamma=trace.max_gamma or 24, vocab_size=1000)


def outcome(run: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """The rounds, or how asking for them failed."""
    try:
        found = run(*given, **more)
        return [tuple(one) for one in getattr(found, "rounds", found)]
    except DraftsimError as error:
        return type(error)


def walk(trace: Trace, policy: DraftPolicy, name: str) -> RoundLog:
    """The log without the loop, however few the requests."""
    with patch.object(vectorised, "FEWEST", 0):
        [log] = replay_many(trace, {name: policy})
    return log


def served(trace: Trace, policy: DraftPolicy, lookahead: int = UNRESERVED) -> list[Any]:
    """Rounds of every request, as the serving engine asks for them, numbered by request."""
    mine = own_policy(trace, policy)
    found: list[Any] = []
    for i, request in enumerate(trace.requests):
        job = Job(0.0, i, request.prompt_length, request.tokens)
        sequence = ServedSequence(trace, job, lookahead, EngineState())
        found += [(i, *one) for one in stepped(sequence, mine.fresh())]
    return found


def stepped(sequence: ServedSequence, policy: DraftPolicy) -> Iterator[Round]:
    """Rounds of a sequence that an engine decodes by itself."""
    together, slot = PerRequest(policy, guarded=True), Slot(0, Job(0.0, 0, 1, 1), 0.0, sequence)
    slot.policy = policy
    sequence.declare(policy.reads)
    while not sequence.ended:
        yield from step(together, [slot])


@pytest.mark.invariant(9)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(trace=recordings)
def test_the_three_loops_go_through_the_same_rounds(name: str, trace: Trace) -> None:
    policy = parsed(name, trace)
    if not set(policy.reads) <= trace.signals:
        return
    logged = outcome(replay, trace, policy)
    assert outcome(walk, trace, policy, name) == logged
    if isinstance(logged, list):
        log, walked = replay(trace, policy, name=name), walk(trace, policy, name)
        for field in ("policy", "source", "drafter", "verify", "fidelity", "reads", "first"):
            assert getattr(walked, field) == getattr(log, field), field
    # Whatever the recording did, an engine's prefill emits the first token.
    assert outcome(served, trace, policy) == outcome(replay, trace, policy, first=1)


@pytest.mark.invariant(9)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None)
@given(
    trace=recordings, request=st.integers(0, 2), output=st.integers(1, 90),
    lookahead=st.integers(0, 12), prompt=st.integers(1, 50), batch=st.integers(1, 9),
)  # fmt: skip
def test_a_request_of_another_length_is_decoded_by_the_same_loop(
    name: str, trace: Trace, request: int, output: int, lookahead: int, prompt: int, batch: int
) -> None:
    """Cut short, or begun again, with as many slots as the engine has reserved."""
    policy = parsed(name, trace)
    if not set(policy.reads) <= trace.signals:
        return
    engine = EngineState()
    engine.batch = batch

    def decoded(run: Callable[[ServedSequence, DraftPolicy], Any]) -> Any:
        own, job = own_policy(trace, policy), Job(0.0, request, prompt, output)
        return outcome(run, ServedSequence(trace, job, lookahead, engine), own.fresh())

    rounds = decoded(stepped)
    assert rounds == decoded(speculate)
    if isinstance(rounds, list):
        assert 1 + sum(emitted for _, _, _, emitted, _, _ in rounds) == output


class Noting(DraftPolicy):
    """Drafts three tokens, and notes what it may know of the engine."""

    def __init__(self) -> None:
        self.loads: list[Load] = []

    def begin_round(self, load: Load) -> None:
        self.loads.append(load)

    def keep_drafting(self, draft: Any) -> bool:
        return len(draft) < 3


class Wavering(DraftPolicy):
    """Ends every draft at two tokens, and would go on if it was asked again."""

    def __init__(self, reads: tuple[str, ...]) -> None:
        vars(self)["reads"] = reads

    def begin_round(self, load: Load) -> None:
        self.ended = False

    def keep_drafting(self, draft: Any) -> bool:
        ended, self.ended = self.ended, len(draft) == 2
        return len(draft) < (5 if ended else 2)


@pytest.mark.parametrize(("concentration", "reads"), [(None, ()), (4.0, ("prob",))])
def test_a_draft_that_has_ended_is_asked_about_no_more(
    concentration: float | None, reads: tuple[str, ...]
) -> None:
    trace = synthetic_trace(0.9, requests=3, tokens=30, concentration=concentration, seed=2)
    for i, request in enumerate(trace.requests):
        job = Job(0.0, i, request.prompt_length, request.tokens)
        sequence = ServedSequence(trace, job, UNRESERVED, EngineState())
        rounds = outcome(stepped, sequence, Wavering(reads))
        assert rounds == outcome(speculate, ReplayDecoder(trace, i, 1), Wavering(reads))
        assert max(drafted for _, drafted, *_ in rounds) == 2


@pytest.mark.invariant(9)
@settings(max_examples=40, deadline=None)
@given(trace=recordings)
def test_a_policy_is_told_the_same_load(trace: Trace) -> None:
    for i, request in enumerate(trace.requests):
        job = Job(0.0, i, request.prompt_length, request.tokens)
        replayed, engine = Noting(), Noting()
        theirs = outcome(speculate, ReplayDecoder(trace, i, 1), replayed)
        sequence = ServedSequence(trace, job, UNRESERVED, EngineState())
        assert outcome(stepped, sequence, engine) == theirs
        assert engine.loads == replayed.loads
        if trace.requests[i].tokens > 1:
            assert engine.loads[0].context == request.prompt_length + 1
