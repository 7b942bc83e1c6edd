"""Run the tests against a sample of small changes of the core, and say which go unnoticed.

    python -m benchmarks.mutants [--sample 6] [--seed 0] [--minutes 60] [--again] [FILE...]

In a copy of the working tree, each of `--sample` mutants per file (Cosmic Ray's, see `places`) is
run against the tests that reach its line, the quickest first and until one fails; where none does,
against their whole files, those first that are named like it.  What is found is kept in
``.mutants/`` (``results.jsonl``), and the next call goes on from there; a mutant of a file that has
changed since is run again, and with ``--again`` every survivor is.  Equivalent mutants are named,
with the reason, in ``benchmarks/mutants/equivalent.toml``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
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

from benchmarks.mutants.forked import load_libraries, run_tests
from benchmarks.mutants.places import Mutant, files, mutants, sample
from benchmarks.mutants.reach import PYTEST, Reach, environment, sha

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".mutants"
FIRST_S, THEN_S = 10.0, 60.0
"""Seconds, as measured, of the tests and then of the test files that a mutant is run against."""

AREAS = ("policies", "traces", "simulator/serving", "simulator")
"""Folders that are counted apart; of two that hold a file, the first."""

PASSED = (0, 5)
"""pytest's exit codes: all passed, and none was left to run."""

Row = dict[str, Any]


def main() -> int:
    """Measure, run, report; 1 if a mutant survived without a reason."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("files", nargs="*", help="only these files of the scope")
    parser.add_argument("--sample", type=int, default=6, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--tests", nargs="+", default=["tests/test_*.py"], metavar="PATTERN",
                        help="the test files to measure, in this order")  # fmt: skip
    parser.add_argument("--slowest", type=float, default=60.0,
                        help="seconds above which a test file is not used")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="run survivors again")
    parser.add_argument("--measure", action="store_true", help="only measure what tests reach")
    parser.add_argument("--known", action="store_true", help="use the tests measured so far")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    paths = [path for path in files(ROOT) if not given.files or path in given.files]
    samples = [sample(mutants(ROOT, path), given.sample, given.seed) for path in paths]
    # One of each file in turn: what is done when time is up is a smaller sample, and as fair.
    chosen = [m for turn in zip_longest(*samples) for m in turn if m is not None]
    results = Results(FOLDER / "results.jsonl")
    if not given.report:
        named = [path for pattern in given.tests for path in sorted(ROOT.glob(pattern))]
        tests = list(dict.fromkeys(str(path.relative_to(ROOT)) for path in named))
        reach = Reach(ROOT, FOLDER)
        if not given.known and not reach.measure(tests, given.slowest, deadline):
            print("not all tests are measured yet: call it again")
            return 1
        if given.measure:
            return 0
        reach.load(tests)
        todo = [m for m in chosen if results.wanted(m, given.again)]
        run(todo, reach, results, deadline)
    return report([row for m in chosen if (row := results.of(m))], len(chosen))


class Results:
    """One line of JSON per mutant that was run; the last one of a mutant holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: dict[tuple[Any, ...], Row] = {key(r): r for r in map(json.loads, lines)}

    def of(self, mutant: Mutant) -> Row | None:
        """Return the known result of this mutant for the file as it is now."""
        return self.rows.get((*mutant[:3], sha(ROOT / mutant.path)))

    def wanted(self, mutant: Mutant, again: bool) -> bool:
        row = self.of(mutant)
        if row is None or row["outcome"] == "unreached":
            return True
        return again and row["outcome"] == "survived" and not reason(row)

    def add(self, mutant: Mutant, found: Row) -> None:
        """Keep what was found, of the file as it stands."""
        row = {**mutant._asdict(), "sha": sha(ROOT / mutant.path), **found}
        self.rows[key(row)] = row
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def key(row: Row) -> tuple[Any, ...]:
    return row["path"], row["operator"], row["occurrence"], row["sha"]


def run(todo: list[Mutant], reach: Reach, results: Results, deadline: float) -> None:
    """Run mutants until all are done or time is up."""
    load_libraries()
    with copied_tree() as tree:
        for number, mutant in enumerate(todo, 1):
            found = tried(mutant, reach, tree, deadline)
            if found is None:
                return
            results.add(mutant, found)
            head = f"{number}/{len(todo)} {found['outcome']} {found['seconds']} s"
            print(f"{head} {say(mutant.path, mutant.line, found)}", flush=True)


