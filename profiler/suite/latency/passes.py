"""Times single passes as the decoder runs them, and parts of passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from profiler.decoding.single import ModelToken
from profiler.latency.batch import batch_pass
from profiler.latency.passes import random_ids
from profiler.latency.table import Stopwatch
from profiler.models.graphs import CompiledRunner, GraphRunner
from profiler.models.runner import Runner
from profiler.models.sampling import draw
from traces.acceptance.sampling import GREEDY
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
    (`profiler.suite.latency.rounds`).

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
