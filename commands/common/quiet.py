"""Remarks of commands on how quiet the machine was (`traces.machine`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from traces.machine import BUSY, State, describe, differ, label, slowdown

if TYPE_CHECKING:
    import pandas as pd

    from traces.latency.table import LatencyTable

AGAIN = "measure the latencies again with `draftsim profile --latency-only`"
QUIETLY = ("left_out", "slowdown", "diverged", "requests_left_out")
"""Columns that the JSON has and the printed table has not."""


def columns_shown(rows: pd.DataFrame) -> list[str]:
    """The columns that the printed table has."""
    return [column for column in rows.columns if column not in QUIETLY]


def machine_of(meta: Mapping[str, Any]) -> State | None:
    """The state kept in the metadata of a measurement, if any was."""
    state = meta.get("machine")
    return state if isinstance(state, Mapping) else None


def with_machine(rows: pd.DataFrame, latency: LatencyTable, state: State) -> pd.DataFrame:
    """Return `rows` with ``slowdown``: the reference work's time in the runs over that in the
    profile that predicted them, less 1."""
    change = slowdown(machine_of(latency.meta), state)
    return rows.assign(slowdown=math.nan if change is None else change)


def say_machine(latency: LatencyTable, state: State, remedy: str | None) -> None:
    """Warn where the real runs were disturbed, or saw another machine than the profile did.

    ``remedy`` says what to do; None where the latencies were measured during the runs.
    """
    if label(state) == BUSY:
        words = describe(state) if remedy is None else f"{describe(state)}: {remedy}"
        note(f"warning: the machine was disturbed during the real runs: {words}")
    elif int(state.get("disturbed") or 0):
        note(f"the machine was quiet, disturbed runs made again or left out: {describe(state)}")
    before = machine_of(latency.meta)
    if remedy is not None and before is not None and differ(before, state):
        note(
            "warning: profile and real runs saw different machines: the same piece of work took "
            f"{1e3 * before['reference_s']:.3g} ms during the profile and "
            f"{1e3 * state['reference_s']:.3g} ms during the runs "
            f"({slowdown(before, state):+.0%}): {remedy}"
        )


def say_disturbed(latency: LatencyTable) -> None:
    """A note where the latencies were measured on a disturbed machine."""
    state = machine_of(latency.meta)
    if state is not None and label(state) == BUSY:
        note(
            f"these latencies were measured on a disturbed machine: {describe(state)}; measure "
            "them again with `draftsim profile --latency-only` when it is quiet"
        )
