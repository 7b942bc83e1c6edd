"""Interleaved runs: every request, or group of requests, under every policy before the next.

The order of the policies rotates, so that a slow minute of the machine affects all.  A disturbed
run is repeated, within a budget for every policy.

Finished runs of a check that was stopped are kept, and taken by the next one (`unfinished`).
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from policies.core import DraftPolicy
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from profiler.machine import Machine, NoTimeError, Repeats, Timing, sweeps
from profiler.recording.run import digest_of
from traces.acceptance.trace import Trace
from traces.aliases import Say
from traces.machine import State
from traces.replay.rounds import RoundLog
from traces.store.checkpoint import Checkpoint
from traces.store.identity import identity

if TYPE_CHECKING:
    from profiler.models.loading import Pair

LEAST_REPEATS = 2
"""Repeats if time is short: one alone cannot separate a difference from chance."""
PLACE, DONE = ".validate", ".validated"
"""Beginnings of the names of folders that keep real runs: of an unfinished command, and of a check
that more repeats may be added to."""

FOUND = 2
"""Version of the findings that are kept of a run: those of another are not continued."""

Attempt = tuple[Timing, tuple[Any, dict[str, Any]]]
"""A run's time, the state of its policy after it, and its findings (both fit into JSON)."""


Unit = tuple[int, Sequence[int]]
"""A batch size, and the requests that are decoded together."""


class UnitRun(NamedTuple):
    """The least disturbed run of a unit under a policy, and how often it was repeated."""

    repeat: int
    unit: Unit
    label: str
    timing: Timing
    repeated: int
    found: dict[str, Any]


class CheckWork(ABC):
    """The policies that a check runs, and the units (requests, or groups) that each decodes."""

    planned: Sequence[Any]
    units: Sequence[Unit]
    """Units of one size warm up, rotate and learn apart."""

    @abstractmethod
    def captured(self) -> int:
        """Return the count of captured CUDA graphs; a run in which it grows is repeated."""

    @abstractmethod
    def label(self, run: Any, unit: Unit) -> str:
        """Return the name of a policy's runs over units of this one's size."""

    @abstractmethod
    def begun(self, run: Any, unit: Unit) -> Any:
        """Return the state of a policy at the beginning of a repeat."""

    @abstractmethod
    def attempt(self, repeat: int, unit: Unit, run: Any, learnt: Any) -> Attempt:
        """Run a unit under a policy with the state `learnt`, which is not changed."""

    def relearnt(self, done: UnitRun, run: Any, learnt: Any, policy: bool) -> Any:
        """Return the state after a run of an earlier call that began with `learnt` (not changed).

        With `policy`, a policy that learns across units runs the unit again.
        """
        own = run.policy
        if not policy or (isinstance(own, DraftPolicy) and not own.learns_across_requests):
            return learnt
        _, (state, _) = self.attempt(done.repeat, done.unit, run, learnt)
        return state


