"""Rows in files, for programs and papers: CSV, LaTeX, Parquet and JSON."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from commands.common.columns import COLUMNS
from commands.common.printed import cell_text, is_number_column, with_spans
from policies.registry import is_bound
from traces.errors import DraftsimError, FileError
from traces.store.parquet import check_no_recording
from traces.store.text import plain
from traces.store.writing import is_device, write_atomically

SCHEMA = 1

TABLES = (".csv", ".tex", ".parquet", ".json")
BEGINS = {".tex": (b"\\begin{tab",), ".parquet": (b"PAR1",), ".json": (b"{",)}
"""How the content of a table's file begins, by suffix; for CSV see `_is_our_csv`."""
OUTPUTS = ("out", "json", "rest", "timeline", "markdown", "plot", "plots")
"""Parameters of commands that name what is written."""


def check_place(path: Path, begins: Sequence[bytes] = (), recording: bool = False) -> None:
    """Raise FileError if a file at `path` could not be written, so far as can be told.

    Nor may something else be lost: a file that is there must begin in one of the ways `begins`,
    where any are given (a table's file in .csv: with columns of ours), and be no recording, unless
    a `recording` is to be written.
    """
    if reason := _unwritable(path):
        raise FileError(f"{path}: cannot be written ({reason}): choose another place for it")
    if not (_begins(path, begins) if begins else path.suffix != ".csv" or _is_our_csv(path)):
        raise FileError(
            f"{path}: holds something else than this command writes: name another file, or remove "
            "it"
        )
    if not recording:
        check_no_recording(path)


def _begins(path: Path, ways: Sequence[bytes]) -> bool:
    """Return True if the file at `path` begins in one of these ways, is empty or does not exist."""
    if not path.is_file():
        return True
    try:
        with path.open("rb") as file:
            start = file.read(max(map(len, ways)))
    except OSError:  # it may be replaced, and not be read
        return True
    return not start or start.startswith(tuple(ways))


def _is_our_csv(path: Path) -> bool:
    """Return True if the file at `path` has a first line of our columns, or there is none."""
    if not path.is_file():
        return True
    try:
        with path.open(encoding="utf-8") as file:
            names = file.readline().strip().split(",")
    except OSError:  # it may be replaced, and not be read
        return True
    except UnicodeDecodeError:
        return False
    # The glossary has no columns that are written and never printed.
    return names == [""] or (names[0] in COLUMNS and sum(name in COLUMNS for name in names) > 1)


def check_apart(options: Mapping[str, Any]) -> None:
    """Raise FileError if two `OUTPUTS` among `options` are one file, or one is read as well.

    ``options`` are a command's values, by parameter.
    """
    written: dict[Path, str] = {}
    for name in OUTPUTS:
        if (value := options.get(name)) in (None, "-") or isinstance(value, bool):
            continue
        path = Path(os.path.realpath(str(value)))
        if is_device(path):
            continue
        if path in written:
            raise FileError(
                f"{value}: --{written[path]} and --{name} would both write it: name two files"
            )
        written[path] = name
    for name, value in options.items():
        if name in OUTPUTS or not isinstance(value, (str, Path, list, tuple)):
            continue
        for text in map(str, value if isinstance(value, (list, tuple)) else [value]):
            # Files may be a list in one text, with a draft length or part (FILE@K, FILE#CURVE).
            parts = {text, *text.split(","), *re.split("[@#:]", text)[:1]}
            for part in (*parts, os.path.join(text, "trace.parquet")):
                path = Path(os.path.realpath(part))
                if path in written and path.is_file():
                    raise FileError(
                        f"{part}: this command reads it, so --{written[path]} cannot write it: "
                        "name another file"
                    )


def _unwritable(path: Path) -> str:
    """Return why no file can be written at `path`; empty if one can, so far as can be told."""
    if path.is_dir():
        return "it is a folder"
    if is_device(path):  # it is written to, not replaced
        return "" if os.access(path, os.W_OK) else "it may only be read"
    return _closed(Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent)


def check_writable(path: Path) -> None:
    """Raise FileError where files in a folder at `path`, made if need be, could not be written."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if reason := _closed(there):
        raise FileError(f"{path}: cannot be written to ({reason}): choose another folder")


def _closed(folder: Path) -> str:
    """Return why nothing can be put into `folder`; empty if it can, so far as can be told."""
    if not folder.is_dir():
        return f"{folder} is no folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may only be read"


def check_suffix(path: Path) -> None:
    """Raise DraftsimError if the name of a table's file has another suffix than `TABLES`."""
    if path.suffix not in TABLES:
        raise DraftsimError(f"--out {path}: the suffix is not one of {', '.join(TABLES)}")


def rows_file(out: Path | None) -> Path | None:
    """Return the file of rows as they come: `out`, or one next to a table that replaces it.

    Raises DraftsimError if that one holds finished results, which the table would replace.
    """
    from simulator.serving.outcome.results import read_results

    if out is None or out.suffix not in TABLES:
        return out
    lines = out.with_name(out.name + ".jsonl")
    if lines.is_file():
        with suppress(FileError):  # a damaged one says so when it is continued
            if read_results(lines).complete:
                raise DraftsimError(
                    f"{lines}: holds finished results, which would be lost: name another file than "
                    f"{out}, or remove it"
                )
    return lines


