"""The requests of a real server against the same requests in simulated time.

Latencies are composed from operators, settings are the server's own, and nothing is fitted to its
requests.  The server ran with asynchronous scheduling, as its configuration says.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policies.arrays import Floats
from policies.lengths.basic import Autoregressive
from simulator.papers.measured.rows import Evidence, evidence
from simulator.serving import ArrivalFile, Limits, Scenario, simulate
from simulator.serving.arrivals import METRICS, Requests, read_requests
from simulator.serving.outcome.metrics import compared
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.store.recordings import find_latency

SERVER = "vLLM server on an RTX 4090, 300 requests"
SERVER_LOG = "gpu_ops/llmservingsim/bench/RTX4090-Llama-3.1-8B/requests.jsonl.gz"
OVER_TIME = "timeseries.csv"
SERVED = "rtx-4090/llama-3.1-8b"
LIMITS = Limits(max_batch=256, token_budget=2048, kv_blocks=2587, async_scheduling=True)
"""The server's settings.  One of its 2,588 blocks is vLLM's null block, which no request holds."""
WINDOW_S = 10.0
"""Requests that run and wait are compared as means over this many seconds."""


class ServedRequests(NamedTuple):
    """Results of a run of the server's requests."""

    requests: dict[str, Floats]
    """Seconds of each of `METRICS`, a request each, in order of arrival."""
    over_time: dict[str, Floats]
    """Mean ``running`` and ``waiting`` requests in each window of `WINDOW_S`."""


def server_rows(folder: Path) -> list[Evidence]:
    """Return the server's statistics, every request of it, and who runs and waits over time.

    Empty if `folder` does not hold its requests.  Raises DraftsimError if they are damaged.
    """
    path = folder / SERVER_LOG
    if not path.is_file():
        return []
    real = read_requests(path)
    ours = served(real)
    given = "operators and the server's settings"
    rows = [
        evidence(
            SERVER, f"{given}: {SERVED}", f"{row['metric'][:-2]} {row['statistic']}, s",
            row["predicted"], row["measured"],
        )
        for row in compared(ours.requests, real.measured)
    ]  # fmt: skip
    for name in METRICS:
        predicted, measured = ours.requests[name], real.measured[name]
        rows += [
            evidence(
                SERVER, f"{given}, {name[:-2]} of each request: {SERVED}",
                f"{name[:-2]} of request {i}, s", *both,
            )
            for i, both in enumerate(zip(predicted.tolist(), measured.tolist(), strict=True))
        ]  # fmt: skip
    return [*rows, *_over_time_rows(path.with_name(OVER_TIME), ours, given)]


def _over_time_rows(path: Path, ours: ServedRequests, given: str) -> Iterator[Evidence]:
    if not path.is_file():
        return
    for name, measured in read_over_time(path).items():
        predicted = ours.over_time[name]
        for i in range(min(len(predicted), len(measured))):
            if measured[i] >= 1:
                yield evidence(
                    SERVER, f"{given}, {name} over time: {SERVED}",
                    f"requests {name}, {i * WINDOW_S:g} to {(i + 1) * WINDOW_S:g} s",
                    predicted[i], measured[i],
                )  # fmt: skip


def read_over_time(path: Path) -> dict[str, Floats]:
    """Read the requests that ran and waited, sampled each second, as means over `WINDOW_S`.

    Raises DraftsimError if the file is damaged.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        window = np.array([np.ceil(float(row["t"]) / WINDOW_S) - 1 for row in rows]).astype(int)
        columns = {
            name: np.array([float(row[name]) for row in rows]) for name in ("running", "waiting")
        }
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise DraftsimError(f"cannot read the samples in {path}: {error}") from None
    count = np.bincount(window)
    return {name: np.bincount(window, values) / count for name, values in columns.items()}


def served(real: Requests) -> ServedRequests:
    """Serve the same requests under plain decoding, at the latencies `SERVED`."""
    trace = synthetic_trace(0.5, requests=8, tokens=640, max_gamma=1, seed=0)
    arrivals = ArrivalFile("the server's requests", requests=real)
    scenario = Scenario(arrivals, LIMITS, requests=len(real.output), warmup=0.0)
    run = simulate(trace, find_latency(SERVED), Autoregressive(), scenario)
    requests = run.requests.sort_values("index")
    edges = np.arange(0, run.simulated_s + WINDOW_S, WINDOW_S)
    starts, means = run.recorder.batch.means(run.simulated_s)
    ends = np.append(starts[1:], run.simulated_s)
    running = np.interp(edges, np.append(starts, ends[-1]), _summed(means * (ends - starts)))
    came, left = (requests[name].to_numpy(float) for name in ("arrival_s", "finish_s"))
    inside = _since(came, edges) - _since(left, edges)
    spans = np.diff(np.minimum(edges, run.simulated_s))
    over_time = {
        "running": np.diff(running) / spans,
        "waiting": (np.diff(inside) - np.diff(running)) / spans,
    }
    return ServedRequests({m: requests[m].to_numpy(float) for m in METRICS}, over_time)


def _since(times: Floats, edges: Floats) -> Floats:
    """Return the seconds from each of `times` to each edge, summed over the times before it."""
    return np.asarray(np.maximum(edges[:, None] - times[None, :], 0.0).sum(axis=1))


def _summed(parts: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(parts)])
