"""When requests arrive, and which recorded sequence each of them replays.

Sequences are dealt from a shuffled deck of the recording, so that every sequence is used
once before any is used twice.  A file that gives lengths is matched by length instead:
see `ArrivalFile`.  Both draw from the generator of the replication alone, never from a
policy's, so every policy meets the same requests at the same times (common random
numbers).

Files of requests, with what was measured of each: a CSV with the columns of the Azure LLM inference
traces, the result of ``vllm bench serve --save-result --save-detailed`` (vLLM 0.32,
``benchmarks/serve.py``), and the requests of LLMServingSim's ``bench`` (``requests.jsonl``,
engine's clock).
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.arrays import Floats, Ints
from policies.json_text import JSONError, parse_json
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError, FileError
from traces.store.text import json_lines, read_text

FILE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LONGEST = 10_000_000
"""Tokens of a prompt or an output that a file may ask for; more is taken for a mistake."""
MOST_S = 1e9
"""Seconds that a file may span, some thirty years; more is taken for a mistake."""
MOST_BYTES = 256 * 2**20
"""A larger result of a benchmark is not read."""
METRICS = ("ttft_s", "tpot_s", "e2e_s")
UNREADABLE = (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""Errors of pandas for a file that is no CSV, or a damaged archive."""
DETAILED = ("input_lens", "output_lens", "ttfts", "itls")
BENCHED = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")


class Requests(NamedTuple):
    """Requests in the order of their arrival; arrays of shape (requests,)."""

    arrival_s: Floats
    """Seconds from the first arrival."""
    prompt: Ints
    output: Ints
    measured: Mapping[str, Floats] = {}
    """Seconds measured of each request, by the names of `METRICS`; empty if the file has none."""
    skipped: int = 0
    """Requests of the file that failed and are left out."""


def read_requests(path: Path) -> Requests:
    """Return the requests in the file at `path`.

    A CSV has the columns ``TIMESTAMP,ContextTokens,GeneratedTokens``, with dates or seconds.

    Raises FileError if the file is missing, empty, lacks a column, or holds a timestamp out of
    order, a negative one, or a length below one or beyond `LONGEST`.
    """
    kind = path.name.removesuffix(".gz")
    if kind.endswith(".jsonl"):
        return _read_bench(path)
    if kind.endswith(".json"):
        return _read_detailed(path)
    return _read_csv(path)


def _read_detailed(path: Path) -> Requests:
    """Read a result of ``vllm bench serve --save-detailed``."""
    try:
        document: Any = parse_json(read_text(path, MOST_BYTES))
    except JSONError as error:
        raise FileError(f"arrivals file {path} is not JSON ({error})") from None
    if not isinstance(document, dict) or any(name not in document for name in DETAILED):
        raise FileError(
            f"arrivals file {path} has no requests one by one: run `vllm bench serve "
            "--save-result --save-detailed`"
        )
    if not document.get("start_times"):
        raise FileError(
            f"arrivals file {path} does not say when requests started (start_times): run the "
            "benchmark of a newer vLLM"
        )
    try:
        starts, ttft, prompt, output = (
            np.array(document[name], dtype=float)
            for name in ("start_times", "ttfts", "input_lens", "output_lens")
        )
        gaps = np.array([float(sum(itl)) for itl in document["itls"]])
        ok = (output >= 1) & (ttft > 0)
        order = np.flatnonzero(ok)[np.argsort(starts[ok], kind="stable")]
        columns = (values[order] for values in (starts, prompt, output, ttft, gaps))
    except (TypeError, ValueError, IndexError) as error:
        raise FileError(f"arrivals file {path} is damaged: {error}") from None
    return _checked(path, *columns, skipped=int((~ok).sum()))


def _read_bench(path: Path) -> Requests:
    """Read the requests that LLMServingSim's ``bench`` recorded."""
    try:
        rows = [row for _, row in json_lines(path)]
        columns = [np.array([row[name] for row in rows], dtype=float) for name in BENCHED]
    except (TypeError, ValueError, KeyError) as error:
        raise FileError(
            f"arrivals file {path} is not of LLMServingSim's bench ({error}): expected "
            f"{', '.join(BENCHED)} in each line"
        ) from None
    prompt, output, queued, first, last = (
        values[np.argsort(columns[2], kind="stable")] for values in columns
    )
    return _checked(path, queued, prompt, output, first - queued, last - first)


