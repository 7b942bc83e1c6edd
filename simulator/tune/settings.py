"""The result of a search: the document an engine reads, and the evidence for it."""

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
from simulator.tune.evidence import about_row, origin
from simulator.tune.formats import CHECKS, check_settings
from simulator.tune.gains import OFF
from simulator.tune.served import NO_SPECULATION
from traces.latency.table import LatencyTable
from traces.store.writing import write_atomically

ENGINES = tuple(CHECKS)

TUNE_COLUMNS = (
    "engine", "batch", "context", "setting", "deploy", "served_tok_s", "gain", "gain_lo", "gain_hi",
    "decode_tok_s", "decode_gain", "decode_gain_lo", "decode_gain_hi", "default", "default_gain",
    "within_slo", "outside", "held_out", "scaled", "assumed", "warnings",
)  # fmt: skip
"""Columns of `Tuned.rows`.  Every gain is a ratio of tokens per second to no speculation, except
``default_gain``, which is over the engine's own ``default``.

* ``deploy`` is on where the setting gives a gain, off where no speculation is as fast, and
  ``SLO missed`` where neither meets the targets.
* ``served_tok_s`` and ``gain`` are of a full engine that serves requests, prompts included, with
  the interval over resampled prompts.  With targets, only requests within them count.
* ``decode_tok_s`` and ``decode_gain`` are of decoding alone: rounds priced at the batch, without
  prompts or waiting.  transformers and llama.cpp decode one request, and nothing is served for
  them: ``gain`` is then ``decode_gain``.  For SGLang nothing is priced alone.
* ``within_slo`` is the share of requests (of prompts, where nothing is served) within the targets.
* ``outside`` is the share of passes read outside the measured cells.
* ``held_out`` says whether the gain is that of prompts that the setting was not chosen on.
* ``scaled`` says that latencies were carried over from another device; ``assumed`` names what the
  user said costs nothing (`traces.latency.table.LatencyTable.said_batch_free`)."""
Gain = tuple[float, float, float]
"""A gain and its interval."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """Settings for an engine.

    Attributes
    ----------
    engine:
        One of `ENGINES`.
    document:
        What the engine reads; it has passed `check_settings`.  None where no setting is to be
        deployed at any batch searched: no draft model should be loaded.
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
        """Return the policy to deploy if loads stay at a searched `batch`: `policy`, or no
        speculation.
        """
        deploy = {row["batch"]: row["deploy"] for row in self.rows}
        return Autoregressive() if deploy[batch] == OFF else self.policy


def row_of(
    engine: str, grid: Grid, option: int, latency: LatencyTable, *, setting: str, deploy: str,
    served_tok_s: float | None, gain: Gain, decode_tok_s: float | None, decode_gain: Gain | None,
    default: str, default_gain: float, within: float, held_out: bool,
) -> dict[str, Any]:  # fmt: skip
    """A row of `TUNE_COLUMNS`, without its warnings; `option` is the setting's place in `grid`."""
    names = ("decode_gain", "decode_gain_lo", "decode_gain_hi")
    return {
        "engine": engine, "batch": grid.batch, "context": grid.context, "setting": setting,
        "deploy": deploy, "served_tok_s": served_tok_s,
        **dict(zip(("gain", "gain_lo", "gain_hi"), gain, strict=True)),
        "decode_tok_s": decode_tok_s,
        **dict(zip(names, decode_gain or (None,) * 3, strict=True)),
        "default": default, "default_gain": default_gain, "within_slo": within,
        "outside": float(max(grid.outside[option], grid.outside[0])), "held_out": held_out,
        **origin(latency, grid.batch),
    }  # fmt: skip


def plain_row(
    row: Mapping[str, Any], grid: Grid, served_tok_s: float | None, within: float
) -> dict[str, Any]:
    """`row` of a setting turned into that of no speculation, the first option of `grid`."""
    decode = grid.batch * float(grid.tokens[0].sum() / grid.seconds[0].sum())
    found = dict(row) | dict.fromkeys(
        ("gain", "gain_lo", "gain_hi", "decode_gain", "decode_gain_lo", "decode_gain_hi"), 1.0
    )
    found |= {
        "setting": NO_SPECULATION, "served_tok_s": served_tok_s, "decode_tok_s": decode,
        "within_slo": within, "outside": float(grid.outside[0]), "held_out": True,
        # That of the setting that lost says nothing here.
        "default_gain": 1.0 if row["default"] == NO_SPECULATION else None,
    }  # fmt: skip
    return found | {"warnings": about_row(found)}


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
    write_atomically(path, f"{laid_out(tuned.document)}\n".encode())


def laid_out(document: Mapping[str, Any] | None) -> str:
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
