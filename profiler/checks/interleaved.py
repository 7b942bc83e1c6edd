"""Arms decoded for real in turn, one stream at a time; a check that was stopped goes on.

Every request is decoded under every arm before the next request, and the order of the arms
rotates, so that a slow minute of the machine falls on all.  A run that was disturbed is made
again, within a budget of every arm's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch

from policies.core import DraftPolicy, Round, own_copy, speculate
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from profiler.machine.repeats import Repeats, sweeps
from profiler.machine.state import Machine
from profiler.machine.stopwatch import Timing, timed
from profiler.models.loading import Pair
from profiler.recording.checkpoint import Checkpoint
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.machine import State
from traces.store.measured import MEASURED_COLUMNS, OFF_COLUMNS


@dataclass(frozen=True)
class Arm:
    """A policy to run, under the name it is reported by; losslessly unless a rule is given."""

    name: str
    policy: DraftPolicy
    rule: VerifyRule | None = None

    @property
    def label(self) -> str:
        """The label of its runs: the name, and the rule if it is lossy."""
        return self.name if self.lossy is None else f"{self.name} {describe_rule(self.lossy)}"

    @property
    def lossy(self) -> VerifyRule | None:
        """The rule, unless it is lossless: then the decoder needs none."""
        return None if self.rule is None or self.rule.lossless else self.rule

    def verify(self, trace: Trace) -> str:
        """Name of the rule that its drafts are verified with along `trace`."""
        if self.lossy is not None:
            return describe_rule(self.lossy)
        return "exact" if trace.temperature == 0 else "rejection-sampling"


Opener = Callable[[Arm, int, int, VerifyRule | None], Any]
"""From an arm, a request, a repeat and the sweep's own rule: a decoder after its prefill."""

Learnt = tuple[DraftPolicy, VerifyRule | None]
"""An arm's policy and rule of one sweep, with what they learnt in it so far."""


Attempt = tuple[Timing, tuple[Learnt, Any, list[Round]]]
"""A run's time; what its arm has then learnt, its decoder and its rounds."""


class Ran(NamedTuple):
    """An arm's run of a request: the least disturbed one, and how often it was made again.

    ``mismatched`` and ``log_probs`` are those of `profiler.decoding.single.ModelDecoder`, of runs
    under a lossy rule.
    """

    taken: Timing
    repeated: int
    rounds: list[Round]
    output: list[int]
    mismatched: list[int]
    log_probs: list[float]


class Runs(NamedTuple):
    """Times of every run (`MEASURED_COLUMNS`), and by label each arm's runs of the first repeat.

    ``rules`` are the rules as the first repeat left them.
    """

    times: pd.DataFrame
    first: dict[str, list[Ran]]
    rules: dict[str, VerifyRule | None]
    machine: State


def run_interleaved(
    pair: Pair,
    trace: Trace,
    arms: Sequence[Arm],
    opened: Opener,
    vocab_size: int,
    *,
    requests: Sequence[int] | None = None,
    forced: bool = False,
    repeats: int = 3,
    advance: Callable[[], None] = lambda: None,
    kept: Checkpoint | None = None,
) -> Runs:
    """Decode `requests` of `trace` (None: all) for real under every arm, `repeats` times.

    Policies that learn across requests, and lossy rules, start each repeat without what they
    learnt.  ``advance`` is called after every arm's run of a request.

    What `kept` holds of an earlier call is not run again: all arms' runs of a request are put
    there together.  A policy that learns across requests then decodes those of the repeat that
    was under way once more, untimed, and so has learnt what it had: exact in every mode, at the
    price of a part of one repeat of that arm.  Runs under a lossy rule are not kept.  In what is
    told of the machine, steal and other work are those since the last call.

    Raises
    ------
    DraftsimError
        If a rule or policy cannot run here.
    """
    if kept is not None and any(arm.lossy for arm in arms):
        raise ValueError("runs under a lossy rule are not kept")
    chosen = range(len(trace.requests)) if requests is None else requests
    names = {arm.label: (arm.name, arm.verify(trace)) for arm in arms}
    rows: list[tuple[Any, ...]] = []
    first: dict[str, list[Ran]] = {arm.label: [] for arm in arms}
    rules: dict[str, VerifyRule | None] = {}
    machine, counted = Machine(pair.target, pair.device), {arm.label: Repeats() for arm in arms}
    for repeat in sweeps(repeats):
        learnt = {arm.label: _begun(arm, vocab_size, trace.sampling) for arm in arms}
        earlier: list[int] = []  # requests of this repeat that an earlier call ran
        for n, i in enumerate(chosen if repeat >= 0 else chosen[:1]):
            rotated = [arms[(k + n + repeat) % len(arms)] for k in range(len(arms))]
            run = partial(_decoded, pair.device, opened, repeat)
            if repeat < 0:  # what warms up does so on one request
                _in_turn(rotated, i, run, learnt, {arm.label: Repeats(0) for arm in arms})
                continue
            step = f"{repeat:03d}-{n:05d}"
            ran = None if kept is None else _restored(kept, step, machine, counted)
            if ran is not None:
                earlier.append(i)
                for _ in arms:
                    advance()
            else:
                for arm in (a for a in arms if a.policy.learns_across_requests):
                    for j in earlier:
                        _, (learnt[arm.label], *_) = run(j, arm, learnt[arm.label])
                earlier.clear()
                machine.pulse()
                ran = _in_turn(rotated, i, run, learnt, counted, advance)
                if kept is not None:
                    _keep(kept, step, machine, counted, ran)
            for label, one in ran.items():
                rows.append(
                    (*names[label], 1, forced, repeat, trace.requests[i].id, one.taken.wall_s,
                     len(one.rounds), one.taken.off_s, one.repeated)
                )  # fmt: skip
                if repeat == 0:
                    first[label].append(one)
        if repeat == 0:
            rules = {label: rule for label, (_, rule) in learnt.items()}
    times = pd.DataFrame(rows, columns=[*MEASURED_COLUMNS, *OFF_COLUMNS])
    return Runs(times, first, rules, machine.state(list(counted.values())))


