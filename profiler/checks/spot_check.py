"""Full runs of policies on the device, to hold predictions against.

Arms run interleaved: every request is decoded under every arm before the next request,
and the order of the arms rotates, so that a slow minute of the machine falls on all.
A run that was disturbed is made again, within a budget of every arm's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from policies.core import DraftPolicy, Round, own_copy, speculate
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from profiler.decoding.forced import ForcedDecoder
from profiler.decoding.single import ModelDecoder
from profiler.machine.repeats import Repeats, sweeps
from profiler.machine.state import Machine
from profiler.machine.stopwatch import Timing, timed
from profiler.models.loading import Pair, check_same_models
from profiler.models.runner import Runner
from profiler.models.seq2seq import make_runner
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
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
        """What `Measured` files its rounds under: the name, and the rule if it is lossy."""
        return self.name if self.lossy is None else f"{self.name} {describe_rule(self.lossy)}"

    @property
    def lossy(self) -> VerifyRule | None:
        """The rule, unless it is lossless: then the decoder needs none."""
        return None if self.rule is None or self.rule.lossless else self.rule


Attempt = tuple[Timing, tuple[DraftPolicy, VerifyRule | None, ModelDecoder, list[Round]]]
"""A run's time; policy and rule as it left them, its decoder and its rounds."""


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


