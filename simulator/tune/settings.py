"""What a search found: the document an engine reads, and the evidence for it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive
from simulator.tune.costs import Grid
from simulator.tune.evidence import about_row, origin, summed_up
from simulator.tune.formats import CHECKS, check_settings
from traces.latency.table import LatencyTable
from traces.store.writing import write_atomically

ENGINES = tuple(CHECKS)

TUNE_COLUMNS = (
    "engine", "batch", "context", "setting", "deploy", "throughput_tok_s", "default", "gain",
    "gain_lo", "gain_hi", "within_slo", "outside", "held_out", "served_gain", "scaled",
    "assumed", "warnings",
)  # fmt: skip
"""Columns of `Tuned.rows`: tokens per second of decoding over the whole batch (SGLang's, which
are served, include prompts); the gain is a ratio to
the default, with its bootstrap interval over prompts; ``outside`` is the share of passes
read outside the measured cells, ``held_out`` whether the gain is one of prompts that the
choice was not made on; ``served_gain`` is the rate of the whole setting, served at that batch,
over that of the best single option or of no speculation there (None where nothing is served);
``deploy`` is off where no speculation beats the setting, else on; ``scaled`` says that the
latencies were carried over from another device, ``assumed`` what figures take to cost nothing
on somebody's word (`traces.latency.table.LatencyTable.said_batch_free`)."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """Settings for an engine.

    Attributes
    ----------
    engine:
        One of `ENGINES`.
    document:
        What the engine reads; it has passed `check_settings`.  None where no speculation beats
        every setting at every batch searched: no draft model should be loaded.
    policy:
        The same decisions as a policy, for replay and `serve`.
    rows:
        One record per batch and context searched (columns `TUNE_COLUMNS`).
    warnings:
        Where the evidence is thin, in words.
    """

    engine: str
    document: Mapping[str, Any] | None
    policy: DraftPolicy | BatchPolicy
    rows: Sequence[Mapping[str, Any]]
    warnings: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.document is not None:
            check_settings(self.engine, self.document)

    def policy_at(self, batch: int) -> DraftPolicy | BatchPolicy:
        """What to deploy where loads stay at a searched `batch`: `policy`, or no speculation."""
        deploy = {row["batch"]: row["deploy"] for row in self.rows}
        return self.policy if deploy[batch] == "on" else Autoregressive()


def switched_off(
    engine: str, grids: Sequence[Grid], latency: LatencyTable, warnings: Sequence[str]
) -> Tuned:
    """No speculation at all, which the first option of every grid stands for."""
    rows: list[dict[str, Any]] = [
        {
            "engine": engine, "batch": grid.batch, "context": grid.context, "setting": "off",
            "deploy": "off",
            "throughput_tok_s": grid.batch * float(grid.tokens[0].sum() / grid.seconds[0].sum()),
            "default": "off", "gain": 1.0, "gain_lo": 1.0, "gain_hi": 1.0,
            "within_slo": float(grid.within[0]), "outside": float(grid.outside[0]),
            "held_out": True, "served_gain": 1.0, **origin(latency, grid.batch),
        }
        for grid in grids
    ]  # fmt: skip
    for row in rows:
        row["warnings"] = about_row(row)
    return Tuned(engine, None, Autoregressive(), rows, [*warnings, *summed_up(rows)])


def write_settings(tuned: Tuned, path: str | os.PathLike[str]) -> None:
    """Write the document as JSON, ``null`` for none: whole, or not at all.

    Raises
    ------
    SettingsError
        If the engine would refuse it.
    FileError
        If the file cannot be written.
    """
    if tuned.document is not None:
        check_settings(tuned.engine, tuned.document)
    write_atomically(path, f"{_laid_out(tuned.document)}\n".encode())


def _laid_out(document: Mapping[str, Any] | None) -> str:
    """JSON with a line per key and per row of a table, as people write these files."""
    if document is None:
        return "null"
    lines = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], list):
            text = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"
