"""A calibrated server as a latency table, and runs read from a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import pandas as pd

from policies.spec import choice
from simulator.aggregate.fit import Calibration
from simulator.aggregate.server import ServerRun
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.store.text import json_lines, read_text

POSITIONS = "acceptance"
COLUMNS = ("batch", "k", "tokens_per_s", "context", "emitted", POSITIONS)
MOST = 1e9
"""Largest number of a run; no server comes near it, and fits of larger ones overflow."""


def read_runs(path: Path) -> list[ServerRun]:
    """Runs from CSV with a head, or JSON lines.

    Columns: ``batch``, ``k``, ``tokens_per_s``; optional ``context``, ``emitted`` (tokens a
    round), and ``acceptance``, chances that the first 1, 2, ... drafted tokens are accepted,
    separated by blanks.

    Raises
    ------
    DraftsimError
        Naming file and line of what is wrong.
    """
    text = read_text(path)
    if path.suffix == ".jsonl":
        rows: list[Any] = [row for _, row in json_lines(path, text)]
    else:
        rows = _csv_rows(path, text)
    if not rows:
        raise DraftsimError(f"{path} holds no runs: a head batch,k,tokens_per_s, and a run a line")
    return [_run(row, f"{path}, run {number}") for number, row in enumerate(rows, 1)]


def _csv_rows(path: Path, text: str) -> list[dict[str, str]]:
    lines = [line for line in text.split("\n") if line.strip() and line[0] != "#"]
    reader = csv.DictReader(lines, skipinitialspace=True)
    try:
        names, rows = list(reader.fieldnames or ()), list(reader)
    except csv.Error as error:
        raise DraftsimError(f"{path} is not CSV: {error}") from None
    if len(set(names)) < len(names):
        raise DraftsimError(f"{path}: names a column twice, of {shown(names)}")
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise DraftsimError(f"{path}, run {number}: has not as many values as the head names")
    return rows


def _run(row: Any, where: str) -> ServerRun:
    if not isinstance(row, dict):
        raise DraftsimError(f"{where}: is {shown(row)}, expected an object")
    if unknown := sorted(set(map(str, row)) - set(COLUMNS)):
        raise DraftsimError(f"{where}: unknown {shown(unknown[0])}{choice(unknown[0], COLUMNS)}")
    if missing := [name for name in COLUMNS[:3] if row.get(name) in (None, "")]:
        raise DraftsimError(f"{where}: has no {missing[0]}")
    positions = row.get(POSITIONS) or ()
    if isinstance(positions, str):
        positions = positions.split()
    if not isinstance(positions, list | tuple):
        positions = [positions]
    given = {name: row[name] for name in COLUMNS[:5] if row.get(name) not in (None, "")}
    found = {name: _number(where, name, value) for name, value in given.items()}
    for name in ("batch", "k"):
        if not found[name].is_integer():
            raise DraftsimError(f"{where}: {name} is {found[name]:g}, expected a whole number")
    try:
        return ServerRun(
            int(found["batch"]), int(found["k"]), found["tokens_per_s"], found.get("context", 0.0),
            found.get("emitted"), tuple(_number(where, POSITIONS, value) for value in positions),
        )  # fmt: skip
    except DraftsimError as error:
        raise DraftsimError(f"{where}: {error}") from None


def _number(where: str, name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MOST:
        raise DraftsimError(
            f"{where}: {name} is {shown(value)}, expected numbers of at most {MOST:g}"
        )
    return number


def latency_table(found: Calibration, runs: Sequence[ServerRun]) -> LatencyTable:
    """Forward passes of target and draft over the loads that the runs span.

    Costs that the runs do not determine count as nothing, as in the fit.
    """
    server = found.server
    batches = sorted({1, *(run.batch for run in runs)})
    widths = range(1, max(run.k for run in runs) + 2)
    contexts = sorted({0, *(int(run.context) for run in runs)})
    cells: list[list[Any]] = []
    for batch in batches:
        for context in contexts:
            for width in widths:
                columns = server.columns(batch, width - 1, context)
                columns[3:5] = 0  # drafting is the draft's
                seconds = float(columns @ server.costs)
                cells.append(["target", "forward", batch, width, context, seconds, 0.0, 1])
            seconds = server.draft_s + server.draft_token_s * batch
            cells.append(["draft", "forward", batch, 1, context, max(0.0, seconds), 0.0, 1])
    if bad := [row for row in cells if not row[5] >= 0]:
        raise DraftsimError(
            f"the fit gives {bad[0][5]:.3g} s for a pass of {bad[0][3]} tokens at batch "
            f"{bad[0][2]}: measure more runs before writing a table"
        )
    meta = {"kind": "calibrated", "noise": found.noise, "runs": len(runs)}
    return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)), meta)
