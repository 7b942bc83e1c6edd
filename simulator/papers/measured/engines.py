"""Published runs of engines by draft length and load, and a server's requests, all predicted.

`ladder_rows` and `engine_rows` predict speeds and acceptance from the fewest runs that determine
them, and `roofline_rows` predicts passes from data sheets.

`server_rows` compares a server's requests with the same requests in simulated time.  Latencies are
composed from operators, settings are the server's own, and nothing is fitted to its requests.  The
server ran with asynchronous scheduling, as its configuration says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from policies.arrays import Floats
from policies.lengths.basic import Autoregressive
from simulator.aggregate.hazard import emitted_at
from simulator.bootstrap import Interval
from simulator.hardware.record import ALONE, by_library, check_published, predicted_runs
from simulator.hardware.roofline import FORMATS
from simulator.papers.measured.rows import Evidence, evidence, ranked
from simulator.published import (
    CLASSES,
    ENGINE_STUDIES,
    GAMMATUNE,
    RTX3090,
    RTX3090_PLAIN,
    EngineRun,
    published_rows,
)
from simulator.serving import ArrivalFile, Limits, Scenario, simulate
from simulator.serving.arrivals import METRICS, Requests, read_requests
from simulator.serving.outcome.metrics import compared
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.store.recordings import find_latency

TWO, ONE = "plain and two lengths", "plain and one length"
ELSEWHERE = "plain and one length here, all lengths at another load"
FIRST = "the first two positions"
GIVEN = {
    "GammaTune 1, ms": ("GammaTune Table 1", "data sheet and the table's other models"),
    "SpecBound 3, ms": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
    "SpecBound 4, 3090/H800": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
}
"""By table of `check_published`: the study, and what its rows are predicted from."""

SERVER = "vLLM server on an RTX 4090, 300 requests"
SERVER_LOG = "gpu_ops/llmservingsim/bench/RTX4090-Llama-3.1-8B/requests.jsonl.gz"
SERVED = "rtx-4090/llama-3.1-8b"
LIMITS = Limits(max_batch=256, token_budget=2048, kv_blocks=2587, async_scheduling=True)
"""The server's settings.  One of its 2,588 blocks is vLLM's null block, which no request holds."""
WINDOW_S = 10.0
"""Requests that run and wait are compared as means over this many seconds."""


def ladder_rows(named: str = "") -> list[Evidence]:
    """Return every length of the RTX 3090's ladder from every two others, and every single one.

    Only of drafters whose study's name contains `named`: these rows take longest of all studies'.
    """
    rows = []
    for drafter, ladder in RTX3090.items():
        study = f"RTX 3090 llama.cpp 27B 4-bit, {drafter}"
        if named.lower() not in study.lower():
            continue
        for count, kind in ((2, TWO), (1, ONE)):
            for given in combinations(sorted(ladder), count):
                text = f"{kind}: {' and '.join(map(str, given))}"
                rows += list(_predicted(study, text, ladder, given))
    return rows


def cycle_at(known: Mapping[int, float], length: int) -> float:
    """Return a round over a plain step, on the line from a plain step nearest to the known ones."""
    slope = sum(n * (k - 1) for n, k in known.items()) / sum(n * n for n in known)
    return 1 + slope * length


def _predicted(
    study: str, named: str, ladder: Mapping[int, EngineRun], given: Sequence[int]
) -> Iterator[Evidence]:
    cycles = {n: ladder[n].cycle for n in given}
    speeds = {n: run.tokens_per_s for n, run in ladder.items()}
    totals = {n: ladder[n].emitted for n in given}
    yield from _others(study, named, "tokens/s at length {}", totals, cycles, speeds, RTX3090_PLAIN)
    for k, name in enumerate(CLASSES):
        # Cycles are the same for every class; so its gain says what a round of it emits.
        speeds = {n: 1 + ladder[n].gains[k] / 100 for n in ladder}
        totals = {n: min(n + 1.0, speeds[n] * ladder[n].cycle) for n in given}
        text, what = named.replace(":", f", {name}:"), f"speedup at length {{}}, {name}"
        yield from _others(study, text, what, totals, cycles, speeds, 1.0)


def _others(
    study: str, named: str, what: str, totals: Mapping[int, float], cycles: Mapping[int, float],
    speeds: Mapping[int, float], plain: float,
) -> Iterator[Evidence]:  # fmt: skip
    """Yield the speed at every other length than those whose tokens a round, ``totals``, are given.

    ``cycles`` are their rounds over a plain step, ``speeds`` those measured, ``plain`` without
    speculation.
    """
    known = tuple(totals.items())
    rows = [
        evidence(
            study, named, what.format(n),
            _family(known, n).scaled(plain / cycle_at(_same_kernel(cycles, n), n)), speed, plain,
        )
        for n, speed in speeds.items() if n not in totals
    ]  # fmt: skip
    yield from ranked(rows, [plain, *(speeds[n] for n in totals)])


def _same_kernel(known: Mapping[int, float], length: int) -> Mapping[int, float]:
    """Return the lengths whose verification, of the draft and one token, runs `length`'s kernel."""
    near = {n: k for n, k in known.items() if (n < ALONE) == (length < ALONE)}
    return near or known


