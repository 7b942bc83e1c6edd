"""SIGTERM and SIGHUP end a command as Ctrl-C does, with all processes that it started."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NUMBERS = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
TOGETHER_S = 1.0
"""Signals that arrive within this time are one: `timeout` sends two of them."""


@dataclass
class CommandStop:
    """The way in which the command was stopped."""

    number: int = signal.SIGINT

    @property
    def code(self) -> int:
        """Exit code: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + self.number


@contextmanager
def stop_signals() -> Iterator[CommandStop]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, unless they are ignored."""
    stop, last_s = CommandStop(), -TOGETHER_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal last_s
        del frame
        now_s = time.monotonic()
        before_s, last_s = last_s, now_s
        stop.number = number
        if now_s - before_s >= TOGETHER_S:
            raise KeyboardInterrupt

    held: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for one in NUMBERS:
            if signal.getsignal(one) is signal.SIG_DFL:
                held[one] = signal.signal(one, interrupt)
    try:
        yield stop
    finally:
        for one, handler in held.items():
            signal.signal(one, handler)


def end_workers() -> None:
    """End the worker processes of a study, if any run, and remove the folders they share."""
    loky = sys.modules.get("joblib.externals.loky.reusable_executor")
    executor = getattr(loky, "_executor", None)
    if executor is not None:
        executor.terminate(kill_workers=True)
