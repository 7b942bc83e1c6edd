"""How commands speak: tables for people, JSON for programs, one line for errors."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from traces.errors import DraftsimError

if TYPE_CHECKING:
    from traces.latency import LatencyTable

SCHEMA = 1

JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the rows as JSON to FILE; - is standard output."
    ),
]


def emit(
    command: str,
    rows: pd.DataFrame | Sequence[Mapping[str, Any]],
    json_to: str | None,
    *,
    show: Sequence[str] | None = None,
    title: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print `rows` as a table (columns `show`), or write them as JSON to `json_to`.

    ``more`` are keys that the JSON has beside its results.
    """
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    if json_to is None:
        print_table(records, show, title)
        return
    results = [_plain(r) for r in records]
    document = {"schema": SCHEMA, "command": command, "results": results, **_plain(more or {})}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if json_to == "-":
        sys.stdout.write(text)
        return
    try:
        Path(json_to).write_text(text)
    except OSError as error:
        raise DraftsimError(f"cannot write --json {json_to}: {error.strerror}") from None


def print_table(
    records: Sequence[Mapping[Any, Any]],
    show: Sequence[str] | None = None,
    title: str | None = None,
) -> None:
    """A rich table of `records`; times, named ``*_s``, are shown in milliseconds or seconds."""
    if not records:
        Console().print("no rows")
        return
    columns = list(show or records[0])
    table = Table(title=title, title_justify="left")
    for name in columns:
        numeric = all(isinstance(r.get(name), (int, float)) for r in records)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for record in records:
        table.add_row(*(_cell(name, record.get(name)) for name in columns))
    # Off a terminal the table must not be wrapped at 80 columns.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _cell(name: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if name in ("error", "speedup_error", "profile_error", "bias"):
            return f"{100 * value:+.1f} %"
        if name in ("spread", "share"):
            return f"{100 * value:.1f} %"
        if 1e4 <= abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:.4g}" if abs(value) < 1e-2 or abs(value) >= 1e9 else f"{value:.3f}"
    return str(value)


def _plain(value: Any) -> Any:
    """JSON values: numpy scalars unwrapped, what is not a number null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def note(text: str) -> None:
    """A remark for the person at the terminal, kept off standard output."""
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)


def say_unjudged(latency: LatencyTable) -> None:
    """A note where the table has no time for the verdicts of lossy rules."""
    if not latency.is_constant and not latency.has("target", "judge"):
        note(
            "the latencies hold no time for judging under a lossy rule: it is not included in "
            "what is predicted; measure it with `draftsim profile --latency-only`"
        )