@cache
def _family(totals: tuple[tuple[int, float], ...], length: int) -> Interval:
    return emitted_at(dict(totals), length)


def engine_rows() -> list[Evidence]:
    """Return predictions of every study's runs from the fewest of them that determine it."""
    rows: list[Evidence] = []
    for study, loads in ENGINE_STUDIES.items():
        for load, runs in loads.items():
            if not any(np.isnan(run.emitted) for run in runs.values()):
                plain = runs[0].tokens_per_s
                speeds = {n: run.tokens_per_s for n, run in runs.items() if n}
                for given, speed in speeds.items():
                    emitted = runs[given].emitted
                    rows += _others(
                        study, f"{ONE}: {given}", "tokens/s at length {}", {given: emitted},
                        {given: emitted / (speed / plain)}, speeds, plain,
                    )  # fmt: skip
            elif load != min(loads):
                rows += _elsewhere(study, loads[min(loads)], load, runs)
    return [*rows, *_positions()]


def _elsewhere(
    study: str, alone: Mapping[int, EngineRun], load: int, here: Mapping[int, EngineRun]
) -> Iterator[Evidence]:
    """Yield lengths at a load from one of them there, and from all at the smallest load.

    A round emits as much at every load.  With the tokens of a round unknown, the speeds at the
    smallest load only say how much more time than tokens a longer draft takes there; at the
    other load the drafts are taken to cost as much.
    """
    given = min(n for n in here if n)
    rows = [
        evidence(
            study, f"{ELSEWHERE}: length {given} at {load} streams",
            f"tokens/s of {load} streams at length {asked}",
            here[given].tokens_per_s * alone[asked].tokens_per_s / alone[given].tokens_per_s,
            run.tokens_per_s, here[0].tokens_per_s,
        )
        for asked, run in here.items() if asked not in (0, given)
    ]  # fmt: skip
    yield from ranked(rows, [here[0].tokens_per_s, here[given].tokens_per_s])


def _positions() -> Iterator[Evidence]:
    """Yield later positions' acceptance from the first two, by the acceptance family."""
    rows = list(published_rows("positions"))
    accepted = [float(row["accepted"]) for row in rows]
    known = {n: 1 + sum(accepted[:n]) for n in (1, 2)}
    for n in range(3, len(accepted) + 1):
        yield evidence(
            rows[0]["study"], f"{FIRST}: {accepted[0]:g} and {accepted[1]:g}",
            f"tokens a round of {n}", emitted_at(known, n), 1 + sum(accepted[:n]),
        )  # fmt: skip


def roofline_rows() -> list[Evidence]:
    """Return `check_published` and `predicted_runs` as rows of evidence; quantised models apart."""
    groups: dict[str, list[Evidence]] = {}
    for row in check_published().to_dict("records"):
        study, given = GIVEN[str(row["table"])]
        if "quantised" in str(row["kind"]):
            given += ", quantised"
        quantity = f"{str(row['table']).partition(', ')[2]}, {row['row']}"
        groups.setdefault(str(row["table"]), []).append(
            evidence(study, given, quantity, float(row["ours"]), float(row["published"]))
        )
    for one in (*predicted_runs("eager"), *by_library(), *predicted_runs("graph")):
        if one.study is GAMMATUNE:
            continue  # above
        given = f"data sheet; {one.given}"
        if FORMATS[one.run.weights].quantised:
            given = given.replace("its unquantised", "quantised from its unquantised")
        if one.run.new_tokens > 1:
            given += ", wider"
        groups.setdefault(f"{one.study.name}, {given}", []).append(evidence(
            one.study.name, given, f"ms, {one.label}, {one.run.device}", 1e3 * one.seconds,
            1e3 * one.run.seconds,
        ))  # fmt: skip
    return [row for rows in groups.values() for row in ranked(rows)]


