"""While ``draftsim serve`` runs: its progress, and readable results if it is stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.common.written import TABLES, Shown, as_latex, write_rows
from commands.serve.loads import requests_of
from commands.serve.rows import shown
from traces.store.lock import only_writer
from traces.store.writing import write_atomically

if TYPE_CHECKING:
    from simulator.serving import Scenario


@contextmanager
def kept(
    rows: list[dict[str, Any]], out: Path | None, meta: Mapping[str, Any], caption: str = ""
) -> Iterator[None]:
    """Write the table `out` at the end, and leave readable results after an interruption.

    Lines of the rows that are finished stay then: the same command goes on with them.  ``caption``
    is that of a LaTeX table.
    """
    table = out if out is not None and out.suffix in TABLES else None
    with only_writer(table) if table is not None else nullcontext():
        try:
            yield
        except KeyboardInterrupt:
            rows = _finished(rows, out)
            if table is not None and rows:
                write_as(rows, table, meta, caption, complete=False)
            where = f" are in {out}, marked incomplete" if out is not None else " were finished"
            note(f"stopped: {len(rows)} row{'s' * (len(rows) != 1)}{where}")
            raise
        if table is not None:
            write_as(rows, table, meta, caption)
            _lines_of(table).unlink(missing_ok=True)


def _finished(rows: list[dict[str, Any]], out: Path | None) -> list[dict[str, Any]]:
    """Return the rows of the file of lines, which may be one ahead of `rows` at an interruption."""
    from simulator.serving.outcome.results import read_results, restored

    lines = rows_file(out)
    if not rows or lines is None or not lines.is_file():
        return rows
    return [restored(row) for row in read_results(lines).rows]


def write_as(
    rows: Sequence[Mapping[str, Any]], path: Path, meta: Mapping[str, Any], caption: str,
    complete: bool = True,
) -> None:  # fmt: skip
    """Write the rows as the table that the suffix names; only Parquet says whether they are
    complete.
    """
    from simulator.serving.outcome.results import flat, write_table

    if path.suffix == ".parquet":
        write_table(rows, path, meta, complete)
    elif path.suffix == ".tex":
        write_atomically(path, as_latex([Shown(shown(rows), caption)]).encode())
    else:
        nested = path.suffix == ".json"
        write_rows(path, rows if nested else flat(rows).to_dict("records"), "serve")


def rows_file(out: Path | None) -> Path | None:
    """Return the file of rows as they come: `out`, or a file next to it that a table replaces."""
    return _lines_of(out) if out is not None and out.suffix in TABLES else out


def _lines_of(table: Path) -> Path:
    return table.with_name(table.name + ".jsonl")


@contextmanager
def requests_bar(
    scenarios: Sequence[Scenario], policies: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Show a progress bar over every request of every run, on standard error: (advance,
    progress).
    """
    each = requests_of(scenarios[:1])
    runs = len(scenarios) * len(policies)
    with progress_bar() as bar:
        task = bar.add_task(f"requests, run 1 of {runs}", total=each * runs)

        def progress(done: int, total: int, name: str) -> None:
            label = f"requests, run {min(done + 1, total)} of {total}"
            bar.update(task, completed=each * done, description=label)

        waiting = 0

        def advance(count: int) -> None:
            # A bar takes as long to move as a request to serve: not for every one of many.
            nonlocal waiting
            waiting += count
            if waiting * 200 >= each:
                bar.advance(task, waiting)
                waiting = 0

        yield advance, progress
