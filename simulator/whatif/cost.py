"""The cost of an iteration with the noise of the target's widths smoothed out."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.estimators import rising_blocks
from simulator.serving.cost.policy_cost import TableCost
from traces.latency.table import LatencyTable

Floats = npt.NDArray[np.float64]


class LatencyCost(TableCost):
    """A `TableCost` in which a wider pass of the target costs no less than a narrower one.

    Differences between neighbouring widths decide how long a draft should be, and measured ones
    may be noise, or the step from one kernel to another.  So the target's seconds are an isotonic
    fit over the widths 1 to ``longest + 1``.

    Parameters
    ----------
    latency, signals:
        Of `TableCost`.
    longest:
        Draft length up to which the target's pass is fitted.
    smooth:
        False leaves the seconds as measured.
    """

    def __init__(
        self, latency: LatencyTable, signals: bool = True, longest: int = 24, smooth: bool = True
    ) -> None:
        super().__init__(latency, signals)
        self.longest, self.smooth = longest, smooth

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Seconds of `draft_length` batched draft steps and one verification."""
        seconds = super().__call__(batch, draft_length, verify_tokens, context)
        if not self.smooth:
            return seconds
        beyond = _beyond(self.latency, self.longest, batch, context)
        widths = np.arange(1.0, self.longest + 2)
        return seconds + float(np.interp(verify_tokens / batch, widths, beyond))

    def __deepcopy__(self, memo: dict[int, Any]) -> LatencyCost:
        return self  # a table of measurements, which nothing changes

    def __reduce__(self) -> tuple[type[LatencyCost], tuple[Any, ...]]:
        return type(self), (self.latency, self.signals, self.longest, self.smooth)


def _beyond(latency: LatencyTable, longest: int, batch: int, context: float) -> Floats:
    """Return what a fit that nowhere falls adds to the target's pass of each width, (widths,)."""
    known = _known.setdefault(latency, {})
    key = longest, batch, context
    if key not in known:
        width = np.arange(1, longest + 2)
        raw = latency.seconds("target", "forward", batch=batch, new_tokens=width, context=context)
        blocks = rising_blocks(raw, np.ones(len(raw)))
        values, weights = [v for _, _, v in blocks], [int(w) for _, w, _ in blocks]
        known[key] = np.repeat(values, weights) - raw
    return known[key]


# Fits of one recording read one table, under several ways to weigh the same passes.
_known: WeakKeyDictionary[LatencyTable, dict[tuple[int, int, float], Floats]] = WeakKeyDictionary()
