"""Processes of their own that begin with what the tests have imported: a fork of this one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest


@contextmanager
def forked(work: Callable[[], object], said: Path = Path(os.devnull)) -> Iterator[BaseProcess]:
    """`work` in another process while the block runs; what it says on standard error is in `said`.

    It is waited for when the block ends, and ended where the block fails.  One that does not end
    by itself is ended, and fails the test.
    """

    def call() -> None:
        with said.open("w", encoding="utf-8") as sys.stderr:
            try:
                work()
            except BaseException:
                traceback.print_exc()  # what would say it finds the file closed
                raise

    process = get_context("fork").Process(target=call)
    process.start()
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        process.join(300)
        if process.exitcode is None:
            process.kill()
            pytest.fail("the other process does not end")
