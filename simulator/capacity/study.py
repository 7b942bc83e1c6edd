"""Answers the questions of several searches side by side, and keeps the answers in a file."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from simulator.capacity.points import Bench, Point, Verdict
from simulator.executors import Executor, Local, Lost
from simulator.serving.outcome.results import ResultsFile, restored
from traces.errors import DraftsimError

Found = TypeVar("Found")
Search = Generator[Sequence[Point], Verdict, Found]
"""Yields the replications of a point, is sent what came of them, returns what it looked for."""
Progress = Callable[[int, str], None]
"""Called with the runs there are, and a word on the one just finished."""


class Study:
    """Runs points, each once.

    Parameters
    ----------
    bench:
        What they need.
    executor:
        Who runs them; None: this process.
    kept:
        A file that was entered, of whose rows none is computed again.
    progress:
        Called whenever a point is there.
    """

    def __init__(
        self,
        bench: Bench,
        executor: Executor | None = None,
        kept: ResultsFile | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.bench = bench
        self.executor = executor or Local(1)
        self.progress = progress
        self._file = kept
        self._known: dict[Point, Mapping[str, Any]] = {}
        for row in kept.kept.values() if kept is not None else ():
            self._know(restored(row))

    def drive(self, searches: Mapping[str, Search[Found]]) -> dict[str, Found]:
        """Run searches to their ends, all their open questions at a time.

        Raises
        ------
        DraftsimError
            If a point fails, or was lost with its worker.
        """
        found: dict[str, Found] = {}
        asked: dict[str, Sequence[Point]] = {}
        for name, search in searches.items():
            self._step(name, search, None, asked, found)
        while asked:
            self._answer([point for points in asked.values() for point in points])
            for name, points in list(asked.items()):
                del asked[name]
                outcomes = [self._known[point] for point in points]
                verdict = Verdict(outcomes, self.bench.targets)
                self._step(name, searches[name], verdict, asked, found)
        return found

    def _step(
        self,
        name: str,
        search: Search[Found],
        verdict: Verdict | None,
        asked: dict[str, Sequence[Point]],
        found: dict[str, Found],
    ) -> None:
        try:
            asked[name] = next(search) if verdict is None else search.send(verdict)
        except StopIteration as end:
            found[name] = end.value

    def _answer(self, points: Sequence[Point]) -> None:
        missing = [p for p in dict.fromkeys(points) if p not in self._known]
        lost = 0
        for _, outcome in self.executor.run(self.bench, missing):
            if isinstance(outcome, Lost):
                lost += 1
                continue
            self._know(outcome)
            if self._file is not None:
                self._file.add(outcome)
            if self.progress is not None:
                at = f"{outcome['policy']}, {outcome['replicas']} x at {outcome['rate']:.3g}/s"
                self.progress(len(self._known), at)
        if lost:
            raise DraftsimError(
                f"{lost} of {len(missing)} runs were lost with their workers: run the same "
                "command again; with --out what is finished is kept"
            )

    def _know(self, outcome: Mapping[str, Any]) -> None:
        self._known[Point(*(outcome[name] for name in Point._fields))] = outcome
