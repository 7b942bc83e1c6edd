"""Times single passes as the decoder runs them, and parts of passes.

On a device that lags the host these do not add up from parts.  They are therefore measured where
they occur: the real loop runs fixed draft lengths with dictated verdicts, and what the passes' own
cells do not explain is the host's share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from policies.core import DraftPolicy, Round, speculate
from policies.lengths.basic import Fixed
from policies.together import PerRequest
from profiler.decoding.batch import BatchedDecoder, enter, speculate_batch
from profiler.decoding.forced import ForcedDecoder, ForcedStream
from profiler.decoding.single import ModelToken
from profiler.features.heads import ExitHeads
from profiler.latency.batch import batch_pass
from profiler.latency.host import HOST_GAMMAS
from profiler.latency.passes import random_ids
from profiler.latency.table import Stopwatch
from profiler.machine import timed
from profiler.models.graphs import CompiledRunner, GraphRunner, capture
from profiler.models.runner import Runner
from profiler.models.sampling import draw
from profiler.models.stack import LayerRunner
from profiler.suite.environment import Workplace
from traces.acceptance.sampling import GREEDY
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable

EAGER, GRAPH, COMPILED = "eager", "graph", "compiled"
MODES = (EAGER, GRAPH, COMPILED)
RUNNERS = {EAGER: Runner, GRAPH: GraphRunner, COMPILED: CompiledRunner}
MOST = 16
"""Passes in one timing at most."""
LONG_CALLS, LONG_REPEATS = 2, 3
"""Calls and timings of a pass so long that these alone tell its time."""
COUPLES = 2
"""Calls in one timing of a call that follows another one."""


class Sample(NamedTuple):
    """Median and half the interquartile range of some repeats, seconds."""

    median_s: float
    spread_s: float
    repeats: int


def make_runner(mode: str, model: Any, slots: int, batch: int = 1) -> Runner:
    """The runner of a mode: what Hugging Face users get, their kernels in a graph, or compiled."""
    return RUNNERS[mode](model, slots, batch)


@dataclass(frozen=True)
class Timer:
    """Times calls in the middle of a stream of them.

    Calls follow each other without waiting, as passes within a round do: the host prepares
    one while the device still runs the last.  What waiting adds is measured in whole rounds
    (`profiler.suite.latency.passes`).

    Parameters
    ----------
    repeats:
        Timings of a call.
    enough_s:
        A timing holds as many calls as last this long, three to MOST of them; one if it is 0, as in
        miniatures.  Of a call that takes this long itself there are LONG_REPEATS of LONG_CALLS: its
        spread is small, and such calls are what the stage's time goes into.
    """

    device: torch.device
    repeats: int = 5
    enough_s: float = 0.008

    def time(self, run: Callable[[], object], alone: bool = False) -> Sample:
        """Seconds of one call; ``alone`` waits around each, as prefill does."""
        watch = Stopwatch(self.device)
        run()
        first = watch.time(run)
        count = int(np.clip(np.ceil(self.enough_s / max(first, 1e-7)), 3, MOST))
        if self._long(first):
            count = LONG_CALLS
        count = 1 if alone or not self.enough_s else count

        def several() -> None:
            for _ in range(count):
                run()

        return summary([watch.time(several) / count for _ in range(self._timings(first))])

    def following(self, before: Callable[[], object], run: Callable[[], object]) -> Sample:
        """Return the seconds of a call right after another one, as a draft pass after the target's.

        What ran before decides what the caches hold and how far the host is ahead.
        """

        def both() -> None:
            before()
            run()

        both()
        first = Stopwatch(self.device).time(both)
        return summary([self._couples(before, run) for _ in range(self._timings(first))])

    def _long(self, seconds: float) -> bool:
        return 0 < self.enough_s <= seconds

    def _timings(self, seconds: float) -> int:
        return min(self.repeats, LONG_REPEATS) if self._long(seconds) else self.repeats

    def _couples(self, before: Callable[[], object], run: Callable[[], object]) -> float:
        """Mean seconds of `run` over some couples, on a device that was idle."""
        if self.device.type != "cuda":
            spent = 0.0
            for _ in range(COUPLES):
                before()
                begin = time.perf_counter()
                run()
                spent += time.perf_counter() - begin
            return spent / COUPLES
        torch.cuda.synchronize(self.device)
        marks = []
        for _ in range(COUPLES):
            before()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            marks.append((start, stop))
        torch.cuda.synchronize(self.device)
        return sum(float(start.elapsed_time(stop)) for start, stop in marks) / 1e3 / COUPLES


def summary(seconds: Sequence[float]) -> Sample:
    """Median and spread of some timings of the same call."""
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return Sample(float(median), float(high - low) / 2, len(seconds))


def fill(runner: Runner) -> None:
    """Random keys and values in every slot: zeros would draw less power than text does."""
    runner.forward_batch(
        torch.zeros(1, 1, dtype=torch.long, device=runner.device),
        torch.zeros(1, 1, dtype=torch.long, device=runner.device), 1,
    )  # fmt: skip
    with torch.inference_mode():
        for layer in runner.cache.layers:
            for states in (layer.keys, layer.values):  # type: ignore[union-attr]
                assert states is not None
                states.normal_()


def forward_call(
    runner: Runner, batch: int, width: int, context: int, *, drafts: bool
) -> Callable[[], object]:
    """Return one pass followed by the choice of tokens, as target or as draft."""
    if batch == 1:
        ids = random_ids(runner, width)
        keep = 1 if drafts else width
        return lambda: runner.forward(ids, context, keep=keep).argmax(-1)
    run = batch_pass(runner, batch, width, context, keep=1 if drafts else 0)
    return lambda: run().argmax(-1)


def cell(model: str, phase: str, batch: int, width: int, context: int, s: Sample) -> list[Any]:
    """A row of `traces.latency.schema.CELL_COLUMNS`."""
    return [model, phase, batch, width, context, s.median_s, s.spread_s, s.repeats]


def table_of(rows: Sequence[Sequence[Any]]) -> LatencyTable:
    """Rows as in `cell` as a table."""
    return LatencyTable(pd.DataFrame(rows, columns=list(CELL_COLUMNS)))


def prefill_cells(
    runner: Runner, model: str, lengths: Sequence[int], timer: Timer
) -> list[list[Any]]:
    """Cells of whole prompts, each waited for."""
    rows = []
    for length in lengths:
        ids = random_ids(runner, length)

        def run(ids: Tensor = ids) -> object:
            return runner.forward(ids, 0, keep=1)

        sample = timer.time(run, alone=True)
        rows.append(cell(model, "prefill", 1, length, 0, sample))
    return rows


def choice_parts(runner: Runner, timer: Timer) -> list[dict[str, Any]]:
    """Times of what happens to logits: argmax, a draw at T = 1, copying, a draft's signals."""
    device, dtype = runner.device, runner.model.dtype
    rows = torch.randn(8, runner.vocab_size, device=device, dtype=dtype)
    one = rows[:1]
    token = one.argmax(-1)

    # A new token each time: one keeps what it has fetched.
    calls: dict[str, Callable[[], object]] = {
        "argmax of 1 row": lambda: one.argmax(-1),
        "argmax of 8 rows": lambda: rows.argmax(-1),
        "draw of 1 row at T = 1": lambda: draw(torch.softmax(one.float(), -1), None),
        "copy of 1 row of logits": one.clone,
        "signals of 1 row, fetched": lambda: ModelToken(token, one, GREEDY, None).prob,
        "rollback (cache placement)": lambda: runner.cache.place(0),
    }
    with torch.inference_mode():
        samples = {name: timer.time(run) for name, run in calls.items()}
    return [{"part": name, **sample._asdict()} for name, sample in samples.items()]


