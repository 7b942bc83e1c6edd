"""Requests that a server got, read from a file, with what was measured of each.

Formats: a CSV with the columns of the Azure LLM inference traces, the result of ``vllm bench serve
--save-result --save-detailed`` (vLLM 0.32, ``benchmarks/serve.py``), and the requests of
LLMServingSim's ``bench`` (``requests.jsonl``, engine's clock).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.json_text import JSONError, parse_json
from traces.errors import FileError
from traces.store.text import json_lines, read_text

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FILE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LONGEST = 10_000_000
"""Tokens of a prompt or an output that a file may ask for; more is taken for a mistake."""
MOST_S = 1e9
"""Seconds that a file may span, some thirty years; more is taken for a mistake."""
MOST_BYTES = 256 * 2**20
"""A larger result of a benchmark is not read."""
METRICS = ("ttft_s", "tpot_s", "e2e_s")
QUANTILES = (50, 90, 95, 99)
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


class Compared(NamedTuple):
    """A statistic of a metric, predicted and measured."""

    metric: str
    statistic: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")


def read_requests(path: Path) -> Requests:
    """Return the requests in the file at `path`.

    A CSV has the columns ``TIMESTAMP,ContextTokens,GeneratedTokens``, with dates or seconds.

    Raises
    ------
    FileError
        If the file is missing, empty, lacks a column, or holds a timestamp out of order,
        a negative one, or a length below one or beyond `LONGEST`.
    """
    kind = path.name.removesuffix(".gz")
    if kind.endswith(".jsonl"):
        return _read_bench(path)
    if kind.endswith(".json"):
        return _read_detailed(path)
    return _read_csv(path)


def statistics(values: Floats) -> dict[str, float]:
    """Return the mean and the `QUANTILES` of `values`, by ``mean``, ``p50``, ..."""
    at = np.percentile(values, QUANTILES)
    quantiles = {f"p{q}": float(v) for q, v in zip(QUANTILES, at, strict=True)}
    return {"mean": float(values.mean()), **quantiles}


def compared(predicted: Mapping[str, Floats], measured: Mapping[str, Floats]) -> list[Compared]:
    """Compare the statistics of each metric of the same requests."""
    found = []
    for name, values in measured.items():
        theirs = statistics(values)
        ours = statistics(np.asarray(predicted[name], dtype=float))
        found += [Compared(name, label, ours[label], value) for label, value in theirs.items()]
    return found


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
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError, OSError) as e:
        raise FileError(f"arrivals file {path} cannot be read as CSV: {e}") from None
    if missing := [c for c in FILE_COLUMNS if c not in frame.columns]:
        raise FileError(f"arrivals file {path} lacks the column(s) {', '.join(missing)}")
    if frame.empty:
        raise FileError(f"arrivals file {path} holds no request, only a header")
    seconds = pd.to_numeric(frame["TIMESTAMP"], errors="coerce").to_numpy(float)
    if np.isnan(seconds).all():
        dates = pd.to_datetime(frame["TIMESTAMP"], errors="coerce", format="ISO8601")
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
