"""Seconds of the calls that rounds of other sources than a draft model consist of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.passes import NO_PASSES, PassCount, read_each
from traces.errors import DraftsimError
from traces.latency.table import EXTRAPOLATED, INTERPOLATED, LatencyTable
from traces.replay.calls import ADAPTER, CALL_KINDS, DRAFTER, DRAFTER_TREE, LAYER, ONE_PASS
from traces.replay.rounds import RoundLog

FALLBACKS = {
    ("exit", "head"): ("target", "head"),
    ("exit", "layer"): ("target", "layer"),
    ("target", "pass"): ("target", "forward"),
    ("target", "tree"): ("target", "pass"),
}
"""Where a part was not measured by itself, the nearest that was."""


def call_seconds(
    log: RoundLog, latency: LatencyTable, *, batch: int = 1, verify: bool
) -> tuple[npt.NDArray[np.float64], PassCount]:
    """Seconds of each round's drafting or verification calls, shape (rounds,).

    Also returns the calls, counted as passes.  A layer call is read at its width and the
    round's context.

    Raises
    ------
    DraftsimError
        If the table lacks the cells of a call; its message names them.
    """
    assert log.calls is not None
    calls: npt.NDArray[Any] = log.calls
    kinds = np.where(calls["verify"] == verify, calls["kind"], -1)
    context = np.maximum(log.context - 1, 0)
    rounds, seconds = [np.zeros(0, np.int64)], [np.zeros(0)]
    passes = NO_PASSES
    for kind in np.flatnonzero(np.bincount(kinds[kinds >= 0])).tolist():
        mine = np.flatnonzero(kinds == kind)
        at_round, width, count = (
            calls[name][mine].astype(np.int64) for name in ("round", "new_tokens", "count")
        )
        model, phase = CALL_KINDS[kind]
        if kind in (DRAFTER, DRAFTER_TREE, ONE_PASS):
            model = latency.drafter(log.drafter)
        if kind == ONE_PASS:
            phase = latency.first_draft_phase(model)
        model, phase = _cells(latency, model, phase)
        at = context[at_round]
        attends = kind in (DRAFTER, DRAFTER_TREE, ONE_PASS) or phase == "layer"
        attends |= model == "target" and phase != "head"
        if not attends:
            # Nothing else attends to the context: it is read where it was measured.
            at = np.clip(at, *latency.grid(model, phase).contexts).astype(np.int64)
        read = read_each(latency, model, batch, width, at, phase)
        rounds.append(at_round)
        seconds.append(count * read.seconds)
        outside = (int(count[read.origin == o].sum()) for o in (INTERPOLATED, EXTRAPOLATED))
        passes += PassCount(int(count.sum()), *outside)
    # In the order of the calls, whose sums depend on it.
    total = np.bincount(np.concatenate(rounds), np.concatenate(seconds), len(log))
    return total.astype(np.float64, copy=False), passes


def verify_phase(log: RoundLog, latency: LatencyTable) -> str:
    """The phase of the target's cells that the rounds' verifications cost.

    A pass takes longer after passes that left other weights in the processor's caches: heads and
    lookups leave few.
    """
    if log.calls is None or not latency.has("target", "pass"):
        return "forward"
    return "forward" if np.isin(log.calls["kind"], (LAYER, ADAPTER)).any() else "pass"


def _cells(latency: LatencyTable, model: str, phase: str) -> tuple[str, str]:
    key: tuple[str, str] | None
    key = ("exit", "layer") if (model, phase) == ("target", "layer") else (model, phase)
    if latency.is_constant and phase == "tree":  # a pass costs what a pass costs
        key = model, "forward"
    while key is not None:
        if latency.has(*key):
            return key
        key = FALLBACKS.get(key)
    raise DraftsimError(
        f"latency table has no {phase!r} cells of {model!r}, which these rounds ran: profile the "
        "target with its sources"
    )
