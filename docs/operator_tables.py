"""Tables of what composed latencies predict, for the page about operators."""

from __future__ import annotations

from functools import cache

from docs.reading import table
from simulator.papers.measured.operators import operator_rows
from simulator.papers.measured.rows import by_study
from simulator.papers.ours import Ours
from simulator.papers.settings import setting_rows
from traces.store.recordings import find_latency, find_trace

SETTINGS = (
    "speedup, best fixed length", "c", "break-even c", "break-even alpha",
    "GammaTune over fixed lengths",
)  # fmt: skip


@cache
def held_against() -> str:
    """Return every study that is predicted from operators without a log, with the errors."""
    rows = [
        (study, given, one.rows, f"{one.median:.1%}", f"{one.worst:+.0%}")
        for (study, given), one in by_study(operator_rows()).items()
    ]
    return table(("held against", "predicted from", "figures", "median error", "worst"), rows)


@cache
def paper_settings() -> str:
    """Return the papers' pairs on their GPUs at the acceptance of a recording."""
    rows = setting_rows(Ours(find_trace("qwen-coder-cpu"), find_latency("a100/llama-2-7b")))
    cells = {(row.row, row.column): row for row in rows}
    lines = []
    for label in dict.fromkeys(row.row for row in rows):
        if (label, SETTINGS[0]) not in cells:
            continue
        values = []
        for column in SETTINGS:
            row = cells.get((label, column))
            value = "–" if row is None or row.ours is None else f"{row.ours:.3g}"
            if row is not None and row.published is not None:
                value += f" (paper {row.published:.3g}: {row.note.partition(':')[0]})"
            values.append(value)
        curve = [
            f"{row.column.rpartition(' ')[2]}: {row.ours:.3g}" for row in rows
            if row.row == label and row.column.startswith("speedup at batch") and row.ours
        ]  # fmt: skip
        lines.append((label, *values, ", ".join(curve)))
    return table(
        ("setting", "speedup, best fixed length", "c", "break-even c", "break-even α",
         "GammaTune over fixed", "best fixed length at other batches"),
        lines,
    )  # fmt: skip
