"""Rounds and iterations that an engine took, held to those of the replay or of the simulated batch.

A request whose text diverged (`commands.engine.texts`) is compared up to there.  What depends on it
later is not compared either: the iterations of its load, and the rounds of policies that decide for
a batch or remember other requests.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commands.engine.loads import drawn as drawn_loads
from policies.core import DraftPolicy, Round
from profiler.checks.unfinished import version
from profiler.engines.texts import prompts_of
from profiler.recording.run import digest_of
from simulator.serving import Timeline, simulate
from simulator.serving.replays import clock_free
from traces.acceptance.trace import Trace
from traces.replay.run import replay
from traces.store.identity import identity

if TYPE_CHECKING:
    from profiler.engines.engine import Engine
    from profiler.engines.loads import LoadRun
    from simulator.serving import Run, Scenario
    from simulator.serving.arrivals import Arrivals
    from traces.latency.table import LatencyTable

Iteration = tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]
"""Requests that decode with their drafted tokens; others with their prompt tokens processed."""


class Comparison(NamedTuple):
    """The rounds and iterations of a run, compared with the predicted ones."""

    rounds_differ: int
    rounds_compared: int
    """Predicted rounds that a real one was held to."""
    iterations_differ: int | None
    """Up to the first divergence; None under timed arrivals, where the clock decides."""
    iterations_after: int
    """After the first divergence, where nothing is compared."""


class Drawn(Timeline):
    """Keeps the rounds and iterations of a simulation instead of drawing them."""

    def __init__(self) -> None:
        super().__init__(os.devnull)
        self.rounds: dict[int, list[Round]] = {}
        """By the request's place in the load."""
        self._iterations: list[tuple[set[tuple[int, int]], set[tuple[int, int]]]] = []

    @property
    def iterations(self) -> list[Iteration]:
        """The iterations, in order."""
        return [(frozenset(decoded), frozenset(prompts)) for decoded, prompts in self._iterations]

    def tokens(self, start_s: float, seconds: float, accepted: int, wasted: int) -> None:
        """An iteration begins to be drawn."""
        self._iterations.append((set(), set()))

    def round(
        self, index: int, start_s: float, seconds: float, outcome: Round, wasted: int
    ) -> None:
        """A request decoded in this iteration."""
        self.rounds.setdefault(index, []).append(outcome)
        self._iterations[-1][0].add((index, outcome.drafted))

    def request(self, index: int, start_s: float, seconds: float, label: str, **args: Any) -> None:
        """A request's prompt was processed in this iteration, or the request waited."""
        if label == "prefill":
            self._iterations[-1][1].add((index, args["tokens"]))


def compare_run(
    run: LoadRun, diverged: Mapping[str, int], predicted: Run, drawn: Drawn | None, trace: Trace,
    policy: Any,
) -> Comparison:  # fmt: skip
    """Compare a run with its prediction.

    ``diverged``: by request, the position at which its text diverged; ``drawn``: of the prediction,
    where the clock decides nothing (closed loops).

    The rounds of a policy that sees one request are the replay's (`clock_free`).  Any other policy
    decides by the requests that run together: in closed loops its rounds are those of the
    simulation.  Under timed arrivals only their number is predicted, and only if no text diverged.
    """
    alone = isinstance(policy, DraftPolicy) and clock_free(policy, None)
    first = first_divergence(run, diverged)
    names = _decoded(run)
    if alone:
        replayed = _replayed(trace, policy)
        expected: dict[str, Sequence[Round]] = {
            n: replayed.get(int(n.partition("/")[0]), []) for n in names
        }
    elif drawn is not None:
        expected = {n: drawn.rounds.get(index_of(n), []) for n in names}
    else:
        differ, compared = (0, 0) if diverged else _counts(run, predicted)
        return Comparison(differ, compared, None, 0)
    found = {n: run.rounds.get(n, ()) for n in names}
    if first is not None and not alone:
        until = Counter(
            d.name for step in run.steps[: first + 1] for d in step.decoded if d.emitted
        )
        found, expected = ({n: r[n][: until[n]] for n in names} for r in (found, expected))
    cut = [
        tuple(before(r[n], diverged[n]) if n in diverged else r[n] for r in (found, expected))
        for n in names
    ]
    # Where drafts come from the target itself, the engine's records count the catching up of
    # another drafter.
    fields = len(Round._fields) - trace.takes_verified
    pairs = [pair for real, told in cut for pair in itertools.zip_longest(real, told)]
    return Comparison(
        sum((a and a[:fields]) != (b and b[:fields]) for a, b in pairs),
        sum(len(told) for _, told in cut),
        None if drawn is None else _iterations_differ(run, drawn, first),
        0 if first is None else len(run.steps) - 1 - first,
    )


