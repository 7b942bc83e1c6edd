"""Which tests reach a line: measured once per test file, again when it or what it ran changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.mutants.places import functions, statement

PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "benchmarks.mutants.plugin",
          "--hypothesis-profile=mutants")  # fmt: skip


class Reach:
    """The tests of the checkout at `root`, as far as they are known, kept in `folder`.

    Attributes
    ----------
    seconds:
        Of each test function; of a test file, those of its imports.
    lines:
        By path and line, the tests that run the line.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder / "reach"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, set[str]]] = {}
        self.failed: set[str] = set()

    def measure(self, tests: Iterable[str], limit_s: float, deadline: float) -> bool:
        """Run the test files whose answer is not known yet; False if time ran out.

        A file that takes more than `limit_s` is left out: too slow to be run on every mutant.
        """
        for test in tests:
            if self._known(test):
                continue
            left = deadline - time.monotonic()
            if left < 5:
                return False
            found = self.folder / f"found-{os.getpid()}.json"
            try:
                subprocess.run(
                    [sys.executable, "-m", "pytest", *PYTEST, "--lines", str(found), test],
                    cwd=self.root, env=environment(self.root), capture_output=True, check=False,
                    timeout=min(limit_s, left),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                if left < limit_s:
                    return False
            said = json.loads(found.read_text()) if found.exists() else {}
            found.unlink(missing_ok=True)
            sources = [test, *said.get("lines", {})]
            said["shas"] = {path: sha(self.root / path) for path in sources}
            self._file(test).write_text(json.dumps(said))
            print(f"{test}: {sum(said.get('seconds', {}).values()):.1f} s", flush=True)
        return True

    def load(self, tests: Iterable[str]) -> None:
        """Read what was measured of these test files."""
        opening: dict[str, float] = {}
        for test in filter(self._known, tests):
            said = json.loads(self._file(test).read_text())
            self.seconds |= said.get("seconds", {})
            opening[test] = said.get("opening", 0.0)
            self.failed |= set(said.get("failed", []))
            for path, by_line in said.get("lines", {}).items():
                lines = self.lines.setdefault(path, {})
                for line, names in by_line.items():
                    lines.setdefault(int(line), set()).update(names)
        # What every file imports is imported once.
        common = min(opening.values(), default=0.0)
        self.seconds |= {test: seconds - common + 0.1 for test, seconds in opening.items()}

    def tests_of(self, path: str, line: int) -> list[str]:
        """Return the tests that run the statement at `line`, those that are soonest done first.

        What only an import runs, a constant or a default, is everybody's that calls into the file.
        """
        text = (self.root / path).read_text(encoding="utf-8")
        ran = self.lines.get(path, {})
        names = {name for at in statement(text, line) for name in ran.get(at, ())}
        if not names and not any(line in body for body in functions(text)):
            bodies = {at for body in functions(text) for at in body}
            names |= {name for at in bodies & ran.keys() for name in ran[at]}
        return sorted(names, key=lambda name: (self.cost([name]), name))

    def files_of(self, tests: Iterable[str], path: str) -> list[str]:
        """Return their files, those named like `path` first, then the quickest.

        Whole files, for fixtures and caches are the first test's alone.
        """
        files, words = {file_of(name) for name in tests}, named(path)
        return sorted(files, key=lambda f: (-len(words & named(f)), self.cost([f]), f))

    def within(self, tests: list[str], budget_s: float) -> list[str]:
        """Return `tests` in turn, as far as they take no more than `budget_s` together; one at
        least.
        """
        chosen = tests[:1]
        for name in tests[1:]:
            if self.cost([*chosen, name]) <= budget_s:
                chosen.append(name)
        return chosen

    def cost(self, tests: Iterable[str]) -> float:
        """Return seconds of tests, or of whole files, the imports of each file counted once."""
        names = set(tests)
        if whole := {name for name in names if "::" not in name}:
            names |= {name for name in self.seconds if file_of(name) in whole}
        names |= {file_of(name) for name in names}
        return sum(self.seconds.get(name, 0.0) for name in names)

    def _file(self, test: str) -> Path:
        return self.folder / f"{Path(test).stem}.json"

    def _known(self, test: str) -> bool:
        try:
            said: dict[str, Any] = json.loads(self._file(test).read_text())
        except FileNotFoundError:
            return False
        shas = said["shas"]
        return test in shas and all(
            (self.root / path).exists() and sha(self.root / path) == known
            for path, known in shas.items()
        )


def file_of(test: str) -> str:
    return test.partition("::")[0]


def named(path: str) -> set[str]:
    """Return the words of a path."""
    return set(re.findall("[a-z]+", path))


def environment(root: Path) -> dict[str, str]:
    """Return the environment in which the packages are those under `root`, and nothing is compiled.

    Coverage does not see into machine code, and a mutant is not worth compiling.
    """
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(root), *(p for p in others if p and Path(p) != Path.cwd())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "NUMBA_DISABLE_JIT": "1"}


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
