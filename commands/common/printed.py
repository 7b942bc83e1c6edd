"""Rows for people: tables and entries that fit a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from commands.common.layout import GAP, blocks, heading, in_lines, in_parts, longest

OFF_TERMINAL = 100
"""Columns of a table that is not for a terminal."""
WORD = 32
"""Characters that a column of words is left, at the least."""
INDENT = 4
"""Of what stands below a name."""


def print_table(
    records: Sequence[Mapping[Any, Any]],
    show: Sequence[str] | None = None,
    title: str | None = None,
    stderr: bool = False,
) -> None:
    """A table of `records`, on standard output or on standard error.

    No number is cut: columns that do not fit beside the others stand below them, behind those
    that say what a row is of.
    """
    if not records:
        console(stderr=stderr).print("no rows")
        return
    cells = {n: [cell_text(n, r.get(n)) for r in records] for n in list(show or records[0])}
    values = {n: [r.get(n) for r in records] for n in cells}
    numeric = {n for n, v in values.items() if all(_is_number(one) for one in v)}
    for name in cells.keys() - numeric:
        cells[name] = [text if " " in text else in_lines(text, WORD) for text in cells[name]]
    # What leads until the first figure tells the rows apart.
    keys = list(takewhile(lambda name: not _is_figure(values[name]), cells))
    room = _room(stderr)
    # Headings are folded only where there is no room for them.
    heads = {n: heading(n, len(n)) for n in cells}
    if sum(max(map(longest, [*cells[n], n])) + GAP for n in cells) > room:
        heads = {n: heading(n, max(map(longest, column))) for n, column in cells.items()}
    needed = {n: max(map(longest, [*column, heads[n]])) for n, column in cells.items()}
    needed |= {n: min(width, WORD) for n, width in needed.items() if n not in numeric}
    if len(keys) == len(cells):  # all words, which are folded where they have to be
        _print_block(cells, heads, {keys[0]: needed[keys[0]]}, numeric, title, room, stderr)
        return
    if sum(needed[name] + GAP for name in keys) > room // 2:
        keys = keys[:1]
    for i, names in enumerate(blocks(needed, keys, room)):
        block = {n: cells[n] for n in names}
        _print_block(block, heads, needed, numeric, None if i else title, room, stderr)


def print_entries(entries: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> None:
    """Names, and below each its paragraphs, in whose parts no line is broken.

    Blanks at the end of a part stand between it and the next, or at a line's end.
    """
    where = console(width=_room())
    for i, (name, paragraphs) in enumerate(entries):
        if i:
            where.print()
        where.print(Text(printable(name), style="bold"))
        for parts in paragraphs:
            shown = in_parts([printable(part) for part in parts], where.width - INDENT)
            where.print(Text(indent(shown, " " * INDENT)), soft_wrap=True)


def _print_block(
    cells: Mapping[str, Sequence[str]], heads: Mapping[str, str], needed: Mapping[str, int],
    numeric: Collection[str], title: str | None, room: int, stderr: bool,
) -> None:  # fmt: skip
    from rich.box import SIMPLE_HEAD

    table = Table(
        title=None if title is None else Text(printable(title), style="bold"), title_justify="left",
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
    where = console(width=room, stderr=stderr)
    where.print()
    where.print(table)


def _room(stderr: bool = False) -> int:
    stream = sys.stderr if stderr else sys.stdout
    return console(stderr=stderr).width if stream.isatty() else OFF_TERMINAL


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _is_figure(values: Sequence[Any]) -> bool:
    """Whether a column tells something of its rows, rather than which they are."""
    return any(isinstance(value, float) for value in values)


def console(**options: Any) -> Console:
    """A console that takes text for text: names hold brackets, and come from anybody's file."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def printable(text: str) -> str:
    """`text` with what a terminal would take for a command written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def three_digits(value: float) -> str:
    """Return a number with three significant digits, whole from a hundred on.

    >>> [three_digits(x) for x in (0.00123, 0.1234, 1.234, 12.34, 123.4, 12345.6)]
    ['0.00123', '0.123', '1.23', '12.3', '123', '12,346']
    """
    size = abs(value)
    if not math.isfinite(value) or size >= 1e9:
        return f"{value:.3g}"
    if size >= 99.95:
        return f"{value:,.0f}"
    if 0 < size < 0.0995:
        return f"{value:.3g}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def cell_text(name: str, value: Any) -> str:
    """What a cell of the column `name` shows of `value`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # A standard error is in its figure's own unit, every other error relative.
        relative = name.endswith("error") and name != "standard_error"
        if relative or name in ("bias", "slowdown"):
            return f"{100 * value:+.1f} %"
        if name.endswith("noise") or name in ("spread", "share", "disturbed"):
            return f"{100 * value:.1f} %"
        return three_digits(value)
    return printable(str(value))