def server_rows(folder: Path) -> list[Evidence]:
    """Return the server's statistics, every request of it, and who runs and waits over time.

    Empty if `folder` does not hold its requests.  Raises DraftsimError if they are damaged.
    """
    path = folder / SERVER_LOG
    if not path.is_file():
        return []
    real = read_requests(path)
    ours, over_time = served(real)
    given = "operators and the server's settings"
    rows = [
        evidence(
            SERVER, f"{given}: {SERVED}", f"{row['metric'][:-2]} {row['statistic']}, s",
            row["predicted"], row["measured"],
        )
        for row in compared(ours, real.measured)
    ]  # fmt: skip
    for name in METRICS:
        predicted, measured = ours[name], real.measured[name]
        rows += [
            evidence(
                SERVER, f"{given}, {name[:-2]} of each request: {SERVED}",
                f"{name[:-2]} of request {i}, s", *both,
            )
            for i, both in enumerate(zip(predicted.tolist(), measured.tolist(), strict=True))
        ]  # fmt: skip
    samples = path.with_name("timeseries.csv")
    for name, measured in (read_over_time(samples) if samples.is_file() else {}).items():
        windows = enumerate(zip(over_time[name], measured, strict=False))
        rows += [
            evidence(
                SERVER, f"{given}, {name} over time: {SERVED}",
                f"requests {name}, {i * WINDOW_S:g} to {(i + 1) * WINDOW_S:g} s", *both,
            )
            for i, both in windows if both[1] >= 1
        ]  # fmt: skip
    return rows


def read_over_time(path: Path) -> dict[str, Floats]:
    """Read the requests that ran and waited, sampled each second, as means over `WINDOW_S`.

    Raises DraftsimError if the file is damaged.
    """
    try:
        frame = pd.read_csv(path)
        window = np.ceil(frame["t"] / WINDOW_S) - 1
        means = frame.groupby(window)[["running", "waiting"]].mean()
        means = means.reindex(range(int(window.max()) + 1))
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise DraftsimError(f"cannot read the samples in {path}: {error}") from None
    return {name: means[name].to_numpy(float) for name in ("running", "waiting")}


def served(real: Requests) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Serve the same requests under plain decoding, at the latencies `SERVED`.

    Returns the seconds of each of `METRICS`, a request each in order of arrival, and the mean
    ``running`` and ``waiting`` requests in each window of `WINDOW_S`.
    """
    trace = synthetic_trace(0.5, requests=8, tokens=640, max_gamma=1, seed=0)
    arrivals = ArrivalFile("the server's requests", requests=real)
    scenario = Scenario(arrivals, LIMITS, requests=len(real.output), warmup=0.0)
    run = simulate(trace, find_latency(SERVED), Autoregressive(), scenario)
    requests = run.requests.sort_values("index")
    edges = np.arange(0, run.simulated_s + WINDOW_S, WINDOW_S)
    starts, means = run.recorder.batch.means(run.simulated_s)
    ends = np.append(starts[1:], run.simulated_s)
    summed = np.concatenate([[0.0], np.cumsum(means * (ends - starts))])
    running = np.interp(edges, np.append(starts, ends[-1]), summed)
    came, left = (requests[name].to_numpy(float) for name in ("arrival_s", "finish_s"))
    inside = _since(came, edges) - _since(left, edges)
    spans = np.diff(np.minimum(edges, run.simulated_s))
    over_time = {
        "running": np.diff(running) / spans,
        "waiting": (np.diff(inside) - np.diff(running)) / spans,
    }
    return {m: requests[m].to_numpy(float) for m in METRICS}, over_time


def _since(times: Floats, edges: Floats) -> Floats:
    """Return the seconds from each of `times` to each edge, summed over the times before it."""
    return np.asarray(np.maximum(edges[:, None] - times[None, :], 0.0).sum(axis=1))