def _checked(
    path: Path, start_s: Floats, prompt: Floats, output: Floats, ttft_s: Floats, rest_s: Floats,
    *, skipped: int = 0,
) -> Requests:  # fmt: skip
    """Return requests with their metrics; ``rest_s`` is from the first token to the last.

    Raises FileError if there are none, or one has impossible lengths or times.
    """
    if not len(start_s):
        raise FileError(f"arrivals file {path} holds no request that succeeded")
    sizes = (prompt, output)
    bad = ~np.isfinite(start_s) | ~(ttft_s > 0) | ~(rest_s >= 0)
    for values in sizes:
        bad |= ~((values >= 1) & (values <= LONGEST)) | (values % 1 != 0)
    if bad.any() or start_s[-1] - start_s[0] > MOST_S:
        row = int(np.flatnonzero(bad)[0]) if bad.any() else len(start_s) - 1
        raise FileError(
            f"arrivals file {path}, request {row + 1} by arrival: has impossible lengths or times"
        )
    measured = {
        "ttft_s": ttft_s, "tpot_s": rest_s / np.maximum(output - 1, 1), "e2e_s": ttft_s + rest_s,
    }  # fmt: skip
    return Requests(
        start_s - start_s[0], prompt.astype(np.int64), output.astype(np.int64), measured, skipped
    )


def _read_csv(path: Path) -> Requests:
    try:
        frame = pd.read_csv(path)
    except FileNotFoundError:
        raise FileError(f"arrivals file {path} does not exist") from None
    except UNREADABLE as e:
        raise FileError(f"arrivals file {path} cannot be read as CSV: {e}") from None
    if missing := [c for c in FILE_COLUMNS if c not in frame.columns]:
        raise FileError(f"arrivals file {path} lacks the column(s) {', '.join(missing)}")
    if frame.empty:
        raise FileError(f"arrivals file {path} holds no request, only a header")
    seconds = pd.to_numeric(frame["TIMESTAMP"], errors="coerce").to_numpy(float)
    if np.isnan(seconds).all():
        dates = pd.to_datetime(frame["TIMESTAMP"], errors="coerce", format="ISO8601", utc=True)
        seconds = (dates - dates.min()).dt.total_seconds().to_numpy(float)
    lengths = [pd.to_numeric(frame[c], errors="coerce").to_numpy(float) for c in FILE_COLUMNS[1:]]
    # Refused below, and not computed with.
    seconds, *lengths = (np.where(np.isinf(v), np.nan, v) for v in (seconds, *lengths))
    checks = [
        np.isnan(seconds) | (seconds < 0) | (seconds - seconds[0] > MOST_S),
        *(~((v >= 1) & (v <= LONGEST)) | (v % 1 != 0) for v in lengths),
    ]
    for name, bad in zip(FILE_COLUMNS, checks, strict=True):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            whole = f"a whole number, 1 to {LONGEST}"
            dated = f"a date or seconds >= 0, at most {MOST_S:g} s after the first"
            want = dated if name == "TIMESTAMP" else whole
            value = frame[name].iloc[row]
            raise FileError(
                f"arrivals file {path}, row {row + 1}: {name} is {str(value)[:40]}, expected {want}"
            )
    if (back := np.flatnonzero(np.diff(seconds) < 0)).size:
        raise FileError(
            f"arrivals file {path}, row {int(back[0]) + 2}: TIMESTAMP goes back in time: "
            "sort the file"
        )
    prompts, outputs = (v.astype(np.int64) for v in lengths)
    return Requests(seconds - seconds[0], prompts, outputs)


AT_ONCE = 4096
"""Rows of a file that are given sequences together."""


class Job(NamedTuple):
    """One request as the engine sees it arrive."""

    arrival_s: float
    """Time of arrival; a lower bound in a closed loop, where completions decide."""
    sequence: int
    """Index of the recorded sequence whose acceptance it replays."""
    prompt_tokens: int
    output_tokens: int
    number: int = 0
    """Place in the order of arrival."""


