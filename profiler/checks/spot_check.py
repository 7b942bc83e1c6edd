"""Full runs of policies on the device, to hold predictions against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from policies.rules.base import VerifyRule
from profiler.checks.differences import before
from profiler.checks.interleaved import Arm, run_interleaved
from profiler.decoding.forced import ForcedDecoder
from profiler.decoding.single import ModelDecoder
from profiler.models.loading import Pair, check_same_models
from profiler.models.seq2seq import make_runner
from profiler.recording.checkpoint import Checkpoint
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog

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
    """Opens requests of a trace with both models of a pair (`profiler.checks.interleaved.Opener`).

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
    ``kept`` makes a stopped call go on (see `profiler.checks.interleaved`).

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
