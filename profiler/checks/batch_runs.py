"""Full batched runs of policies on the device, with which predictions are compared.

Consecutive requests of the trace are decoded in groups of `batch`, each until its slowest
has ended (a static batch); the last group may be smaller.  Arms run in turn
(`profiler.checks.turns`), every batch size within every repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import pandas as pd
import torch

from policies.core import Round
from policies.together import Together, together_of
from profiler.checks.spot_check import Arm, Measured, check_decodable
from profiler.checks.turns import Attempt, CheckWork, take_turns
from profiler.decoding.batch import BatchedDecoder, Stream, enter, speculate_batch
from profiler.decoding.forced import ForcedStream
from profiler.machine import timed
from profiler.models.loading import Pair
from profiler.models.runner import Runner
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog
from traces.store.checkpoint import Checkpoint
from traces.store.measured import MEASURED_COLUMNS, OFF_COLUMNS

Unit = tuple[int, Any]
"""A batch size, and a group of as many requests."""


def groups_of(requests: int, batch: int) -> list[range]:
    """Return the groups of consecutive requests that are decoded together.

    >>> groups_of(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(i, min(i + batch, requests)) for i in range(0, requests, batch)]


def run_batches(
    pair: Pair,
    trace: Trace,
    arms: Sequence[Arm],
    *,
    batches: Sequence[int] = (1, 4, 16),
    forced: bool = False,
    repeats: int = 3,
    advance: Callable[[], None] = lambda: None,
    kept: Checkpoint | None = None,
    in_time: Callable[[], bool] | None = None,
    runner: Callable[[Any, int, int], Runner] = Runner,
) -> Measured:
    """Decode the trace's requests for real under every arm at every batch size.

    The times have a row per arm, batch, repeat and group: ``request`` is the id of the group's
    first request, ``wall_s`` the seconds from the end of the group's prefill to its last token,
    ``rounds`` its iterations.  Round k of a request ran in iteration k of its group.

    ``forced`` takes drafts and verdicts from the trace instead of the models.  ``advance``
    is called after every arm's run of a group.  What `kept` holds of an earlier call is not run
    again, and with `in_time` as many groups are run as there is time for (`take_turns`).
    ``runner`` makes a model's runner for a number of slots and of sequences.

    Raises
    ------
    DraftsimError
        If a batch size is below 1, or the trace was sampled or has no prompts (and the run is
        not forced).
    """
    if bad := [b for b in batches if b < 1]:
        raise DraftsimError(f"batch is {bad[0]}, expected at least 1")
    if not forced:
        check_decodable(pair, trace)
    if not forced and trace.temperature > 0:
        raise DraftsimError(
            f"this trace was sampled at temperature {trace.temperature:g}, and batches are decoded "
            "greedily: record at temperature 0, or use --forced"
        )
    work = _Groups(pair, trace, arms, batches, forced, runner)
    turns = take_turns(pair, work, repeats, advance, kept, in_time)
    keys = {work.label(arm, (batch, None)): (arm, batch) for batch in batches for arm in arms}
    rows: list[tuple[Any, ...]] = []
    rounds: dict[tuple[str, int], list[list[Round]]] = {}
    outputs: dict[tuple[str, int], list[list[int]]] = {}
    for arm, batch in keys.values():
        rounds[arm.name, batch] = [[] for _ in trace.requests]
        outputs[arm.name, batch] = [[] for _ in trace.requests]
    ran = Counter[int]()
    for one in turns.taken:
        (arm, batch), (_, group), found = keys[one.label], one.unit, one.found
        ran[batch] = max(ran[batch], group[-1] + 1)  # the first requests, in whole groups
        rows.append(
            (arm.name, arm.verify(trace), batch, forced, one.repeat, trace.requests[group[0]].id,
             one.timing.wall_s, found["iterations"], one.timing.off_s, one.repeated)
        )  # fmt: skip
        if one.repeat == 0:
            for i, own, output in zip(group, found["rounds"], found["outputs"], strict=True):
                rounds[arm.name, batch][i] = [Round(*r) for r in own]
                outputs[arm.name, batch][i] = output
    logs = {
        (arm.name, batch): RoundLog(
            RoundLog.pack(rounds[arm.name, batch][: ran[batch]]),
            trace.requests[: ran[batch]],
            arm.name,
            verify=arm.verify(trace),
            reads=arm.policy.reads,
        )
        for arm, batch in keys.values()
        if ran[batch]
    }
    times = pd.DataFrame(rows, columns=[*MEASURED_COLUMNS, *OFF_COLUMNS])
    return Measured(times, logs, outputs, machine=turns.machine)


class _Groups(CheckWork):
    """Groups of requests at each batch size; the style of a policy decides what it learns."""

    def __init__(
        self, pair: Pair, trace: Trace, arms: Sequence[Arm], batches: Sequence[int],
        forced: bool, runner: Callable[[Any, int, int], Runner],
    ) -> None:  # fmt: skip
        self.arms, self._pair, self._trace, self._forced = arms, pair, trace, forced
        self.units = [(b, group) for b in batches for group in groups_of(len(trace.requests), b)]
        self._decoders = {
            b: BatchedDecoder(
                *(runner(model, trace.longest, b) for model in (pair.target, pair.draft)),
                watch_eos=not forced,
            )
            for b in batches
        }

    def size(self, unit: Unit) -> int:
        return unit[0]

    def captured(self) -> int:
        return sum(d.target.captured + d.draft_model.captured for d in self._decoders.values())

    def label(self, arm: Arm, unit: Unit) -> str:
        return f"{arm.name} at batch {unit[0]}"

    def begun(self, arm: Arm, unit: Unit) -> Together:
        vocab_size = self._trace.vocab_size or self._decoders[unit[0]].target.vocab_size
        return together_of(arm.policy, vocab_size=vocab_size)

    def attempt(self, repeat: int, unit: Unit, arm: Arm, learnt: Together) -> Attempt:
        (batch, group), style = unit, deepcopy(learnt)
        decoder = self._decoders[batch]
        streams = [_stream(self._pair, self._trace, i, self._forced) for i in group]
        enter(decoder, style, streams)
        with timed(self._pair.device) as span:
            log = list(speculate_batch(decoder, style))
        rounds: dict[int, list[Round]] = {i: [] for i in group}
        for stream, outcome in chain.from_iterable(log):
            rounds[stream.request].append(outcome)
        found = {
            "rounds": list(rounds.values()), "iterations": len(log),
            "outputs": [stream.output for stream in streams],
        }  # fmt: skip
        return span.timing, (style, found)


def _stream(pair: Pair, trace: Trace, i: int, forced: bool) -> Stream:
    if forced:
        vocab = int(pair.target.config.get_text_config().vocab_size)
        return ForcedStream(trace, i, vocab, pair.device)
    info, starts = trace.requests[i], trace.request_starts
    runs = trace.run_lengths[starts[i] : starts[i + 1]].tolist()
    prompt = torch.tensor(info.prompt_ids, device=pair.device)
    return Stream(i, prompt, info.max_new_tokens, pair.eos, runs)
