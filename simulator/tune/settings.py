"""The result of a search: the document that an engine reads, and how good its evidence is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from policies.arrays import Floats, Ints
from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive
from policies.registry import NO_SPECULATION
from simulator.bootstrap import Interval
from simulator.hardware.scaling import scaling_words
from simulator.targets import Targets
from simulator.tune.costs import PricedOptions, longest_seen
from simulator.tune.formats import check_settings
from simulator.tune.gains import MISSED, OFF, ON
from simulator.unmeasured import percentage
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.operators.compose import overfull
from traces.store.writing import write_atomically

TUNE_COLUMNS = (
    "engine", "batch", "context", "setting", "deploy", "served_tok_s", "gain", "gain_lo", "gain_hi",
    "decode_tok_s", "decode_gain", "decode_gain_lo", "decode_gain_hi", "default", "default_gain",
    "within_slo", "outside", "held_out", "scaled", "assumed", "warnings",
)  # fmt: skip
"""Columns of `Tuned.rows`.  Every gain is a ratio of tokens per second to no speculation, except
``default_gain``, which is over the engine's own ``default``.

* ``deploy``: ``on`` if the setting gives a gain, ``off`` if no speculation is as fast, ``SLO
  missed`` if neither meets the SLO.
* ``served_tok_s``, ``gain``: of a full engine that also reads prompts, with the interval over
  resampled prompts.  With an SLO, only requests within it count.
* ``decode_tok_s``, ``decode_gain``: of decoding alone, without prompts or waiting.  transformers
  and llama.cpp decode one request, so their ``gain`` is ``decode_gain``.  SGLang has none.
* ``within_slo``: share of requests within the SLO (of prompts, if nothing is served).
* ``outside``: share of passes read outside the measured cells.
* ``held_out``: True if the gain is that of prompts that the setting was not chosen on.
* ``scaled``: True if latencies were extrapolated from another device.
* ``assumed``: what the user said costs nothing
  (`traces.latency.table.LatencyTable.said_batch_free`)."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """Settings for an engine.

    Attributes
    ----------
    engine:
        A name in `CHECKS`.
    document:
        Document that the engine reads; it has passed `check_settings`.  None if no setting should
        be deployed at any batch searched: start the engine without a draft model.
    rows:
        One record per batch and context searched (columns `TUNE_COLUMNS`).
    warnings:
        Where the evidence is thin, in words.
    policy:
        The document's decisions as a policy, for replay and `serve`; no speculation without one.
    """

    engine: str
    document: Mapping[str, Any] | None
    rows: Sequence[Mapping[str, Any]]
    warnings: Sequence[str] = ()
    policy: DraftPolicy | BatchPolicy = field(init=False)

    def __post_init__(self) -> None:
        document = self.document
        policy = Autoregressive() if document is None else check_settings(self.engine, document)
        object.__setattr__(self, "policy", policy)

    def policy_at(self, batch: int) -> DraftPolicy | BatchPolicy:
        """Return the policy to deploy for loads of a searched `batch`: `policy`, or none."""
        deploy = {row["batch"]: row["deploy"] for row in self.rows}
        return Autoregressive() if deploy[batch] == OFF else self.policy


def row_of(
    engine: str, grid: PricedOptions, latency: LatencyTable, gain: Interval,
    decode_gain: Interval | None, **given: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return a row of `TUNE_COLUMNS`, without its warnings; the other columns are `given`."""
    found: dict[str, Any] = {
        "engine": engine, "batch": grid.batch, "context": grid.context,
        "scaled": "scaled" in latency.meta, "assumed": latency.said_batch_free(grid.batch), **given,
    }  # fmt: skip
    unknown = dict.fromkeys(("decode_gain", "decode_gain_lo", "decode_gain_hi"))
    found |= gain.columns("gain") | (decode_gain.columns("decode_gain") if decode_gain else unknown)
    return {name: found[name] for name in TUNE_COLUMNS if name != "warnings"}


