"""How commands speak: tables for people, JSON for programs, one line for errors."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commands.common.layout import GAP, blocks, heading, in_lines, longest
from traces.errors import DraftsimError, FileError
from traces.store.parquet import write_atomically

if TYPE_CHECKING:
    from traces.latency.table import LatencyTable

SCHEMA = 1

TABLES = (".csv", ".tex", ".parquet", ".json")


def _placed(path: Path | None) -> Path | None:
    """`path`, refused before any work is done for it."""
    if path is not None and path.suffix not in TABLES:
        raise DraftsimError(f"--out {path}: the suffix is none of {', '.join(TABLES)}")
    if path is not None:
        check_place(path)
    return path


def check_place(path: Path) -> None:
    """Raise FileError where a file at `path` could not be written, so far as can be told."""
    parent = path.parent
    if not parent.is_dir():
        reason = f"{parent} is no folder"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(parent, os.W_OK | os.X_OK):
        reason = f"{parent} may only be read"
    else:
        return
    raise FileError(f"{path}: cannot be written ({reason}): choose another place for it")


def _placed_json(path: str | None) -> str | None:
    if path not in (None, "-"):
        check_place(Path(str(path)))
    return path


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_placed_json,
        help="Write the rows as JSON to FILE; - is standard output.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        callback=_placed,
        help="Also write the rows: .csv, .tex, .parquet or .json.",
    ),
]


def emit(
    command: str,
    rows: pd.DataFrame | Sequence[Mapping[Any, Any]],
    json_to: str | None,
    *,
    show: Sequence[str] | None = None,
    title: str | None = None,
    more: Mapping[str, Any] | None = None,
    out: Path | None = None,
    printed: Callable[[], None] | None = None,
) -> None:
    """Print `rows` as a table (columns `show`), or write them as JSON to `json_to`.

    ``more`` are keys that the JSON has beside its results.  With ``out`` all columns are also
    written to that file, in the form its suffix names.  ``printed`` prints them in place of the
    table, where a command has tables of its own.
    """
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    if out is not None:
        write_rows(out, records, command, more)
        note(f"wrote {out}")
    if json_to is None:
        if printed is None:
            print_table(records, show, title)
        else:
            printed()
        return
    text = _document(command, records, more)
    if json_to == "-":
        sys.stdout.write(text)
        return
    write_atomically(json_to, text.encode())


def _document(
    command: str, records: Sequence[Mapping[Any, Any]], more: Mapping[str, Any] | None
) -> str:
    results = [_plain(r) for r in records]
    document = {"schema": SCHEMA, "command": command, "results": results, **_plain(more or {})}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def write_rows(
    path: Path,
    records: Sequence[Mapping[Any, Any]],
    command: str = "",
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a table in the form that the suffix names, whole or not at all.

    ``command`` and ``more`` are what JSON holds beside the rows.

    Raises
    ------
    DraftsimError
        For another suffix than `TABLES`, or a place that cannot be written to.
    """
    frame = pd.DataFrame([{k: _flat(v) for k, v in _plain(r).items()} for r in records])
    if path.suffix == ".csv":
        content = frame.to_csv(index=False).encode()
    elif path.suffix == ".tex":
        content = _latex(frame).encode()
    elif path.suffix == ".parquet":
        content = frame.to_parquet(index=False)
    elif path.suffix == ".json":
        content = _document(command, records, more).encode()
    else:
        raise DraftsimError(f"--out {path}: the suffix is none of {', '.join(TABLES)}")
    write_atomically(path, content)


def _flat(value: Any) -> Any:
    """A value for one cell: what holds others is JSON text there."""
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _latex(frame: pd.DataFrame) -> str:
    """A booktabs table; what LaTeX would take for its own is escaped."""
    heads = [_escaped(str(name)) for name in frame.columns]
    align = "".join("r" if kind.kind in "if" else "l" for kind in frame.dtypes)
    lines = [f"\\begin{{tabular}}{{{align}}}", "\\toprule", " & ".join(heads) + r" \\", "\\midrule"]
    for row in frame.itertuples(index=False):
        cells = (_escaped(_cell(str(n), v)) for n, v in zip(frame.columns, row, strict=True))
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}  # fmt: skip


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