def captured(run: Callable[[], Tensor], device: torch.device) -> Callable[[], object]:
    """`run` as one CUDA graph; on a CPU, `run` itself."""
    if device.type != "cuda":
        return run
    graph, _ = capture(run, device)
    return graph.replay


@torch.inference_mode()
def layer_cells(
    mode: str,
    model: Any,
    name: str,
    widths: Sequence[int],
    contexts: Sequence[int],
    timer: Timer,
    *,
    exits: bool,
    check_time: Callable[[], None] = lambda: None,
) -> list[list[Any]]:
    """Cells ``layer`` and ``head`` of a model, and ``head`` of its exits.

    A layer's time is that of the whole stack over the number of layers: one after another
    is how they run.  The head is the final norm, the output projection and the argmax; an
    exit's is its low-rank block, norm, projection and confidence.  `check_time` is asked before
    every cell, and may raise.
    """
    runner = LayerRunner(model, max(contexts) + max(widths))
    fill(runner)
    device, rows = runner.device, []
    hidden_size = model.config.get_text_config().hidden_size
    heads = ExitHeads((max(1, runner.layers // 2),), hidden_size).to(device)

    def timed(run: Callable[[], Tensor]) -> Any:
        check_time()
        return timer.time(captured(run, device) if mode == GRAPH else run)

    for width in widths:
        states = torch.randn(width, hidden_size, device=device, dtype=model.dtype)
        for context in contexts:
            sample = timed(partial(runner.run_layers, states, context, range(runner.layers)))
            share = sample._replace(
                median_s=sample.median_s / runner.layers, spread_s=sample.spread_s / runner.layers
            )
            rows.append(cell(name, "layer", 1, width, context, share))

        def finish(s: Tensor = states) -> Tensor:
            return runner.logits(s).argmax(-1)

        sample = timed(finish)
        rows.append(cell(name, "head", 1, width, 0, sample))
        if exits:

            def leave(s: Tensor = states) -> Tensor:
                logits = runner.project(heads.states(0, s)).float()
                return logits.amax(-1) - logits.logsumexp(-1)

            rows.append(cell("exit", "head", 1, width, 0, timed(leave)))
    return rows


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


KERNELS: Mapping[str, str] = {
    EAGER: "Hugging Face modules, launched kernel by kernel",
    GRAPH: "Hugging Face kernels in a CUDA graph, attention grouped and split over the keys",
    COMPILED: "torch.compile and fused projections in a CUDA graph, attention as in graph",
}
"""Description of each mode that was measured; none is an engine."""

GAMMA, TOKENS, PROMPT = 4, 12, 64
"""The rounds that are traced: drafted tokens, and the run that they are from."""


@contextmanager
def span(name: str) -> Iterator[None]:
    """An NVTX range around work on a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@contextmanager
def named_passes(runner: Runner, name: str) -> Iterator[None]:
    """Inside the block every pass of a runner is a named range, of NVTX and of a profile."""

    def within(run: Any, *args: Any, **kwargs: Any) -> Any:
        width = args[0].shape[-1]
        with span(f"{name}, {width} wide"), record_function(f"{name}, {width} wide"):
            return run(*args, **kwargs)

    own: Any = runner
    passes = ("forward", "forward_batch")
    for method in passes:
        setattr(own, method, partial(within, getattr(own, method)))
    try:
        yield
    finally:
        for method in passes:
            delattr(own, method)


def profile_rounds(place: Workplace, name: str, mode: str, models: tuple[Any, Any]) -> Path:
    """Write the kernels of a few rounds as ``profile-NAME-MODE.json``, Chrome's trace format.

    The rounds are those of a run with dictated verdicts, after one that captures and warms up;
    every pass is a named range.  Opens in Perfetto and chrome://tracing.
    """
    tokens, prompt = (6, 16) if place.quick else (TOKENS, PROMPT)
    trace = loop_trace(1, tokens, prompt, GAMMA)
    target, draft = (make_runner(mode, model, tokens + prompt + GAMMA + 1) for model in models)
    for runner in (target, draft):
        fill(runner)
    run_single(target, draft, trace, 0, Fixed(GAMMA))
    path = place.out / f"profile-{name}-{mode}.json"
    part = path.with_suffix(".part.json")
    wanted: Sequence[ProfilerActivity] = sorted(supported_activities(), key=str)
    with ExitStack() as stack:
        for runner, role in ((target, "target"), (draft, "draft")):
            stack.enter_context(named_passes(runner, role))
        kept = stack.enter_context(profile(activities=wanted))
        with record_function("rounds"):
            run_single(target, draft, trace, 0, Fixed(GAMMA))
    kept.export_chrome_trace(str(part))
    part.replace(path)
    return path
