"""How commands speak: tables for people, JSON for programs, one line for errors."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from commands.common.printed import console, print_table, printable
from commands.common.written import (
    BEGINS,
    Shown,
    check_place,
    check_suffix,
    check_writable,
    document,
    write_rows,
)
from simulator.pricing import extras_of, missing_parts
from traces.acceptance.sampling import Sampling
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.store.writing import write_atomically


def placed_as(*begins: bytes, recording: bool = False) -> Callable[[Path | None], Path | None]:
    """Return an option's callback that refuses the path of a file to write before any work is done.

    A file that is there may hold nothing else (`check_place`).
    """

    def placed(path: Path | None) -> Path | None:
        if path is not None:
            check_place(path, begins, recording)
        return path

    return placed


placed = placed_as()
"""The callback of a file that may begin in any way."""
placed_recording = placed_as(*BEGINS[".parquet"], recording=True)
"""The callback of a file that may hold a recording; `write_file` checks its kind."""


def placed_folder(path: Path | None) -> Path | None:
    """Return `path` of a folder to write files into, likewise; it is made when they are."""
    if path is not None:
        check_writable(path)
    return path


def _placed_table(path: Path | None) -> Path | None:
    if path is not None:
        check_suffix(path)
    return placed_table(path)


def placed_table(path: Path | None) -> Path | None:
    """Return the callback of a file that holds a table where its suffix says so."""
    if path is not None:
        check_place(path, BEGINS.get(path.suffix, ()))
    return path


def _placed_json(path: str | None) -> str | None:
    if path not in (None, "-"):
        check_place(Path(str(path)), BEGINS[".json"])
    return path


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_placed_json,
        help="Write the rows as JSON to FILE instead of printing the table; - is standard output.",
    ),
]
PlotsOption = Annotated[
    Path | None,
    typer.Option(
        "--plots",
        metavar="DIR",
        callback=placed_folder,
        help="Also draw the results into this folder: PNG, SVG and PDF.",
    ),
]
LevelOption = Annotated[float, typer.Option(min=0.5, max=0.999, help="Level of the intervals.")]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        callback=_placed_table,
        help="Also write the rows: .csv, .parquet or .json; .tex is the printed table.",
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
    tables: Callable[[], Sequence[Shown]] | None = None,
) -> None:
    """Print `rows` as a table (columns `show`), or write them as JSON to `json_to`.

    ``more`` are keys that the JSON has next to its results.  With ``out`` all columns are also
    written to that file, in the form its suffix names; .tex holds the printed table.
    ``tables`` are printed instead, and ``printed`` prints in another way.
    Remarks that waited for the answer follow (`remark`).
    """
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    shown = tables or (lambda: [Shown(records, title, show)])
    if out is not None:
        write_rows(out, records, command, more, shown)
    if json_to == "-":
        sys.stdout.write(document(command, records, more))
    elif json_to is not None:
        write_atomically(json_to, document(command, records, more).encode())
    elif printed is not None:
        printed()
    else:
        for one in shown():
            print_table(one.rows, one.show, one.title)
            for line in one.notes:
                print(wrapped(printable(line), _room(console())))
    say_remarks()
    if out is not None:
        note(f"wrote {out}")


WIDEST = 100
"""Columns of a remark at most, and where there is no terminal."""


def note(text: str, whole: bool = False) -> None:
    """Print a remark on standard error, wrapped to the terminal.

    Nothing between backticks is broken.  A command or a file's content to copy is `whole`: it is
    printed on one line.
    """
    where = console(stderr=True)
    shown = printable(text)
    where.print(shown if whole else wrapped(shown, _room(where)), soft_wrap=True)


def _room(where: Console) -> int:
    """Return the columns of a remark on a terminal, or where there is none."""
    return min(WIDEST, where.width) if where.is_terminal else WIDEST


def say_launch(line: str, models: Iterable[str | None]) -> None:
    """Print the command that starts an engine, and before it what of it has to be replaced.

    ``models`` are names from a recording.  One that is no folder here, and no name on the hub,
    means nothing to an engine.
    """
    unknown = [
        name for name in dict.fromkeys(models)
        if name and name in line and "/" not in name and not Path(name).exists()
        and name not in ("TARGET", "DRAFT")
    ]  # fmt: skip
    if unknown:
        note(
            "before running, write your models' folders, or their names on the hub, for "
            f"{' and '.join(unknown)}"
        )
    note(f"launch: {line}", whole=True)


_WAITING: ContextVar[list[str] | None] = ContextVar("remarks that wait", default=None)


@contextmanager
def answering() -> Iterator[None]:
    """Let remarks wait until a command's answer is printed, or until the command ends."""
    before = _WAITING.set([])
    try:
        yield
    finally:
        say_remarks()
        _WAITING.reset(before)


