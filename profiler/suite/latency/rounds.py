"""Time of whole rounds beyond their passes: waiting, launching, accepting, reading signals.

On a device that lags the host these do not add up from parts.  They are therefore measured where
they occur: the real loop runs fixed draft lengths with dictated verdicts, and what the passes' own
cells do not explain is the host's share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from policies.core import DraftPolicy, Round, speculate
from policies.lengths.basic import Fixed
from policies.together import PerRequest
from profiler.decoding.batch import BatchedDecoder, enter, speculate_batch
from profiler.decoding.forced import ForcedDecoder, ForcedStream
from profiler.latency.host import HOST_GAMMAS
from profiler.machine import timed
from profiler.models.graphs import GraphRunner
from profiler.models.runner import Runner
from profiler.suite.latency.passes import cell, summary
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

ALPHA = 0.7
"""Acceptance of the loops, so that some rounds catch up and some do not."""

Floats = npt.NDArray[np.float64]


class ReadingFixed(Fixed):
    """A fixed length that reads a signal of every drafted token, as adaptive policies do."""

    reads = ("prob",)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        """Return True until the length is reached; reads the last token's probability."""
        if draft:
            _ = draft[-1].prob
        return super().keep_drafting(draft)


def loop_trace(requests: int, tokens: int, prompt: int, max_gamma: int) -> Trace:
    """The recording that dictates the loops' verdicts."""
    return synthetic_trace(
        ALPHA, requests=requests, tokens=tokens, prompt_length=prompt, max_gamma=max_gamma,
        concentration=4.0, seed=11,
    )  # fmt: skip


def run_single(
    target: Runner, draft: Runner, trace: Trace, request: int, policy: DraftPolicy
) -> tuple[float, list[Round]]:
    """Seconds after prefill, and the rounds, of one request with dictated verdicts."""
    decoder = ForcedDecoder(target, draft, trace, request)
    with timed(target.device) as seconds:
        log = list(speculate(decoder, policy.for_run().fresh()))
    return seconds(), log


def run_group(
    target: Runner, draft: Runner, trace: Trace, group: Sequence[int], policy: DraftPolicy
) -> tuple[float, list[list[Round]]]:
    """Seconds after prefill of requests decoded together, and each iteration's rounds."""
    decoder = BatchedDecoder(target, draft, watch_eos=False)
    together = PerRequest(policy.for_run())
    streams = [ForcedStream(trace, i, target.vocab_size, target.device) for i in group]
    enter(decoder, together, streams)
    with timed(target.device) as seconds:
        log = [[outcome for _, outcome in it] for it in speculate_batch(decoder, together)]
    return seconds(), log


def first_pass(latency: LatencyTable, batch: int, width: int, context: int) -> float:
    """Return the seconds of a round's first draft pass, over `width` tokens, as the cells say."""
    phase = latency.first_draft_phase("draft")
    return float(
        latency.seconds(
            "draft", phase, batch=batch, new_tokens=width, context=max(context - width, 0)
        )
    )


def pass_seconds(rounds: Sequence[Round], prompt: int, latency: LatencyTable) -> float:
    """Return the seconds of the passes of a single stream's rounds, as the cells say."""
    total = 0.0
    for r in rounds:
        context = prompt + r.position
        total += _verification(latency, 1, r.drafted + 1, context)
        if r.draft_forwards:
            total += first_pass(latency, 1, r.catch_up, context)
            later = np.arange(context, context + r.draft_forwards - 1)
            total += float(latency.seconds("draft", "forward", context=later).sum())
    return total


def group_pass_seconds(
    iterations: Sequence[Sequence[Round]], prompt: int, latency: LatencyTable
) -> float:
    """Return the seconds of a batch's passes by the cells: the widest and longest rectangles."""
    total = 0.0
    for rounds in iterations:
        batch = len(rounds)
        context = prompt + max(r.position for r in rounds)
        width = max(r.drafted for r in rounds) + 1
        total += _verification(latency, batch, width, context)
        drafting = [r for r in rounds if r.draft_forwards]
        longest = max(r.draft_forwards for r in rounds)
        if drafting:
            catch_up = max(r.catch_up for r in drafting)
            total += first_pass(latency, batch, catch_up, context)
            later = context + np.arange(longest - 1)
            total += float(latency.seconds("draft", "forward", batch=batch, context=later).sum())
    return total


def _verification(latency: LatencyTable, batch: int, width: int, context: int) -> float:
    return float(
        latency.seconds(
            "target", "forward", batch=batch, new_tokens=width, context=max(context - 1, 0)
        )
    )


def host_cells(
    target: Runner, draft: Runner, latency: LatencyTable, *, batch: int = 1, repeats: int = 3,
    tokens: int = 40, prompt: int = 64, gammas: Sequence[int] = HOST_GAMMAS,
    late: Callable[[], bool] = lambda: False, check_time: Callable[[], None] = lambda: None,
) -> list[list[Any]]:  # fmt: skip
    """Cells ``host_round``, ``host_draft`` and ``signal`` at a batch size.

    By least squares over draft lengths, of what the passes leave of whole runs.  At a batch
    a round is an iteration and a drafted token a draft step of the batch.  Once it is `late` no
    further repeat begins; `check_time` is asked before every run, and may raise.
    """
    trace = loop_trace(batch, tokens, prompt, max(gammas))

    def once(policy: DraftPolicy) -> tuple[float, int, int]:
        """Seconds beyond the passes, rounds, and draft steps."""
        check_time()
        if batch == 1:
            spent, log = run_single(target, draft, trace, 0, policy)
            return (
                spent - pass_seconds(log, prompt, latency), len(log),
                sum(r.draft_forwards for r in log),
            )  # fmt: skip
        spent, many = run_group(target, draft, trace, range(batch), policy)
        steps = sum(max(r.draft_forwards for r in rounds) for rounds in many)
        return spent - group_pass_seconds(many, prompt, latency), len(many), steps

    shape = (repeats, len(gammas))
    plain, reading = np.empty(shape), np.empty(shape)
    rounds, steps = np.empty(len(gammas)), np.empty(len(gammas))
    done = 0
    if isinstance(target, GraphRunner):  # every shape: reading signals has none of its own
        for gamma in gammas:
            once(Fixed(gamma))
    once(ReadingFixed(min(g for g in gammas if g)))
    for repeat in range(repeats):
        if done and late():
            break
        for i, gamma in enumerate(gammas):
            plain[repeat, i], rounds[i], steps[i] = once(Fixed(gamma))
            reading[repeat, i] = once(ReadingFixed(gamma))[0] if steps[i] else np.nan
        done = repeat + 1
    plain, reading = plain[:done], reading[:done]
    counts = np.stack([rounds, steps], axis=1)
    # Together non-negative: work that the device hides must not count twice.
    fits = np.array([nnls(counts, row)[0] for row in plain])
    drafting = steps > 0
    extra = ((reading - plain)[:, drafting] / steps[drafting]).mean(axis=1).clip(min=0)
    named: list[tuple[str, str, Floats]] = [
        ("target", "host_round", fits[:, 0]), ("target", "host_draft", fits[:, 1]),
        ("draft", "signal", extra),
    ]  # fmt: skip
    return [
        cell(model, phase, batch, 1, 0, summary(values.tolist())) for model, phase, values in named
    ]
