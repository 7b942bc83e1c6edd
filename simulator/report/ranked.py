"""Policies in the order of their speedups, and what the first line of the page says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from simulator.summary import paired_gain, price_all, speedups_over, summarize_runs, to_rows
from simulator.whatif.ranking import BEST_FIXED, fastest, fixed_lengths
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog

SHOWN = 5e-4
"""Relative differences below which a page of tenths of a percent shows none."""


def with_best_fixed(
    trace: Trace, latency: LatencyTable, logs: Sequence[RoundLog], notes: Mapping[str, str]
) -> tuple[list[RoundLog], dict[str, str]]:
    """The logs and notes with the fastest fixed draft length among them, noted as such."""
    if BEST_FIXED in notes.values():
        return list(logs), dict(notes)
    best = fastest(fixed_lengths(trace), latency)
    held = [log.policy for log in logs]
    return [*logs, *([] if best.policy in held else [best])], {**notes, best.policy: BEST_FIXED}


def ranked(
    logs: Sequence[RoundLog], latency: LatencyTable, notes: Mapping[str, str], draws: int,
    sums: Callable[[RoundLog], list[float]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows by speedup, the fastest first, with the prompts that each policy slows down.

    ``sums`` of a log are what the page's sliders compute with.
    """
    plain, *runs = price_all(logs, latency)
    rows = to_rows(summarize_runs([plain, *runs], resamples=draws))[1:]
    for row, run in zip(rows, runs, strict=True):
        own = speedups_over(plain, run)
        row["note"] = notes.get(row["policy"])
        row["oracle"] = row["policy"].partition(":")[0] == "oracle"
        row["below"] = float(np.mean(own[np.isfinite(own)] < 1))
        row["outside"] = run.passes.extrapolated / max(run.passes.passes, 1)
        row["sums"] = sums(run.log)
    return sorted(rows, key=lambda row: -(row["speedup"] or 0.0))


def headline(
    rows: Sequence[Mapping[str, Any]], logs: Sequence[RoundLog], latency: LatencyTable, draws: int
) -> dict[str, Any]:
    """The fastest policy that could be run, and how it stands to the best fixed length.

    Keys: ``policy``, the index of its row in `rows`; ``fixed``, that of the best fixed
    length; ``gain`` with ``gain_lo`` and ``gain_hi``, the ratio of the first's tokens per second
    to the second's and its paired interval over prompts (None with one prompt);
    ``told_apart``, whether that interval leaves out 1; and ``same``, whether all of it would be
    shown as no difference, as where a fitted rule comes out as that very length.  Where the
    best fixed length is itself the fastest, it is held against the fastest that adapts its
    length, ``next``; otherwise None.
    """
    real = [i for i, row in enumerate(rows) if not row["oracle"]] or [0]
    fixed = next(i for i, row in enumerate(rows) if row["note"] == BEST_FIXED)
    top = real[0]
    rest = [i for i in real if i != fixed and not rows[i]["policy"].startswith("fixed:")]
    second = rest[0] if top == fixed and rest else None
    found: dict[str, Any] = {"policy": top, "fixed": fixed, "next": second}
    by_name = {log.policy: log for log in logs}
    other = fixed if second is None else second
    value, low, high = paired_gain(
        by_name[rows[top]["policy"]], by_name[rows[other]["policy"]], latency, resamples=draws
    )
    known = bool(np.isfinite([low, high]).all())
    return {
        **found, "gain": value, "gain_lo": low if known else None,
        "gain_hi": high if known else None, "told_apart": known and not low <= 1 <= high,
        "same": max(abs(n - 1) for n in (value, low, high) if np.isfinite(n)) < SHOWN,
    }  # fmt: skip
