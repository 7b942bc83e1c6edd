"""The latency table of stage ``trained``: the pair's own passes, in the modes of real decoding."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from profiler.models.architectures import PairShape
from profiler.models.loading import Pair
from profiler.suite.account import Account
from profiler.suite.environment import NoTimeError, Workplace
from profiler.suite.latency.grids import Grids
from profiler.suite.latency.kernels import KERNELS
from profiler.suite.latency.pair import PairMeasurement
from profiler.suite.runs.checks import TRAINED_MODES
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.store.files import write_latency

FILE = "trained-latency.parquet"
SHARE = 0.04
"""Share of the stage's time for a mode."""


def measure_modes(
    place: Workplace, pair: Pair, shape: PairShape, account: Account
) -> dict[str, Any]:
    """The pair's ``cells``, models named ``pair/mode/model``, and what else was measured.

    Raises NoTimeError if there was no time for any.
    """
    rows: list[list[Any]] = []
    units: dict[str, Any] = {}
    for mode in TRAINED_MODES:
        grids = Grids(place.quick)
        if not place.quick:
            grids.contexts, grids.prompts = (64, 384), (64, 128)
            grids.widths = (1, 2, 3, 5, 9, 17)
        grids.batches = grids.between = ()
        grids.host_batches = (1,)
        end = time.monotonic() + SHARE * place.seconds
        models = (pair.target, pair.draft)
        measured = PairMeasurement(place, shape, mode, models, grids, end)
        measured.run()
        for piece, why in measured.failed.items():
            account.failed[f"latency, {mode}, {piece}"] = why
        rows += named(measured.cells, shape.name, mode)
        unit = measured.unit()
        units[mode] = {k: v for k, v in unit.items() if k != "cells"}
    if not rows:
        raise NoTimeError("no time left")
    failed = any(unit["failed"] for unit in units.values())
    return {"latency": units, "cells": rows, "unfinished": failed}


def named(rows: Sequence[Sequence[Any]], pair: str, mode: str) -> list[list[Any]]:
    """Cells of a pair in a mode, as the table of several names them."""
    return [[f"{pair}/{mode}/{row[0]}", *row[1:]] for row in rows]


def of_mode(rows: Sequence[Sequence[Any]], mode: str) -> list[list[Any]]:
    """The cells of a mode in a table of one pair, its models named as usual."""
    split = [(row[0].split("/"), row) for row in rows]
    return [[model, *row[1:]] for (_, own, model), row in split if own == mode]


def write_table(
    place: Workplace, rows: Sequence[Sequence[Any]], shapes: Mapping[str, Mapping[str, Any]]
) -> int:
    """Write the table; how many cells it has.  ``shapes``: by pair, of its models."""
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    meta = {
        "kind": "measured", "attention": "sdpa", "shapes": dict(shapes), "kernels": KERNELS,
        **place.meta(),
    }  # fmt: skip
    write_latency(LatencyTable(frame, meta), place.out / FILE)
    return len(rows)
