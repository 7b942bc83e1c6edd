"""The disagreements of a lossless run, from which CSD's memory is calibrated offline."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core import DraftPolicy
from policies.rules.memory import OnlineCorrectionMemory
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError
from traces.replay.rounds import RoundLog
from traces.replay.run import replay


def rejected_pairs(trace: Trace, log: RoundLog) -> list[tuple[int, int]]:
    """Return (draft token, target token) of every rejection in `log`, in the order they happened.

    ``log`` is a lossless replay of `trace`; its policy decides which mismatches are met
    at all.  The pairs are what `policies.rules.memory.OnlineCorrectionMemory.calibrate` counts.

    Raises SignalError if the trace does not hold both tokens, or the log is of a lossy run.
    """
    draft, target = _at_rejections(trace, log, "draft_token", "target_token")
    return list(zip(draft.tolist(), target.tolist(), strict=True))


def rejected_gaps(trace: Trace, log: RoundLog) -> npt.NDArray[np.float64]:
    """Return CSD's z(draft) - z(target), nats, at every rejection (`rejected_pairs`)."""
    draft, best = _at_rejections(trace, log, "target_draft_logit", "target_top1")
    return draft.astype(np.float64) - best.astype(np.float64)


def _at_rejections(trace: Trace, log: RoundLog, *columns: str) -> list[npt.NDArray[Any]]:
    if missing := [c for c in columns if c not in trace.columns]:
        raise SignalError(
            f"this trace lacks the column(s) {', '.join(missing)} that name the disagreements: "
            "record one with `draftsim profile`"
        )
    if log.mismatched is not None:
        raise SignalError(
            f"the rounds were verified by {log.verify}, which leaves the recorded path: "
            "calibrate from a lossless run"
        )
    rounds = log.rounds[log.rounds["accepted"] < log.rounds["drafted"]]
    starts = trace.request_starts[rounds["request"]]
    rows = trace.on_path[starts + rounds["position"] + rounds["accepted"]]
    return [np.asarray(trace.columns[c])[rows] for c in columns]


def calibrated(
    trace: Trace, policy: DraftPolicy, memory: OnlineCorrectionMemory | None = None
) -> OnlineCorrectionMemory:
    """Return a memory that has counted every rejection of `policy` over `trace`, in its order.

    It is `memory`, or a new one without a bound; its ``sizes`` show its growth by request.  Raises
    what `rejected_pairs` and `traces.replay.run.replay` raise.
    """
    memory = OnlineCorrectionMemory() if memory is None else memory
    log = replay(trace, policy)
    pairs = rejected_pairs(trace, log)
    rejected = log.rounds["accepted"] < log.rounds["drafted"]
    counts = np.bincount(log.rounds["request"][rejected], minlength=len(trace.requests))
    for begin, end in pairwise([0, *np.cumsum(counts).tolist()]):
        memory.calibrate(pairs[begin:end])
        memory.end_request()
    return memory


def split_requests(trace: Trace, share: float) -> tuple[list[int], list[int]]:
    """Return indices of a training part, `share` of the requests, and of the rest.

    Both are spread evenly over the categories, and keep the order of the trace.  Raises
    DraftsimError if `share` is not above 0 and at most 1, or leaves no request to train on.
    """
    if not 0 < share <= 1:
        raise DraftsimError(f"share is {share}, expected above 0 and at most 1")
    order = sorted(range(len(trace.requests)), key=lambda i: trace.requests[i].category)
    train = {i for n, i in enumerate(order) if int((n + 1) * share) > int(n * share)}
    if not train:
        raise DraftsimError(
            f"share {share:g} of {len(trace.requests)} requests leaves none to calibrate on"
        )
    return sorted(train), [i for i in range(len(trace.requests)) if i not in train]
