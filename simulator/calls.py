"""Seconds of the calls that rounds of other sources than a draft model consist of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.passes import PassCount
from traces.errors import DraftsimError
from traces.latency.table import EXTRAPOLATED, INTERPOLATED, LatencyTable
from traces.replay.calls import ADAPTER, CALL_KINDS, DRAFTER, DRAFTER_TREE, LAYER
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
    seconds = np.zeros(len(log))
    assert log.calls is not None
    calls: npt.NDArray[Any] = log.calls[log.calls["verify"] == verify]
    context = np.maximum(log.context - 1, 0)
    total = inside = outside = 0
    for kind in np.unique(calls["kind"]).tolist():
        mine = calls[calls["kind"] == kind]
        model, phase = CALL_KINDS[kind]
        if kind in (DRAFTER, DRAFTER_TREE):
            model = latency.drafter(log.drafter)
        model, phase = _cells(latency, model, phase)
        at = context[mine["round"]]
        attends = kind in (DRAFTER, DRAFTER_TREE) or phase == "layer"
        attends |= model == "target" and phase != "head"
        if not attends:
            # Nothing else attends to the context: it is read where it was measured.
            at = np.clip(at, *latency.grid(model, phase).contexts)
        read = latency.estimate(
            model, phase, batch=batch, new_tokens=mine["new_tokens"], context=at
        )
        np.add.at(seconds, mine["round"], mine["count"] * read.seconds)
        total += int(mine["count"].sum())
        inside += int(mine["count"][read.origin == INTERPOLATED].sum())
        outside += int(mine["count"][read.origin == EXTRAPOLATED].sum())
    return seconds, PassCount(total, inside, outside)


def verify_phase(log: RoundLog, latency: LatencyTable) -> str:
    """The phase of the target's cells that the rounds' verifications cost.

    A pass is dearer behind passes that left other weights in the processor's caches: heads and
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
