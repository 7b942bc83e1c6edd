"""The searches of every engine by one class, which refuses forms that an engine does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulator.tune.formats import CHECKS
from simulator.tune.launch import WITHOUT_TABLE
from simulator.tune.settings import Tuned
from simulator.tune.sglang import tune_sglang, tune_standalone
from simulator.tune.single import ONE_REQUEST, tune_single
from simulator.tune.tensorrt_llm import tune_dynamo, tune_tensorrt_llm
from simulator.tune.vllm import by_length, tune_vllm
from traces.acceptance.trace import Trace
from traces.aliases import Progress, silent
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

SEARCHES: Mapping[str, Callable[..., Tuned]] = {
    "vllm": tune_vllm, "sglang": tune_sglang, "tensorrt-llm": tune_tensorrt_llm,
    "dynamo": tune_dynamo,
}  # fmt: skip
"""Searches by batch size; those of `ONE_REQUEST` are by `tune_single`."""
ONE_LENGTH: Mapping[str, Callable[..., Tuned]] = {
    "vllm": partial(tune_vllm, one_length=True), "sglang": tune_standalone,
}  # fmt: skip
"""Searches of one K for all loads, of engines that also read a table."""


@dataclass(frozen=True)
class Search:
    """The settings searched for one engine.

    Parameters
    ----------
    engine:
        A name in `simulator.tune.formats.CHECKS`.
    batches:
        Batch sizes; None: those measured.
    by_context, contexts:
        vLLM's form by batch and context, at these contexts; None: those measured.
    by_length:
        vLLM's form by sequence length, at one batch size (by default 1).
    method:
        vLLM's method of the drafter, if known; with some an engine has one K for all loads
        (`simulator.tune.launch.WITHOUT_TABLE`).

    Raises
    ------
    DraftsimError
        If the engine has no such form, or no such batch sizes.
    """

    engine: str
    batches: Sequence[int] | None = None
    by_context: bool = False
    contexts: Sequence[int] | None = None
    by_length: bool = False
    method: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in CHECKS:
            known = ", ".join(CHECKS)
            raise DraftsimError(f"--engine is {self.engine!r}, expected one of {known}")
        by_context = self.by_context or self.contexts is not None
        form = "--by-length" if self.by_length else "--by-context"
        if self.engine != "vllm" and (by_context or self.by_length):
            raise DraftsimError(f"{form} makes a table of vllm, not of {self.engine}: drop it")
        if self.one_length and (by_context or self.by_length):
            raise DraftsimError(f"{self.engine} takes no table with {self.method}: drop {form}")
        if self.by_length and (self.by_context or len(self.batches or [1]) != 1):
            raise DraftsimError("--by-length has one K for all batch sizes: name one --batch")
        if self.engine in ONE_REQUEST and list(self.batches or [1]) != [1]:
            raise DraftsimError(f"{ONE_REQUEST[self.engine].alone}: drop --batch")

    @property
    def one_length(self) -> bool:
        """True if the engine has one K for all loads with the drafter's method."""
        return self.method in WITHOUT_TABLE.get(self.engine, ())

    def largest(self, latency: LatencyTable) -> int:
        """Return the largest batch size searched."""
        one = self.by_length or self.engine in ONE_REQUEST
        return max(self.batches or ([1] if one else latency.usual_batches))

    def run(
        self, trace: Trace, latency: LatencyTable, *, progress: Progress = silent, **options: Any
    ) -> Tuned:
        """Return the settings found; ``options`` are those that all searches take.

        Raises DraftsimError if the engine cannot draft with the recording's drafter, or as its
        search does.
        """
        if self.engine in ONE_REQUEST:
            if "drafts" in trace.meta:
                raise DraftsimError(
                    f"a setting for {self.engine} needs a draft model, not {trace.source}: tune "
                    "for vllm, sglang, tensorrt-llm or dynamo"
                )
            return tune_single(self.engine, trace, latency, **options)
        batches = [1] if self.by_length and not self.batches else self.batches
        if self.engine == "vllm":
            by_context = self.by_context or self.by_length or self.contexts is not None
            options |= {"by_context": by_context, "contexts": self.contexts}
        tune = (ONE_LENGTH if self.one_length else SEARCHES)[self.engine]
        found = tune(trace, latency, batches, progress=progress, **options)
        return by_length(found) if self.by_length else found
