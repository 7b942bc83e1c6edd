"""Full batched runs of policies on the device, to hold predictions against.

Consecutive requests of the trace are decoded in groups of `batch`, each until its slowest
has ended (a static batch); the last group may be smaller.  Arms run interleaved as in
`profiler.checks.spot_check`: each group is decoded under every arm before the next group, in
rotated order, every batch size within every repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

import pandas as pd
import torch

from policies.core import Round
from policies.together import Policy, Synchronise, Together, together_of
from profiler.decoding.batch import BatchedDecoder, Stream, enter, speculate_batch
from profiler.decoding.forced import ForcedStream
from profiler.machine import Machine, Repeats, Timing, sweeps, timed
from profiler.models.loading import Pair, check_same_models
from profiler.models.runner import Runner
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog
from traces.store.measured import MEASURED_COLUMNS, OFF_COLUMNS


@dataclass(frozen=True)
class BatchArm:
    """A policy to run, per request or per batch, under the name it is reported by."""

    name: str
    policy: Policy
    synchronise: Synchronise = "ragged"


@dataclass(frozen=True, eq=False)
class MeasuredBatches:
    """Times of every group, and each arm's rounds and outputs at each batch size.

    ``times`` has a row (`MEASURED_COLUMNS`) per arm, batch, repeat and group: ``request``
    is the id of the group's first request, ``wall_s`` the seconds from the end of the
    group's prefill to its last token, ``rounds`` its iterations.  ``logs`` and ``outputs``
    are keyed by (arm, batch).  Round k of a request ran in iteration k of its group.
    """

    times: pd.DataFrame
    logs: dict[tuple[str, int], RoundLog]
    outputs: dict[tuple[str, int], list[list[int]]]
    machine: dict[str, Any] = field(default_factory=dict)
    """How quiet the machine was (`traces.machine`)."""


Attempt = tuple[Timing, tuple[Together, list[Stream], list[list[tuple[Stream, Round]]]]]
"""A run's time; the style as it left it, its streams, and the rounds of each iteration."""


def groups_of(requests: int, batch: int) -> list[range]:
    """Return the groups of consecutive requests that are decoded together.

    >>> groups_of(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(i, min(i + batch, requests)) for i in range(0, requests, batch)]


def run_batches(
    pair: Pair,
    trace: Trace,
    arms: Sequence[BatchArm],
    *,
    batches: Sequence[int] = (1, 4, 16),
    forced: bool = False,
    repeats: int = 3,
    advance: Callable[[], None] = lambda: None,
) -> MeasuredBatches:
    """Decode the trace's requests for real under every arm at every batch size.

    ``forced`` takes drafts and verdicts from the trace instead of the models.  ``advance``
    is called after every arm's run of a group.

    Raises
    ------
    DraftsimError
        If a batch size is below 1, the trace was sampled or has no prompts (and the run is
        not forced), or an arm cannot be synchronised as it asks.
    """
    if bad := [b for b in batches if b < 1]:
        raise DraftsimError(f"batch is {bad[0]}, expected at least 1")
    if not forced and any(r.prompt_ids is None for r in trace.requests):
        raise DraftsimError("this trace holds no prompts to decode again: use --forced")
    if not forced and trace.temperature > 0:
        raise DraftsimError(
            f"this trace was sampled at temperature {trace.temperature:g}, and batches are decoded "
            "greedily: record at temperature 0, or use --forced"
        )
    if not forced:
        check_same_models(trace.meta, pair)
    count = len(trace.requests)
    slots = trace.longest
    verify = "exact" if trace.temperature == 0 else "rejection-sampling"
    rows: list[tuple[Any, ...]] = []
    keys = [(arm.name, batch) for batch in batches for arm in arms]
    rounds: dict[tuple[str, int], list[list[Round]]] = {k: [[] for _ in range(count)] for k in keys}
    outputs: dict[tuple[str, int], list[list[int]]] = {k: [[] for _ in range(count)] for k in keys}
    runners = {b: (Runner(pair.target, slots, b), Runner(pair.draft, slots, b)) for b in batches}
    machine, counted = Machine(pair.target, pair.device), {key: Repeats() for key in keys}
    for repeat, batch in product(sweeps(repeats), batches):
        decoder = BatchedDecoder(*runners[batch], watch_eos=not forced)
        # Policies that learn across requests start each sweep without what they learnt.
        vocab = decoder.target.vocab_size
        styles = [together_of(arm.policy, arm.synchronise, vocab) for arm in arms]
        groups = groups_of(count, batch)
        # What warms up does so on one group.
        for g, group in enumerate(groups if repeat >= 0 else groups[:1]):
            if repeat >= 0:
                machine.pulse()
            for k in range(len(arms)):
                at = (k + g + repeat) % len(arms)

                def attempt(
                    group: range = group, learnt: Together = styles[at],
                    decoder: BatchedDecoder = decoder,
                ) -> Attempt:  # fmt: skip
                    # Made again, a run begins with what was learnt before it.
                    style = deepcopy(learnt)
                    streams = [_stream(pair, trace, i, forced) for i in group]
                    enter(decoder, style, streams)
                    with timed(pair.device) as span:
                        log = list(speculate_batch(decoder, style))
                    return span.timing, (style, streams, log)

                name, first = arms[at].name, trace.requests[group[0]].id
                again = counted[name, batch] if repeat >= 0 else Repeats(0)
                before = again.repeated
                taken, (styles[at], streams, log) = again.best(attempt)
                if repeat >= 0:
                    rows.append(
                        (name, verify, batch, forced, repeat, first, taken.wall_s, len(log),
                         taken.off_s, again.repeated - before)
                    )  # fmt: skip
                if repeat == 0:
                    for stream, outcome in chain.from_iterable(log):
                        rounds[name, batch][stream.request].append(outcome)
                    for stream in streams:
                        outputs[name, batch][stream.request] = stream.output
                if repeat >= 0:
                    advance()
    logs = {
        (arm.name, batch): RoundLog(
            RoundLog.pack(rounds[arm.name, batch]),
            trace.requests,
            arm.name,
            verify=verify,
            reads=arm.policy.reads,
        )
        for batch, arm in product(batches, arms)
    }
    times = pd.DataFrame(rows, columns=[*MEASURED_COLUMNS, *OFF_COLUMNS])
    return MeasuredBatches(times, logs, outputs, machine.state(list(counted.values())))


def _stream(pair: Pair, trace: Trace, i: int, forced: bool) -> Stream:
    if forced:
        vocab = int(pair.target.config.get_text_config().vocab_size)
        return ForcedStream(trace, i, vocab, pair.device)
    info, starts = trace.requests[i], trace.request_starts
    runs = trace.run_lengths[starts[i] : starts[i + 1]].tolist()
    prompt = torch.tensor(info.prompt_ids, device=pair.device)
    return Stream(i, prompt, info.max_new_tokens, pair.eos, runs)
