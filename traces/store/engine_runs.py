"""Real runs: the loads that a serving engine ran, and measured times by policy and request.

A load has its requests, the engine's iterations, and the rounds of every request (`LoadRun`).
Predictions are compared with measured times (`MeasuredRuns`), which have a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from policies.core import Round
from traces.store.header import MOST, PathLike, check_rows, file_error, meta_of
from traces.store.outputs import Divergence
from traces.store.parquet import read_file, write_file

PARTS = ("schedule", "execute", "sample", "propose", "update", "output")
"""Parts of a step in seconds: the scheduler's plan, the model's pass, sampling with the
engine's bookkeeping, drafting, taking the results in, and detokenising with what is left."""
MEASURED_COLUMNS = (
    "policy", "verify", "batch", "forced", "repeat", "request", "wall_s", "rounds"
)  # fmt: skip
"""One row per run, repeat and request (or group of requests decoded together): ``request`` is its
id, ``wall_s`` decode seconds after prefill, ``rounds`` the number of verifications."""
OFF_COLUMNS = ("off_s", "repeated")
"""If it was watched: the part of ``wall_s`` without a processor, in seconds, and how often the run
was repeated because it was disturbed (the row has the least disturbed one)."""


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

    ``requests``: ``name, sequence, arrival_s, first_s, finish_s, tokens``, from the load's start.
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
    """A load that a server served; a step of `load` lasts to the next if the engine is busy."""

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
        """Return the requests that are not left out; all, if that leaves none."""
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


@dataclass(frozen=True, eq=False)
class MeasuredRuns:
    """Times of real runs (`MEASURED_COLUMNS`), and where they were taken."""

    times: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)


def write_measured(runs: MeasuredRuns, path: PathLike) -> None:
    """Write measured runs, atomically."""
    table = pa.Table.from_pandas(runs.times, preserve_index=False).replace_schema_metadata(None)
    write_file(path, "measured", table, {"meta": dict(runs.meta)})


def read_measured(path: PathLike) -> MeasuredRuns:
    """Return the measured runs in a file.

    Raises FileError if the file is missing or damaged, lacks a column, holds no run or an
    impossible value, or a policy lacks a run of a request and repeat that another one has.
    """
    header, table = read_file(path, "measured")
    if missing := [c for c in MEASURED_COLUMNS if c not in table.column_names]:
        raise file_error(path, f"lacks the column(s) {', '.join(missing)}")
    meta = meta_of(path, header)
    if not table.num_rows:
        raise file_error(path, "holds no run", "measure again")
    for name, (is_of_type, least) in _COLUMNS.items():
        if name not in table.column_names:
            continue
        column, may_lack = table.column(name), name in OFF_COLUMNS
        gaps = 0 if may_lack else column.null_count
        if not is_of_type(column.type) or gaps:
            raise file_error(path, f"column {name!r} is of type {column.type}, with {gaps} gaps")
        if least is not None:
            values = column.to_numpy()
            sound = ((values >= least) & (values <= MOST)) | (np.isnan(values) & may_lack)
            check_rows(path, {f"{least} <= {name} <= {MOST}": sound})
    times = table.to_pandas()
    _check_whole(path, times)
    return MeasuredRuns(times, meta)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_COLUMNS: Mapping[str, tuple[Callable[[pa.DataType], bool], int | None]] = {
    **dict.fromkeys(("policy", "verify", "request", "pair", "mode"), (_is_text, None)),
    "forced": (pa.types.is_boolean, None),
    "batch": (pa.types.is_integer, 1),
    **dict.fromkeys(("repeat", "rounds", "repeated"), (pa.types.is_integer, 0)),
    **dict.fromkeys(("wall_s", "off_s"), (pa.types.is_floating, 0)),
}
"""The check of each column's type, and the least of its numbers."""


def _check_whole(path: PathLike, times: pd.DataFrame) -> None:
    """Raise FileError unless every policy of a batch ran every request once in every repeat."""
    together = [name for name in ("pair", "mode", "batch", "forced") if name in times]
    runs = times.groupby([*together, "policy", "verify", "repeat", "request"]).size()
    if (runs > 1).any():
        again = dict(zip(runs.index.names, runs.index[int(runs.argmax())], strict=True))
        raise file_error(path, f"holds a run twice: {again}", "measure again")
    for _, part in times.groupby(together):
        counts = part.groupby(["policy", "verify"]).size()
        grid = part["repeat"].nunique() * part["request"].nunique()
        if (counts != grid).any():
            policy, verify = counts.index[int((counts != grid).argmax())]
            raise file_error(
                path,
                f"{policy} / {verify} has {counts[policy, verify]} runs of the {grid} that its "
                "requests and repeats make",
                "measure again",
            )
