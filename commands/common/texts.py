"""Remarks of commands on texts that diverged in real runs (`profiler.checks.differences`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commands.common.output import note

NAMED = 3
"""Divergences that are named at the terminal; the JSON names all."""


def say_texts(rows: Sequence[Mapping[Any, Any]]) -> None:
    """Say which texts diverged, what is not compared, and whether rounding can have done it."""
    from profiler.checks.differences import Divergence

    found = [
        (Divergence(**{k: one[k] for k in Divergence._fields}), _policy(row))
        for row in rows
        for one in _listed(row, "diverged")
    ]
    if drafts := sum(row.get("drafts_diverged") or 0 for row in rows):
        note(
            f"{drafts} {'draft' if drafts == 1 else 'drafts'} diverged at a near-tie of the draft "
            "model: from there on the rounds of those requests are not compared"
        )
    if not found:
        return
    named = "; ".join(f"{one} under {text}" for one, text in found[:NAMED])
    rest = f"; {len(found) - NAMED} more" if len(found) > NAMED else ""
    note(f"{len(found)} {'text' if len(found) == 1 else 'texts'} diverged: {named}{rest}")
    note(f"from there on their rounds are not compared; {_left_out(rows)}")
    if faults := sum(one.near_tie is False for one, _ in found):
        note(
            f"warning: {faults} of them diverged where the recorded logits are no near-tie, which "
            "rounding does not explain: see whether a profile with --dtype float32 diverges too"
        )


def _left_out(rows: Sequence[Mapping[Any, Any]]) -> str:
    if "load" in rows[0]:
        return (
            "nor are iterations of the load (iterations_after counts them); requests_left_out are "
            "in no mean latency"
        )
    out = max(row["requests_left_out"] for row in rows if _listed(row, "diverged"))
    if not out:
        return "every request diverged under some policy, so none is left out of the seconds"
    return f"{out} {'request is' if out == 1 else 'requests are'} left out of all seconds"


def _policy(row: Mapping[Any, Any]) -> str:
    if "load" in row:
        return f"{row['load']} {row['policy']}"
    return f"{row['policy']}" if row["batch"] == 1 else f"{row['policy']} at batch {row['batch']}"


def _listed(row: Mapping[Any, Any], name: str) -> list[dict[str, Any]]:
    """A column that rows of another kind lack."""
    found = row.get(name)
    return found if isinstance(found, list) else []
