"""The account of what a stage did not do, and why: device limits, time, failures, stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from profiler.suite.environment import Workplace

COMPLETE, FAILED, REFUSED, UNFINISHED = range(4)
"""Exit codes: all done, something failed, a wrong request, and time alone was lacking."""


class StoppedError(BaseException):
    """The process was told to end; what is finished is written first."""


class Account:
    """The work that a stage leaves undone; `summary` goes into its results, `status` is its exit
    code.

    What failed or came too late stays unfinished: the same command tries it again.
    """

    def __init__(self, place: Workplace) -> None:
        self.place = place
        self.limits: dict[str, str] = {}
        """Parts that this device or model does not hold, by name."""
        self.late: dict[str, str] = {}
        """Parts that there was no time for, by name."""
        self.failed: dict[str, str] = {}
        """Errors, by the part that they stopped."""
        self.stopped: str | None = None
        """Why the stage broke off, if it did."""

    def limit(self, name: str, why: str) -> None:
        """Leave something out for good."""
        self.limits[name] = why
        self.place.say(why)

    def fail(self, name: str, error: BaseException | str) -> None:
        """Something went wrong; it is said at once."""
        self.failed[name] = error if isinstance(error, str) else reason(error)
        self.place.say(f"FAILED {name}: {self.failed[name]}")

    @property
    def status(self) -> int:
        """The exit code."""
        if self.failed or self.stopped:
            return FAILED
        return UNFINISHED if self.late else COMPLETE

    @property
    def notes(self) -> list[str]:
        """Everything left out, a line each."""
        undone = {**self.late, **{name: f"failed: {why}" for name, why in self.failed.items()}}
        return [*self.limits.values(), *(f"{name}: {why}" for name, why in undone.items())]

    def summary(self) -> dict[str, Any]:
        """Return the summary that the stage's results hold."""
        return {
            "complete": self.status == COMPLETE, "left_out": self.notes, "late": self.late,
            "failed": self.failed, "stopped": self.stopped,
        }  # fmt: skip

    @contextmanager
    def closing(self, write: Callable[[], None]) -> Iterator[None]:
        """Whatever ends the block, what there is by then is written."""
        try:
            yield
        except BaseException as error:
            self.stopped = reason(error)
            write()
            raise
        write()


def reason(error: BaseException) -> str:
    """An error in one line: its first, or what it is."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
