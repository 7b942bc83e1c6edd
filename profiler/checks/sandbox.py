"""Tests of code that a model wrote, run in a separate process with limits.

The process has no environment, an empty folder of its own, no site packages, and limits of
processor time, memory, file size and seconds.  On Linux with x86_64 or aarch64 the kernel denies it
sockets and further processes.  Python refuses changes of files outside of its folder; it may read
files.  This protects from accidents of a language model, not from malicious code: for that use a
virtual machine.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from policies.json_text import parse_json
from profiler.prompts import CodeTask
from traces.errors import DraftsimError

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(^[ \t]*```|\Z)", re.M | re.S)
_SPECIAL = re.compile(r"(?:<\|[^<>|\s]+\|>|</s>)+\s*\Z")
PYTHON = ("", "py", "python", "python3")
WALL_S = 30.0
LIMITS = {
    "RLIMIT_CPU": 5, "RLIMIT_AS": 512 << 20, "RLIMIT_FSIZE": 1 << 20, "RLIMIT_NOFILE": 64,
    "RLIMIT_CORE": 0,
}  # fmt: skip
"""Limits of one run of code, by `resource`'s names: seconds, bytes, and open files."""


class CodeVerdict(NamedTuple):
    """The result of running code: passed or not, and the reason if not."""

    passed: bool
    said: str = ""


def code_of(text: str) -> tuple[str, bool]:
    """Return the first Python block of a text (all of it without one), and whether it is cut off.

    >>> code_of("Sure:\\n```python\\nx = 1\\n```\\nThis sets x.")
    ('x = 1\\n', False)
    """
    whole = _SPECIAL.sub("", text)
    endless = whole == text  # the token limit ended it
    for tag, code, end in _BLOCK.findall(whole):
        if tag.lower() in PYTHON:
            return dedent(code), endless and not end
    return whole, endless


def judge_code(task: CodeTask, text: str) -> CodeVerdict:
    """Run the code of an answer against the prompt's tests.

    Code is run with the prompt's unit tests.  If the answer is a test, it must pass on correct code
    and fail on wrong code.  Code that the token limit cut off counts up to its last whole
    statement.
    """
    code, cut = code_of(text)
    if task.unit_tests:
        return run(code, task.entry, tests=task.unit_tests, cut=cut)
    right = run(code, task.entry, given=task.solution, cut=cut)
    if not right.passed:
        return CodeVerdict(False, f"on the right code: {right.said}")
    if run(code, task.entry, given=task.mutant, cut=cut).passed:
        return CodeVerdict(False, "passes on the wrong code too")
    return CodeVerdict(True)


def run(
    code: str, entry: str, *, tests: str = "", given: str = "", cut: bool = False
) -> CodeVerdict:
    """Run `code` with `tests`, or as tests of the code `given` where there are none.

    If the code is `cut`, lines at its end are left out until it is valid Python; of tests at least
    the last line is.

    Only a verdict with the token that the process was given counts, so the code cannot succeed by
    an exit or a print.  Raises DraftsimError if this system lacks such limits.
    """
    if sys.platform != "linux":
        raise DraftsimError(f"--run-code needs the limits of Linux; this is {sys.platform}")
    token, child = secrets.token_hex(16), str(Path(__file__).with_name("sandboxed.py"))
    job = {
        "code": code, "entry": entry, "tests": tests, "given": given, "cut": cut,
        "token": token, "limits": LIMITS,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="draftsim-code-", ignore_cleanup_errors=True) as own,
        tempfile.TemporaryFile() as asked,
        tempfile.TemporaryFile() as answered,
    ):
        asked.write(json.dumps(job).encode())
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", child], env={}, cwd=own, stdin=asked,
            stdout=answered, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            ended = process.wait(WALL_S)
        except subprocess.TimeoutExpired:
            return CodeVerdict(False, f"no end within {WALL_S:g} s")
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        answered.seek(0)
        return _read(answered.read(4096), token, ended)


def _read(written: bytes, token: str, ended: int) -> CodeVerdict:
    try:
        found = parse_json(written)
        if found["token"] == token:
            said = found["said"]
            return CodeVerdict(said is None, said or "")
    except (ValueError, TypeError, KeyError):
        pass
    if ended < 0:
        return CodeVerdict(False, f"ended by {signal.Signals(-ended).name}")
    return CodeVerdict(False, f"ended by itself with {ended}, before its tests had")
