"""Full runs of policies on the device, to hold predictions against.

Every request is decoded under every arm before the next request, and the order of the arms
rotates, so that a slow minute of the machine falls on all.  A run that was disturbed is made
again, within a budget of every arm's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch

from policies.core import DraftPolicy, Round, own_copy, speculate
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from profiler.checks.differences import before
from profiler.decoding.forced import ForcedDecoder
from profiler.decoding.single import ModelDecoder
from profiler.machine import Machine, Repeats, Timing, sweeps, timed
from profiler.models.loading import Pair, check_same_models
from profiler.models.seq2seq import make_runner
from profiler.recording.checkpoint import Checkpoint
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
from traces.machine import State
from traces.replay.rounds import RoundLog
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
    """Return every arm's run of a request; `learnt` is then what they have learnt by it."""
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
    """Return the sweep's own copies of the arm's policy and rule; no rule where it is lossless."""
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


__all__ = ["Arm", "DraftModel", "Measured", "rounds_differ", "run_arms"]


@dataclass(frozen=True, eq=False)
class Measured:
    """Times of every run (`MEASURED_COLUMNS`) and each arm's rounds and outputs, by label.

    ``log_likelihoods`` holds, for arms with a lossy rule, the target's log-likelihood of
    each output at T = 1, in nats; ``machine`` how quiet the machine was (`traces.machine`).
    """

    times: pd.DataFrame
    logs: dict[str, RoundLog]
    outputs: dict[str, list[list[int]]]
    log_likelihoods: dict[str, list[float]]
    machine: dict[str, Any] = field(default_factory=dict)


class DraftModel:
    """Opens requests of a trace with both models of a pair (`profiler.checks.spot_check.Opener`).

    ``forced`` takes drafts and verdicts from the trace instead of the models (see
    `profiler.decoding.forced`).
    """

    def __init__(self, pair: Pair, trace: Trace, forced: bool = False) -> None:
        slots = trace.longest
        self.target, self.draft = make_runner(pair.target, slots), make_runner(pair.draft, slots)
        self._pair, self._trace, self._forced = pair, trace, forced
        self._generator = torch.Generator(pair.device)

    def __call__(self, arm: Arm, i: int, repeat: int, rule: VerifyRule | None) -> ModelDecoder:
        """Return a decoder after the prefill of request `i`; every repeat draws its own numbers."""
        del arm
        trace = self._trace
        if self._forced:
            return ForcedDecoder(self.target, self.draft, trace, i)
        info, starts, runs = trace.requests[i], trace.request_starts, None
        if trace.temperature == 0 and rule is None:
            runs = trace.run_lengths[starts[i] : starts[i + 1]].tolist()
        prompt = torch.tensor(info.prompt_ids, device=self._pair.device)
        return ModelDecoder(
            self.target, self.draft, prompt, info.max_new_tokens, self._pair.eos,
            sampling=trace.sampling, generator=self._generator.manual_seed(repeat * 7919 + i),
            first=trace.first, run_lengths=runs, rule=rule,
        )  # fmt: skip


def run_arms(
    pair: Pair,
    trace: Trace,
    arms: Sequence[Arm],
    *,
    forced: bool = False,
    repeats: int = 3,
    advance: Callable[[], None] = lambda: None,
    kept: Checkpoint | None = None,
) -> Measured:
    """Decode the trace's requests for real under every arm, `repeats` times.

    ``forced`` takes drafts and verdicts from the trace instead of the models (see
    `profiler.decoding.forced`).  ``advance`` is called after every arm's run of a request.  A
    lossy rule is copied for each repeat and shared by its requests, in the order of the trace.
    ``kept`` makes a stopped call go on (see `profiler.checks.spot_check`).

    Raises
    ------
    DraftsimError
        If the trace has no prompts to run (and the run is not forced), or a rule or policy
        cannot run here.
    """
    if forced and any(arm.lossy for arm in arms):
        raise DraftsimError("a forced run takes its verdicts from the trace: drop --verify")
    if not forced and any(r.prompt_ids is None for r in trace.requests):
        raise DraftsimError("this trace holds no prompts to decode again: use --forced")
    if not forced:
        check_same_models(trace.meta, pair)
    opened = DraftModel(pair, trace, forced)
    runs = run_interleaved(
        pair, trace, arms, opened, opened.target.vocab_size, forced=forced, repeats=repeats,
        advance=advance, kept=kept,
    )  # fmt: skip
    logs = {}
    for arm in arms:
        first, rule = runs.first[arm.label], runs.rules[arm.label]
        requests: Sequence[Request] = trace.requests
        mismatched = None
        if rule is not None:
            pairs = zip(trace.requests, first, strict=True)
            requests = [_emitted(r, ran.output, pair.eos) for r, ran in pairs]
            mismatched = np.array([n for ran in first for n in ran.mismatched], dtype=np.int32)
        logs[arm.label] = RoundLog(
            RoundLog.pack(ran.rounds for ran in first), requests, arm.name,
            verify=arm.verify(trace), reads=arm.policy.reads, first=trace.first,
            mismatched=mismatched, rule=rule,
        )  # fmt: skip
    return Measured(
        runs.times, logs,
        {label: [ran.output for ran in first] for label, first in runs.first.items()},
        {a.label: [sum(r.log_probs) for r in runs.first[a.label]] for a in arms if a.lossy},
        dict(runs.machine),
    )  # fmt: skip


def _emitted(request: Request, output: Sequence[int], eos: frozenset[int]) -> Request:
    """`request` with the length and end of an output of its own."""
    ended: Literal["eos", "length"] = "eos" if output[-1] in eos else "length"
    return replace(request, tokens=len(output), ended=ended, wall_s=None)


def rounds_differ(
    real: RoundLog, replayed: RoundLog, until: Mapping[int, int] | None = None
) -> int:
    """Count the rounds whose (drafted, accepted) differ; unequal numbers of rounds differ too.

    ``until``: by request, the position at which its text diverged; nothing after it is compared.
    """
    count, until = 0, until or {}
    for i in range(len(real.requests)):
        mine, theirs = (log.rounds[log.rounds["request"] == i] for log in (real, replayed))
        if i in until:
            mine, theirs = before(mine, until[i]), before(theirs, until[i])
        shared = min(len(mine), len(theirs))
        differ = (mine["drafted"][:shared] != theirs["drafted"][:shared]) | (
            mine["accepted"][:shared] != theirs["accepted"][:shared]
        )
        count += int(differ.sum()) + abs(len(mine) - len(theirs))
    return count
