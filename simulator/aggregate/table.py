"""A calibrated server as a latency table, and runs read from a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from simulator.aggregate.fit import Calibration
from simulator.aggregate.server import ServerRun
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable

POSITIONS = "acceptance"
VLLM_NAMES = {
    "max_concurrency": "batch", "num_speculative_tokens": "k", "output_throughput": "tokens_per_s",
    "mean_acceptance_length": "emitted",
}  # fmt: skip
"""Columns of vLLM's benchmarks (``vllm bench serve``) by what they are called here."""


def read_runs(path: Path) -> list[ServerRun]:
    """Runs from CSV with a head, or JSON lines.

    Columns: ``batch``, ``k``, ``tokens_per_s``; optional ``context``, ``emitted`` (tokens a
    round), and ``acceptance``, chances that the first 1, 2, ... drafted tokens are accepted,
    separated by blanks.  vLLM's own names of columns are taken as well (`VLLM_NAMES`); K is 0
    where its column is there and empty.  Other columns are left alone.

    Raises
    ------
    DraftsimError
        Naming file and line of what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows: list[Mapping[str, Any]] = [json.loads(x) for x in text.splitlines() if x.strip()]
        else:
            lines = [line for line in text.splitlines() if line.strip() and line[0] != "#"]
            rows = list(csv.DictReader(lines))
    except (OSError, ValueError) as error:
        raise DraftsimError(f"cannot read the runs in {path}: {error}") from None
    if not rows:
        raise DraftsimError(f"{path} holds no runs: a head batch,k,tokens_per_s, and a run a line")
    return [_run(row, f"{path}, run {number}") for number, row in enumerate(rows, 1)]


def _named(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row under our names of columns."""
    found = dict(row)
    for theirs, ours in VLLM_NAMES.items():
        if theirs not in row:
            continue
        if row.get(ours) not in (None, ""):
            raise DraftsimError(f"{where}: has {ours} and {theirs}, which are one: leave one out")
        found[ours] = row[theirs]
    if found.get("k") in (None, "") and "num_speculative_tokens" in row:
        found["k"] = 0
    return found


def _run(own: Mapping[str, Any], where: str) -> ServerRun:
    row = _named(own, where)
    if missing := [name for name in ("batch", "k", "tokens_per_s") if row.get(name) in (None, "")]:
        also = next(theirs for theirs, ours in VLLM_NAMES.items() if ours == missing[0])
        raise DraftsimError(f"{where}: has no {missing[0]} (or {also}, as vLLM calls it)")
    try:
        positions = row.get(POSITIONS) or ()
        if isinstance(positions, str):
            positions = [float(part) for part in positions.split()]
        emitted = row.get("emitted")
        return ServerRun(
            int(row["batch"]), int(row["k"]), float(row["tokens_per_s"]),
            float(row.get("context") or 0), None if emitted in (None, "") else float(emitted),
            tuple(map(float, positions)),
        )  # fmt: skip
    except DraftsimError as error:
        raise DraftsimError(f"{where}: {error}") from None
    except (TypeError, ValueError) as error:
        raise DraftsimError(f"{where}: {error}: expected numbers") from None


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
            cells.append(["draft", "forward", batch, 1, context, seconds, 0.0, 1])
    if bad := [row for row in cells if not row[5] >= 0]:
        raise DraftsimError(
            f"the fit gives {bad[0][5]:.3g} s for a pass of {bad[0][3]} tokens at batch "
            f"{bad[0][2]}: measure more runs before writing a table"
        )
    meta = {"kind": "calibrated", "noise": found.noise, "runs": len(runs)}
    return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)), meta)