def tried(mutant: Mutant, reach: Reach, tree: Path, deadline: float) -> Row | None:
    """Return the result of a mutant; None if time ran out."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    tests, begun = reach.tests_of(mutant.path, mutant.line), time.monotonic()
    first = reach.within(tests, FIRST_S)
    then = reach.within(reach.files_of(tests, mutant.path), THEN_S)
    operator = get_operator(mutant.operator)()
    with use_mutation(tree / mutant.path, operator, mutant.occurrence) as (before, after):
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        change = [f"{line[0]} {line[1:].strip()}" for line in list(lines)[2:] if line[0] in "-+"]
        alive = "survived" if tests else "unreached"
        row: Row = {"outcome": alive, "change": change, "tests": len(tests)}
        if not compiles(after):
            return {**row, "outcome": "invalid", "seconds": 0.0}
        for some in filter(None, (first, then)):
            limit = 10 + 3 * reach.cost(some)
            left = deadline - time.monotonic()
            if left < 5:
                return None
            without = [f"--deselect={name}" for name in sorted(reach.failed)]
            arguments = [*PYTEST, "-x", "--tb=line", *without, *some]
            code, output = run_tests(arguments, tree, min(limit, left))
            if code is None and left < limit:
                return None
            if "(no match in any of" in output:
                raise RuntimeError(f"a test is gone that was measured: {output[-500:]}")
            if code not in PASSED:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                row["by"] = failed[1] if failed else output.strip()[-200:]
                row["outcome"] = "killed" if code is not None else "timeout"
                break
    row["seconds"] = round(time.monotonic() - begun, 1)
    return row


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a copy of the working tree to change files in, whose packages this process imports."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="draftsim-mutants-") as folder:
        tree = Path(folder) / "tree"
        for name in names.splitlines():
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        # By hash: a change within the second that leaves the size alone would else be missed.
        compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
        subprocess.run([*compiled, str(tree)], check=False, capture_output=True)
        os.environ.update(environment(tree))
        here = {"", str(ROOT)}
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in here)]
        yield tree


def area_of(path: str) -> str:
    """Return that of `AREAS` which a file of the scope lies in."""
    return next(area for area in AREAS if path.startswith(f"{area}/"))


def say(path: str, line: int, row: Row) -> str:
    return f"{path}:{line} {' '.join(row['change'])}"


def reason(row: Row) -> str:
    """Return why the mutant is no other program, if somebody has said so."""
    file = ROOT / "benchmarks" / "mutants" / "equivalent.toml"
    known = tomllib.loads(file.read_text(encoding="utf-8"))["equivalent"]
    this = [row["path"], *row["change"]]
    return next((str(e["why"]) for e in known if [e["path"], *e["change"]] == this), "")


def report(rows: list[Row], asked: int) -> int:
    """Print how many were noticed, and each that was not."""
    made = [row for row in rows if row["outcome"] != "invalid"]  # the others are no programs
    rows, asked = made, asked - len(rows) + len(made)
    alive = [row for row in rows if row["outcome"] in ("survived", "unreached")]
    unexplained = [row for row in alive if not reason(row)]
    for area in AREAS:
        run, lost, unknown = (
            [row["path"] for row in some if area_of(row["path"]) == area]
            for some in (rows, alive, unexplained)
        )
        same = len(lost) - len(unknown)
        said = f"{len(set(run))} files, {len(run)} mutants, {same} the same program"
        if run:
            print(f"{area}: {said}, {len(run) - len(lost)} of {len(run) - same} noticed")
    same = len(alive) - len(unexplained)
    for row in alive:
        print(f"{row['outcome']}: {say(row['path'], row['line'], row)}  {reason(row)}")
    real = len(rows) - same
    if real:
        print(
            f"{len(rows)} of {asked} run; {same} are the same program; of the other {real}, "
            f"{real - len(unexplained)} ({1 - len(unexplained) / real:.1%}) are noticed"
        )
    return int(bool(unexplained) or len(rows) < asked)


if __name__ == "__main__":
    sys.exit(main())
