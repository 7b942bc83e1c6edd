"""Rows for people: tables and entries that fit a terminal.

Headings, names and lists fold where they have to; a number never does.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from numbers import Integral
from textwrap import indent
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from traces.digits import three_digits

NAME = 36
"""Characters of a name on one line."""
GAP = 2
"""Blanks between two columns."""
_WORD = r"(?>\[[^\]]*\]|[^:,])"
OFF_TERMINAL = 100
"""Columns of a table that is not for a terminal."""
WORD, NARROW = 32, 15
"""Characters of a column of words where there is less room."""
_NUMBER = r"(inf|[\d.,]+(e[+-]\d+)?)[%x]?"
_FIGURE = re.compile(
    rf"[-+\u2212\u00b1\u2265]? ?({_NUMBER})?(([-/]| of | to )[-+]?{_NUMBER}| \(.*\))?"
)
"""A figure, its interval, or its part of another; a dash, or nothing."""
INDENT = 4
"""Blanks before what is below a name."""


BETTER, WORSE = "green", "red"
"""Colours of what is faster and slower than no speculation, beyond chance where that is known."""
ANSWERS = ("k", "setting", "deploy", "speedup", "gain", "replicas", "says")
"""Columns that answer the question: they stay in a table where every row has the same value."""
RATIOS = ("speedup", "gain", "decode_gain", "default_gain", "served_gain")
"""Columns whose figures are ratios to no speculation."""
SHARES = ("spread", "share", "disturbed", "chance faster", "median")
"""Columns of parts of 1, shown in percent."""
LOADS = {"rate", "alpha", "c"}
"""Columns that tell rows apart though they hold no whole numbers."""


def print_table(
    records: Sequence[Mapping[Any, Any]],
    show: Sequence[str] | None = None,
    title: str | None = None,
    stderr: bool = False,
) -> None:
    """Print a table of `records`, on standard output or on standard error.

    No number is cut: columns that do not fit next to the others follow below them, after those
    that say which row it is. Bounds of an interval (``x_lo``, ``x_hi``) share a column, and a
    column without a value in any row is left out. A column with the same value in every row is
    said once below the table.
    """
    where = table_console(stderr)
    if not records:
        where.print("no rows")
        return
    shown, names = with_spans(records, list(show or records[0]))
    names = [n for n in names if any(not _is_missing(r.get(n)) for r in shown)] or names
    names, alike = without_alike(shown, names)
    texts = {n: [cell_text(str(n), r.get(n)) for r in shown] for n in names}
    numeric = {n for n, column in texts.items() if is_number_column(column)}
    sentences = {n for n in {*names} - numeric if any(map(_is_sentence, texts[n]))}
    room = where.width
    for width in (NAME, NARROW, WORD):
        cells = texts | {
            n: [text if _is_sentence(text) else in_lines(text, width) for text in texts[n]]
            for n in {*names} - numeric
        }
        # Headings are folded only where there is no room for them.
        heads = {n: heading(n, len(n)) for n in names}
        if sum(max(map(longest, [*cells[n], n])) + GAP for n in names) > room:
            heads = {n: heading(n, max(map(longest, column))) for n, column in cells.items()}
        needed = {n: max(map(longest, [*column, heads[n]])) for n, column in cells.items()}
        needed |= {n: min(needed[n], WORD) for n in sentences}
        if sum(needed.values()) + GAP * (len(names) - 1) <= room:
            break
    # What leads until the first figure tells the rows apart.
    counts = {n for n in numeric if all(str(r.get(n)).replace(",", "").isdigit() for r in shown)}
    keys = list(takewhile(lambda n: n in counts or n in LOADS or n not in numeric, names))
    if keys == names:  # all words, which are folded where they have to be
        words = {n: " ".join([*cells[n], heads[n]]).split() for n in sentences}
        needed |= {n: max(map(len, column)) for n, column in words.items()}
    if sum(needed[name] + GAP for name in keys) > 2 * room // 3:
        keys = keys[:1]
    for i, block in enumerate(blocks(needed, keys, room)):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for n in block:
            table.add_column(
                Text(heads[n]), overflow="fold", justify="right" if n in numeric else "left",
                no_wrap=n in numeric, min_width=needed[n],
            )  # fmt: skip
        for row, record in enumerate(records):
            table.add_row(*(Text(cells[n][row], style=style_of(str(n), record)) for n in block))
        where.print()
        if title is not None and not i:  # one of the table's own is folded to its width
            where.print(Text(printable(title), style="bold"))
        # A terminal wraps what is wider than itself.
        width = sum(needed[n] + GAP for n in block) - GAP
        (where if width <= room else console(width=width, stderr=stderr)).print(table)
    print_alike(alike, where)


def _is_sentence(text: str) -> bool:
    """Return True if a cell holds several words, and no name with its marks."""
    return " " in text.removesuffix(" *").removesuffix(" ~")


SPAN = " interval"
"""Ending of the name of a column that holds the interval of another."""


def with_spans(
    records: Sequence[Mapping[Any, Any]], names: Sequence[Any]
) -> tuple[list[Mapping[Any, Any]], list[Any]]:
    """Return rows and columns with ``x_lo`` and ``x_hi`` in one column next to ``x``.

    >>> with_spans([{"gain": 1.2, "gain_lo": 1.1, "gain_hi": 1.3}], ["gain", "gain_lo", "gain_hi"])
    ([{'gain': 1.2, 'gain interval': '1.10-1.30'}], ['gain', 'gain interval'])
    """
    have = {*names}
    spans = {n: f"{n}{SPAN}" for n in names if {f"{n}_lo", f"{n}_hi"} <= have}
    bounds = {f"{n}_{end}" for n in spans for end in ("lo", "hi")}
    kept: list[Any] = []
    for name in names:
        if name not in bounds:
            kept += [name, spans[name]] if name in spans else [name]
    rows: list[Mapping[Any, Any]] = []
    for record in records:
        row = {n: record.get(n) for n in names if n not in bounds}
        for name, span in spans.items():
            low, high = (record.get(f"{name}_{end}") for end in ("lo", "hi"))
            missing = _is_missing(low) or _is_missing(high)
            row[span] = None if missing else "-".join(cell_text(name, v) for v in (low, high))
        rows.append({n: row.get(n) for n in kept})
    return rows, kept


def without_alike(
    rows: Sequence[Mapping[Any, Any]], names: Sequence[Any]
) -> tuple[list[Any], dict[str, str]]:
    """Return the columns that tell rows apart, and the text of those that are the same in all.

    A column without a value in any row is in neither.
    A single row keeps all its columns, and so do rows that nothing tells apart.  `ANSWERS` stay.

    >>> without_alike([{"K": 1, "pair": "a"}, {"K": 3, "pair": "a"}], ["K", "pair"])
    (['K'], {'pair': 'a'})
    """
    alike = {}
    for name in names:
        first, *others = (row.get(name) for row in rows)
        if all(one == first or (_is_missing(one) and _is_missing(first)) for one in others):
            alike[name] = cell_text(str(name), first)
    if len(rows) == 1 or len(alike) == len(names):
        return list(names), {}
    gone = {name: text for name, text in alike.items() if name not in ANSWERS}
    said = {str(name): text for name, text in gone.items() if text != "-"}
    return [name for name in names if name not in gone], said


def print_alike(alike: Mapping[str, str], where: Console) -> None:
    """Print what every row of a table has."""
    if alike:
        parts = [f"{' '.join(name.split())} {text}" for name, text in alike.items()]
        where.print(printable("the same in every row: " + "; ".join(parts)))


def style_of(name: str, row: Mapping[Any, Any]) -> str:
    """Return the style of a cell: faster or slower than no speculation, empty if neither is known.

    >>> style_of("gain", {"gain": 1.2, "gain_lo": 1.1, "gain_hi": 1.3})
    'green'
    >>> style_of("gain", {"gain": 1.2, "gain_lo": 0.9, "gain_hi": 1.3})
    ''
    """
    value: Any = row.get(name)
    ends: list[Any] = [row.get(f"{name}_{end}") for end in ("lo", "hi")]
    low, high = (value if _is_missing(end) else end for end in ends)
    if name not in RATIOS or not isinstance(low, (int, float)):
        return ""
    return BETTER if low > 1 else WORSE if high < 1 else ""


def is_number_column(texts: Sequence[str]) -> bool:
    """Return True if every text is a figure, with an interval or not, or a dash."""
    return all(map(_FIGURE.fullmatch, texts))


def print_entries(entries: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> None:
    """Print names, and below each its paragraphs, in whose parts no line is broken.

    Blanks at the end of a part stand between it and the next, or at a line's end.
    """
    where = table_console()
    for i, (name, paragraphs) in enumerate(entries):
        if i:
            where.print()
        where.print(Text(printable(name), style="bold"))
        for parts in paragraphs:
            shown = in_parts([printable(part) for part in parts], where.width - INDENT)
            where.print(Text(indent(shown, " " * INDENT)), soft_wrap=True)


def table_console(stderr: bool = False) -> Console:
    """Return the console of a table: as wide as the terminal, or as `OFF_TERMINAL`."""
    stream = sys.stderr if stderr else sys.stdout
    return console(width=None if stream.isatty() else OFF_TERMINAL, stderr=stderr)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def console(**options: Any) -> Console:
    """Return a console without markup, because names can hold brackets."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def printable(text: str) -> str:
    """Return `text` with what a terminal would take for a command written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def cell_text(name: str, value: Any) -> str:
    """Return the text of a cell of the column `name` with this value."""
    if _is_missing(value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # A standard error is in its figure's own unit, every other error relative.
        relative = name.endswith("error") and name != "standard_error"
        if relative or name in ("bias", "slowdown", "drift", "worst"):
            return f"{100 * value:+.1f}%"
        if name.endswith("noise") or name in SHARES:
            return f"{100 * value:.1f}%"
        return three_digits(value)
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return printable(str(value))


def in_lines(name: str, width: int = NAME) -> str:
    """Return `name` on lines of at most `width`, as far as it can be broken; never within a number.

    A name is not broken at its hyphens, so that it can be copied.

    >>> in_lines("spec-verification:beta=5,tau=0.533", 19)
    'spec-verification:\\nbeta=5,tau=0.533'
    """
    return in_parts(re.findall(rf"{_WORD}*[:,]+\s*|{_WORD}+", name), width)


def heading(name: str, width: int) -> str:
    """Return a column's name on lines of at most `width`, as far as its words allow.

    >>> heading("standard_error", 8)
    'standard_\\nerror'
    """
    return in_parts(re.findall(r"[^\s_]*[\s_]+|[^\s_]+", name), width)


def in_parts(parts: Sequence[str], width: int) -> str:
    """Return `parts` on lines of at most `width`, broken only between them.

    >>> in_parts(["gamma=5, ", "weights=[1,2,3], ", "beta=1"], 17)
    'gamma=5,\\nweights=[1,2,3],\\nbeta=1'
    """
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def longest(text: str) -> int:
    """Return the number of characters of the longest line of `text`."""
    return max(map(len, text.split("\n")))


def blocks(widths: Mapping[str, int], keys: Sequence[str], room: int) -> list[list[str]]:
    """Return the columns that stand together, in order: `keys` lead every block.

    ``widths`` are the characters that each column needs.  A block takes at most `room`, `GAP`
    between its columns, unless a single column needs more.

    >>> blocks({"policy": 8, "a": 6, "b": 6, "c": 6}, ["policy"], 24)
    [['policy', 'a', 'b'], ['policy', 'c']]
    """
    lead = sum(widths[name] + GAP for name in keys)
    found, taken = [list(keys)], lead
    for name, width in widths.items():
        if name in keys:
            continue
        if taken + width > room and found[-1] != list(keys):
            found.append(list(keys))
            taken = lead
        found[-1].append(name)
        taken += width + GAP
    return found
