"""A pytest plugin: which test runs which line, how long it takes, and no time spent on shrinking.

    pytest -p benchmarks.mutants.plugin --hypothesis-profile=mutants [--lines FILE]

With ``--lines`` it writes what the tests that passed have run: ``{"opening": seconds, "seconds":
{test: seconds}, "failed": [test, ...], "lines": {path: {line: [test, ...]}}}``.  A test is a
function: its parameters share one entry.  Opening is what happens before the first: imports.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# The same examples at every run, and none looked for once one has failed.
settings.register_profile(
    "mutants", phases=(Phase.explicit, Phase.generate), database=None, derandomize=True,
    deadline=None,
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", metavar="FILE", help="write which test runs which line")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--lines"):
        config.pluginmanager.register(Lines(Path(path), config.rootpath), "lines")


class Lines:
    """Writes `path` when the tests have ended; `root` is the checkout's folder."""

    def __init__(self, path: Path, root: Path) -> None:
        import coverage

        from benchmarks.mutants.places import SCOPE

        self.path, self.root = path, root
        self.begun, self.opening = time.monotonic(), 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        include = [str(root / pattern) for pattern in SCOPE]
        self.coverage = coverage.Coverage(data_file=None, include=include, config_file=False)
        self.coverage.start()

    def pytest_collection_finish(self) -> None:
        self.opening = time.monotonic() - self.begun

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.coverage.switch_context(function_of(item.nodeid))
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = function_of(report.nodeid)
        self.seconds[name] += report.duration
        if report.failed:
            self.failed.add(name)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in sorted(data.measured_files()):
            by_line = {
                line: sorted({*names} - {""} - self.failed)
                for line, names in data.contexts_by_lineno(file).items()
            }
            lines[os.path.relpath(file, self.root)] = {k: v for k, v in by_line.items() if v}
        found = {
            "opening": self.opening, "seconds": self.seconds, "failed": sorted(self.failed),
            "lines": lines,
        }  # fmt: skip
        self.path.write_text(json.dumps(found))


def function_of(node: str) -> str:
    """Return the test function of a node id."""
    return node.partition("[")[0]
