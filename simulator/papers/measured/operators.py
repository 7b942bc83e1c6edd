"""Predictions from operators against published measurements: steps, cells, decoding, a server.

A step is composed from operators alone, and from a few whole steps besides; a cell of attention or
of an MoE block from half of the others; a published decode step from operators, and from them with
the host's time seen in the study's other models.  The requests of a real server are served in
simulated time at the composed latencies, with its settings and nothing fitted to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.lengths.basic import Autoregressive
from simulator.papers.measured.rows import Evidence, evidence
from simulator.published import A100_CONCURRENCY, STUDIES
from simulator.serving import ArrivalFile, Limits, Scenario, simulate
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.operators.attention import Plane, heads_of, timed_planes
from traces.operators.compose import Composer, Placed
from traces.operators.shapes import find_architecture
from traces.operators.steps import NOTHING, fit_steps, parts_of_steps
from traces.store.operators import STANDS_FOR, bundled_operators, timed_devices
from traces.store.recordings import find_latency
from traces.store.text import json_lines

Floats = npt.NDArray[np.float64]

STEPS = "Whole steps of Llama-3.1-8B, RTX PRO 6000"
CELLS = "Cells of operators"
SERVER = "vLLM server on an RTX 4090, 300 requests"
SERVER_LOG = "gpu_ops/llmservingsim/bench/RTX4090-Llama-3.1-8B/requests.jsonl.gz"
SERVED = "rtx-4090/llama-3.1-8b"
ALONE, WITH_HOST = "operators alone", "operators, and the host's time in its other models"
EAGER = "operators alone, of passes that a host launches kernel by kernel"
SERVER_SOURCE = (
    "github.com/casys-kaist/LLMServingSim at 5daddb21, bench, MIT licence: vLLM 0.19, 2,588 blocks "
    "of 16 tokens, 2,048 tokens an iteration; read from the folder of --logs"
)


def operator_rows(named: str = "") -> list[Evidence]:
    """The rows of studies whose name contains `named`, none of which needs a log."""
    rows: list[Evidence] = []
    if named.lower() in STEPS.lower():
        rows += step_rows()
    if named.lower() in CELLS.lower():
        rows += [*attention_rows(), *law_rows(), *expert_rows()]
    return [*rows, *decode_rows(), *concurrency_rows()]


@cache
def composer_of(device: str) -> Composer:
    """Passes on one GPU."""
    return Composer(bundled_operators(device), device)


def step_rows() -> Iterator[Evidence]:
    """Every whole step, from operators, and from some of the steps besides."""
    composer, placed = composer_of("rtx-pro-6000"), Placed(find_architecture("llama-3.1-8b"))
    steps = composer.steps
    tokens = (steps["tokens"] + steps["batch"]).to_numpy()
    full = (steps["mode"] == "full").to_numpy()
    short = full & (steps["batch_context"] == 1024).to_numpy()
    every, ends = np.ones(len(steps), bool), np.isin(tokens, (1, 64))
    parts, measured = parts_of_steps(composer, placed, steps), steps["seconds"].to_numpy(float)
    for given, known, asked in (
        (ALONE, None, every), ("operators, and steps of 1 and 64 tokens", ends, ~ends),
        ("operators, and steps at 1k of context", short, full & ~short),
    ):  # fmt: skip
        factors = NOTHING if known is None else fit_steps(composer, placed, steps[known])
        predicted = factors.of(parts)
        for i in np.flatnonzero(asked).tolist():
            mode, chunk, batch, context = (
                steps[name].iloc[i] for name in ("mode", "tokens", "batch", "batch_context")
            )
            what = f"ms, {mode}, {batch} x {context} cached, {chunk} of a prompt"
            yield evidence(STEPS, given, what, 1e3 * predicted[i], 1e3 * measured[i])


def attention_rows() -> Iterator[Evidence]:
    """Every other cell of attention from those of every other size and context."""
    for device in timed_devices():
        for name, planes in timed_planes(bundled_operators(device), device).items():
            for kind, plane in zip(("decoding", "prompts"), planes, strict=False):
                what = f"microseconds of attention, {kind}, {name}"
                yield from _half(f"half the cells: {device}", what, plane)


def law_rows() -> Iterator[Evidence]:
    """Attention with one token a sequence, by the law fitted to another GPU's timings."""
    timed = {name: composer_of(name).attention for name in timed_devices()}
    timed = {name: of for name, of in timed.items() if timed_planes(bundled_operators(name), name)}
    for device, own in timed.items():
        others = [of.law for name, of in timed.items() if name != device]
        law = tuple(float(np.mean(column)) for column in zip(*others, strict=True))
        for name, planes in timed_planes(bundled_operators(device), device).items():
            model, _, shared = name.partition("@tp")
            heads = heads_of(find_architecture(model), int(shared or 1))
            plane = planes.split
            for i, batch in enumerate(plane.sizes.tolist()):
                for j, context in enumerate(plane.contexts.tolist()):
                    sizes = np.array([batch]), np.array([context])
                    predicted = float(own.by_law(law, heads, *sizes)[0])  # type: ignore[arg-type]
                    what = f"microseconds of attention, {name}: {batch:g} at {context:g}"
                    yield evidence(
                        CELLS, f"another GPU's attention: {device}", what, 1e6 * predicted,
                        1e6 * plane.seconds[i, j],
                    )  # fmt: skip


