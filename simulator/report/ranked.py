"""Policies in the order of their speedups, and what the first line of the page says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from simulator.degenerate import degenerate
from simulator.summary import paired_gain, price_all, speedups_over, summarize_runs, to_rows
from simulator.whatif.ranking import (
    BEST_FIXED,
    FITTED,
    fastest,
    fixed_lengths,
    winner,
)
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
    held = [log.policy for log in logs if log.source == best.source]
    return [*logs, *([] if best.policy in held else [best])], {**notes, best.policy: BEST_FIXED}


def ranked(
    logs: Sequence[RoundLog], latency: LatencyTable, notes: Mapping[str, str], draws: int,
    sums: Callable[[RoundLog], list[float]], own: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return rows by speedup, the fastest first, with the share of prompts that each slows down.

    ``own`` is the source that the recording drafts with, which `notes` are about.  Keys beside
    those of a summary: ``name`` tells the row from all others; ``sums`` is what the page's sliders
    compute with; ``at_own`` is said of a policy at the pair's own cost ratios, ``always`` at any,
    ``note`` both; ``fitted`` policies were fitted to the pair's own costs, and would decide
    otherwise at others; ``own`` rows are drafted by that source.
    """
    plain, *runs = price_all(logs, latency)
    rows = to_rows(summarize_runs([plain, *runs], resamples=draws))[1:]
    names = [row["policy"] for row in rows]
    for row, run, same in zip(rows, runs, degenerate([run.log for run in runs]), strict=True):
        slowed = speedups_over(plain, run)
        again = names.count(row["policy"]) > 1
        row["name"] = f"{row['policy']} ({row['source']})" if again else row["policy"]
        row["at_own"] = notes.get(row["policy"]) if row["source"] == own else None
        row["always"] = same or None
        row["note"] = "; ".join(filter(None, (row["at_own"], row["always"]))) or None
        row["fitted"] = says(row, FITTED)
        row["own"] = row["source"] == own
        row["oracle"] = row["policy"].partition(":")[0] == "oracle"
        row["below"] = float(np.mean(slowed[np.isfinite(slowed)] < 1))
        row["outside"] = run.passes.extrapolated / max(run.passes.passes, 1)
        row["sums"] = sums(run.log)
    return sorted(rows, key=lambda row: -(row["speedup"] or 0.0))


def says(row: Mapping[str, Any], what: str) -> bool:
    """Return whether the note of a row at the pair's own ratios says `what`."""
    return what in (row["at_own"] or "").split("; ")


def headline(
    rows: Sequence[Mapping[str, Any]], logs: Sequence[RoundLog], latency: LatencyTable, draws: int,
    constant: Sequence[RoundLog],
) -> dict[str, Any]:  # fmt: skip
    """Return the recommended policy (`winner`), and how it compares with the best fixed length.

    Keys: ``policy``, the index of its row in `rows`; ``fixed``, that of the best fixed
    length; ``gain`` with ``gain_lo`` and ``gain_hi``, the ratio of the first's tokens per second
    to the second's and its paired interval over prompts (None with one prompt);
    ``told_apart``, whether that interval leaves out 1; and ``same``, whether all of it would be
    shown as no difference, as where a fitted rule comes out as that very length.  Where the
    best fixed length is itself the fastest, it is compared with the fastest policy of the same
    drafter that adapts its length, ``next``; otherwise None.  A policy whose rounds are those of
    one of the `constant` lengths, or that never drafts, does not adapt.  ``pays`` says whether any
    policy of that drafter is faster than no speculation.
    """
    fixed = next(i for i, row in enumerate(rows) if says(row, BEST_FIXED))
    found = winner(rows)
    top = fixed if found is None else found
    by_row = {(log.policy, log.source, log.verify): log for log in logs}
    own = [by_row[row["policy"], row["source"], row["verify"]] for row in rows]
    still = {log.rounds.tobytes() for log in constant}
    rest = [
        i for i, (row, log) in enumerate(zip(rows, own, strict=True))
        if row["source"] == rows[fixed]["source"] and not row["oracle"]
        and log.rounds.tobytes() not in still and log.rounds["drafted"].any()
    ]  # fmt: skip
    second = rest[0] if top == fixed and rest else None
    drafted = [row for row in rows if row["own"]]
    first = winner(drafted)
    other = fixed if second is None else second
    value, low, high = paired_gain(own[top], own[other], latency, resamples=draws)
    known = bool(np.isfinite([low, high]).all())
    return {
        "policy": top, "fixed": fixed, "next": second,
        "pays": first is not None and drafted[first]["speedup"] > 1,
        "gain": value, "gain_lo": low if known else None,
        "gain_hi": high if known else None, "told_apart": known and not low <= 1 <= high,
        "same": max(abs(n - 1) for n in (value, low, high) if np.isfinite(n)) < SHOWN,
    }  # fmt: skip
