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
NEAR_FEATURES = 16.0
"""The same of a drafter on the target's features, which were rounded otherwise as well."""


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
    drafted: Trace | None = None,
) -> list[dict[str, Any]]:
    """The first difference of every request that differs, and its cause.

    ``drafted``: the recording of what drafted, where that is not `trace`'s own draft model.

    Causes: ``target near a tie`` and ``draft near a tie`` (margins within `NEAR` units in
    the drafted span, for drafters on the target's features `NEAR_FEATURES`); ``signal at a
    threshold``: the draft length differs, which after equal outcomes only a signal can have
    caused; else ``unexplained``.
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
        target = _closest(trace, "target", rows, dtype)
        of, near = trace if drafted is None else drafted, NEAR
        if of.by_start:
            # What was drafted from this round's start stands behind it, row by row.
            ends = np.append(of.on_path, len(of))[first : first + 2]
            rows = np.arange(ends[0], min(ends[1], ends[0] + last - first))
            near = NEAR_FEATURES
        draft = _closest(of, "draft", rows, dtype)
        if target <= NEAR:
            cause = "target near a tie"
        elif draft <= near:
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


def _closest(trace: Trace, side: str, rows: npt.NDArray[np.int64], dtype: torch.dtype) -> float:
    """The smallest margin of a model's two likeliest tokens, in units in the last place."""
    first, second = (trace.columns[f"{side}_{top}"][rows] for top in ("top1", "top2"))
    return float(units(first, second, dtype).min(initial=np.inf))


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