def _half(given: str, what: str, plane: Plane) -> Iterator[Evidence]:
    sizes, contexts = np.arange(len(plane.sizes)), np.arange(len(plane.contexts))
    left = Plane(plane.sizes[::2], plane.contexts[::2], plane.seconds[::2, ::2])
    for i in sizes[(sizes % 2 == 1) & (sizes < len(sizes) - 1)].tolist():
        for j in contexts[(contexts % 2 == 1) & (contexts < len(contexts) - 1)].tolist():
            size, context = plane.sizes[i], plane.contexts[j]
            predicted = float(left.at(np.array([size]), np.array([context]))[0])
            asked = f"{what}: {size:g} at {context:g}"
            yield evidence(CELLS, given, asked, 1e6 * predicted, 1e6 * plane.seconds[i, j])


def expert_rows() -> Iterator[Evidence]:
    """Every other cell of an MoE block from the tokens and experts beside it."""
    rows = bundled_operators("rtx-pro-6000").of(operator="moe")
    table = rows.pivot_table(index="tokens", columns="experts", values="seconds")
    for j, experts in enumerate(table.columns):
        own = table[experts].dropna()
        tokens, seconds = own.index.to_numpy(float), own.to_numpy(float)
        for i in range(1 + j % 2, len(tokens) - 1, 2):
            others = np.arange(len(tokens)) != i
            predicted = np.interp(tokens[i], tokens[others], seconds[others])
            what = f"microseconds of an MoE block, {tokens[i]:g} tokens, {experts} experts"
            yield evidence(
                CELLS, "half the cells: experts", what, 1e6 * predicted, 1e6 * seconds[i]
            )


def decode_rows() -> Iterator[Evidence]:
    """Published times a token in 16 bits, on every GPU whose operators were timed."""
    for study in STUDIES:
        runs = [
            run for run in study.runs
            if run.weights == "bf16"
            and STANDS_FOR.get(run.device, run.device) in timed_devices()
        ]  # fmt: skip
        if not runs:
            continue
        composed = np.array([
            float(
                composer_of(run.device).pass_s(
                    Placed(find_architecture(run.model)), 1, run.new_tokens, run.context
                )
            )
            for run in runs
        ])  # fmt: skip
        measured = np.array([run.seconds for run in runs])
        yield from _decoded(study.name, study.mode, runs, composed, measured)


