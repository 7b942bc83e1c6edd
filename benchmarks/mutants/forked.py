"""Tests run in a copy of this process, which has loaded the libraries: a second saved each time."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

LIBRARIES = (
    "pytest", "hypothesis.strategies", "hypothesis.extra.numpy", "numpy", "pandas",
    "pyarrow.parquet", "scipy.stats", "scipy.optimize", "simpy", "typer", "rich.console",
    "joblib",
)  # fmt: skip
"""The tests' imports other than our packages, which each run has to read again."""


def load_libraries() -> None:
    for name in LIBRARIES:
        import_module(name)


def run_tests(arguments: list[str], tree: Path, limit_s: float) -> tuple[int | None, str]:
    """Return pytest's exit code in `tree`, None if it took more than `limit_s`, and what it
    printed.
    """
    output = tree.parent / "output"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run(arguments, tree, output)
    end = time.monotonic() + limit_s
    code: int | None = None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    return code, output.read_text(encoding="utf-8", errors="replace")


def _run(arguments: list[str], tree: Path, output: Path) -> None:
    code = 3
    try:
        os.setsid()  # what a test has started ends with it
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = open(file, "w", encoding="utf-8")  # noqa: SIM115
        os.chdir(tree)
        sys.dont_write_bytecode = True
        import pytest

        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