def decided(
    engine: str, trace: Trace, latency: LatencyTable, slo: Targets | None,
    rows: Sequence[dict[str, Any]], grids: Sequence[PricedOptions],
    off: Mapping[int, tuple[float | None, float]], document: Mapping[str, Any], *, remedy: str,
    reason: str = "", more: Sequence[str] = (), told: Sequence[str] = (),
) -> Tuned:  # fmt: skip
    """Return the document; none, and rows of no speculation, if it gives a gain at no batch.

    ``off`` holds tokens/s of no speculation (None if nothing is served) and its share within the
    SLO, by batch searched; ``reason`` and ``remedy`` are those of `about_deploying`; ``more`` warns
    of the document, ``told`` of the search.
    """
    warnings = [
        *about_recording(trace, latency), *about_batches([*off]),
        *about_caches(trace, latency, off), *about_targets(rows, slo),
        *about_deploying(rows, reason, remedy), *told,
    ]  # fmt: skip
    if any(row["deploy"] == ON for row in rows):
        return Tuned(engine, document, rows, [*warnings, *summed_up(rows), *more])
    plain = [
        plain_row(row, grid, *off[grid.batch]) if row["deploy"] == OFF else row
        for row, grid in zip(rows, grids, strict=True)
    ]
    return Tuned(engine, None, plain, [*warnings, *summed_up(plain)])


def plain_row(
    row: Mapping[str, Any], grid: PricedOptions, served_tok_s: float | None, within: float
) -> dict[str, Any]:
    """Return `row` of a setting turned into that of no speculation, the first option of `grid`."""
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
    """Return JSON with a line per key and per row of a table, as people write these files."""
    if document is None:
        return "null"
    lines = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], list):
            text = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


FEW_PROMPTS = 30
"""Below this many prompts a bootstrap interval is itself a rough guess."""
NOISY = 0.1
"""Relative spread of repeated timings beyond which a cell's median is uncertain."""
WIDE = 0.25
"""Width of a gain's interval, relative to the gain, beyond which it is a rough guess."""
GAP = 4
"""Ratio of neighbouring batch sizes beyond which what lies between is a guess."""


def about_recording(trace: Trace, latency: LatencyTable) -> list[str]:
    """Return what the recording and the latency table leave uncertain."""
    found = []
    if len(trace.requests) < FEW_PROMPTS:
        found.append(
            f"only {len(trace.requests)} prompts were recorded: intervals are rough below "
            f"{FEW_PROMPTS}"
        )
    if (seen := longest_seen(trace)) is not None:
        found.append(f"this log has no verified draft longer than {seen}, so none is searched")
    if "imputed" in trace.meta or trace.meta.get("fidelity") == "approximate":
        found.append(
            "the trace is approximate: outcomes that were not observed were drawn at random"
        )
    if said := scaling_words(latency):
        found.append(f"latencies were scaled, not measured: {said}")
    if not latency.has("target", "prefill"):
        found.append(
            "these latencies have no prefill, so tokens/s and gains are too high for long prompts"
        )
    if latency.is_constant:
        found.append("constant latencies do not depend on batch or context: measure them")
        return found
    cells = latency.cells[latency.cells["phase"] == "forward"]
    timed = cells[(cells["repeats"] > 1) & (cells["median_s"] > 0)]
    if len(timed):
        spread = float(np.median(timed["spread_s"] / timed["median_s"]))
        if spread > NOISY:
            found.append(
                f"repeated timings differ by {spread:.0%} of their median, which the intervals do "
                "not include: profile on an idle device"
            )
    return found


def about_row(row: Mapping[str, Any]) -> list[str]:
    """Return what one searched batch and context leaves uncertain, without naming them."""
    found = []
    if row["outside"] > 0:
        found.append(f"{percentage(row['outside'])} of passes lie outside the measured sizes")
    if row["assumed"]:
        found.append(f"assumed to cost nothing: {row['assumed']}")
    gain, lo, hi = row["gain"], row["gain_lo"], row["gain_hi"]
    if np.isnan(gain):
        found.append("no speculation serves no request within the SLO, so there is no gain")
    elif not np.isfinite([lo, hi]).all():
        found.append("the gain has no interval")
    else:
        if hi - lo > WIDE * gain:
            found.append(f"the gain's interval is wide ({lo:.2f} to {hi:.2f})")
        if lo <= 1 <= hi and lo < hi:
            found.append("no significant gain: its interval includes 1")
    if not row["held_out"]:
        found.append("no held-out prompts: the gain is that of the prompts that chose the setting")
    return found


