"""Writes ``slow.txt``: the tests that took a second or more (`make slow-tests`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

LEAST_S = 1.0
TOOK = re.compile(r"\s*([\d.]+)s (?:call|setup)\s+(tests/\S+?::\w+)")
"""A line that pytest prints with ``--durations``."""


def slow_tests(lines: Iterable[str]) -> list[str]:
    """Return the tests of `LEAST_S` and more, without their parameters."""
    found = filter(None, map(TOOK.match, lines))
    return sorted({took[2] for took in found if float(took[1]) >= LEAST_S})


def shown(lines: Iterable[str]) -> Iterator[str]:
    """Yield `lines`, printed as they come."""
    for line in lines:
        print(line, end="", flush=True)
        yield line


if __name__ == "__main__":
    Path(__file__).with_name("slow.txt").write_text("\n".join(slow_tests(shown(sys.stdin))) + "\n")
