"""A stopwatch on every part of an engine's iteration, and a note of who ran in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from profiler.engines.drafts import caller_name

PARTS = ("schedule", "execute", "sample", "propose", "update", "output")
"""Parts of a step in seconds: the scheduler's plan, the model's pass, sampling with the
engine's bookkeeping, drafting, taking the results in, and detokenising with what is left."""


class Prompt(NamedTuple):
    """Prompt tokens of one request that a step processed."""

    name: str
    tokens: int
    cached: int
    left: int
    """Prompt tokens read before this step."""


class Decoded(NamedTuple):
    """One request that a step decoded."""

    name: str
    context: int
    """Tokens known before the step, prompt and output."""
    drafted: int
    emitted: int


@dataclass(frozen=True)
class Step:
    """One iteration: who ran, what came of it, and where its seconds went."""

    start_s: float
    seconds: float
    parts: Mapping[str, float]
    decoded: Sequence[Decoded]
    prompts: Sequence[Prompt]
    emitted: Mapping[str, int]
    """Tokens that each request's caller got."""
    finished: Sequence[str]

    @property
    def kind(self) -> str:
        """``decode``, ``prompt`` or ``mixed``."""
        if not self.prompts:
            return "decode"
        return "mixed" if self.decoded else "prompt"


class Watch:
    """Stopwatches on an engine's scheduler (vLLM 0.32), and on its executor and model runner.

    Around every iteration: `begin`, then `taken`.  Where the latter two run in another process,
    ``output`` holds their part of an iteration, too.
    """

    def __init__(self, scheduler: Any, executor: Any = None, runner: Any = None) -> None:
        self._scheduler: Any = None
        self._followed: list[Any] = []
        self._watch: dict[str, float] = {}
        self._plan: Any = None
        self._before: dict[str, tuple[int, int, int]] = {}
        self._sampled: dict[str, int] = {}
        self.follow(scheduler)
        if executor is not None:
            self._timed(executor, "execute_model", "execute")
            self._timed(executor, "sample_tokens", "sample")
        if runner is not None:
            self._timed(runner, "propose_draft_token_ids", "propose")

    def follow(self, scheduler: Any) -> None:
        """The iterations to come are planned by this scheduler."""
        self._scheduler = scheduler
        if not any(scheduler is known for known in self._followed):
            self._followed.append(scheduler)
            self._timed(scheduler, "schedule", "schedule", self._planned)
            self._timed(scheduler, "update_from_output", "update", before=self._output)

    def begin(self) -> None:
        """An iteration begins."""
        self._watch = dict.fromkeys(PARTS, 0.0)
        self._plan, self._sampled = None, {}

    def taken(
        self, start_s: float, seconds: float, emitted: Mapping[str, int], finished: Sequence[str]
    ) -> Step | None:
        """Return the iteration that has ended; None if nothing was run."""
        if self._plan is None or not self._plan.total_num_scheduled_tokens:
            return None
        parts = self._watch
        parts["sample"] -= parts["propose"]
        parts["output"] = seconds - sum(parts[p] for p in PARTS if p != "output")
        decoded, prompts = self._who()
        return Step(start_s, seconds, parts, decoded, prompts, emitted, finished)

    def _who(self) -> tuple[list[Decoded], list[Prompt]]:
        decoded, prompts = [], []
        for name, tokens in self._plan.num_scheduled_tokens.items():
            known, computed, prompt = self._before[name]
            own = caller_name(name)
            if computed < prompt:
                prompts.append(Prompt(own, tokens, computed, prompt - computed))
            else:
                emitted = self._sampled.get(name, 0)
                decoded.append(Decoded(own, known, tokens - 1, emitted))
        return decoded, prompts

    def _planned(self, plan: Any) -> None:
        self._plan = plan
        requests = self._scheduler.requests
        self._before = {
            name: (
                requests[name].num_tokens,
                # `schedule` has already counted what it planned.
                requests[name].num_computed_tokens - tokens,
                requests[name].num_prompt_tokens,
            )
            for name, tokens in plan.num_scheduled_tokens.items()
        }

    def _output(self, plan: Any, output: Any) -> None:
        del plan
        self._sampled = {
            name: len(ids)
            for name, ids in zip(output.req_ids, output.sampled_token_ids, strict=True)
        }

    def _timed(
        self,
        owner: Any,
        method: str,
        part: str,
        after: Callable[..., None] | None = None,
        before: Callable[..., None] | None = None,
    ) -> None:
        """Put the stopwatch on a method of the engine."""
        own = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            began = time.perf_counter()
            result = own(*args, **kwargs)
            self._watch[part] = self._watch.get(part, 0.0) + time.perf_counter() - began
            if after is not None:
                after(result)
            return result

        setattr(owner, method, timed)
