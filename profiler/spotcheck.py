"""Full runs of policies on the device, to hold predictions against.

Arms run interleaved: every request is decoded under every arm before the next request,
and the order of the arms rotates, so that a slow minute of the machine falls on all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from policies.core import DraftPolicy, Round, speculate
from profiler.decoder import ModelDecoder
from profiler.forced import ForcedDecoder
from profiler.loading import Pair
from profiler.runner import Runner
from traces.errors import DraftsimError
from traces.measured import MEASURED_COLUMNS
from traces.rounds import RoundLog
from traces.trace import Trace


@dataclass(frozen=True)
class Arm:
    """A policy to run, under the name it is reported by."""

    name: str
    policy: DraftPolicy


@dataclass(frozen=True, eq=False)
class Measured:
    """Times of every run (`MEASURED_COLUMNS`) and each arm's rounds and outputs."""

    times: pd.DataFrame
    logs: dict[str, RoundLog]
    outputs: dict[str, list[list[int]]]


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
    `profiler.forced`).  ``advance`` is called once per request and repeat.

    Raises
    ------
    DraftsimError
        If the trace has no prompts to run (and the run is not forced).
    """
    if not forced and any(r.prompt_ids is None for r in trace.requests):
        raise DraftsimError("this trace holds no prompts to decode again: use --forced")
    slots = max(r.prompt_length + r.max_new_tokens for r in trace.requests)
    target, draft = Runner(pair.target, slots), Runner(pair.draft, slots)
    generator = torch.Generator(pair.device)
    verify = "exact" if trace.temperature == 0 else "rejection-sampling"
    rows: list[tuple[Any, ...]] = []
    rounds: dict[str, list[list[Round]]] = {arm.name: [] for arm in arms}
    outputs: dict[str, list[list[int]]] = {arm.name: [] for arm in arms}
    for repeat in range(-1, repeats):  # the sweep before the first warms up, on one request
        # Policies that learn across requests start each sweep anew.
        shared = {arm.name: arm.policy.fresh() for arm in arms}
        for i in range(len(trace.requests) if repeat >= 0 else 1):
            for k in range(len(arms)):
                arm = arms[(k + i + repeat) % len(arms)]
                generator.manual_seed(repeat * 7919 + i)
                decoder = _decoder(pair, target, draft, trace, i, forced, generator)
                mine = shared[arm.name] if arm.policy.learns_across_requests else arm.policy.fresh()
                with timed(pair.device) as seconds:
                    log = list(speculate(decoder, mine))
                if repeat < 0:
                    continue
                request = trace.requests[i].id
                rows.append((arm.name, verify, 1, forced, repeat, request, seconds(), len(log)))
                if repeat == 0:
                    rounds[arm.name].append(log)
                    outputs[arm.name].append(decoder.output)
            if repeat >= 0:
                advance()
    logs = {
        arm.name: RoundLog(
            RoundLog.pack(rounds[arm.name]), trace.requests, arm.name, reads=arm.policy.reads
        )
        for arm in arms
    }
    return Measured(pd.DataFrame(rows, columns=list(MEASURED_COLUMNS)), logs, outputs)


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
    generator: torch.Generator,
) -> ModelDecoder:  # fmt: skip
    if forced:
        return ForcedDecoder(target, draft, trace, i)
    info = trace.requests[i]
    starts = trace.request_starts
    runs = trace.run_lengths[starts[i] : starts[i + 1]].tolist() if trace.temperature == 0 else None
    prompt = torch.tensor(info.prompt_ids, device=pair.device)
    return ModelDecoder(
        target, draft, prompt, info.max_new_tokens, pair.eos,
        temperature=trace.temperature, generator=generator, run_lengths=runs,
    )  # fmt: skip


@contextmanager
def timed(device: torch.device) -> Iterator[Callable[[], float]]:
    """Wall seconds of the block, garbage collection kept out of it."""
    gc.collect(0)
    gc.disable()
    span = [0.0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    try:
        yield lambda: span[0]
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        span[0] = time.perf_counter() - begin
        gc.enable()


def assisted_generation(
    pair: Pair, prompt: torch.Tensor, max_new_tokens: int, **settings: Any
) -> tuple[list[int], int, float]:
    """transformers' own assisted generation: (output ids, target passes, wall seconds).

    ``settings`` go to the draft's generation config: ``num_assistant_tokens``,
    ``num_assistant_tokens_schedule``, ``assistant_confidence_threshold``.
    """
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    config = pair.draft.generation_config
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    handle = pair.target.register_forward_pre_hook(count)
    try:
        with torch.inference_mode(), timed(pair.device) as seconds:
            out = pair.target.generate(
                input_ids=prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                assistant_model=pair.draft,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
    finally:
        handle.remove()
        for name, value in before.items():
            setattr(config, name, value)
    return out[0, prompt.shape[0] :].tolist(), passes, seconds()


def output_of(trace: Trace, request: int) -> list[int]:
    """The recorded output of a request."""
    starts = trace.request_starts
    rows = trace.on_path[starts[request] : starts[request + 1]]
    tokens: list[int] = np.asarray(trace.columns["token"])[rows].tolist()
    return tokens
