"""Adaptive rules of engines: SGLang by throughput, TensorRT-LLM with a gate, filled graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.batch.base import BatchPolicy, IterationCost, KeptInStep, Planned, TextbookCost
from policies.batch.confidence import CAPTURED
from policies.batch.sglang import candidate_steps, config_slots, slot_at
from policies.batch.tables import requests_asked
from policies.core import Load, Round
from policies.spec import flag, ordered, parameter, whole, within

_DEFAULT_CONFIG: Mapping[str, Any] = {"1": {"candidate_steps": [1, 3, 5, 7]}}
_SETTINGS: Mapping[str, float] = {
    "window_size": 20, "update_interval": 5, "switch_hysteresis": 0.1, "profile_run_seq_len": 128,
}  # fmt: skip


@dataclass(eq=False)
class SGLangThroughput(KeptInStep):
    """Steps with the most expected tokens per second (SGLang's strategy ``throughput_aware``).

    sgl-project/sglang pull request 28045: the score of S steps is (1 + p_1 + ... + p_S) over the
    seconds of an iteration with S steps, measured for every batch size when the server starts.
    p_k is the mean over the last `window_size` iterations of the share of requests that accepted k
    tokens or more; positions without data follow geometrically.  Every `update_interval`
    iterations, once all positions in use have a full window, the best candidate is taken if its
    score is `switch_hysteresis` above that of the steps in force.  Reads no signal.

    Parameters
    ----------
    config:
        As SGLang's configuration file: candidate steps by batch size, ``{"1": {"candidate_steps":
        [1, 3, 5, 7]}}``, and the settings above; ``profile_run_seq_len`` is the context that the
        start-up profile is measured at.  None: SGLang's default.
    initial_steps:
        Steps at first, if they are a candidate; else the middle one.
    cost:
        The start-up profile (`policies.batch.base.IterationCost`).
    in_step:
        See `KeptInStep`.
    """

    config: Mapping[str, Any] | None = None
    initial_steps: int = parameter(3, whole, 0)
    cost: IterationCost | None = None
    in_step: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = _DEFAULT_CONFIG if self.config is None else self.config
        known = (*_SETTINGS, "strategy", "profile_run_batch_sizes", "max_profile_run_batch_size",
                 "profile_run_n_warmup", "profile_run_n_measure")  # fmt: skip
        slots, given = config_slots(chosen, known)
        self._settings = settings = {**_SETTINGS, **given}
        for name in ("window_size", "update_interval", "profile_run_seq_len"):
            whole(name, settings[name], 1)
        within("switch_hysteresis", settings["switch_hysteresis"], 0)
        self._slots = {size: candidate_steps(size, slot, 1) for size, slot in slots.items()}
        every = sorted({step for steps in self._slots.values() for step in steps})
        self.draft_up_to(every[-1])
        first = self._slots[min(self._slots)]
        initial = self.initial_steps
        self._steps = initial if initial in every else first[len(first) // 2]
        size = int(settings["window_size"])
        self._windows: list[deque[float]] = [deque(maxlen=size) for _ in range(every[-1])]
        self._since = 0
        self._profile: dict[tuple[int, int], float] = {}

    def plan(self, loads: Sequence[Load]) -> int:
        batch = loads[0].batch
        candidates = slot_at(self._slots, batch)
        if self._steps not in candidates:
            scores = self._scores(candidates, batch)
            middle = candidates[len(candidates) // 2]
            self._switch(max(scores, key=lambda s: scores[s]) if scores else middle)
        if self._since >= self._settings["update_interval"]:
            full = int(self._settings["window_size"])
            if all(len(window) == full for window in self._windows[: self._steps]):
                scores = self._scores(candidates, batch)
                best = max(scores, key=lambda s: scores[s])
                margin = 1 + self._settings["switch_hysteresis"]
                if scores[best] > scores[self._steps] * margin:
                    self._switch(best)
            self._since = 0
        return self._steps

    def observe(self, outcomes: Sequence[Round]) -> None:
        if not outcomes:
            return
        self._since += 1
        for place in range(self._steps):
            hits = sum(outcome.accepted > place for outcome in outcomes)
            self._windows[place].append(hits / len(outcomes))

    def _switch(self, steps: int) -> None:
        for window in self._windows[steps:]:
            window.clear()
        self._steps = steps

    def _scores(self, candidates: Sequence[int], batch: int) -> dict[int, float]:
        """Return expected tokens per second of every candidate; empty before anything was seen."""
        seen = [sum(w) / len(w) for w in self._windows if w]
        if not seen:
            return {}
        # The mean factor from one position to the next.
        factor = seen[-1] ** (1 / len(seen))
        rates = seen + [seen[-1] * factor**i for i in range(1, len(self._windows) - len(seen) + 1)]
        return {s: (1 + sum(rates[:s])) / self._seconds(batch, s) for s in candidates}

    def _seconds(self, batch: int, steps: int) -> float:
        if (batch, steps) not in self._profile:
            cost = self.cost or TextbookCost()
            context = float(self._settings["profile_run_seq_len"])
            self._profile[batch, steps] = cost(batch, steps, batch * (steps + 1), context)
        return self._profile[batch, steps]


@dataclass(eq=False)
class TensorRTLLM(KeptInStep):
    """Draft length by batch size, and a gate that switches speculation off for good.

    TensorRT-LLM's ``draft_len_schedule`` gives K up to each batch size and 0 beyond the last.
    ``acceptance_window`` and ``acceptance_length_threshold`` (``_torch/speculative/
    speculation_gate.py``): once the mean of the last `window` completed requests' accepted tokens
    per iteration is below `threshold`, nothing is drafted any more for the life of the server.
    A request is complete when it is no longer in the batch.  Reads no signal.

    Parameters
    ----------
    schedule:
        Draft length by the largest batch size that it is for.
    window:
        Completed requests that the mean is over; 0: no gate.
    threshold:
        Accepted tokens per iteration, the target's own not counted.
    in_step:
        True if the drafter reads along where the schedule gives 0 (`KeptInStep`).
    """

    schedule: Mapping[Any, int] | None = None
    window: int = parameter(0, whole, 0)
    threshold: float = parameter(0.5, within, 0)
    in_step: bool = parameter(False, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {4: 4, 8: 2, 32: 1} if self.schedule is None else self.schedule
        rows = sorted((int(batch), k) for batch, k in given.items())
        if not rows:
            raise ValueError("schedule is empty, expected draft lengths by batch size")
        for batch, k in rows:
            whole(f"schedule batch size {batch}", batch, 1)
            whole(f"schedule[{batch}]", k, 0)
        if rows[0][1] < max(k for _, k in rows):
            raise ValueError(
                f"schedule {dict(rows)}: the smallest batch size must have the longest draft"
            )
        self.draft_up_to(rows[0][1])
        self._rows = rows
        self._running: dict[Hashable, tuple[int, int]] = {}
        self._order: list[Hashable] = []
        self._means: deque[float] = deque(maxlen=max(self.window, 1))
        self.disabled = False

    def _scheduled(self, batch: int) -> int:
        at = bisect_left([largest for largest, _ in self._rows], batch)
        return 0 if at == len(self._rows) else self._rows[at][1]

    def planned_at(self, scheduled: int) -> Planned | None:
        length = self._scheduled(scheduled)
        return None if self.window else Planned(self.passes_of(length), length)

    def plan(self, loads: Sequence[Load]) -> int:
        return 0 if self.disabled else self._scheduled(requests_asked(loads))

    def plan_each(self, requests: Sequence[Hashable], loads: Sequence[Load]) -> Sequence[int]:
        for gone in self._running.keys() - set(requests):
            accepted, rounds = self._running.pop(gone)
            self._means.append(accepted / rounds)
            if self.window and len(self._means) == self.window:
                self.disabled |= sum(self._means) / self.window < self.threshold
        self._order = list(requests)
        if self.disabled:
            self._verified = 0
            return [0] * len(requests)
        return super().plan_each(requests, loads)

    def observe(self, outcomes: Sequence[Round]) -> None:
        if self.disabled:
            return
        for request, outcome in zip(self._order, outcomes, strict=False):
            accepted, rounds = self._running.get(request, (0, 0))
            self._running[request] = accepted + outcome.accepted, rounds + 1


@dataclass(eq=False)
class GraphAware(BatchPolicy):
    """The longest draft that costs no larger CUDA graph than `gamma` does.

    An engine pads the ``batch x (K + 1)`` tokens that it verifies to the next captured size, so
    the padding of `gamma` can hold drafts instead.  Where no graph holds `gamma`, K is the longest
    that the largest graph holds.  The rule is ours.  Reads no signal.

    Parameters
    ----------
    gamma:
        Draft length to begin with.
    gamma_max:
        Longest draft.
    graphs:
        Captured sizes in tokens; None: vLLM's default.
    """

    gamma: int = parameter(3, whole, 1)
    gamma_max: int = parameter(8, whole, 1)
    graphs: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered("gamma", self.gamma, "gamma_max", self.gamma_max)
        self._sizes: list[int] = sorted(CAPTURED if self.graphs is None else self.graphs)
        if not self._sizes:
            raise ValueError("graphs is empty, expected captured sizes")
        for size in self._sizes:
            whole("graphs", size, 1)

    def plan(self, loads: Sequence[Load]) -> int:
        batch = loads[0].batch
        at = bisect_left(self._sizes, batch * (self.gamma + 1))
        size = self._sizes[min(at, len(self._sizes) - 1)]
        return max(min(size // batch - 1, self.gamma_max), 0)
