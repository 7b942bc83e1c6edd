"""Rows that say less than they seem to: rules that hardly verify, runs that coincide."""

from __future__ import annotations

from collections.abc import Sequence

from traces.replay.rounds import RoundLog

HARDLY_VERIFIES = 0.95
"""Share of the judged mismatches from which on a rule is said to accept nearly everything."""


def accepted_mismatches(log: RoundLog) -> float | None:
    """Return the share of the mismatches that a lossy rule judged and let stand; None without any.

    A refusal ends a round, and is of a token that the target would not have chosen.
    """
    if log.mismatched is None:
        return None
    stood = int(log.mismatched.sum())
    refused = int((log.rounds["accepted"] < log.rounds["drafted"]).sum())
    return stood / (stood + refused) if stood + refused else None


def degenerate(logs: Sequence[RoundLog]) -> list[str]:
    """Return for each run what makes it degenerate, in words; empty for the others.

    A rule that accepts over `HARDLY_VERIFIES` of the mismatches it judges, one that accepts
    none, and runs whose rounds are identical to an earlier one's: their settings differ in name
    alone.
    """
    seen: dict[tuple[bytes, bytes], RoundLog] = {}
    found = []
    for log in logs:
        said = []
        share = accepted_mismatches(log)
        if share is not None and share > HARDLY_VERIFIES:
            said.append(f"accepts {share:.0%} of mismatches: hardly verifies")
        calls = b"" if log.calls is None else log.calls.tobytes()
        first = seen.setdefault((log.rounds.tobytes(), calls), log)
        if first is not log:
            said.append(f"identical to {_name(first, log)}")
        elif share == 0:
            said.append("accepts no mismatch: never fires")
        found.append("; ".join(said))
    return found


def _name(log: RoundLog, other: RoundLog) -> str:
    """Return the shortest name that tells `log` from `other`."""
    if log.policy != other.policy:
        return log.policy
    return log.verify if log.verify != other.verify else log.source
