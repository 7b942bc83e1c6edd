"""Seconds of an iteration from a latency table, in the form a cost-aware policy takes."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.estimators import rising_blocks
from simulator.host import host_seconds
from traces.latency.settling import settling_sums
from traces.latency.table import LatencyTable
from traces.replay.always import passes_always

Floats = npt.NDArray[np.float64]


class LatencyCost:
    """A `policies.batch.base.IterationCost` read from measured or assumed latencies.

    Parameters
    ----------
    latency:
        The table; host phases it lacks cost nothing.
    signals:
        Whether the policy that asks reads draft signals, which then cost a `signal` phase
        per drafted token.
    longest:
        Draft length up to which the target's pass is read.
    smooth:
        Whether a wider pass of the target is taken to cost no less than a narrower one, by
        an isotonic fit over the widths 1 to ``longest + 1``.  Differences between neighbouring
        widths decide, and measured ones may be noise, or the step from one kernel to another.
    """

    def __init__(
        self, latency: LatencyTable, signals: bool = True, longest: int = 24, smooth: bool = True
    ) -> None:
        self.latency = latency
        self.signals = signals
        self.longest = longest
        self.smooth = smooth
        self._always = passes_always(latency)
        self._widths: dict[tuple[int, float], Floats] = {}
        self._steps: dict[tuple[int, float], float] = {}
        self._settling: dict[tuple[int, float], Floats] = {}
        self._host: dict[tuple[str, int], float] = {}
        self._at = np.arange(1.0, longest + 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> LatencyCost:
        return self  # a table of measurements, which nothing changes

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Seconds; sizes are rounded to whole tokens per sequence."""
        draft_length = max(draft_length, self._always)
        key = (batch, context)
        if key not in self._widths:
            raw, rising, one, first = _read(self.latency, self.longest, batch, context)
            self._widths[key] = rising if self.smooth else raw
            self._settling[key] = settling_sums(self.latency, "draft", batch) + first - one
            step = one + self._hosts("host_draft", batch)
            self._steps[key] = step + (self._hosts("signal", batch) if self.signals else 0.0)
        per_sequence = verify_tokens / batch
        verify = float(np.interp(per_sequence, self._at, self._widths[key]))
        drafting = draft_length * self._steps[key]
        if draft_length:
            beyond = self._settling[key]
            drafting += float(beyond[min(draft_length, len(beyond)) - 1])
        return self._hosts("host_round", batch) + drafting + verify

    def _hosts(self, phase: str, batch: int) -> float:
        if (phase, batch) not in self._host:
            self._host[phase, batch] = host_seconds(self.latency, phase, batch)
        return self._host[phase, batch]


def _rising(seconds: Floats) -> Floats:
    """The least-squares fit to `seconds` that nowhere falls."""
    blocks = rising_blocks(seconds, np.ones(len(seconds)))
    return np.repeat([value for _, _, value in blocks], [int(weight) for _, weight, _ in blocks])


class _Passes(NamedTuple):
    """Seconds of the target's passes over 1, 2, ... tokens, of a draft pass, and of the first."""

    widths: Floats
    rising: Floats
    """`widths` as `_rising` fits them."""
    draft: float
    first: float


def _read(latency: LatencyTable, longest: int, batch: int, context: float) -> _Passes:
    known = _known.setdefault(latency, {})
    key = longest, batch, context
    if key not in known:
        at: dict[str, Any] = {"batch": batch, "context": context}
        width = np.arange(1, longest + 2)
        widths = latency.seconds("target", "forward", new_tokens=width, **at)
        known[key] = _Passes(
            widths,
            _rising(widths),
            float(latency.seconds("draft", "forward", **at)),
            float(latency.seconds("draft", latency.first_draft_phase("draft"), **at)),
        )
    return known[key]


# Fits of one recording read one table, under several ways to weigh the same passes.
_known: WeakKeyDictionary[LatencyTable, dict[tuple[int, int, float], _Passes]] = WeakKeyDictionary()