def _decoded(
    study: str, mode: str, runs: Sequence[Any], composed: Floats, measured: Floats
) -> Iterator[Evidence]:
    for i, run in enumerate(runs):
        what = f"ms, {run.model.rpartition('/')[2]}, {run.device}, {run.new_tokens} tokens"
        given = EAGER if mode == "eager" else ALONE
        yield evidence(study, given, what, 1e3 * composed[i], 1e3 * measured[i])
        others = [
            j for j, other in enumerate(runs)
            if other.device == run.device and other.model != run.model
        ]  # fmt: skip
        if mode != "eager" and others:
            host_s = max(float(np.median(measured[others] - composed[others])), 0.0)
            predicted = 1e3 * (composed[i] + host_s)
            yield evidence(study, WITH_HOST, what, predicted, 1e3 * measured[i])


def concurrency_rows() -> Iterator[Evidence]:
    """A server's time between tokens at several concurrencies: a step, and the prompts in it."""
    study = A100_CONCURRENCY
    latency = find_latency("a100/llama-3-8b")
    context = study.prompt + study.output / 2
    for requests, measured_s in study.itl_s.items():
        step_s = latency.seconds("target", "forward", batch=requests, context=context).item()
        added_s = latency.seconds("target", "prefill", new_tokens=study.prompt).item()
        added_s -= latency.seconds("target", "forward").item()
        # Every request ends and begins once in its output; alone, it interrupts nobody.
        each = (requests - 1) / study.output
        predicted = step_s + each * max(added_s, 0.0)
        what = f"ms between tokens, {requests} requests at a time"
        yield evidence(study.name, ALONE, what, 1e3 * predicted, 1e3 * measured_s)


def server_rows(folder: Path) -> list[Evidence]:
    """The requests of a real server beside the same requests in simulated time.

    Empty where the folder does not hold them.  Raises DraftsimError if they are damaged.
    """
    path = folder / SERVER_LOG
    if not path.is_file():
        return []
    real = read_server(path)
    order = np.argsort(real["queued_s"], kind="stable")
    real = {name: values[order] for name, values in real.items()}
    run = served(real)
    rows = []
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        ours, theirs = _statistics(run[name]), _statistics(real[name])
        rows += [
            evidence(SERVER, f"{ALONE}: {SERVED}", f"{name[:-2]} {label}, s", value, theirs[label])
            for label, value in ours.items()
        ]
    return rows


def _statistics(values: Floats) -> dict[str, float]:
    quantiles = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}
    return {"mean": float(values.mean()), **quantiles}


def read_server(path: Path) -> dict[str, Floats]:
    """The requests that LLMServingSim's ``bench`` recorded, by column."""
    try:
        rows: list[Any] = [row for _, row in json_lines(path)]
        columns = {
            name: np.array([row[name] for row in rows], float)
            for name in ("input_toks", "output_toks", "queued_ts", "first_token_ts",
                         "last_token_ts")
        }  # fmt: skip
    except (TypeError, ValueError, KeyError) as error:
        raise DraftsimError(f"cannot read the requests in {path}: {error}") from None
    queued, first, last = (columns[n] for n in ("queued_ts", "first_token_ts", "last_token_ts"))
    return {
        "prompt": columns["input_toks"], "output": columns["output_toks"], "queued_s": queued,
        "ttft_s": first - queued, "e2e_s": last - queued,
        "tpot_s": (last - first) / np.maximum(columns["output_toks"] - 1, 1),
    }  # fmt: skip


def served(real: dict[str, Floats], name: str = SERVED) -> dict[str, Floats]:
    """The same requests under plain decoding, at the latencies called `name`."""
    trace = synthetic_trace(0.5, requests=8, tokens=640, max_gamma=1, seed=0)
    arrivals = ArrivalFile("the server's requests")
    times = real["queued_s"] - real["queued_s"].min()
    lengths = (real[column].astype(np.int64) for column in ("prompt", "output"))
    vars(arrivals)["rows"] = (times, *lengths)
    limits = Limits(max_batch=256, token_budget=2048, kv_blocks=2588)
    scenario = Scenario(arrivals, limits, requests=len(times), warmup=0.0)
    run = simulate(trace, find_latency(name), Autoregressive(), replace(scenario))
    requests = run.requests.sort_values("index")
    return {column: requests[column].to_numpy(float) for column in ("ttft_s", "tpot_s", "e2e_s")}