def write_rows(
    path: Path,
    records: Sequence[Mapping[Any, Any]],
    command: str = "",
    more: Mapping[str, Any] | None = None,
    tables: Callable[[], Sequence[Shown]] | None = None,
) -> None:
    """Write a table in the form that the suffix names, whole or not at all.

    ``command`` and ``more`` are what JSON holds in addition to the rows; LaTeX holds the `tables`
    as they are printed, if there are any.  Raises DraftsimError for another suffix than `TABLES`,
    or a place that cannot be written to.
    """
    check_suffix(path)
    if path.suffix in (".csv", ".parquet"):
        frame = pd.DataFrame([{k: _flat(v) for k, v in plain(r).items()} for r in records])
        as_csv = path.suffix == ".csv"
        content = frame.to_csv(index=False).encode() if as_csv else frame.to_parquet(index=False)
    elif path.suffix == ".tex":
        shown = [Shown(records)] if tables is None else tables()
        content = "\n".join(
            _table(one, f"draftsim {command}") for one in shown if one.rows
        ).encode()
    else:
        content = document(command, records, more).encode()
    write_atomically(path, content)


def document(
    command: str, records: Sequence[Mapping[Any, Any]], more: Mapping[str, Any] | None
) -> str:
    """Return `records` and their context as the JSON that every command writes."""
    results = [plain(r) for r in records]
    document = {"schema": SCHEMA, "command": command, "results": results, **plain(more or {})}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _flat(value: Any) -> Any:
    """Return a value for one cell: what holds others is JSON text there."""
    return json.dumps(value) if isinstance(value, (dict, list)) else value


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
    notes: Sequence[str] = ()
    """Lines below the table, which explain its marks and columns."""


def escaped(text: str) -> str:
    """Return `text` with what LaTeX would read as a command written out.

    >>> escaped("a_b & 50%")
    'a\\\\_b \\\\& 50\\\\%'
    """
    return "".join(_SPECIAL.get(c, c) for c in text)


def _table(one: Shown, caption: str) -> str:
    """Return a table environment without columns that are empty; its title is the caption."""
    names = list(one.show or dict.fromkeys(name for row in one.rows for name in row))
    rows, names = with_spans(one.rows, names)
    cells = {
        name: [cell_text(str(name), row.get(name)) for row in rows] for name in names
    }  # fmt: skip
    names = [name for name in names if set(cells[name]) != {"-"}] or names
    best = _best(one.rows, names)
    align = "".join("r" if is_number_column(cells[n]) else "l" for n in names)
    lines = [
        r"\begin{table}", r"\centering", f"\\caption{{{escaped(one.title or caption)}}}",
        f"\\begin{{tabular}}{{{align}}}", r"\toprule",
        " & ".join(escaped(_one_line(str(n))) for n in names) + r" \\", r"\midrule",
    ]  # fmt: skip
    for i in range(len(rows)):
        texts = [_in_table(cells[name][i]) for name in names]
        if i == best:
            texts = [f"\\textbf{{{text}}}" for text in texts]
        # A star or a bracket after a row's end would be read as its argument.
        guard = "{}" if texts[0][:1] in ("*", "[") else ""
        lines.append(guard + " & ".join(texts) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if one.notes:
        lines += [r"\par\smallskip\footnotesize", *(f"{escaped(n)}\\par" for n in one.notes)]
    return "\n".join([*lines, r"\end{table}", ""])


def _one_line(heading: str) -> str:
    """Return a heading on one line; a name that was broken inside is whole again.

    >>> [_one_line(text) for text in ("tokens\\n/round", "rate-\\noptimal", "in\\ntime")]
    ['tokens/round', 'rate-optimal', 'in time']
    """
    return " ".join(re.sub(r"(?<=[:-])\n|\n(?=/)", "", heading).split())


def _in_table(text: str) -> str:
    """Return a cell's text escaped; a range of figures is set with an en dash."""
    if is_number_column([text]):
        text = re.sub(r"(?<=[\d%])-(?=[\d+])", "--", text)
    return escaped(" ".join(text.split()))


def _best(rows: Sequence[Mapping[Any, Any]], names: Sequence[Any]) -> int | None:
    """Return the row with the largest figure in the column that ranks, None if none does.

    Bounds are left out, and rules that hardly verify.
    """
    from simulator.summary import HARDLY_SAID

    ranked = ("speedup", "gain", "served_tok_s", "tokens/s", "best speedup", "mean speedup")
    column = next((name for name in ranked if name in names), None)
    if column is None or len(rows) < 2:
        return None
    figures = {
        i: figure for i, row in enumerate(rows)
        if (figure := _figure(row.get(column))) is not None
        and not is_bound(str(row.get("policy", "")).split(" ")[0])  # marks may follow
        and HARDLY_SAID not in str(row.get("note"))
    }  # fmt: skip
    return max(figures, key=lambda i: figures[i], default=None)


def _figure(value: Any) -> float | None:
    """Return the number that a cell holds; None for a bound or no number."""
    try:
        figure = float(str(value).removesuffix("x"))
    except ValueError:
        return None
    return None if math.isnan(figure) else figure