def before(rounds: Sequence[Round], position: int) -> list[Round]:
    """Return what is comparable of rounds if the text diverged at `position`.

    As `profiler.checks.differences.before`: rounds that begin by then, with what was accepted and
    emitted before it.
    """
    return [
        r._replace(
            accepted=min(r.accepted, position - r.position),
            emitted=min(r.emitted, position - r.position),
        )
        for r in rounds
        if r.position <= position
    ]


def first_divergence(run: LoadRun, diverged: Mapping[str, int]) -> int | None:
    """Return the iteration in which a text first diverged; None if none did.

    ``diverged`` holds the position by request.
    """
    emitted = Counter[str]()
    for number, step in enumerate(run.steps):
        # A prompt that is processed to its end emits a token.
        emitted.update(p.name for p in step.prompts if p.tokens >= p.left)
        emitted.update({d.name: d.emitted for d in step.decoded})
        if any(emitted[name] > position for name, position in diverged.items()):
            return number
    return None


def simulated_rounds(
    trace: Trace, latency: LatencyTable, policy: Any, scenario: Scenario
) -> dict[int, list[Round]]:
    """Return the rounds of every request that the simulator serves, by its place in the load."""
    drawn = Drawn()
    simulate(trace, latency, policy, scenario, timeline=drawn)
    return drawn.rounds


def index_of(name: str) -> int:
    """Return the place in its load of a request called SEQUENCE/INDEX."""
    return int(name.rpartition("/")[2])


def _counts(run: LoadRun, predicted: Run) -> tuple[int, int]:
    """Return how much the numbers of rounds differ in all, and how many are predicted."""
    requests = predicted.requests
    numbers = dict(zip(requests["index"], requests["rounds"], strict=True))
    told = {name: int(numbers[index_of(name)]) for name in run.rounds}
    return sum(abs(len(run.rounds[n]) - count) for n, count in told.items()), sum(told.values())


def _iterations_differ(run: LoadRun, drawn: Drawn, first: int | None) -> int:
    """Iterations that run other requests, drafts or prompts, up to the `first` divergence."""
    real = [
        (
            frozenset((index_of(d.name), d.drafted) for d in step.decoded),
            frozenset((index_of(p.name), p.tokens) for p in step.prompts),
        )
        for step in run.steps
    ]
    told = drawn.iterations
    if first is not None:
        real, told = real[: first + 1], told[: first + 1]
    return sum(a != b for a, b in itertools.zip_longest(real, told))


def _replayed(trace: Trace, policy: DraftPolicy) -> dict[int, list[Round]]:
    own: dict[int, list[Round]] = {}
    for row in replay(trace, policy).rounds:
        outcome = Round(*(int(row[field]) for field in Round._fields))
        own.setdefault(int(row["request"]), []).append(outcome)
    return own


def _decoded(run: LoadRun) -> list[str]:
    """Return the names of the requests that have rounds: whose prompt does not end them."""
    requests = run.requests
    return list(requests["name"][requests["tokens"] > 1])


def check_key(
    engine: Engine, latency: LatencyTable, trace: Trace, chosen: Mapping[str, Any],
    loads: Mapping[str, Arrivals], requests: int, seed: int, **more: Any
) -> dict[str, Any]:  # fmt: skip
    """Return the identity of a check without its repeats: requests, prompts, and each run's rounds.

    The rounds that the simulator predicts tell what names do not: a policy's own file that has
    changed since, or another recording.
    """
    scenarios, jobs = drawn_loads(loads, engine, trace, requests, seed)
    served = {job.sequence for own in jobs.values() for job in own}
    prompts = prompts_of(trace, engine.vocabulary, seed)
    return {
        "version": version(), "trace": identity(trace.meta), "seed": seed,
        "prompts": digest_of({str(i): prompts[i] for i in sorted(served)}),
        "loads": [
            (load, s.arrivals.concurrency, digest_of({"jobs": jobs[load]}))
            for load, s in scenarios.items()
        ],
        "arms": [
            (text, [
                digest_of({"rounds": simulated_rounds(trace, latency, policy, s)})
                for s in scenarios.values()
            ])
            for text, policy in chosen.items()
        ],
        **more,
    }  # fmt: skip
