"""Remarks of commands on real runs: how quiet the machine was, and which texts diverged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from commands.common.output import note, remark
from traces.digits import counted
from traces.latency.table import LatencyTable
from traces.machine import BUSY, State, describe_machine, differ, machine_label, slowdown
from traces.store.outputs import Divergence

AGAIN = "measure the latencies again with `draftsim profile latency`"


def columns_shown(rows: pd.DataFrame) -> list[str]:
    """Return the columns that the printed table has; the JSON has them all."""
    left_out = ("left_out", "slowdown", "diverged", "requests_left_out")
    return [column for column in rows.columns if column not in left_out]


def machine_of(meta: Mapping[str, Any]) -> State | None:
    """Return the state kept in the metadata of a measurement, if any was."""
    state = meta.get("machine")
    return state if isinstance(state, Mapping) else None


def with_machine(rows: pd.DataFrame, latency: LatencyTable, state: State) -> pd.DataFrame:
    """Return `rows` with ``slowdown``: the reference work's time in the runs over that in the
    profile that predicted them, less 1."""
    change = slowdown(machine_of(latency.meta), state)
    return rows.assign(slowdown=math.nan if change is None else change)


def say_machine(latency: LatencyTable, state: State, remedy: str | None) -> None:
    """Warn where the real runs were disturbed, or saw another machine than the profile did.

    ``remedy`` says what to do; None if the latencies were measured during the runs.
    """
    if machine_label(state) == BUSY:
        words = (
            describe_machine(state) if remedy is None else f"{describe_machine(state)}: {remedy}"
        )
        note(f"warning: the machine was disturbed during the real runs: {words}")
    elif int(state.get("disturbed") or 0):
        note(
            "the machine was quiet; disturbed runs were repeated or left out: "
            f"{describe_machine(state)}"
        )
    before = machine_of(latency.meta)
    if remedy is not None and before is not None and differ(before, state):
        note(
            "warning: the machine's speed changed: a fixed amount of work took "
            f"{1e3 * before['reference_s']:.3g} ms during the profile and "
            f"{1e3 * state['reference_s']:.3g} ms during the runs "
            f"({slowdown(before, state):+.0%}): {remedy}"
        )


def say_disturbed(latency: LatencyTable) -> None:
    """Note where the latencies were measured on a disturbed machine."""
    state = machine_of(latency.meta)
    if state is not None and machine_label(state) == BUSY:
        remark(
            f"these latencies were measured on a disturbed machine: {describe_machine(state)}; "
            "measure them again with `draftsim profile latency` when it is quiet"
        )


def say_texts(rows: Sequence[Mapping[Any, Any]]) -> None:
    """Say which texts diverged, what is not compared, and whether rounding can have done it."""
    found = [
        (Divergence(**{k: one[k] for k in Divergence._fields}), _policy(row))
        for row in rows
        for one in _diverged(row)
    ]
    if drafts := sum(row.get("drafts_diverged") or 0 for row in rows):
        note(
            f"{counted(drafts, 'draft')} diverged at a near-tie of the draft model; later rounds "
            "of those requests are not compared"
        )
    if not found:
        return
    named = "; ".join(f"{one} under {text}" for one, text in found[:3])  # the JSON names all
    rest = f"; {len(found) - 3} more" if len(found) > 3 else ""
    note(f"{counted(len(found), 'text')} diverged: {named}{rest}")
    out = 0 if "load" in rows[0] else max(r["requests_left_out"] for r in rows if _diverged(r))
    left_out = "every request diverged under some policy, so none is left out of the seconds"
    if out:
        left_out = f"{out} {'request is' if out == 1 else 'requests are'} left out of all seconds"
    if "load" in rows[0]:
        left_out = (
            "nor are later steps of the load (iterations_after counts them); mean latencies leave "
            "these requests out (requests_left_out)"
        )
    note(f"their later rounds are not compared; {left_out}")
    if faults := sum(one.near_tie is False for one, _ in found):
        note(
            f"warning: {faults} of them diverged where the recorded logits are no near-tie, which "
            "rounding does not explain: profile with --dtype float32 and compare again"
        )


def _policy(row: Mapping[Any, Any]) -> str:
    if "load" in row:
        return f"{row['load']} {row['policy']}"
    return f"{row['policy']}" if row["batch"] == 1 else f"{row['policy']} at batch {row['batch']}"


def _diverged(row: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return a row's divergences, a column that rows of another kind lack."""
    found = row.get("diverged")
    return found if isinstance(found, list) else []
