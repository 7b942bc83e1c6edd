"""The disagreements of a lossless run, from which CSD's memory is calibrated offline."""

from __future__ import annotations

from traces.errors import SignalError
from traces.rounds import RoundLog
from traces.trace import Trace


def rejected_pairs(trace: Trace, log: RoundLog) -> list[tuple[int, int]]:
    """(draft token, target token) of every rejection in `log`, in the order they happened.

    ``log`` is a lossless replay of `trace`; its policy decides which mismatches are met
    at all.  The pairs are what `policies.memory.OnlineCorrectionMemory.calibrate` counts.

    Raises
    ------
    SignalError
        If the trace does not hold both tokens, or the log is of a lossy run.
    """
    if missing := [c for c in ("draft_token", "target_token") if c not in trace.columns]:
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
    pairs = zip(
        trace.columns["draft_token"][rows], trace.columns["target_token"][rows], strict=True
    )
    return [(int(draft_token), int(target_token)) for draft_token, target_token in pairs]
