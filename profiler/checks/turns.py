"""Runs of several arms in turn: every request, or group of them, under every arm before the next.

The order of the arms rotates, so that a slow minute of the machine falls on all.  A run that was
disturbed is made again, within a budget of every arm's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from profiler.machine import Machine, Repeats, Timing, sweeps
from profiler.models.loading import Pair
from profiler.recording.checkpoint import Checkpoint
from traces.machine import State

Attempt = tuple[Timing, tuple[Any, dict[str, Any]]]
"""A run's time; what its arm has then learnt, and what was found, which JSON can hold."""


class Taken(NamedTuple):
    """An arm's run of a unit: the least disturbed one, and how often it was made again."""

    repeat: int
    unit: Any
    label: str
    timing: Timing
    repeated: int
    found: dict[str, Any]


class Work(ABC):
    """The arms of a check, and the units (requests, or groups) that each of them decodes."""

    arms: Sequence[Any]
    units: Sequence[Any]

    def size(self, unit: Any) -> int:
        """Return requests decoded together: units of one size warm up, rotate and learn by
        themselves.
        """
        del unit
        return 1

    @abstractmethod
    def label(self, arm: Any, unit: Any) -> str:
        """Return the name of an arm's runs over units of this one's size."""

    @abstractmethod
    def learns(self, arm: Any) -> bool:
        """Return True if an arm's run of a unit depends on the units before it."""

    @abstractmethod
    def begun(self, arm: Any, unit: Any) -> Any:
        """Return what an arm has learnt at the beginning of a repeat."""

    @abstractmethod
    def attempt(self, repeat: int, unit: Any, arm: Any, learnt: Any) -> Attempt:
        """Run a unit under an arm that has `learnt` so much, which stays as it is."""


class Turns(NamedTuple):
    """All runs in their order, what the arms had learnt after the first repeat, by label, and how
    quiet the machine was."""

    taken: list[Taken]
    learnt: dict[str, Any]
    machine: State


def take_turns(
    pair: Pair, work: Work, repeats: int, advance: Callable[[], None] = lambda: None,
    kept: Checkpoint | None = None,
) -> Turns:  # fmt: skip
    """Run every unit under every arm, `repeats` times.

    What arms learn across units is theirs for one repeat.  ``advance`` is called after every run.

    What `kept` holds of an earlier call is not run again: all arms' runs of a unit are put there
    together.  An arm that learns then runs those of the repeat that was under way once more,
    untimed, and so has learnt what it had: exact, at the price of a part of one repeat of that
    arm.  In what is told of the machine, steal and other work are those since the last call.
    """
    arms, first = work.arms, dict[str, Any]()
    firsts = {work.size(unit): unit for unit in reversed(work.units)}.values()
    labels = {work.label(arm, unit): (arm, unit) for unit in firsts for arm in arms}
    machine, counted = Machine(pair.target, pair.device), {label: Repeats() for label in labels}
    taken: list[Taken] = []
    for repeat in sweeps(repeats):
        learnt = {label: work.begun(*own) for label, own in labels.items()}
        earlier: list[Any] = []  # units of this repeat that an earlier call ran
        places = Counter[int]()
        for n, unit in enumerate(work.units):
            place = places[work.size(unit)]
            places[work.size(unit)] += 1
            rotated = [arms[(k + place + repeat) % len(arms)] for k in range(len(arms))]
            if repeat < 0:  # what warms up does so on one unit
                if place == 0:
                    _turn(work, repeat, unit, rotated, learnt, dict.fromkeys(labels, Repeats(0)))
                continue
            step = f"{repeat:03d}-{n:05d}"
            ran = None if kept is None else _restored(kept, step, repeat, unit, machine, counted)
            if ran is not None:
                earlier.append(unit)
                for _ in arms:
                    advance()
            else:
                for before in earlier:
                    for arm in filter(work.learns, arms):
                        label = work.label(arm, before)
                        _, (learnt[label], _) = work.attempt(repeat, before, arm, learnt[label])
                earlier.clear()
                machine.pulse()
                ran = _turn(work, repeat, unit, rotated, learnt, counted, advance)
                if kept is not None:
                    _keep(kept, step, machine, counted, ran)
            taken += ran
        if repeat == 0:
            first = learnt
    return Turns(taken, first, machine.state(list(counted.values())))


def _turn(
    work: Work, repeat: int, unit: Any, arms: Sequence[Any], learnt: dict[str, Any],
    counted: Mapping[str, Repeats], advance: Callable[[], None] = lambda: None,
) -> list[Taken]:  # fmt: skip
    """Return every arm's run of a unit; `learnt` is then what they have learnt by it."""
    ran = []
    for arm in arms:
        label = work.label(arm, unit)
        again = counted[label]
        before = again.repeated
        # Made again, a run begins with what was learnt before it.
        timing, (learnt[label], found) = again.best(
            partial(work.attempt, repeat, unit, arm, learnt[label])
        )
        ran.append(Taken(repeat, unit, label, timing, again.repeated - before, found))
        advance()
    return ran


def _keep(
    kept: Checkpoint, step: str, machine: Machine, counted: Mapping[str, Repeats],
    ran: Sequence[Taken],
) -> None:  # fmt: skip
    """Keep what all arms' runs of a unit gave, and the counters as they are then."""
    found = {
        "ran": {
            one.label: {"taken": one.timing, "repeated": one.repeated, **one.found} for one in ran
        },
        "counted": {label: vars(one) for label, one in counted.items()},
        "reference_s": machine.taken[-1:],
    }
    kept.put_json(step, found)


def _restored(
    kept: Checkpoint, step: str, repeat: int, unit: Any, machine: Machine,
    counted: Mapping[str, Repeats],
) -> list[Taken] | None:  # fmt: skip
    """Return what `_keep` kept and set the counters to it; None if there is nothing."""
    found = kept.get_json(step)
    if found is None:
        return None
    machine.taken += found["reference_s"]
    for label, figures in found["counted"].items():
        vars(counted[label]).update(figures, kept=Timing(*figures["kept"]))
    return [
        Taken(repeat, unit, label, Timing(*one.pop("taken")), one.pop("repeated"), one)
        for label, one in found["ran"].items()
    ]
