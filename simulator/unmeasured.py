"""Sentences on passes outside the measured sizes, and on parts that a latency table lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policies.batch.base import Policy
from simulator.pricing import extras_of, missing_parts
from traces.acceptance.sampling import Sampling
from traces.latency.table import LatencyTable

ERRS = {
    "host_round": "speedups are too low, or too high if the host starts draft passes slowly",
    "target prefill": "tokens/s are too high, and speedups too far from 1 for long prompts",
    "sampling": "tokens/s are too high, and so are most speedups",
}
"""How results err if a part that plain decoding has, too, costs nothing."""


def free_hosts(
    tables: Iterable[LatencyTable], policies: Iterable[Policy], sampling: Sampling
) -> set[str]:
    """Return the host's parts of runs of `policies` that at least one of `tables` lacks."""
    extras = {extras_of(policy.reads, sampling=sampling) for policy in policies}
    return {part for table in tables for own in extras for part in missing_parts(table, own)}


def said_free(unpriced: Iterable[str]) -> list[str]:
    """Return a line on what a latency table does not hold, and how results err without it.

    No line if it holds everything.
    """
    names = sorted(set(unpriced))
    apart = {name: way for name, way in ERRS.items() if name in names}
    drafting = [name for name in names if name not in apart]
    said = [f"{', '.join(drafting)} (speedups are too high)"] if drafting else []
    said += [f"{name} ({way})" for name, way in apart.items()]
    return [f"not in the latency table, counted as 0 s: {'; '.join(said)}"] if said else []


def said_outside(rows: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Return a line on rows with passes outside the measured sizes, with the row of the most.

    ``outside`` is the share of a row's passes; ``batch`` and ``context`` are named if rows have
    them.  No line if there is no such row.
    """
    found = [row for row in rows if row["outside"]]
    if not found:
        return []
    worst = sorted(found, key=lambda row: (row["outside"], row.get("batch") or 0))[-1]
    at = f" at batch {worst['batch']}" if "batch" in worst else ""
    context = worst.get("context")
    at += f", context {context:g}" if context is not None and not math.isnan(context) else ""
    return [
        f"{len(found)} of {len(rows)} rows have passes outside the measured sizes, priced by a "
        f"fitted roofline: most {worst['policy']}{at} ({percentage(worst['outside'])} of its "
        "passes)"
    ]


def percentage(share: float) -> str:
    """Return a share above 0 in percent, never as zero.

    >>> percentage(0.00001), percentage(0.024)
    ('under 0.1%', '2.4%')
    """
    return f"{share:.1%}" if share >= 0.0005 else "under 0.1%"


def said_served(rows: Sequence[Mapping[str, Any]], remedy: str = "") -> list[str]:
    """Return lines on the passes of served loads outside the measured sizes, and `said_free`.

    ``remedy`` ends the first line: where these passes are listed.
    """
    names = dict.fromkeys(row["policy"] for row in rows if row["extrapolated"])
    said = [
        "passes outside the measured sizes were priced by a fitted roofline for "
        f"{', '.join(names)}{remedy}"
    ]  # fmt: skip
    return said * bool(names) + said_free(what for row in rows for what in row["unpriced"])