def run_interleaved(
    pair: Pair, work: CheckWork, repeats: int, advance: Callable[[], None] = lambda: None,
    kept: Checkpoint | None = None, in_time: Callable[[], bool] | None = None,
) -> tuple[list[UnitRun], dict[str, Any], State]:  # fmt: skip
    """Run every unit under every policy, `repeats` times, or with `in_time` the first ones
    (`order`).

    State that policies learn across units lasts for one repeat.  ``advance`` is called after every
    run.  If it raises NoTimeError, the unit under way does not count (of the first unit, only its
    last repeat).  The error is raised again if not even one repeat of the first unit was done.

    Runs that `kept` holds of an earlier call are not repeated: all runs of a unit are stored
    together.  Policies and rules that learn then reach the same state (`CheckWork.relearnt`).

    Returns all runs in their order, the state after the first repeat, by label, and how quiet the
    machine was since this call began.  If an earlier call ran that repeat to its end, a policy's
    state is not up to date.
    """
    planned = work.planned
    labels = {work.label(p, unit): (p, unit) for unit in reversed(work.units) for p in planned}
    machine, counted = Machine(pair.target, pair.device), {label: Repeats() for label in labels}
    counters = defaultdict[int, Iterator[int]](itertools.count)
    places = [next(counters[unit[0]]) for unit in work.units]  # among those of its size
    # By repeat: what the policies have learnt, and kept runs that they have not learnt from yet.
    learners: dict[int, tuple[dict[str, Any], list[UnitRun]]] = {}

    def learn_again(repeat: int, policies: bool) -> dict[str, Any]:
        learnt, earlier = learners[repeat]
        for one in earlier:
            own = labels[one.label][0]
            learnt[one.label] = work.relearnt(one, own, learnt[one.label], policies)
        earlier.clear()
        return learnt

    done: list[tuple[int, int, list[UnitRun]]] = []
    try:
        for repeat, n in order(places, repeats, in_time):
            if repeat not in learners:
                learners[repeat] = {label: work.begun(*own) for label, own in labels.items()}, []
            (learnt, earlier), unit = learners[repeat], work.units[n]
            first = (places[n] + repeat) % len(planned)
            rotated = [*planned[first:], *planned[:first]]
            if repeat < 0:  # in haste one policy warms up for all
                some = rotated if in_time is None else rotated[:1]
                _run_unit(work, repeat, unit, some, learnt, dict.fromkeys(labels, Repeats(0)))
                continue
            step = f"{repeat:03d}-{n:05d}"
            ran = None if kept is None else _restored(kept, step, repeat, unit, machine, counted)
            if ran is not None:
                earlier += ran
                for _ in planned:
                    advance()
            else:
                learn_again(repeat, policies=True)
                machine.pulse()
                ran = _run_unit(work, repeat, unit, rotated, learnt, counted, advance)
                if kept is not None:
                    _keep(kept, step, machine, counted, ran)
            done.append((repeat, n, ran))
    except NoTimeError:
        if not done:
            raise
    counts = Counter(n for _, n, _ in done)
    whole = sorted((d for d in done if counts[d[1]] == counts[0]), key=lambda d: d[0])
    runs = [one for _, _, ran in whole for one in ran]
    learnt = learn_again(0, policies=False) if done else {}
    return runs, learnt, machine.state(list(counted.values()))


