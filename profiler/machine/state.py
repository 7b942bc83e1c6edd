"""The machine's state during the runs: its speed at the moment, and its other work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profiler.machine.repeats import Repeats, counts
from profiler.machine.stopwatch import Clock, Stopwatch

STAT = Path("/proc/stat")


class Machine:
    """Keeps the figures of `traces.machine` while something is measured.

    The reference work reads every weight matrix of the target once, by a product with a vector:
    what a decoding pass does with memory, without the model around it.

    Parameters
    ----------
    model, device:
        The target, and where it runs.

    Attributes
    ----------
    taken:
        Seconds of the reference work, every time it was done.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._watch, self._work = Stopwatch(device), matrix_vector_products(model)
        self.taken: list[float] = []
        self._warm = False
        self._since = read_stat(), Clock().wall(), os.times()

    def pulse(self) -> None:
        """Do the reference work once; the first time, once more before it."""
        if self._work is None:
            return
        if not self._warm:
            self._work()
            self._warm = True
        self.taken.append(self._watch.time(self._work))

    def state(self, repeats: Sequence[Repeats]) -> dict[str, Any]:
        """The figures so far, those of runs from their counters."""
        middle = spread = None
        if self.taken:
            low, middle, high = (float(q) for q in np.quantile(self.taken, [0.25, 0.5, 0.75]))
            spread = (high - low) / 2
        return {
            **counts(repeats), **self._others(),
            "reference_s": middle, "reference_spread_s": spread,
        }  # fmt: skip

    def _others(self) -> dict[str, float | None]:
        """Steal and other work since the beginning."""
        before, begin, own = self._since
        now, wall, spent = read_stat(), Clock().wall() - begin, os.times()
        if before is None or now is None or wall <= 0:
            return {"steal": None, "others": None}
        change = now - before
        ticks = os.sysconf("SC_CLK_TCK")
        # user, nice, system, idle, iowait, irq, softirq, steal
        busy = float(change[[0, 1, 2, 5, 6]].sum()) / ticks
        mine = spent.user + spent.system - own.user - own.system
        return {
            "steal": float(change[7] / max(change[:8].sum(), 1)),
            "others": max(0.0, (busy - mine) / wall),
        }


def read_stat(path: Path = STAT) -> Any:
    """The processors' time by kind, in ticks, as an array; None where there is no such file."""
    try:
        fields = path.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        values = np.array(fields, dtype=np.int64)
    except (OSError, ValueError):
        return None
    return values if len(values) >= 8 else None


def matrix_vector_products(model: torch.nn.Module) -> Callable[[], object] | None:
    """A product of each weight matrix of `model` with a vector; None if it has none."""
    matrices = [p.detach() for p in model.parameters() if p.ndim == 2 and p.is_floating_point()]
    if not matrices:
        return None
    vectors = {m.shape[1]: m.new_ones(m.shape[1]) for m in matrices}

    def run() -> None:
        with torch.inference_mode():
            for matrix in matrices:
                torch.mv(matrix, vectors[matrix.shape[1]])

    return run
