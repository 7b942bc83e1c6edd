"""How far a command has come: a bar on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from commands.common.printed import printable

FIRST_S, EVERY_S = 10.0, 60.0
"""Seconds before the first line where there is no terminal, and between the others."""
KEPT_S = 0.2
"""Parts counted this many seconds after the start, or sooner, were kept from an earlier run."""
REDRAW_S = 0.1
"""Seconds between two drawings of a bar that has no thread of its own."""


def progress_bar(alone: bool = False) -> Bar:
    """Return the bar shown for anything that is counted: what, how far, time left.

    With `alone` it has no thread of its own, which would keep `simulator.executors.results_of` from
    sharing the work between processes, and moves only when it is told of progress.
    """
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    return Bar(columns, alone)


@contextmanager
def working(first: str, alone: bool = False) -> Iterator[Callable[..., None]]:
    """Show what is being computed, how far and for how long, and nothing when it is done.

    Gives a function that says what comes next and, where it is counted, how much is done and of how
    much; `alone` as in `progress_bar`.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), _Count()
    with Bar((*columns, TimeElapsedColumn()), alone, transient=True) as bar:
        task = bar.add_task(first, total=None)

        def say(what: str, done: int = 0, total: int | None = None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield say


class Bar(Progress):
    """A progress bar of rich on standard error; lines where that is no terminal.

    The first line comes after `FIRST_S`, the others `EVERY_S` apart, and one at the end.
    """

    def __init__(
        self, columns: tuple[ProgressColumn, ...], alone: bool = False, transient: bool = False
    ) -> None:
        console = Console(stderr=True)  # standard output belongs to results
        self._shown, self._alone = console.is_terminal, alone
        # A bar that is not shown still counts.
        super().__init__(
            *columns, console=console, disable=not self._shown, auto_refresh=not alone,
            transient=transient,
        )  # fmt: skip
        self._began_s: dict[TaskID, tuple[float, float]] = {}
        self._seen: dict[TaskID, tuple[float, float]] = {}
        self._told: set[TaskID] = set()
        self._due_s, self._ended = 0.0, threading.Event()
        self._teller: threading.Thread | None = None

    def start(self) -> None:
        """Begin to show it."""
        super().start()
        self._due_s = time.monotonic() + (REDRAW_S if self._shown else FIRST_S)
        if not self._shown and not self._alone:
            self._teller = threading.Thread(target=self._tell, daemon=True)
            self._teller.start()

    def stop(self) -> None:
        """End it; what was told of now and then is told of once more."""
        self._ended.set()
        if self._teller is not None:
            self._teller.join()
        super().stop()
        for task in self.tasks if not self._shown else ():
            if task.id in self._told:
                _print(f"{self._counted(task)}, {clock(self._since(task)[0])} in all")

    def add_task(self, description: str, *args: Any, **fields: Any) -> TaskID:
        """Add something that is counted."""
        task = super().add_task(description, *args, **fields)
        self._began_s[task] = time.monotonic(), self._tasks[task].completed
        return task

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """Change what is known of a task."""
        super().update(task_id, **fields)
        self._pulse(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Count what is done of a task."""
        super().advance(task_id, advance)
        self._pulse(task_id)

    def _pulse(self, task_id: TaskID) -> None:
        """Draw the bar or print a line if it is time to, without a thread."""
        now_s, (began_s, _) = time.monotonic(), self._began_s[task_id]
        if now_s - began_s < KEPT_S:
            self._began_s[task_id] = began_s, self._tasks[task_id].completed
        if not self._alone or now_s < self._due_s:
            return
        self._due_s = now_s + (REDRAW_S if self._shown else EVERY_S)
        self.refresh() if self._shown else self._line()

    def _tell(self) -> None:
        wait_s = FIRST_S
        while not self._ended.wait(wait_s):
            self._line()
            wait_s = EVERY_S

    def _line(self) -> None:
        """Print how far the last task that is not finished has come."""
        under_way = [task for task in self.tasks if not task.finished]
        if not under_way:
            return
        task = under_way[-1]
        spent_s, done = self._since(task)
        left = f", {clock(spent_s)} so far"
        if task.total is not None and done > 0:
            # A part under way is as long as the finished ones: its seconds so far are spent.
            upto_s = self._upto_s(task, spent_s, done)
            due_s = upto_s / done * (task.total - task.completed) - (spent_s - upto_s)
            left = f", about {clock(max(due_s, 0.0))} left"
        self._told.add(task.id)
        _print(f"{self._counted(task)}{left}")

    def _since(self, task: Task) -> tuple[float, float]:
        """Return seconds since the task was added, and what was done of it in them."""
        began_s, before = self._began_s[task.id]
        return time.monotonic() - began_s, task.completed - before

    def _upto_s(self, task: Task, spent_s: float, done: float) -> float:
        """Return the seconds after which `done` was first seen, of `spent_s` since the start."""
        seen = self._seen.get(task.id)
        if seen is None or seen[0] != done:
            self._seen[task.id] = seen = done, spent_s
        return seen[1]

    def _counted(self, task: Task) -> str:
        what = task.description
        return what if task.total is None else f"{what}: {_count_of(task)}"


class _Count(ProgressColumn):
    """A column with the number of finished parts and of all parts, if they are counted."""

    def render(self, task: Task) -> str:
        return "" if task.total is None else _count_of(task)


def _count_of(task: Task) -> str:
    return f"{int(task.completed):,} of {int(task.total or 0):,}"


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, such as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