class Arrivals(ABC):
    """A source of requests.  Subclass it and define `times`, and `rate_of` if there is a rate."""

    concurrency: int | None = None
    """Requests kept in the system by a closed loop; None for open arrivals."""
    think_s: float = 0.0
    """Seconds between a completion and the next request of a closed loop."""
    remarks: tuple[str, ...] = ()
    """Lines on what is served otherwise than asked."""
    prompt: int | None = None
    """Prompt tokens of every request; None: those recorded."""
    output: int | None = None
    """Output tokens, likewise: the recorded sequence is cut, or begun again."""

    @property
    def resized(self) -> bool:
        """True if requests have other lengths than the recorded sequences that they replay."""
        return self.prompt is not None or self.output is not None

    @abstractmethod
    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds, never decreasing."""

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        """Yield the first `requests` requests, each bound to a sequence of `trace`."""
        if not trace.requests:
            raise DraftsimError("the trace holds no request to replay: record one")
        if requests is None:
            raise DraftsimError("these arrivals never end: give the number of requests")
        dealt = zip(self.times(rng), _deck(len(trace.requests), rng), strict=False)
        for number, (arrival_s, sequence) in enumerate(islice(dealt, requests)):
            info = trace.requests[sequence]
            # A log may not know its prompts; a request has one token at the least.
            prompt, output = self.prompt or max(info.prompt_length, 1), self.output or info.tokens
            yield Job(arrival_s, sequence, prompt, output, number)

    @property
    def rate(self) -> float | None:
        """Requests offered per second; None if the engine's own pace decides."""
        return self.rate_of(None)

    def rate_of(self, requests: int | None) -> float | None:
        """Return the rate of the first `requests`; None: of all."""
        del requests
        return None


@dataclass(frozen=True)
class AtRate(Arrivals):
    """Arrivals at `per_second` requests a second.  Subclass it and define `times`."""

    per_second: float
    prompt: int | None = None
    output: int | None = None

    def __post_init__(self) -> None:
        _positive("rate", self.per_second)

    def rate_of(self, requests: int | None) -> float:
        """Return the requests offered per second."""
        del requests
        return self.per_second


class Poisson(AtRate):
    """Independent arrivals at `per_second` requests a second."""

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Return sums of exponential gaps."""
        return _summed(lambda: rng.exponential(1 / self.per_second, 256))


class Deterministic(AtRate):
    """Arrivals at equal distances, `per_second` requests a second."""

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield 0, 1 / rate, 2 / rate, ..."""
        del rng
        count = 0
        while True:
            yield count / self.per_second
            count += 1


@dataclass(frozen=True)
class GammaGaps(AtRate):
    """Gaps of a gamma distribution, like vLLM's ``--burstiness``: below 1 requests come in bursts.

    1 is Poisson; larger values are more even.
    """

    burstiness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("burstiness", self.burstiness)
        if self.burstiness < 1e-6:  # with less, gaps are too long for a float
            raise DraftsimError(f"burstiness is {self.burstiness}, expected at least 1e-06")

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Return sums of gaps with a mean of 1 / rate."""
        shape = self.burstiness
        return _summed(lambda: rng.gamma(shape, 1 / (self.per_second * shape), 256))


@dataclass(frozen=True)
class ClosedLoop(Arrivals):
    """`concurrency` clients that each send the next request `think_s` seconds after an answer."""

    concurrency: int = field()  # without the default of other arrivals
    think_s: float = 0.0
    prompt: int | None = None
    output: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise DraftsimError(f"concurrency is {self.concurrency}, expected at least 1")
        if not 0 <= self.think_s < np.inf:
            raise DraftsimError(f"think time is {self.think_s}, expected >= 0 seconds")

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Return zero for every request: completions decide."""
        del rng
        return repeat(0.0)


NEAREST = 8
"""Recorded sequences that a request of a file may replay."""