def run_arms(
    pair: Pair,
    trace: Trace,
    arms: Sequence[Arm],
    *,
    forced: bool = False,
    repeats: int = 3,
    advance: Callable[[], None] = lambda: None,
) -> Measured:
    """Decode the trace's requests for real under every arm, `repeats` times.

    ``forced`` takes drafts and verdicts from the trace instead of the models (see
    `profiler.decoding.forced`).  ``advance`` is called after every arm's run of a request.  A
    lossy rule is copied for each repeat and shared by its requests, in the order of the trace.

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
    slots = trace.longest
    target, draft = make_runner(pair.target, slots), make_runner(pair.draft, slots)
    generator = torch.Generator(pair.device)
    lossless = "exact" if trace.temperature == 0 else "rejection-sampling"
    verify = {a.label: describe_rule(a.lossy) if a.lossy else lossless for a in arms}
    rows: list[tuple[Any, ...]] = []
    rounds: dict[str, list[list[Round]]] = {arm.label: [] for arm in arms}
    ended: dict[str, list[ModelDecoder]] = {arm.label: [] for arm in arms}
    rules: dict[str, VerifyRule | None] = {}
    machine, counted = Machine(pair.target, pair.device), {arm.label: Repeats() for arm in arms}
    for repeat in sweeps(repeats):  # what warms up does so on one request
        # Policies that learn across requests start each sweep anew.
        shared = {arm.label: own_copy(arm.policy, target.vocab_size) for arm in arms}
        used = {arm.label: _prepared(arm, target, trace.sampling) for arm in arms}
        if repeat == 0:
            rules = used
        for i in range(len(trace.requests) if repeat >= 0 else 1):
            if repeat >= 0:
                machine.pulse()
            for k in range(len(arms)):
                arm = arms[(k + i + repeat) % len(arms)]

                learnt = shared[arm.label], used[arm.label]

                def attempt(
                    arm: Arm = arm, i: int = i, repeat: int = repeat, learnt: Any = learnt
                ) -> Attempt:
                    # Made again, a run begins with what was learnt before it.
                    learner, rule = deepcopy(learnt)
                    generator.manual_seed(repeat * 7919 + i)
                    decoder = _decoder(pair, target, draft, trace, i, forced, generator, rule)
                    with timed(pair.device) as span:
                        log = _run(decoder, learner.fresh(), arm)
                    if rule is not None:
                        rule.end_request()
                    return span.timing, (learner, rule, decoder, log)

                again = counted[arm.label] if repeat >= 0 else Repeats(0)
                before = again.repeated
                taken, (shared[arm.label], used[arm.label], decoder, log) = again.best(attempt)
                if repeat < 0:
                    continue
                request = trace.requests[i].id
                rows.append(
                    (arm.name, verify[arm.label], 1, forced, repeat, request, taken.wall_s,
                     len(log), taken.off_s, again.repeated - before)
                )  # fmt: skip
                if repeat == 0:
                    rounds[arm.label].append(log)
                    ended[arm.label].append(decoder)
                advance()
    logs = {}
    for arm in arms:
        decoders, rule = ended[arm.label], rules[arm.label]
        requests: Sequence[Request] = trace.requests
        mismatched = None
        if rule is not None:
            requests = [
                _emitted(r, d.output, pair.eos)
                for r, d in zip(trace.requests, decoders, strict=True)
            ]
            mismatched = np.array([n for d in decoders for n in d.mismatched], dtype=np.int32)
        logs[arm.label] = RoundLog(
            RoundLog.pack(rounds[arm.label]), requests, arm.name, verify=verify[arm.label],
            reads=arm.policy.reads, first=trace.first, mismatched=mismatched, rule=rule,
        )  # fmt: skip
    return Measured(
        pd.DataFrame(rows, columns=[*MEASURED_COLUMNS, *OFF_COLUMNS]), logs,
        {label: [d.output for d in decoders] for label, decoders in ended.items()},
        {arm.label: [sum(d.log_probs) for d in ended[arm.label]] for arm in arms if arm.lossy},
        machine.state(list(counted.values())),
    )  # fmt: skip


def _emitted(request: Request, output: Sequence[int], eos: frozenset[int]) -> Request:
    """`request` with the length and end of an output of its own."""
    ended: Literal["eos", "length"] = "eos" if output[-1] in eos else "length"
    return replace(request, tokens=len(output), ended=ended, wall_s=None)


def _prepared(arm: Arm, target: Runner, sampling: Sampling) -> VerifyRule | None:
    """The sweep's own copy of the arm's rule; None where verification is lossless."""
    if arm.lossy is None:
        return None
    rule = arm.lossy.fresh()
    try:
        rule.begin_run(target.vocab_size, sampling.temperature, sampling.top_p)
    except ValueError as error:
        raise DraftsimError(f"{describe_rule(arm.lossy)}: {error}") from None
    return rule


def _run(decoder: ModelDecoder, policy: DraftPolicy, arm: Arm) -> list[Round]:
    try:
        return list(speculate(decoder, policy))
    except ValueError as error:
        # `Oracle` asks how far the drafts match, which a lossy path does not know.
        if decoder.remaining and decoder.load.run_length is None:
            raise DraftsimError(
                f"{arm.label} cannot be decoded for real: {error}; drop this policy"
            ) from error
        raise


def rounds_differ(real: RoundLog, replayed: RoundLog) -> int:
    """Rounds whose (drafted, accepted) differ, request by request; unequal counts differ too."""
    count = 0
    for i in range(len(real.requests)):
        mine, theirs = (log.rounds[log.rounds["request"] == i] for log in (real, replayed))
        shared = min(len(mine), len(theirs))
        differ = (mine["drafted"][:shared] != theirs["drafted"][:shared]) | (
            mine["accepted"][:shared] != theirs["accepted"][:shared]
        )
        count += int(differ.sum()) + abs(len(mine) - len(theirs))
    return count


def _decoder(
    pair: Pair, target: Runner, draft: Runner, trace: Trace, i: int, forced: bool,
    generator: torch.Generator, rule: VerifyRule | None,
) -> ModelDecoder:  # fmt: skip
    if forced:
        return ForcedDecoder(target, draft, trace, i)
    info = trace.requests[i]
    starts = trace.request_starts
    runs = None
    if trace.temperature == 0 and rule is None:
        runs = trace.run_lengths[starts[i] : starts[i + 1]].tolist()
    prompt = torch.tensor(info.prompt_ids, device=pair.device)
    return ModelDecoder(
        target, draft, prompt, info.max_new_tokens, pair.eos,
        sampling=trace.sampling, generator=generator, first=trace.first, run_lengths=runs,
        rule=rule,
    )  # fmt: skip
