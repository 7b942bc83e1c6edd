"""SGLang's adaptive draft length: tiers by batch size, an average with hysteresis."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from policies.arrays import Bools, Floats, Ints
from policies.batch.base import KeptInStep
from policies.core import Load, Round
from policies.spec import flag, parameter, whole, within
from policies.vectorised import VectorisedPlan, VectorisedState

T = TypeVar("T")

DEFAULT_CONFIG: Mapping[str, Mapping[str, Any]] = {
    "1": {"candidate_steps": [1, 3, 5, 7], "down_hysteresis": -0.25},
    "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
    "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
}
"""SGLang 0.5.23, ``DEFAULT_ADAPTIVE_CONFIG``."""
_SETTINGS = {
    "ema_alpha": 0.2,
    "update_interval": 5,
    "warmup_batches": 10,
    "down_hysteresis": -0.25,
    "up_hysteresis": 0.0,
    "ceiling_coeff": 0.0,
}

COUNTS: Mapping[str, int] = {"update_interval": 1, "warmup_batches": 0}
"""Settings that are whole numbers, and the least of each."""
NUMBERS: Mapping[str, tuple[float, float]] = {
    "ema_alpha": (0.0, 1.0),
    "up_hysteresis": (-math.inf, math.inf),
    "down_hysteresis": (-math.inf, math.inf),
    "ceiling_coeff": (0.0, math.inf),
}
"""Settings that are finite numbers, and their bounds."""


@dataclass(eq=False)
class SGLangAdaptive(KeptInStep):
    """Steps per batch-size slot from an average of accepted drafts (SGLang 0.5.23).

    srt/speculative/adaptive_spec_params.py: each slot keeps e <- 0.8 e + 0.2 (mean accepted
    drafts, no bonus), starting at steps - 1; after 10 iterations, every 5th moves to
    a neighbouring candidate: down while e <= previous - 0.5 + down_hysteresis, otherwise
    up while e > current - 0.5 + up_hysteresis; from 0 steps always one up, as a probe.
    All sequences share the number of steps.  Reads no signal.

    Parameters
    ----------
    config:
        As SGLang's configuration file: ``{"batch size": {"candidate_steps": [...], ...}}``,
        each slot serving batches from its size on; settings (``ema_alpha``,
        ``update_interval``, ``warmup_batches``, ``up_hysteresis``, ``down_hysteresis``,
        ``ceiling_coeff``) per slot, or next to the slots for all.  None: SGLang's default.
    initial_steps:
        Where a slot starts if this is one of its candidates; else at the middle one.
    graph_batches:
        Captured CUDA-graph batch sizes, to the next of which a batch is padded before its
        slot is looked up; None: no padding.
    in_step:
        True if the draft model reads along at 0 steps, as SGLang's does (`KeptInStep`).
    """

    config: Mapping[str, Any] | None = None
    initial_steps: int = parameter(3, whole, 0)
    graph_batches: Sequence[int] | None = None
    in_step: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.graph_batches or ():
            whole("graph_batches", size, 1)
        chosen = DEFAULT_CONFIG if self.config is None else self.config
        slots, common = config_slots(chosen, _SETTINGS)
        if wrong := [k for k, v in slots.items() if not isinstance(v, Mapping)]:
            raise ValueError(f"config slot {wrong[0]} is no object with candidate_steps")
        self._slots = {
            size: _Slot(size, {**_SETTINGS, **common, **slot}, self.initial_steps)
            for size, slot in slots.items()
        }
        self._slot = next(iter(self._slots.values()))
        longest = max(slot.candidates[-1] for slot in self._slots.values())
        self.draft_up_to(longest)

    def plan(self, loads: Sequence[Load]) -> int:
        self._slot = self._slot_of(loads[0].batch)
        return self._slot.steps

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(state=self._slot_of(batch).state(self.in_step))

    def _slot_of(self, batch: int) -> _Slot:
        if self.graph_batches:
            sizes = sorted(self.graph_batches)
            i = bisect_left(sizes, batch)
            batch = sizes[i] if i < len(sizes) else batch
        return slot_at(self._slots, batch)

    def observe(self, outcomes: Sequence[Round]) -> None:
        if outcomes:
            self._slot.update(sum(o.accepted for o in outcomes) / len(outcomes))


class _Slot:
    """One batch-size slot: its candidates, its average and its current number of steps."""

    def __init__(self, size: int, settings: Mapping[str, Any], initial_steps: int) -> None:
        if unknown := settings.keys() - {*_SETTINGS, "candidate_steps"}:
            raise ValueError(f"config slot {size}: SGLang reads no setting {min(unknown)!r}")
        for name, least in COUNTS.items():
            whole(f"config slot {size}: {name}", settings[name], least)
        for name, bounds in NUMBERS.items():
            within(f"config slot {size}: {name}", settings[name], *bounds)
        self.candidates = candidate_steps(size, settings, 0)
        middle = self.candidates[len(self.candidates) // 2]
        self.steps: int = initial_steps if initial_steps in self.candidates else middle
        self.average = float(self.steps - 1)
        self._settings = settings
        self._batches = 0

    def state(self, in_step: bool) -> Tiers:
        """Return the same slot among many, one entry a run."""
        at, last = self.candidates.index(self.steps), len(self.candidates) - 1
        settings = {name: self._settings[name] for name in _SETTINGS}
        return Tiers.of(self, at=at, last=last, in_step=in_step, **settings)

    def update(self, accepted: float) -> None:
        """Take in an iteration's mean accepted drafts and maybe change the steps."""
        s = self._settings
        if self.steps > 0:
            self.average += s["ema_alpha"] * (accepted - self.average)
        self._batches += 1
        since = self._batches - s["warmup_batches"]
        if since > 0 and since % s["update_interval"] == 0:
            self.steps = self._choose()

    def _choose(self) -> int:
        s, candidates = self._settings, self.candidates
        start = i = candidates.index(self.steps)
        if self.steps == 0:
            probe = candidates[min(i + 1, len(candidates) - 1)]
            if probe > 0 and self.average < 0:
                self.average = float(probe - 1)
            return probe
        while i > 0:
            below = candidates[i - 1]
            if self.average > (below - 0.5 if below else 0.5) + s["down_hysteresis"]:
                break
            i -= 1
        if i == start:
            while i < len(candidates) - 1:
                if self.average <= candidates[i] - 0.5 + s["up_hysteresis"]:
                    break
                i += 1
        if s["ceiling_coeff"] > 0 and i <= start:
            ceiling = max(1, math.ceil(self.average * s["ceiling_coeff"]))
            while i > 0 and candidates[i] > ceiling:
                i -= 1
        return candidates[i]


