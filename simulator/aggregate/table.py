"""A calibrated server as a latency table, and runs read from a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import pandas as pd

from simulator.aggregate.server import Load, Server, ServerRun
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import ANY_CONTEXT, LatencyTable
from traces.store.text import json_lines, read_text

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch", "concurrency", "max_concurrency"),
    "k": ("k", "num_speculative_tokens", "draft_length", "spec-draft-n-max"),
    "tokens_per_s": ("tokens_per_s", "output_throughput"),
    "context": ("context",),
    "emitted": ("emitted", "mean_acceptance_length", "acceptance_length"),
    "prompt": ("prompt", "mean_input_tokens"),
    "answer": ("answer", "mean_output_tokens"),
    "p_min": ("p_min", "spec-draft-p-min"),
    "rounds": ("rounds",),
    "drafted_total": ("drafted", "draft_n"),
    "accepted_total": ("accepted", "draft_n_accepted"),
    "accepted": ("acceptance", "per_position_acceptance_rate", "acceptance by position"),
}
"""Accepted names of a run's fields: ours first, then those of vLLM and others."""
REQUIRED = ("batch", "k", "tokens_per_s")
NAMES = tuple(name for names in COLUMNS.values() for name in names)
MOST = 1e9
"""Largest number of a run; no server comes near it, and fits of larger ones overflow."""


def read_runs(path: Path) -> list[ServerRun]:
    """Runs from CSV with a head, or JSON lines; the columns are those of `COLUMNS`.

    Acceptance by position is numbers separated by blanks or semicolons (a list in JSON): the
    chances that the first 1, 2, ... drafted tokens are all accepted.  Other columns are ignored,
    but for those that look like one of ours misspelt.

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
    for name in sorted(set(map(str, row)) - set(NAMES)):
        if close := get_close_matches(name, NAMES, n=1, cutoff=0.75):
            raise DraftsimError(f"{where}: unknown {shown(name)} (did you mean {close[0]!r}?)")
    given: dict[str, Any] = {}
    for field, names in COLUMNS.items():
        told = [name for name in names if row.get(name) not in (None, "")]
        if len(told) > 1:
            raise DraftsimError(f"{where}: has {told[0]} and {told[1]}, which are one: drop one")
        if told:
            given[field] = row[told[0]]
    if "k" not in given and "num_speculative_tokens" in row:
        given["k"] = 0  # as vLLM's sweeps leave it empty without speculation
    if missing := [name for name in REQUIRED if name not in given]:
        raise DraftsimError(f"{where}: has no {' or '.join(COLUMNS[missing[0]])}")
    positions = given.pop("accepted", ())
    if isinstance(positions, str):
        positions = positions.replace(";", " ").split()
    if not isinstance(positions, list | tuple):
        positions = [positions]
    found = {name: _number(where, name, value) for name, value in given.items()}
    totals = [found.pop(name, None) for name in ("rounds", "drafted_total", "accepted_total")]
    found |= _per_round(where, totals)
    for name in ("batch", "k"):
        if not found[name].is_integer():
            raise DraftsimError(f"{where}: {name} is {found[name]:g}, expected a whole number")
    try:
        return ServerRun(
            int(found["batch"]), int(found["k"]), found["tokens_per_s"], found.get("context", 0.0),
            found.get("emitted"), tuple(_number(where, "acceptance", v) for v in positions),
            found.get("prompt"), found.get("answer"), found.get("drafted"), found.get("p_min", 0.0),
        )  # fmt: skip
    except DraftsimError as error:
        raise DraftsimError(f"{where}: {error}") from None


def _per_round(where: str, totals: list[float | None]) -> dict[str, float]:
    """Return acceptance length and drafted tokens of a round, from totals over all rounds."""
    rounds, drafted, accepted = totals
    if drafted is None and accepted is None:
        return {}
    if not rounds or drafted is None or accepted is None or accepted > drafted:
        raise DraftsimError(
            f"{where}: drafted and accepted are totals over all rounds: give rounds, drafted and "
            "accepted together"
        )
    return {"emitted": 1 + accepted / rounds, "drafted": drafted / rounds}


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


def latency_table(server: Server, model: str | None = None) -> LatencyTable:
    """Passes of target and draft, and prompts, over the loads that the runs span.

    The cells are the costs that `calibrate` prints and predicts with.  What speculation costs
    whatever the draft length is part of a round's first draft pass.  ``model`` is the target's
    name, by which `--latency` is held against a recording.
    """
    runs = server.runs
    batches = sorted({1, *(run.batch for run in runs)})
    longest = max(1, *(run.k for run in runs))
    # One context determines no cost of context: its cells hold at every other.
    contexts = sorted({int(run.held) for run in runs} | ({0} if server.tells_context else set()))
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
        s, compute = cost["sharpness"], cost["prefill"] * cost["weights"] / server.computing_knee
        work = (cost["weights"] ** s + (compute * tokens) ** s) ** (1 / s)
        cell("target", "prefill", 1, tokens, 0, cost["fixed"] + work)
    meta = {"kind": "calibrated", "misfit": server.misfit, "runs": len(runs)}
    meta |= {"passes_apart": server.tells_passes_apart}
    if not server.tells_context:
        where = f"{contexts[0]:,} tokens" if contexts[0] else "an unknown length"
        meta[ANY_CONTEXT] = True
        meta["remark"] = (
            f"calibrated at one context, {where}: every other is priced like it, and longer ones "
            "come out too fast"
        )
    meta |= {} if model is None else {"target": model}
    return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)), meta)
