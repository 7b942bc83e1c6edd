"""Printed tables as LaTeX: booktabs, a caption, the best row in bold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commands.common.printed import cell_text, is_number_column, with_spans
from policies.registry import is_bound

RANKED = (
    "speedup", "gain", "served_tok_s", "tokens/s", "best speedup", "mean speedup",
)  # fmt: skip
"""Columns in which larger is better; the first that a table has decides which row is in bold."""
_SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "γ": r"$\gamma$", "α": r"$\alpha$", "±": r"$\pm$", "×": r"$\times$", "≥": r"$\geq$",
    "≤": r"$\leq$", "−": "$-$", "–": "--", "…": r"\ldots{}",
}  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """A table as it is printed."""

    rows: Sequence[Mapping[Any, Any]]
    """Cells by column: values, or text that is printed as it is."""
    title: str | None = None
    show: Sequence[str] | None = None
    """Columns in order; None: those of the first row."""


def as_latex(tables: Sequence[Shown]) -> str:
    """Return the tables, each in an environment of its own with its title as the caption."""
    return "\n".join(_table(one) for one in tables if one.rows)


def escaped(text: str) -> str:
    """Return `text` with what LaTeX would read as a command written out.

    >>> escaped("a_b & 50 %")
    'a\\\\_b \\\\& 50 \\\\%'
    """
    return "".join(_SPECIAL.get(c, c) for c in text)


def _table(one: Shown) -> str:
    """Return one table; a column that is empty in every row is left out."""
    names = list(one.show or dict.fromkeys(name for row in one.rows for name in row))
    rows, names = with_spans(one.rows, names)
    cells = {
        name: [cell_text(str(name), row.get(name)) for row in rows] for name in names
    }  # fmt: skip
    names = [name for name in names if set(cells[name]) != {"-"}] or names
    best = _best(rows, names)
    align = "".join("r" if is_number_column(cells[n]) else "l" for n in names)
    lines = [
        r"\begin{table}", r"\centering", f"\\caption{{{escaped(one.title or '')}}}",
        f"\\begin{{tabular}}{{{align}}}", r"\toprule",
        " & ".join(escaped(" ".join(str(n).split())) for n in names) + r" \\", r"\midrule",
    ]  # fmt: skip
    for i in range(len(rows)):
        texts = [_in_table(cells[name][i]) for name in names]
        if i == best:
            texts = [f"\\textbf{{{text}}}" for text in texts]
        # A star or a bracket after a row's end would be read as its argument.
        guard = "{}" if texts[0][:1] in ("*", "[") else ""
        lines.append(guard + " & ".join(texts) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _in_table(text: str) -> str:
    """Return a cell's text escaped; a range of figures is set with an en dash."""
    low, dash, high = text.partition("-")
    if dash and _is_figure(low) and _is_figure(high):
        return f"{low}--{high}"
    return escaped(" ".join(text.split()))


def _is_figure(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _best(rows: Sequence[Mapping[Any, Any]], names: Sequence[Any]) -> int | None:
    """Return the row with the largest figure in the column that ranks, None if none does."""
    column = next((name for name in RANKED if name in names), None)
    if column is None or len(rows) < 2:
        return None
    figures = {
        i: figure for i, row in enumerate(rows)
        if (figure := _figure(row.get(column))) is not None
        and not is_bound(str(row.get("policy", "")))
    }  # fmt: skip
    return max(figures, key=lambda i: figures[i], default=None)


def _figure(value: Any) -> float | None:
    """Return the number that a cell holds; None for a bound or no number."""
    try:
        figure = float(str(value).removesuffix("x"))
    except ValueError:
        return None
    return None if math.isnan(figure) else figure