def config_slots(
    config: Mapping[str, Any], settings: Collection[str]
) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the slots of SGLang's configuration, by rising batch size, and its settings.

    Raises ValueError if it has no slot, or a key that is neither a batch size nor in `settings`.
    """
    slots = {int(k): v for k, v in config.items() if str(k).isdigit()}
    common = {k: v for k, v in config.items() if not str(k).isdigit()}
    if unknown := [k for k in common if k not in settings]:
        raise ValueError(f"config key {unknown[0]!r} is neither a batch size nor a setting")
    if not slots:
        raise ValueError('config has no slot such as {"1": {"candidate_steps": [1,3]}}')
    return dict(sorted(slots.items())), common


def slot_at(slots: Mapping[int, T], batch: int) -> T:
    """Return the slot of the largest size up to `batch`, or else the first."""
    return slots[max((size for size in slots if size <= batch), default=min(slots))]


def candidate_steps(size: object, slot: Any, least: int) -> list[int]:
    """Return the rising candidates of a slot of the configuration; ValueError if it has none."""
    steps = slot.get("candidate_steps") if isinstance(slot, Mapping) else None
    if not steps or not isinstance(steps, list | tuple):
        raise ValueError(f"config slot {size}: candidate_steps is {steps!r}, expected a list")
    for step in steps:
        whole(f"config slot {size}: candidate_steps", step, least)
    return sorted(set(steps))


@dataclass
class Tiers(VectorisedState):
    """The slots of many runs: candidates, which of them is the number of steps, the average."""

    candidates: Ints
    at: Ints
    steps: Ints
    last: Ints
    average: Floats
    batches: Ints
    ema_alpha: Floats
    update_interval: Ints
    warmup_batches: Ints
    down_hysteresis: Floats
    up_hysteresis: Floats
    ceiling_coeff: Floats
    in_step: Ints

    blanks: ClassVar[Mapping[str, float]] = {"candidates": 0}

    def caps(self) -> Ints:
        return np.maximum(self.steps, self.in_step)

    def sent(self) -> Ints:
        return self.steps

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        moved = self.average + self.ema_alpha * (accepted - self.average)
        self.average = np.where(self.steps > 0, moved, self.average)
        self.batches = self.batches + 1
        since = self.batches - self.warmup_batches
        due = (since > 0) & (since % self.update_interval == 0)
        if due.any():
            self._choose(due)

    def _choose(self, due: Bools) -> None:
        """Move the slots of `due` to where their averages call for."""
        start, rounds = self.at, range(self.candidates.shape[1] - 1)
        resting = self.steps == 0
        at = start
        for _ in rounds:
            below = self._steps(np.maximum(at - 1, 0))
            floor = np.where(below > 0, below - 0.5, 0.5) + self.down_hysteresis
            at = at - ((at > 0) & ~(self.average > floor))
        held = at == start
        for _ in rounds:
            enough = self.average > self._steps(at) - 0.5 + self.up_hysteresis
            at = at + (held & (at < self.last) & enough)
        coeff = np.maximum(1, np.ceil(self.average * self.ceiling_coeff))
        capped = (self.ceiling_coeff > 0) & (at <= start)
        for _ in rounds:
            at = at - (capped & (at > 0) & (self._steps(at) > coeff))
        probe = np.minimum(start + 1, self.last)
        first = self._steps(probe)
        woken = due & resting & (first > 0) & (self.average < 0)
        self.average = np.where(woken, first - 1.0, self.average)
        self.at = np.where(due, np.where(resting, probe, at), start)
        self.steps = self._steps(self.at)

    def _steps(self, at: Ints) -> Ints:
        found: Ints = np.take_along_axis(self.candidates, at[:, None], axis=1)[:, 0]
        return found
