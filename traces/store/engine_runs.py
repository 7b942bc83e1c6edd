"""Loads that a serving engine ran: requests, iterations, and the rounds of every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from policies.core import Round
from traces.store.outputs import Divergence

PARTS = ("schedule", "execute", "sample", "propose", "update", "output")
"""Parts of a step in seconds: the scheduler's plan, the model's pass, sampling with the
engine's bookkeeping, drafting, taking the results in, and detokenising with what is left."""


class PlannedRequest(NamedTuple):
    """A request to send: which sequence, when at the earliest, and how many tokens."""

    sequence: int
    arrival_s: float
    tokens: int


class Demand(NamedTuple):
    """The requests of a load: sent at their times, or in a closed loop of `concurrency`."""

    jobs: Sequence[PlannedRequest]
    concurrency: int | None


class PromptRead(NamedTuple):
    """Prompt tokens of one request that a step processed."""

    name: str
    tokens: int
    cached: int
    left: int
    """Prompt tokens not yet read before this step."""


class Decoded(NamedTuple):
    """One request that a step decoded."""

    name: str
    context: int
    """Tokens known before the step, prompt and output."""
    drafted: int
    emitted: int


@dataclass(frozen=True)
class EngineStep:
    """One iteration: the requests in it, their tokens, and its seconds by part."""

    start_s: float
    seconds: float
    parts: Mapping[str, float]
    decoded: Sequence[Decoded]
    prompts: Sequence[PromptRead]
    emitted: Mapping[str, int]
    """Tokens that each request's caller has by then."""
    finished: Sequence[str]

    @property
    def kind(self) -> str:
        """``decode``, ``prompt`` or ``mixed``."""
        if not self.prompts:
            return "decode"
        return "mixed" if self.decoded else "prompt"

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> EngineStep:
        """Return the step of these fields, whose tuples JSON has turned into lists."""
        decoded = [Decoded(*d) for d in kept["decoded"]]
        prompts = [PromptRead(*p) for p in kept["prompts"]]
        return cls(**{**kept, "decoded": decoded, "prompts": prompts})


@dataclass(frozen=True)
class LoadRun:
    """The results of a load.

    ``requests``: ``name, sequence, arrival_s, first_s, finish_s, tokens``, seconds from the
    load's start.
    """

    requests: pd.DataFrame
    steps: Sequence[EngineStep]
    rounds: Mapping[str, Sequence[Round]]
    control_s: float
    """The control load's time around this run, and all along it where it could be had."""
    texts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Output tokens by name; empty if they were not kept."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in iterations."""
        return sum(step.seconds for step in self.steps)

    def written(self) -> dict[str, Any]:
        """Return the form written as JSON, which `read` reads."""
        return {
            "requests": self.requests.to_dict("list"), "steps": [vars(s) for s in self.steps],
            "rounds": {name: list(own) for name, own in self.rounds.items()},
            "control_s": self.control_s, "texts": {n: list(t) for n, t in self.texts.items()},
        }  # fmt: skip

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> LoadRun:
        """Return the run that was `written`."""
        steps = [EngineStep.read(step) for step in kept["steps"]]
        rounds = {name: [Round(*r) for r in own] for name, own in kept["rounds"].items()}
        texts = kept.get("texts", {})  # runs of an earlier version kept none
        return cls(pd.DataFrame(kept["requests"]), steps, rounds, kept["control_s"], texts)


@dataclass(frozen=True)
class ServedRun:
    """A load that a server served.

    A step of `load` holds what follows it until the next one, where the engine is not idle.
    """

    load: LoadRun
    around_request_s: Sequence[float]
    """By request, on the way to the engine and back."""
    around_step_s: Sequence[float]
    """By step, all but scheduling, running the model and taking in what came of it."""
    queued_s: Sequence[float]
    """When each request reached the engine, in the order they did, from the first on."""

    def written(self) -> dict[str, Any]:
        """Return the form written as JSON, which `read` reads."""
        return {**vars(self), "load": self.load.written()}

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> ServedRun:
        """Return the run that was `written`."""
        return cls(**{**kept, "load": LoadRun.read(kept["load"])})


class Speed(NamedTuple):
    """The speed of an engine under a load, over all repeats."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the load."""
        return self.tokens / self.seconds


class Apart(NamedTuple):
    """Speeds by load of an engine in a process of its own, and its settings."""

    speeds: Mapping[str, Speed]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class PolicyRuns:
    """The runs of a load under one policy, and what diverged in them."""

    load: str
    text: str
    """The policy's."""
    runs: Sequence[LoadRun]
    diverged: Sequence[Mapping[str, Divergence]]
    """By run, the divergences by request."""
    left_out: frozenset[str]
    """Requests of the load that diverged in any run under any policy."""
    unlike_recording: int | None
    """Requests whose text is not the recorded one, in the run with most; None if the recording
    is of another model or other prompts."""

    @property
    def texts_diverged(self) -> int:
        """Requests that diverged in any run."""
        return len({name for own in self.diverged for name in own})

    def kept(self, requests: pd.DataFrame) -> pd.DataFrame:
        """Return the requests, measured or predicted, that are not left out; all, if that leaves
        none.
        """
        column = requests["index"] if "index" in requests else requests["name"].map(index_of)
        kept = requests[~column.isin({index_of(name) for name in self.left_out})]
        return kept if len(kept) else requests

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row about texts; ``diverged`` is for the JSON."""
        return {
            "texts_diverged": self.texts_diverged,
            "diverged": [
                {**one._asdict(), "repeat": repeat}
                for repeat, own in enumerate(self.diverged)
                for one in own.values()
            ],
            "requests_left_out": len(self.left_out),
            "texts_unlike_recording": self.unlike_recording,
        }


def index_of(name: str) -> int:
    """Return the place in its load of a request called SEQUENCE/INDEX."""
    return int(name.rpartition("/")[2])