def order(
    places: Sequence[int], repeats: int, in_time: Callable[[], bool] | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (repeat, unit) as they are run; repeats below 0 warm up, on units of place 0.

    A repeat has all units.  With `in_time`, each unit has all of its repeats before the next, and
    as many units are run as there is time for: once `in_time` is False, no unit begins but the
    first, and no repeat of that after LEAST_REPEATS.
    """
    if in_time is None:
        for repeat in sweeps(repeats):
            yield from ((repeat, n) for n, at in enumerate(places) if repeat >= 0 or at == 0)
        return
    for n, at in enumerate(places):
        if n and not in_time():
            return
        for repeat in range(repeats) if at else sweeps(repeats):
            if not n and repeat >= LEAST_REPEATS and not in_time():
                return
            yield repeat, n


def _run_unit(
    work: CheckWork, repeat: int, unit: Unit, planned: Sequence[Any], learnt: dict[str, Any],
    counted: Mapping[str, Repeats], advance: Callable[[], None] = lambda: None,
) -> list[UnitRun]:  # fmt: skip
    """Return every policy's run of a unit; put the states after it into `learnt`."""
    ran = []
    for run in planned:
        label = work.label(run, unit)
        again = counted[label]
        before = again.repeated
        # Made again, a run begins with what was learnt before it.
        timing, (learnt[label], found) = again.best(
            partial(_captured, work, repeat, unit, run, learnt[label])
        )
        ran.append(UnitRun(repeat, unit, label, timing, again.repeated - before, found))
        advance()
    return ran


def _captured(work: CheckWork, repeat: int, unit: Unit, run: Any, learnt: Any) -> Attempt:
    """Make a run; repeat it if a shape was captured within its time."""
    before = work.captured()
    attempt = work.attempt(repeat, unit, run, learnt)
    return attempt if before == work.captured() else _captured(work, repeat, unit, run, learnt)


def _keep(
    kept: Checkpoint, step: str, machine: Machine, counted: Mapping[str, Repeats],
    ran: Sequence[UnitRun],
) -> None:  # fmt: skip
    """Store the results of all policies' runs of a unit, and the counters at this moment."""
    found = {
        "ran": {
            one.label: {"taken": one.timing, "repeated": one.repeated, **one.found} for one in ran
        },
        "counted": {label: vars(one) for label, one in counted.items()},
        "reference_s": machine.taken[-1:],
    }
    kept.put_json(step, found)


def _restored(
    kept: Checkpoint, step: str, repeat: int, unit: Unit, machine: Machine,
    counted: Mapping[str, Repeats],
) -> list[UnitRun] | None:  # fmt: skip
    """Return the results that `_keep` stored and restore the counters; None if there are none."""
    found = kept.get_json(step)
    if found is None:
        return None
    machine.taken += found["reference_s"]
    for label, figures in found["counted"].items():
        vars(counted[label]).update(figures, kept=Timing(*figures["kept"]))
    return [
        UnitRun(repeat, unit, label, Timing(*one.pop("taken")), one.pop("repeated"), one)
        for label, one in found["ran"].items()
    ]


def check_options(
    pair: Pair, trace: Trace, logs: Sequence[RoundLog], repeats: int, **more: Any
) -> dict[str, Any]:
    """Return the conditions of a check: pair and device, what is decoded, and every policy.

    `logs` are the policies' replays.  Their rounds show changes that names do not: another version
    of a policy's file, or of a source's recording.  Runs of two versions are never mixed, because
    one of them may decode faster.
    """
    return {
        "version": version(), "meta": pair.meta, "trace": identity(trace.meta),
        "sampling": trace.sampling.meta, "repeats": repeats,
        "requests": [request.id for request in trace.requests],
        "arms": [(log.policy, log.source, _digest(log)) for log in logs], "found": FOUND, **more,
    }  # fmt: skip


def rule_conditions(rule: VerifyRule) -> dict[str, Any]:
    """Return the conditions that a lossy rule adds: itself, and the memory that it begins with."""
    table = getattr(rule, "table", None)
    memory = (
        None if table is None else digest_of({"pairs": table.items(), "capacity": table.capacity})
    )
    return {"rule": describe_rule(rule), "memory": memory}


def version(name: str = "draftsim") -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    return next((found.version for found in distributions(name=name)), None)


def _digest(log: RoundLog) -> str:
    calls = b"" if log.recorded_calls is None else log.recorded_calls.tobytes()
    return hashlib.sha256(log.rounds.tobytes() + calls).hexdigest()[:16]


@contextmanager
def unfinished(
    run: Path, options: Mapping[str, Any], total: int, say: Say,
    together: int = 1, grows: bool = False,
) -> Iterator[Checkpoint]:  # fmt: skip
    """Yield the runs that an interrupted check with these options kept in the run folder.

    Each check has its own folder there, which is removed when the block is left normally, or with
    nothing in it.  `say` receives a line on how many of `total` runs are kept (`together` at a
    time), and one if this check begins while another is unfinished.

    With `grows` the `options` do not include the repeats, and the runs of a finished check stay
    until another check begins: the same check with a larger `total` continues after them.
    """
    name = digest_of(options)
    place, done_with = run / f"{PLACE}-{name}", run / f"{DONE}-{name}"
    if grows:
        for path in run.glob(f"{DONE}-*"):
            if path == done_with and len(Checkpoint(path, options).names()) * together < total:
                path.rename(place)
            else:
                shutil.rmtree(path)
    kept = Checkpoint(place, options)
    others = [path for path in sorted(run.glob(f"{PLACE}-*")) if path != kept.folder]
    if steps := len(kept.names()):
        done = min(steps * together, total)
        say(f"continues after {done} of {total} runs: remove {kept.folder} to start again")
    elif others:
        say(
            f"{others[0]} keeps unfinished runs with other options: repeat that command to "
            "continue them, or remove the folder; these runs start from the beginning"
        )
    try:
        yield kept
    except BaseException:
        if not kept.names():
            kept.close()
        raise
    if not grows:
        kept.close()
        return
    place.rename(done_with)
    say(f"{done_with} keeps these runs: the same command with more --repeats continues after them")