def remark(text: str) -> None:
    """Print a remark on the answer below the answer; at once outside of `answering`."""
    waiting = _WAITING.get()
    if waiting is None:
        note(text)
    else:
        waiting.append(text)


def waiting_remarks() -> list[str]:
    """Return the remarks that wait, for a page that has to say them too.

    An indented one belongs to the one before it.  Commands that they recommend are left out.
    """
    found: list[str] = []
    for text in _WAITING.get() or ():
        said = text.strip().partition(": `draftsim ")[0]
        if text[:1].isspace() and found:
            found[-1] += f"; {said}"
        else:
            found.append(said)
    return found


def say_remarks() -> None:
    """Print the remarks that waited."""
    waiting = _WAITING.get() or []
    while waiting:
        note(waiting.pop(0))


def wrapped(text: str, width: int) -> str:
    """Return printable `text` on lines of at most `width`, as far as its words allow.

    >>> print(wrapped("measure again with `draftsim profile latency`", 30))
    measure again with
      `draftsim profile latency`
    """
    begin = text[: len(text) - len(text.lstrip())]
    # No printable text holds the mark that keeps words together.
    marked = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text.strip())
    lines = textwrap.wrap(
        marked, width, initial_indent=begin, subsequent_indent=f"{begin}  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines).replace("\0", " ")


def say_drawn(paths: Iterable[Path]) -> None:
    """Note the figures that were written, of which these are the PNGs."""
    for path in paths:
        note(f"wrote {path} (and .svg, .pdf)")


MEASURE_MORE = (
    "`draftsim profile` measures more (latency: --max-context, --max-gamma, --batch; engine: "
    "--engine-length, --engine-longest, --engine-batch)"
)
"""The remedy for passes outside the measured sizes."""


def say_unjudged(latency: LatencyTable) -> None:
    """Note where the table has no time for the verdicts of lossy rules."""
    if not latency.is_constant and not latency.has("target", "judge"):
        note(
            "the latencies hold no time for judging drafts under a lossy rule, so predictions "
            "leave it out; measure it with `draftsim profile latency`"
        )


def say_undrawn(latency: LatencyTable, sampling: Sampling) -> None:
    """Note where the table has no time for the draws of outputs that were sampled so."""
    if "sampling" in missing_parts(latency, extras_of(sampling=sampling)):
        note(
            "the latencies hold no time for drawing and rejecting sampled tokens, so predictions "
            "leave it out; measure it with `draftsim profile latency`"
        )


def say_memory(logs: Sequence[RoundLog]) -> None:
    """Note how a learning rule's memory grew over the requests, in their order."""
    for log in logs:
        table = getattr(log.rule, "table", None)
        if table is not None and table.sizes and table.sizes[-1]:
            note(
                f"{log.policy} / {log.verify}: memory of {table.sizes[0]:,} pairs after the first "
                f"request, {table.sizes[-1]:,} after {len(table.sizes):,}, {table.evictions:,} "
                "evicted"
            )