@dataclass(frozen=True)
class ArrivalFile(Arrivals):
    """Requests of a file (`simulator.serving.arrivals.read_requests`).

    The first request arrives at time 0, and `scale` > 1 speeds the file up.
    A request keeps the file's prompt and output lengths and replays one of the `NEAREST`
    recorded sequences closest in output length (smallest |log(recorded / asked)|), drawn
    at random: cut where the recording is longer, begun again where it is shorter.  The
    recorded acceptance is taken to hold at the file's prompt length.

    ``requests`` are the file's requests where they were read before; by default they are read
    from ``path`` when needed, which raises FileError.
    """

    path: str | Path
    scale: float = 1.0
    requests: Requests | None = field(default=None, compare=False, repr=False)
    resized = True

    def __post_init__(self) -> None:
        _positive("rate scale", self.scale)

    def scaled(self, factor: float) -> ArrivalFile:
        """Return the same file sped up by a further `factor`; it is not read again."""
        return replace(self, scale=self.scale * factor, requests=self.read)

    @cached_property
    def read(self) -> Requests:
        """The requests at the file's own pace, and what was measured of them."""
        return read_requests(Path(self.path)) if self.requests is None else self.requests

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield the file's times, scaled."""
        del rng
        yield from (self.read.arrival_s / self.scale).tolist()

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        """Yield the file's requests, each bound to a recorded sequence of about its length."""
        if not trace.requests:
            raise DraftsimError("the trace holds no request to replay: record one")
        prompts, outputs = self.read.prompt, self.read.output
        recorded = np.log([r.tokens for r in trace.requests])
        order = recorded.argsort(kind="stable")
        ranked = recorded[order]
        window, asked = min(NEAREST, len(order)), np.log(outputs.astype(float))
        pick = rng.integers(window, size=len(asked))
        count = len(asked) if requests is None else min(requests, len(asked))
        rows = zip(self.times(rng), prompts.tolist(), outputs.tolist(), strict=True)
        for first in range(0, count, AT_ONCE):
            own = asked[first : min(first + AT_ONCE, count), None]
            # The nearest in log length are consecutive in rank: as many to either side.
            at = ranked.searchsorted(own)
            ranks = np.maximum(at - window, 0) + np.arange(2 * window)
            last = np.minimum(at + window, len(ranked)) - 1
            away = np.where(ranks <= last, np.abs(ranked[np.minimum(ranks, last)] - own), np.inf)
            near = np.take_along_axis(ranks, away.argsort(axis=1, kind="stable"), axis=1)
            chosen = order[near[np.arange(len(own)), pick[first : first + len(own)]]]
            numbered = enumerate(zip(chosen.tolist(), rows, strict=False), first)
            for number, (sequence, (arrival_s, prompt, output)) in numbered:
                yield Job(arrival_s, sequence, prompt, output, number)

    @property
    def remarks(self) -> tuple[str, ...]:  # type: ignore[override]
        """A line on requests that failed when the file was recorded."""
        failed = self.read.skipped
        verb = "is" if failed == 1 else "are"
        said = f"{self.path}: {counted(failed, 'request')} failed and {verb} left out"
        return (said,) if failed else ()

    def rate_of(self, requests: int | None) -> float | None:
        """Return the mean rate of the first `requests`, scaled; None if they span no time."""
        times = self.read.arrival_s[:requests]
        return float((len(times) - 1) / times[-1] * self.scale) if times[-1] > 0 else None


@dataclass(frozen=True)
class ArrivalTimes(Arrivals):
    """The times of `file` alone: requests keep the lengths of the recorded sequences."""

    file: ArrivalFile

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Return the file's times, scaled."""
        return self.file.times(rng)

    def rate_of(self, requests: int | None) -> float | None:
        """Return the rate of the file's first `requests`."""
        return self.file.rate_of(requests)


PROCESSES: Mapping[str, type[AtRate]] = {"poisson": Poisson, "deterministic": Deterministic}
"""Arrivals at a rate by the names of the command line."""


def arrivals_of(
    rate: float | None,
    path: str | Path | None = None,
    process: str | None = None,
    scaled: bool = False,
) -> AtRate | ArrivalFile:
    """Return the arrivals in the file at `path`, or those of a process at a rate.

    A process is one of `PROCESSES`, by default Poisson, or ``burstiness=B`` (`GammaGaps`).
    ``scaled`` is True if the file's own rate is to be multiplied.
    Raises DraftsimError if the arguments contradict each other or name no load.
    """
    if scaled and (path is None or rate is not None):
        raise DraftsimError(
            "--rate Sx or --scale speeds up a file of arrivals: give --arrivals, and no --rate R"
        )
    if process is not None and (rate is None or path is not None):
        raise DraftsimError("--process shapes arrivals at a rate: give --rate, and no --arrivals")
    if path is not None:
        return ArrivalFile(path)
    if rate is None:
        raise DraftsimError("there is no load: give --rate or --arrivals")
    name, equals, value = (process or "poisson").partition("=")
    if name == "burstiness" and equals:
        try:
            return GammaGaps(rate, burstiness=float(value))
        except ValueError:
            raise DraftsimError(f"process is {process!r}, expected burstiness=NUMBER") from None
    if process is not None and process not in PROCESSES:
        known = ", ".join(PROCESSES)
        raise DraftsimError(f"process is {process!r}, expected {known} or burstiness=NUMBER")
    return PROCESSES[name](rate)


def _summed(drawn: Callable[[], Floats]) -> Iterator[float]:
    """Yield the sums of gaps, of which many are drawn at a time."""
    now = 0.0
    while True:
        for gap in drawn().tolist():
            now += gap
            yield now


def _deck(size: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(size).tolist()


def _positive(name: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise DraftsimError(f"{name} is {value}, expected a positive finite number")
