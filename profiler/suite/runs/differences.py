"""Why a real round differs from its replay: what rounding can and cannot have done.

A pass over several tokens sums in another order than a pass over one, so in low precision
the logits differ in their last bits.  That changes an outcome where two logits nearly tie,
or where a signal nearly equals a policy's threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog

NEAR = 4.0
"""Units in the last place within which two logits count as tied."""


def units(top1: npt.ArrayLike, top2: npt.ArrayLike, dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """Margin of two logits in units in the last place of `top1` in `dtype`."""
    first = np.asarray(top1, dtype=np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(first), 1e-30)))
    last_place = torch.finfo(dtype).eps * 2.0**exponent
    return np.asarray((first - np.asarray(top2, dtype=np.float64)) / last_place)


def explain(
    real: RoundLog,
    replayed: RoundLog,
    outputs: Sequence[Sequence[int]],
    trace: Trace,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """The first difference of every request that differs, and its cause.

    Causes: ``target near a tie`` and ``draft near a tie`` (margins within `NEAR` units in
    the drafted span); ``signal at a threshold``: the draft length differs, which after equal
    outcomes only a signal can have caused; else ``unexplained``.
    """
    found = []
    for i in range(len(trace.requests)):
        mine, theirs = (log.rounds[log.rounds["request"] == i] for log in (real, replayed))
        at = _first_difference(mine, theirs, outputs[i], _output(trace, i))
        if at is None:
            continue
        a, b = mine[min(at, len(mine) - 1)], theirs[min(at, len(theirs) - 1)]
        first = int(trace.request_starts[i]) + int(b["position"])
        last = min(first + max(int(a["drafted"]), int(b["drafted"])) + 1,
                   int(trace.request_starts[i + 1]))  # fmt: skip
        rows = trace.on_path[first:last]
        target, draft = (
            float(units(trace.columns[f"{side}_top1"][rows], trace.columns[f"{side}_top2"][rows],
                        dtype).min(initial=np.inf))
            for side in ("target", "draft")
        )  # fmt: skip
        if target <= NEAR:
            cause = "target near a tie"
        elif draft <= NEAR:
            cause = "draft near a tie"
        elif real.reads and int(a["drafted"]) != int(b["drafted"]):
            cause = "signal at a threshold"
        else:
            cause = "unexplained"
        found.append(
            {
                "policy": real.policy, "request": trace.requests[i].id, "round": at,
                "position": int(b["position"]), "cause": cause,
                "target_units": target, "draft_units": draft,
            }
        )  # fmt: skip
    return found


def _first_difference(
    mine: npt.NDArray[Any], theirs: npt.NDArray[Any], output: Sequence[int], recorded: Sequence[int]
) -> int | None:
    """Index of the first round whose outcome or tokens differ."""
    for k in range(max(len(mine), len(theirs))):
        if k >= min(len(mine), len(theirs)):
            return k
        a, b = mine[k], theirs[k]
        span = slice(int(b["position"]), int(b["position"]) + int(b["emitted"]))
        same = a["drafted"] == b["drafted"] and a["accepted"] == b["accepted"]
        if not same or list(output[span]) != list(recorded[span]):
            return k
    return None


def _output(trace: Trace, request: int) -> list[int]:
    starts = trace.request_starts
    rows = trace.on_path[starts[request] : starts[request + 1]]
    tokens: list[int] = np.asarray(trace.columns["token"])[rows].tolist()
    return tokens
