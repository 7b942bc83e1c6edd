"""A pytest plugin that tells Coverage which test runs a line, and writes how long each takes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = "MUTANTS_SECONDS"
"""The environment variable that names the file of seconds by test, of tests that passed."""
_seconds: defaultdict[str, float] = defaultdict(float)
_failed: set[str] = set()


def function_of(node: str) -> str:
    """Return the test function of a node id: its parameters share one entry."""
    return node.partition("[")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    import coverage

    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(function_of(item.nodeid))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = function_of(report.nodeid)
    _seconds[name] += report.duration
    if report.failed:
        _failed.add(name)


def pytest_sessionfinish() -> None:
    passed = {name: s for name, s in _seconds.items() if name not in _failed}
    Path(os.environ[SECONDS]).write_text(json.dumps(passed), encoding="utf-8")
