"""Kangaroo: drafting from one shallow exit with a trained adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import ADAPTER, Counted
from traces.sources.base import Recordings, SourceReplay, SourceToken
from traces.sources.exits.early_exit import EarlyExit, EarlyExitReplay, ExitTape, Steps


class Kangaroo(EarlyExit):
    """Kangaroo (arXiv:2404.18911): a fixed shallow exit, and an attention block after it.

    The adapter keeps keys and values of its own over the exit's states, which are exact; so a
    draft depends on the fed tokens alone.  A draft of n tokens takes n + 1 shallow passes and
    n of the adapter; verification runs the other layers over n + 1 positions, the last of
    which may give a bonus token.  When to stop is the length policy's: the paper's is a
    confidence threshold.
    """

    name = "kangaroo"
    what = "Kangaroo's adapter after a shallow exit of the target; exact"

    def __init__(self) -> None:
        super().__init__(tau=0, omega=0, depth=1, bonus=True)

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Needs the adapter's recording of the same requests."""
        if recordings.adapter is None:
            raise DraftsimError(
                "no recording of Kangaroo's adapter: make one with `draftsim profile --exit-layers`"
            )
        if first < 1:
            raise DraftsimError("the adapter is recorded after the prefill: replay with first=1")
        tape = ExitTape(trace, recordings.adapter, self)
        return lambda request: KangarooReplay(trace, request, tape, first)


class KangarooReplay(EarlyExitReplay):
    """One recorded request, drafted by the adapter."""

    def __init__(self, trace: Trace, request: int, tape: ExitTape, first: int) -> None:
        super().__init__(trace, request, tape, first)
        self._pending = 0  # positions whose exit states the adapter has not taken in

    def draft(self, so_far: Sequence[Any]) -> SourceToken | None:
        """Return the adapter's proposal after the last token."""
        step = self._step(so_far)
        self._depths.append(step.deepest)
        self.calls.add(ADAPTER, self._pending + 1)
        self._pending = 0
        return step.token

    def charge(self, submitted: int) -> int:
        """The layers that the processed positions still lack."""
        entered = len(self._depths)
        positions = super().charge(submitted)
        self._pending += max(0, positions - entered)
        return positions

    def verify(self, draft: Sequence[Any]) -> int:
        """As any source; what was refused leaves nothing for the adapter to take in."""
        accepted = super().verify(draft)
        if accepted < len(draft):
            self._pending = 0
        return accepted

    at_once = EarlyExitReplay.at_once

    def drafted(self, steps: Steps, waiting: npt.NDArray[np.integer]) -> Counted:
        """Return the adapter's passes: the first of a round takes in what is `waiting`."""
        width = np.where(steps.offset == 0, waiting[steps.round] + 1, 1)
        return Counted(False, ADAPTER, steps.round, width, np.ones_like(width))