def about_served(rival: str, gain: float, kept: bool, worse: bool) -> list[str]:
    """Describe how serving the whole setting at a batch compares with `rival` throughout.

    ``gain`` is the ratio of their rates, 0 if it misses the SLO, ``kept`` whether the first choice
    was kept, ``worse`` whether the setting is still slower beyond the interval.
    """
    found = (
        [] if kept else [f"changed to {rival}, which served faster with the rest of the setting"]
    )
    if worse and not gain:
        found.append(f"the whole setting misses the SLO, which {rival} meets")
    elif worse:
        found.append(f"the whole setting serves {1 - gain:.1%} slower than {rival}")
    return found


def about_deploying(rows: Sequence[Mapping[str, Any]], reason: str, remedy: str) -> list[str]:
    """Return batches at which the setting is slower than no speculation, with its gain there.

    `reason` says why a setting can be slower, `remedy` what to do.
    """
    off = {row["batch"]: row["gain"] for row in rows if row["deploy"] == OFF}
    if off and len(off) == len({row["batch"] for row in rows}):
        return [f"no setting is faster than no speculation at any batch searched: {remedy}"]
    slower = [f"{gain:.3g}x at batch {batch}" for batch, gain in off.items() if gain < 1]
    if not slower:
        return []
    return [f"the setting is slower than no speculation ({', '.join(slower)}), {reason}: {remedy}"]


def about_targets(rows: Sequence[Mapping[str, Any]], slo: Targets | None) -> list[str]:
    """Return batches at which no setting meets the targets, and how near the nearest comes."""
    missed = [row for row in rows if row["deploy"] == MISSED]
    if slo is None or not missed:
        return []
    batches = ", ".join(str(batch) for batch in dict.fromkeys(row["batch"] for row in missed))
    best = max(missed, key=lambda row: float(row["within_slo"]))
    return [
        f"no setting meets {slo} for {slo.share:.0%} of the requests at batch {batches}: "
        f"{best['setting']} at batch {best['batch']} meets it for {best['within_slo']:.1%}. Loosen "
        "the targets, lower p, or use smaller batches"
    ]


def about_rising(
    name: str, batches: Sequence[int], options: Sequence[Any], table: Ints, fixed: Sequence[Floats]
) -> list[str]:
    """Return places where a larger batch drafts more than the one before, and what that gives
    there.

    ``table`` has shape (batches, contexts); ``fixed`` are the rates of every option alone at each
    batch, (options, replications).
    """
    said = []
    for i in range(1, len(table)):
        pairs = zip(table[i - 1].tolist(), table[i].tolist(), strict=True)
        for before, now in dict.fromkeys(pairs):
            if now > before:
                gain = fixed[i][now].mean() / max(fixed[i][before].mean(), 1e-300) - 1
                said.append(
                    f"{name} rises again at batch {batches[i]}, from {options[before]} to "
                    f"{options[now]}: served there, {name} = {options[now]} gives {gain:+.1%} over "
                    f"{name} = {options[before]}"
                )
    return said


def about_batches(batches: Sequence[int]) -> list[str]:
    """Return gaps between the batch sizes searched that a range has to bridge by guessing."""
    return [
        f"no batch between {low} and {high} was searched: it gets the setting of its neighbours"
        for low, high in pairwise(batches)
        if high > GAP * low
    ]


def about_caches(trace: Trace, latency: LatencyTable, batches: Iterable[int]) -> list[str]:
    """Return the smallest batch whose caches do not fit into the memory of a composed table's GPU.

    In the mean a running request holds its prompt and half of its output.
    """
    held = float(np.mean([r.prompt_length + r.tokens / 2 for r in trace.requests]))
    then = "such a batch does not run at once"
    told = (overfull(latency.meta, batch, held, then) for batch in sorted(batches))
    return [text for text in told if text][:1]


def summed_up(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the warnings of all rows, each said once with the places it holds for."""
    places: dict[str, list[str]] = {}
    for row in rows:
        where = f"batch {row['batch']}"
        if row["context"] is not None:
            where += f" at context {row['context']}"
        for text in row["warnings"]:
            places.setdefault(text, []).append(where)
    return [
        text if len(where) == len(rows) > 1 else f"{', '.join(where)}: {text}"
        for text, where in places.items()
    ]
