"""Where the evidence behind a setting is thin, said in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.hardware import scaling_words
from simulator.tune.costs import longest_seen
from simulator.tune.served import beaten
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

Floats = npt.NDArray[np.float64]

FEW_PROMPTS = 30
"""Below this many prompts a bootstrap interval is itself a rough guess."""
NOISY = 0.1
"""Relative spread of repeated timings beyond which a cell's median is uncertain."""
WIDE = 0.25
"""Width of a gain's interval, relative to the gain, beyond which it is a rough guess."""
ENOUGH = 0.95
"""Share of prompts that should meet the targets."""
GAP = 4
"""Ratio of neighbouring batch sizes beyond which what lies between is a guess."""


def about_recording(trace: Trace, latency: LatencyTable) -> list[str]:
    """What the recording and the latency table leave uncertain."""
    found = []
    if len(trace.requests) < FEW_PROMPTS:
        found.append(
            f"only {len(trace.requests)} prompts were recorded: intervals are rough below "
            f"{FEW_PROMPTS}"
        )
    if (seen := longest_seen(trace)) is not None:
        found.append(f"no draft longer than {seen} was seen verified in this log: none is searched")
    if "imputed" in trace.meta or trace.meta.get("fidelity") == "approximate":
        found.append("the trace is approximate: positions that were not observed were filled in")
    if said := scaling_words(latency):
        found.append(f"latencies were scaled, not measured: {said}")
    if latency.is_constant:
        found.append("constant latencies do not depend on batch or context: measure them")
        return found
    cells = latency.cells[latency.cells["phase"] == "forward"]
    timed = cells[(cells["repeats"] > 1) & (cells["median_s"] > 0)]
    if len(timed):
        spread = float(np.median(timed["spread_s"] / timed["median_s"]))
        if spread > NOISY:
            found.append(
                f"timings scatter by {spread:.0%} of their median from repeat to repeat, which "
                "the intervals do not cover: profile on an idle device"
            )
    return found


def origin(latency: LatencyTable, batch: int) -> dict[str, Any]:
    """Columns of a row that say where its seconds come from."""
    return {"scaled": "scaled" in latency.meta, "assumed": latency.said_batch_free(batch)}


def about_row(row: Mapping[str, Any]) -> list[str]:
    """What one searched batch and context leaves uncertain, without saying which."""
    found = []
    if row["outside"] > 0:
        found.append(f"{row['outside']:.0%} of passes lie outside the measured cells")
    if row["assumed"]:
        found.append(f"taken to cost nothing: {row['assumed']}")
    lo, hi = row["gain_lo"], row["gain_hi"]
    if not np.isfinite([lo, hi]).all():
        found.append("the gain has no interval")
    else:
        if hi - lo > WIDE * row["gain"]:
            found.append(f"the gain's interval is wide ({lo:.2f} to {hi:.2f})")
        if lo <= 1 <= hi and lo < hi:
            found.append("the gain is not told from none")
        if hi < 1:
            found.append("on the prompts held back it is slower than the default")
    if not row["held_out"]:
        found.append("no prompts were held back: the gain is that of the choosing prompts")
    if row["within_slo"] < ENOUGH:
        found.append(f"{row['within_slo']:.0%} of prompts meet the targets")
    return found


def about_served(rival: str, gain: float, kept: bool, worse: bool) -> list[str]:
    """What serving the whole setting at a batch told of it against `rival` throughout.

    ``gain`` is the ratio of their rates, ``kept`` whether what was first chosen stands,
    ``worse`` whether the setting is still slower beyond the interval.
    """
    found = [] if kept else [f"{rival} was faster when served with the rest: changed"]
    if worse:
        found.append(f"served as a whole, the setting is {1 - gain:.1%} slower than {rival}")
    return found


def about_deploying(
    batches: Sequence[int], rates: Iterable[Floats], off: Iterable[Floats]
) -> list[str]:
    """Where no speculation beats the setting, served; rates of both, (replications,) a batch."""
    faster = {
        batch: plain.mean() / own.mean() - 1
        for batch, own, plain in zip(batches, rates, off, strict=True) if beaten(own, plain)
    }  # fmt: skip
    if not faster:
        return []
    if len(faster) == len(batches):
        return ["speculation pays at no batch searched: leave it off"]
    said = ", ".join(f"{gain:.1%} at batch {batch}" for batch, gain in faster.items())
    return [
        f"no speculation at all is faster by {said}, because the draft model reads every prompt "
        "and, where K is 0, every token: leave it off where loads stay there"
    ]


def about_batches(batches: Sequence[int]) -> list[str]:
    """Gaps between the batch sizes searched that a range has to bridge by guessing."""
    return [
        f"no batch between {low} and {high} was searched: a range there follows its neighbours"
        for low, high in pairwise(batches)
        if high > GAP * low
    ]


def summed_up(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The warnings of all rows, each said once with the places it holds for."""
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
