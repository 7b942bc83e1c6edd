"""Run the tests against a sample of small changes of the core, and say which go unnoticed.

    python -m benchmarks.mutants [--sample 6] [--seed 0] [--minutes 60] [FILE...] [--tests GLOB...]

A wrapper around Cosmic Ray, which makes the changes, and Coverage, which tells the tests that reach
a line.  In a copy of the working tree each of `--sample` mutants per file (see `places`) is run
against the tests of its line, the quickest first and until one fails.  What is found is kept in
``.mutants/``, and the next call goes on from there; a mutant of a file that has changed since is
run again.  Equivalent mutants are named, with the reason, in ``equivalent.toml`` next to this file.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.mutants.contexts import SECONDS
from benchmarks.mutants.places import SCOPE, Mutant, files, mutants, sample, statement

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".mutants"
BUDGET_S, LIMIT_S = 60.0, 240.0
"""Seconds of tests that a mutant is run against, as measured; and at most, before it counts as
noticed."""
PASSED = (0, 5)
"""pytest's exit codes: all passed, and none was left to run."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")

Row = dict[str, Any]


def main() -> int:
    """Measure, run, report; 1 if a mutant survived without a reason."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("files", nargs="*", help="only these files of the scope")
    parser.add_argument("--sample", type=int, default=6, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--tests", nargs="+", metavar="GLOB",
                        help="measure again which lines tests reach, of these alone")  # fmt: skip
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    deadline = time.monotonic() + 60 * given.minutes
    if given.tests or not (FOLDER / "coverage").exists():
        named = given.tests or ["tests/test_*.py"]
        measure([str(path) for pattern in named for path in sorted(ROOT.glob(pattern))])
    paths = [path for path in files(ROOT) if not given.files or path in given.files]
    samples = [sample(mutants(ROOT, path), given.sample, given.seed) for path in paths]
    # One of each file in turn: what is done when time is up is a smaller sample, and as fair.
    chosen = [m for turn in zip_longest(*samples) for m in turn if m is not None]
    results = Results(FOLDER / "results.jsonl")
    todo = [m for m in chosen if results.of(m) is None]
    with copied_tree() as tree:
        for number, mutant in enumerate(todo, 1):
            if time.monotonic() > deadline:
                break
            found = tried(mutant, tree)
            results.add(mutant, found)
            print(f"{number}/{len(todo)} {found['outcome']} {say(found | mutant._asdict())}")
    return report([row for m in chosen if (row := results.of(m))], len(chosen))


def measure(tests: list[str]) -> None:
    """Run `tests` once under Coverage, and keep which of those that pass runs which line."""
    settings = FOLDER / "coveragerc"
    settings.write_text(
        f"[run]\ndata_file = {FOLDER / 'coverage'}\ninclude =\n"
        + "".join(f"    {ROOT / pattern}\n" for pattern in SCOPE)
    )
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *PYTEST[1:]]
    # Coverage does not see into machine code.
    told = {"NUMBA_DISABLE_JIT": "1", SECONDS: str(FOLDER / "seconds.json")}
    subprocess.run(
        [*command, "-p", "benchmarks.mutants.contexts", *tests], cwd=ROOT, check=False,
        env=os.environ | told,
    )  # fmt: skip


def tests_of(path: str, line: int) -> list[str]:
    """Return the tests that run the statement at `line`, else the file; the quickest first."""
    from coverage import CoverageData

    data, text = CoverageData(str(FOLDER / "coverage")), (ROOT / path).read_text(encoding="utf-8")
    data.read()
    ran = data.contexts_by_lineno(str(ROOT / path))
    seconds = json.loads((FOLDER / "seconds.json").read_text(encoding="utf-8"))
    names = {name for at in statement(text, line) for name in ran.get(at, ()) if name in seconds}
    if not names:  # a constant or a default, which imports run
        names = {name for at in ran for name in ran[at] if name in seconds}
    chosen, spent = [], 0.0
    for name in sorted(names, key=lambda name: (seconds[name], name)):
        spent += seconds[name]
        if chosen and spent > BUDGET_S:
            break
        chosen.append(name)
    return chosen


def tried(mutant: Mutant, tree: Path) -> Row:
    """Return the result of a mutant in the copy at `tree`."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    tests, operator = tests_of(mutant.path, mutant.line), get_operator(mutant.operator)()
    with use_mutation(tree / mutant.path, operator, mutant.occurrence) as (before, after):
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        change = [f"{line[0]} {line[1:].strip()}" for line in list(lines)[2:] if line[0] in "-+"]
        row: Row = {"outcome": "killed", "change": change, "tests": len(tests)}
        try:
            compile(after, "mutant", "exec")
        except SyntaxError:
            return {**row, "outcome": "invalid"}
        if not tests:
            return {**row, "outcome": "unreached"}
        told = {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                [*PYTEST, "-x", *tests], cwd=tree, env=os.environ | told, check=False,
                timeout=LIMIT_S, capture_output=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {**row, "outcome": "timeout"}
        return {**row, "outcome": "survived" if ended.returncode in PASSED else "killed"}


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a copy of the working tree to change files in."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="draftsim-mutants-") as folder:
        tree = Path(folder) / "tree"
        for name in names.splitlines():
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        yield tree


class Results:
    """One line of JSON per mutant that was run; the last one of a mutant holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: dict[tuple[Any, ...], Row] = {key(r): r for r in map(json.loads, lines)}

    def of(self, mutant: Mutant) -> Row | None:
        """Return the known result of this mutant for the file as it is now."""
        return self.rows.get((*mutant[:3], sha(ROOT / mutant.path)))

    def add(self, mutant: Mutant, found: Row) -> None:
        """Keep what was found, of the file as it stands."""
        row = {**mutant._asdict(), "sha": sha(ROOT / mutant.path), **found}
        self.rows[key(row)] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def key(row: Row) -> tuple[Any, ...]:
    return row["path"], row["operator"], row["occurrence"], row["sha"]


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def say(row: Row) -> str:
    return f"{row['path']}:{row['line']} {' '.join(row['change'])}"


def reason(row: Row) -> str:
    """Return why the mutant is no other program, if somebody has said so."""
    file = ROOT / "benchmarks" / "mutants" / "equivalent.toml"
    known = tomllib.loads(file.read_text(encoding="utf-8"))["equivalent"]
    this = [row["path"], *row["change"]]
    return next((str(e["why"]) for e in known if [e["path"], *e["change"]] == this), "")


def report(rows: list[Row], asked: int) -> int:
    """Print how many were noticed, and each that was not."""
    made = [row for row in rows if row["outcome"] != "invalid"]  # the others are no programs
    asked -= len(rows) - len(made)
    alive = [row for row in made if row["outcome"] in ("survived", "unreached")]
    for row in alive:
        print(f"{row['outcome']}: {say(row)}  {reason(row)}")
    lost = sum(not reason(row) for row in alive)
    if real := len(made) - len(alive) + lost:
        print(
            f"{len(made)} of {asked} run; {len(alive) - lost} are the same program; of the other "
            f"{real}, {real - lost} ({1 - lost / real:.1%}) are noticed"
        )
    return int(bool(lost) or len(made) < asked)


if __name__ == "__main__":
    sys.exit(main())
