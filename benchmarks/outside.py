"""Errors on servers and GPUs that others measured, and that nothing here was chosen with.

    python -m benchmarks.outside [--steps | --loops] [--only NAME] [--out FILE]

`outside_servers.csv` holds runs of servers with speculation.  Each study is predicted from a few
runs (`FEW`), then each draft length from the others, then each concurrency from the others; the
figures are those of `benchmarks.server_left_out`.  With ``--steps``, passes of
`outside_steps.csv` are predicted from operators alone (``--latency a100/...``); with ``--loops``,
the throughput and the median TTFT of the closed loops of `outside_loops.csv`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.server_left_out import ALL, NOTHING, Study, left_out, print_row, summary
from policies.lengths.basic import Autoregressive
from simulator.aggregate.server import ANY_TARGET, ServerRun, Target
from simulator.serving import ClosedLoop, Limits, Scenario, simulate
from traces.acceptance.synthetic import synthetic_trace
from traces.operators.devices import DEVICES
from traces.store.recordings import find_latency

HERE = Path(__file__).parent
FEW_RUNS, ONE_K, ONE_LOAD = "few runs", "each K from the others", "each load from the others"
LLAMACPP = Target(vectors=True)
QWEN3_235B, GLM_47 = Target(experts=(128, 8)), Target(experts=(160, 8))
QWEN36_35B, QWEN3_30B = Target(experts=(256, 8)), Target(experts=(128, 8))


class Design(NamedTuple):
    """The runs of a study that are given first, and what its reader knows of the server."""

    lengths: tuple[int, ...]
    """Draft lengths."""
    batches: tuple[int, ...]
    target: Target = ANY_TARGET
    passes: int | None = None
    """As ``--passes``."""


FEW = {
    "apertus EAGLE-3.1, chat": Design((0, 2, 5), (1, 32, 128)),
    "apertus EAGLE-3.1, summarization": Design((0, 2, 5), (1, 32, 128)),
    "apertus DSpark, chat": Design((0, 2, 5), (1, 32, 128), passes=1),
    "sglang 22246, Qwen3-235B": Design((1, 5), (1, 8, 64), QWEN3_235B),
    "sglang 22246, GLM-4.7": Design((1, 4), (1, 8, 64), GLM_47),
    "rtx 4060, draft model": Design((0, 1, 5), (1, 8, 48)),
    "rtx 4060, n-gram": Design((0, 3), (1, 8, 48), passes=1),
    "rtx 5090, 600 W": Design((0, 2, 5), (1,), LLAMACPP),
    "rtx 5090, 400 W": Design((0, 2, 5), (1,), LLAMACPP),
    "v100, llama.cpp": Design((0, 1, 4), (1,), LLAMACPP),
    "strix halo, Qwen3.6-35B": Design((0, 1, 4), (1,), QWEN36_35B),
}
"""Plain decoding and two draft lengths at up to three concurrencies."""


def servers(only: str = "") -> Iterator[tuple[str, str, list[Study]]]:
    """Yield each study with its design and the parts that are predicted, one after another."""
    table = pd.read_csv(HERE / "outside_servers.csv", comment="#")
    for name, rows in table.groupby("study", sort=False):
        if only not in str(name):
            continue
        runs = [_run(row) for row in rows.to_dict("records")]
        design = FEW.get(str(name))
        if design is None:  # one draft length at two loads
            yield str(name), ONE_LOAD, [Study(
                str(name), runs, lambda run: not (run.k and run.batch > 1), QWEN3_30B
            )]  # fmt: skip
            continue

        def part(given: Any, name: str = str(name), runs: Any = runs, d: Any = design) -> Study:
            return Study(name, runs, given, d.target, d.passes)

        lengths, batches = design.lengths, design.batches
        yield str(name), FEW_RUNS, [part(
            lambda run, k=lengths, b=batches: run.k in k and run.batch in b
        )]  # fmt: skip
        drafted = sorted({run.k for run in runs if run.k})
        if len(drafted) > 1:
            parts = [part(lambda run, out=k: run.k != out) for k in drafted]
            yield str(name), ONE_K, parts
        loads = sorted({run.batch for run in runs})
        if len(loads) > 1:
            yield str(name), ONE_LOAD, [part(lambda run, out=b: run.batch != out) for b in loads]


def _run(row: dict[str, Any]) -> ServerRun:
    told = {key: None if np.isnan(row[key]) else row[key] for key in ("emitted", "prompt")}
    answer = row["answer"] if told["prompt"] else None
    return ServerRun(
        int(row["batch"]), int(row["k"]), row["tokens_per_s"], **told, answer=answer
    )  # fmt: skip


def server_rows(only: str = "") -> list[dict[str, Any]]:
    """Return a row per study and design, and one per design for all studies."""
    rows = []
    joined = {FEW_RUNS: NOTHING, ONE_K: NOTHING, ONE_LOAD: NOTHING}
    for name, design, parts in servers(only):
        found = NOTHING
        for part in parts:
            found = found.joined(left_out(part))
        joined[design] = joined[design].joined(found)
        given = sum(map(parts[0].given, parts[0].runs)) if len(parts) == 1 else None
        rows.append({"terms": design, "study": name, "given": given, **summary(found)})
        print_row(rows[-1])
    for design, found in joined.items():
        if found.missed:
            given = sum(row["given"] or 0 for row in rows if row["terms"] == design)
            rows.append({"terms": design, "study": ALL, "given": given or None, **summary(found)})
            print_row(rows[-1])
    return rows


def step_rows(only: str = "") -> pd.DataFrame:
    """Return the passes with their predicted milliseconds."""
    table = pd.read_csv(HERE / "outside_steps.csv", comment="#")
    table = table[table["study"].str.contains(only, regex=False)].reset_index(drop=True)
    return table.assign(predicted=[_pass_ms(row) for row in table.to_dict("records")])


def _pass_ms(row: dict[str, Any]) -> float:
    latency = find_latency(row["latency"])
    batch, context = row["batch"], row["context"]
    if row["part"] == "prefill":
        found = latency.seconds("target", "prefill", batch=batch, new_tokens=context).item()
    else:
        found = latency.seconds("target", "forward", batch=batch, context=context).item()
        if row["part"] == "layers":
            found -= latency.seconds("target", "head", batch=batch).item()
    if isinstance(row["slower"], str):
        timed = DEVICES["a100-80gb"].bandwidth
        found *= timed / DEVICES[row["slower"]].bandwidth
    return 1e3 * found


def loop_rows(only: str = "") -> pd.DataFrame:
    """Return the closed loops with predicted tokens/s and median TTFT in milliseconds."""
    table = pd.read_csv(HERE / "outside_loops.csv", comment="#")
    table = table[table["study"].str.contains(only, regex=False)].reset_index(drop=True)
    found = [_served(row) for row in table.to_dict("records")]
    return table.assign(
        predicted_tokens_per_s=[speed for speed, _ in found],
        predicted_ttft_ms=[ttft for _, ttft in found],
    )


def _served(row: dict[str, Any]) -> tuple[float, float]:
    trace = synthetic_trace(
        0.5, requests=8, tokens=row["answer"], max_gamma=1, prompt_length=row["prompt"]
    )
    limits = Limits(max_batch=256, token_budget=2048, async_scheduling=True)
    scenario = Scenario(
        ClosedLoop(row["clients"]), limits, requests=row["requests"], warmup=0.0
    )  # fmt: skip
    run = simulate(trace, find_latency(row["latency"]), Autoregressive(), scenario)
    ttft = float(np.median(run.requests["ttft_s"]))
    return row["requests"] * row["answer"] / run.simulated_s, 1e3 * ttft


def print_errors(table: pd.DataFrame, predicted: str, measured: str) -> None:
    """Print a line per row, and the errors of each study."""
    errors = table[predicted] / table[measured] - 1
    for row, error in zip(table.to_dict("records"), errors, strict=True):
        load = " ".join(str(row[c]) for c in ("latency", "part", "batch", "clients", "context")
                        if c in row)  # fmt: skip
        print(f"  {row['study']}, {load}: {row[predicted]:.4g}, measured {row[measured]:.4g}, "
              f"{error:+.1%}")  # fmt: skip
    for study, own in errors.groupby(table["study"], sort=False):
        size = own.abs()
        print(f"{study}, {measured}: {len(own)} rows, |error| median {size.median():.1%}, "
              f"mean {own.mean():+.1%}, largest {own[size.idxmax()]:+.1%}")  # fmt: skip


def main() -> None:
    """Print the errors of what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--only", default="", metavar="NAME", help="part of the studies' names")
    parser.add_argument("--out", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.steps:
        found = step_rows(asked.only)
        print_errors(found, "predicted", "ms")
    elif asked.loops:
        found = loop_rows(asked.only)
        print_errors(found, "predicted_tokens_per_s", "tokens_per_s")
        print_errors(found, "predicted_ttft_ms", "ttft_ms")
    else:
        found = pd.DataFrame(server_rows(asked.only))
    if asked.out is not None:
        found.to_csv(asked.out, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