def _in_turn(
    arms: Sequence[Arm], request: int, run: Callable[[int, Arm, Learnt], Attempt],
    learnt: dict[str, Learnt], counted: Mapping[str, Repeats],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Ran]:  # fmt: skip
    """Every arm's run of a request; `learnt` is then what they have learnt by it."""
    ran = {}
    for arm in arms:
        again = counted[arm.label]
        before = again.repeated
        # Made again, a run begins with what was learnt before it.
        taken, (learnt[arm.label], decoder, rounds) = again.best(
            partial(run, request, arm, learnt[arm.label])
        )
        ruled = (decoder.mismatched, decoder.log_probs) if arm.lossy else ([], [])
        ran[arm.label] = Ran(taken, again.repeated - before, rounds, decoder.output, *ruled)
        advance()
    return ran


def _decoded(
    device: torch.device, opened: Opener, repeat: int, request: int, arm: Arm, learnt: Learnt
) -> Attempt:
    learner, rule = deepcopy(learnt)
    decoder = opened(arm, request, repeat, rule)
    with timed(device) as span:
        rounds = _rounds(decoder, learner.fresh(), arm)
    if rule is not None:
        rule.end_request()
    return span.timing, ((learner, rule), decoder, rounds)


def _rounds(decoder: Any, policy: DraftPolicy, arm: Arm) -> list[Round]:
    try:
        return list(speculate(decoder, policy))
    except ValueError as error:
        # `Oracle` asks how far the drafts match, which a lossy path does not know.
        if decoder.remaining and decoder.load.run_length is None:
            raise DraftsimError(
                f"{arm.label} cannot be decoded for real: {error}; drop this policy"
            ) from error
        raise


def _begun(arm: Arm, vocab_size: int, sampling: Sampling) -> Learnt:
    """The sweep's own copies of the arm's policy and rule; no rule where it is lossless."""
    policy = own_copy(arm.policy, vocab_size)
    if arm.lossy is None:
        return policy, None
    rule = arm.lossy.fresh()
    try:
        rule.begin_run(vocab_size, sampling.temperature, sampling.top_p)
    except ValueError as error:
        raise DraftsimError(f"{describe_rule(arm.lossy)}: {error}") from None
    return policy, rule


def _keep(
    kept: Checkpoint, step: str, machine: Machine, counted: Mapping[str, Repeats],
    ran: Mapping[str, Ran],
) -> None:  # fmt: skip
    """Keep what all arms' runs of a request gave, and the counters as they are then."""
    found = {
        "ran": {label: one._asdict() for label, one in ran.items()},
        "counted": {label: vars(one) for label, one in counted.items()},
        "reference_s": machine.taken[-1:],
    }
    kept.put_json(step, found)


def _restored(
    kept: Checkpoint, step: str, machine: Machine, counted: dict[str, Repeats]
) -> dict[str, Ran] | None:
    """Return what `_keep` kept and set the counters to it; None if there is nothing."""
    found = kept.get_json(step)
    if found is None:
        return None
    machine.taken += found["reference_s"]
    for label, figures in found["counted"].items():
        vars(counted[label]).update(figures, kept=Timing(*figures["kept"]))
    return {
        label: Ran(
            **{
                **one,
                "taken": Timing(*one["taken"]),
                "rounds": [Round(*r) for r in one["rounds"]],
            }
        )
        for label, one in found["ran"].items()
    }
