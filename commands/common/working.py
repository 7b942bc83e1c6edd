"""A word on what a command is computing, while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commands.common.printed import printable


@contextmanager
def working(first: str) -> Iterator[Callable[[str], None]]:
    """What is being computed and for how long, on a terminal's standard error, then gone.

    Gives a function that says what comes next.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    console = Console(stderr=True)
    # Off a terminal a bar that goes when it is done would leave an empty line.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(first, total=None)
        yield lambda said: bar.update(task, description=printable(said))
