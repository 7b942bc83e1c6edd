"""A calibrated server as a latency table, and runs read from a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from simulator.aggregate.server import Load, Server, ServerRun
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable

POSITIONS = "acceptance"


COLUMNS: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch", "concurrency", "max_concurrency"),
    "k": ("k", "num_speculative_tokens", "draft_length"),
    "tokens_per_s": ("tokens_per_s", "output_throughput"),
    "context": ("context",),
    "emitted": ("emitted", "mean_acceptance_length", "acceptance_length"),
    "prompt": ("prompt", "mean_input_tokens"),
    "answer": ("answer", "mean_output_tokens"),
    "accepted": ("acceptance", "per_position_acceptance_rate", "acceptance by position"),
}
"""What a run's fields may be called: ours first, then vLLM's and others' names."""
REQUIRED = ("batch", "k", "tokens_per_s")


def read_runs(path: Path) -> list[ServerRun]:
    """Runs from CSV with a head, or JSON lines; the columns are those of `COLUMNS`.

    Acceptance by position is numbers separated by blanks or semicolons (a list in JSON): the
    chances that the first 1, 2, ... drafted tokens are all accepted.

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


def _run(row: Mapping[str, Any], where: str) -> ServerRun:
    found: dict[str, Any] = {
        field: next((row[n] for n in names if row.get(n) not in (None, "")), None)
        for field, names in COLUMNS.items()
    }
    if missing := [name for name in REQUIRED if found[name] is None]:
        names = " or ".join(COLUMNS[missing[0]])
        raise DraftsimError(f"{where}: has no {names}")
    try:
        positions = found["accepted"] or ()
        if isinstance(positions, str):
            positions = positions.replace(";", " ").split()
        emitted, prompt, answer = (
            None if found[name] is None else float(found[name])
            for name in ("emitted", "prompt", "answer")
        )
        return ServerRun(
            int(found["batch"]), int(found["k"]), float(found["tokens_per_s"]),
            float(found["context"] or 0), emitted, tuple(map(float, positions)), prompt, answer,
        )  # fmt: skip
    except DraftsimError as error:
        raise DraftsimError(f"{where}: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise DraftsimError(f"{where}: {error}: expected numbers") from None


def latency_table(server: Server) -> LatencyTable:
    """Passes of target and draft, and prompts, over the loads that the runs span.

    The cells are the costs that `calibrate` prints and predicts with.  What speculation costs
    whatever the draft length is part of a round's first draft pass.
    """
    runs = server.runs
    batches = sorted({1, *(run.batch for run in runs)})
    longest = max(1, *(run.k for run in runs))
    contexts = sorted({0, *(int(run.held) for run in runs)})
    cost = server.central
    cells: list[list[Any]] = []

    def cell(model: str, phase: str, batch: int, tokens: int, context: int, seconds: float) -> None:
        cells.append([model, phase, batch, tokens, context, seconds, 0.0, 1])

    for batch in batches:
        extra = cost["speculating"] + cost["speculating_sequence"] * batch
        each = cost["draft"] + cost["draft_sequence"] * batch
        passes = server.passes
        first = extra + each * (1 if passes is None else passes)
        for context in contexts:
            for width in range(1, longest + 2):
                load = Load(batch, width - 1, context, prompts=0.0)
                speculating = extra + each * (width - 1 if passes is None else passes)
                seconds = float(server.step_s(load, 1.0)[0]) - (width > 1) * speculating
                cell("target", "forward", batch, width, context, seconds)
            for tokens in (1, longest + 1):
                cell("draft", "catch_up", batch, tokens, context, first)
            cell("draft", "forward", batch, 1, context, each if passes is None else 0.0)
    held = max(contexts[-1], 16)
    for tokens in sorted({1, *(2**i for i in range(4, held.bit_length())), held}):
        s, compute = cost["sharpness"], cost["prefill"] * cost["weights"] / cost["knee"]
        work = (cost["weights"] ** s + (compute * tokens) ** s) ** (1 / s)
        cell("target", "prefill", 1, tokens, 0, cost["fixed"] + work)
    meta = {"kind": "calibrated", "misfit": server.misfit, "runs": len(runs)}
    return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)), meta)