def print_table(
    records: Sequence[Mapping[Any, Any]],
    show: Sequence[str] | None = None,
    title: str | None = None,
) -> None:
    """A table of `records`; times, named ``*_s``, are shown in milliseconds or seconds.

    No number is cut: columns that do not fit beside the others stand below them, behind those
    that say what a row is of.
    """
    if not records:
        _console().print("no rows")
        return
    cells = {n: [_cell(n, r.get(n)) for r in records] for n in list(show or records[0])}
    values = {n: [r.get(n) for r in records] for n in cells}
    numeric = {n for n, v in values.items() if all(_is_number(one) for one in v)}
    for name in cells.keys() - numeric:
        cells[name] = [text if " " in text else in_lines(text, WORD) for text in cells[name]]
    # What leads until the first figure tells the rows apart.
    keys = list(takewhile(lambda name: not _is_figure(values[name]), cells))
    room = _console().width if sys.stdout.isatty() else OFF_TERMINAL
    # Headings are folded only where there is no room for them.
    heads = {n: heading(n, len(n)) for n in cells}
    if sum(max(map(longest, [*cells[n], n])) + GAP for n in cells) > room:
        heads = {n: heading(n, max(map(longest, column))) for n, column in cells.items()}
    needed = {n: max(map(longest, [*column, heads[n]])) for n, column in cells.items()}
    needed |= {n: min(width, WORD) for n, width in needed.items() if n not in numeric}
    if len(keys) == len(cells):  # all words, which are folded where they have to be
        _print_block(cells, heads, {keys[0]: needed[keys[0]]}, numeric, title, room)
        return
    if sum(needed[name] + GAP for name in keys) > room // 2:
        keys = keys[:1]
    for i, names in enumerate(blocks(needed, keys, room)):
        block = {n: cells[n] for n in names}
        _print_block(block, heads, needed, numeric, None if i else title, room)


OFF_TERMINAL = 200
"""Columns of a table that is not for a terminal."""
WORD = 24
"""Characters that a column of words is left, at the least."""


def _print_block(
    cells: Mapping[str, Sequence[str]], heads: Mapping[str, str], needed: Mapping[str, int],
    numeric: Collection[str], title: str | None, room: int,
) -> None:  # fmt: skip
    from rich.box import SIMPLE_HEAD

    table = Table(
        title=None if title is None else Text(title, style="bold"), title_justify="left",
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, title_style="",
    )  # fmt: skip
    for name in cells:
        table.add_column(
            Text(heads[name]), overflow="fold",
            justify="right" if name in numeric else "left", no_wrap=name in numeric,
            min_width=needed.get(name),
        )  # fmt: skip
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, row))
    console = _console(width=room)
    console.print()
    console.print(table)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _is_figure(values: Sequence[Any]) -> bool:
    """Whether a column tells something of its rows, rather than which they are."""
    return any(isinstance(value, float) for value in values)


def _console(**options: Any) -> Console:
    """A console that takes text for text: names hold brackets, and come from anybody's file."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def printable(text: str) -> str:
    """`text` with what a terminal would take for a command written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cell(name: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # A standard error is in its figure's own unit, every other error relative.
        relative = name.endswith("error") and name != "standard_error"
        if relative or name in ("bias", "slowdown"):
            return f"{100 * value:+.1f} %"
        if name in ("spread", "share", "disturbed"):
            return f"{100 * value:.1f} %"
        if 1e4 <= abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:.4g}" if abs(value) < 1e-2 or abs(value) >= 1e9 else f"{value:.3f}"
    return printable(str(value))


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
    _console(stderr=True).print(printable(text), soft_wrap=True)


def say_unjudged(latency: LatencyTable) -> None:
    """A note where the table has no time for the verdicts of lossy rules."""
    if not latency.is_constant and not latency.has("target", "judge"):
        note(
            "the latencies hold no time for judging under a lossy rule: it is not included in "
            "what is predicted; measure it with `draftsim profile --latency-only`"
        )
