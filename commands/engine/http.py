"""``draftsim validate --engine vllm --http``: the same loads over HTTP, in the real server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from commands.common.output import note
from commands.common.progress import working
from commands.engine.compare import figures_of, priced_s, row_of, with_profile_errors, with_speedups
from commands.engine.loads import Turn, drawn, in_turn
from commands.engine.rounds import check_key
from commands.engine.texts import PolicyRuns, policy_runs
from profiler.checks.unfinished import unfinished, version
from profiler.recording.checkpoint import Checkpoint, once
from traces.errors import FileError
from traces.latency.schema import SERVER
from traces.latency.table import LatencyTable
from traces.store.files import write_latency

if TYPE_CHECKING:
    from profiler.engines.loads import Job
    from profiler.engines.server.loads import Clients
    from profiler.engines.server.share import ServedRun
    from profiler.engines.start import EngineOptions
    from simulator.serving import Scenario
    from simulator.serving.arrivals import Arrivals
    from traces.acceptance.trace import Trace

SERVED = "latency-http.parquet"
"""File of the run folder with the engine's latencies and the server's share."""
CONTROL_OPEN = 4
"""Requests that the larger control loop keeps where loads are open."""
OF_PROMPTS = ("prefill", "mixed")
"""Phases of a table that prompts are priced with."""
SHOWN = (
    "load", "policy", "rounds_differ", "texts_diverged", "throughput", "throughput_predicted",
    "error", "noise", "ttft_s", "ttft_s_predicted", "tpot_s", "tpot_s_predicted", "e2e_s",
    "e2e_s_predicted", "speedup", "speedup_predicted", "speedup_error", "speedup_noise",
    "request_s", "request_s_predicted", "iteration_s", "iteration_s_predicted", "share",
    "share_predicted", "busy_error", "profile_busy_error", "slowdown", "machine",
)  # fmt: skip


def compare_served(
    options: EngineOptions, latency: LatencyTable, trace: Trace, chosen: Mapping[str, Any],
    loads: Mapping[str, Arrivals], requests: int, repeats: int, seed: int, run: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run every load under every policy, from clients of a real server and in the simulator.

    The server's own time is measured in loops of plain decoding, which get no row, before every
    repeat and after the last.  It is put into the table (kept in the `run` folder as `SERVED`),
    which predicts with it: ``request_s`` around a request, ``iteration_s`` around an iteration, and
    ``share`` of the requests' time.  The same loops tell how much slower the engine is than its
    table says (``slowdown``, from decoding as many requests); every cell of the table is predicted
    longer by that factor.  Columns ``profile_`` are errors without that, columns ``_bare``
    predictions of the engine alone.  Speedups are over the first policy.  A stopped check continues
    from what `run` keeps of it, as without a server.
    """
    from profiler.engines.drafts import Forced
    from profiler.engines.server.loads import Clients
    from profiler.engines.server.process import Server, check_server
    from profiler.engines.setup import Setup

    check_server()
    for policy in chosen.values():
        Setup(policy, Forced(trace, {}, 1))  # refused now if it reads what was not recorded
    note(f"starting vLLM's server with {options.target}")
    with (
        TemporaryDirectory(prefix="draftsim-server-") as room,
        Server(options, Path(room)) as server,
    ):
        clients = Clients(server, trace, latency.meta["device"])
        key = check_key(
            clients.engine, latency, trace, chosen, loads, requests, seed, vllm=version("vllm"),
            options=vars(options), device=latency.meta["device"],
        )  # fmt: skip
        total = repeats * len(loads) * len(chosen)
        with unfinished(run, key, total, note, grows=True) as kept:
            scenarios, jobs = drawn(loads, clients.engine, trace, requests, seed)
            sizes = control_sizes(loads, options.max_batch)
            measured, controls = _measured(
                clients, jobs, scenarios, list(chosen), sizes, repeats, seed, kept
            )
            loaded = {key: [one.load for one in runs] for key, runs in measured.items()}
            own = policy_runs(loaded, trace, clients.texts, latency.meta["dtype"])
            return _rows(measured, own, controls, latency, trace, chosen, scenarios, run)


def _measured(
    clients: Clients, jobs: Mapping[str, Sequence[Job]], scenarios: Mapping[str, Scenario],
    texts: Sequence[str], sizes: Sequence[int], repeats: int, seed: int, kept: Checkpoint,
) -> tuple[dict[tuple[str, str], list[ServedRun]], dict[int, list[ServedRun]]]:  # fmt: skip
    """The runs by load and policy, and the control loops by size, as far as they are not `kept`."""
    from profiler.engines.server.share import ServedRun

    note("the engine's own outputs")
    during_runs = kept.within("beside")
    clients.learn({job.sequence for own in jobs.values() for job in own}, seed, during_runs)
    controls: dict[int, list[ServedRun]] = {}

    def run_controls(when: str) -> None:
        for size in sizes:

            def control(size: int = size) -> dict[str, Any]:
                note(f"control: plain decoding, closed:{size}")
                return clients.control(size).written()

            found = once(during_runs, f"{when}-{size}", control)
            controls.setdefault(size, []).append(ServedRun.read(found))

    measured: dict[tuple[str, str], list[ServedRun]] = {}
    for done, turn in enumerate(in_turn(list(scenarios), texts, repeats)):
        repeat, place = divmod(done, len(scenarios) * len(texts))
        if place == 0:
            run_controls(f"before-{repeat:03d}")

        def run(turn: Turn = turn) -> dict[str, Any]:
            note(turn.said)
            clients.decide(turn.text)
            with working(f"serving {turn.load}"):
                served = clients.run(
                    jobs[turn.load], scenarios[turn.load].arrivals.concurrency
                )  # fmt: skip
            return served.written()

        found = once(kept, turn.name, run)
        measured.setdefault((turn.load, turn.text), []).append(ServedRun.read(found))
    # With fewer repeats, later loops are not counted: each repeat is to have as many.
    run_controls(f"behind-{repeats:03d}")
    return measured, controls


def _rows(
    measured: Mapping[tuple[str, str], list[ServedRun]],
    own_runs: Mapping[tuple[str, str], PolicyRuns],
    controls: Mapping[int, list[ServedRun]], latency: LatencyTable, trace: Trace,
    chosen: Mapping[str, Any], scenarios: Mapping[str, Scenario], run: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    from profiler.engines.server.share import with_server

    served = with_server(latency, controls)
    try:
        write_latency(served, run / SERVED)
        note(f"wrote {run / SERVED}: `draftsim serve --latency` prices the server with it")
    except FileError as error:
        note(f"the server's share is not kept: {error}")
    speed, first = speed_of(controls, latency), next(iter(chosen))
    now = at_speed(latency, speed)
    table = with_server(now, controls)
    rows, old = [], []
    for load, scenario in scenarios.items():
        for text, policy in chosen.items():
            found = own_runs[load, text]
            old.append(row_of(found, served, trace, policy, scenario))
            rows.append(
                _row(found, measured[load, text], now, table, trace, policy, scenario, speed)
            )
    return with_profile_errors(with_speedups(rows, first), with_speedups(old, first))


def control_sizes(loads: Mapping[str, Arrivals], most: int) -> list[int]:
    """Return requests that control loops keep: the ends of what the loads do."""
    closed = [a.concurrency for a in loads.values() if a.concurrency is not None]
    opened = [1, min(CONTROL_OPEN, most)] if len(closed) < len(loads) else []
    return sorted({min([*closed, *opened]), max([*closed, *opened])})


def _row(
    own_runs: PolicyRuns, runs: Sequence[ServedRun], latency: LatencyTable, table: LatencyTable,
    trace: Trace, policy: Any, scenario: Scenario, speed: Speed,
) -> dict[str, Any]:  # fmt: skip
    from profiler.engines.server.share import added
    from simulator.host import HostCost
    from simulator.serving import simulate

    row = row_of(own_runs, table, trace, policy, scenario)
    bare = simulate(trace, latency, policy, scenario, name=own_runs.text)
    alone = figures_of(own_runs.kept(bare.requests))
    alone["throughput"] = figures_of(bare.requests)["throughput"]
    row |= {f"{key}_bare": alone[key] for key in ("throughput", "ttft_s", "tpot_s", "e2e_s")}
    each = [added(r, latency) for r in runs]
    row |= {key: float(np.mean([own[key] for own in each])) for key in each[0]}
    recorder = bare.recorder
    running = scenario.arrivals.concurrency or round(recorder.batch.integral / recorder.busy_s)
    around = HostCost(table, reads=False).at(running)
    return row | {
        "request_s_predicted": around.request_s,
        "iteration_s_predicted": around.iteration_s,
        "slowdown": speed.at(running) - 1,
        "share_predicted": 1 - alone["e2e_s"] / row["e2e_s_predicted"],
    }


def say_shares(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the server's own time, measured and predicted, by load."""
    for load in dict.fromkeys(row["load"] for row in rows):
        own = [row for row in rows if row["load"] == load]
        low, high = min(r["share"] for r in own), max(r["share"] for r in own)
        told = [r["share_predicted"] for r in own]
        note(
            f"{load}: server, streaming and its loop take {low:.1%} to {high:.1%} of the requests' "
            f"time, predicted {min(told):.1%} to {max(told):.1%}"
        )


@dataclass(frozen=True)
class Speed:
    """The seconds of an engine over those that its table predicts.

    decoding:
        Of iterations that decode, by the requests that a loop kept.
    prompts:
        Of those with prompts, over all loops.
    """

    decoding: Mapping[int, float]
    prompts: float

    def at(self, batch: float) -> float:
        """Return the speed of decoding `batch` requests: interpolated, and the nearest beyond the
        loops.
        """
        sizes = sorted(self.decoding)
        factors = np.log([self.decoding[size] for size in sizes])
        return float(np.exp(np.interp(batch, sizes, factors)))


def speed_of(controls: Mapping[int, Sequence[ServedRun]], latency: LatencyTable) -> Speed:
    """Return the engine's seconds in loops of plain decoding, over what `latency` has for them.

    Those that a server adds are no part of it (`profiler.engines.server.share.with_server`).
    """
    from profiler.engines.server.share import known_s
    from simulator.serving.cost.iteration import IterationCost

    cost = IterationCost(latency)
    decoding: dict[int, float] = {}
    of_prompts: list[tuple[float, float]] = []
    for size, runs in controls.items():
        pairs: list[tuple[float, float]] = []
        for step in itertools.chain.from_iterable(run.load.steps for run in runs):
            own_s = sum(step.parts[part] for part in ("schedule", "execute", "update"))
            pair = own_s + known_s(latency, len(step.decoded) or 1), priced_s(step, cost)
            (of_prompts if step.prompts else pairs).append(pair)
        decoding[size] = _ratio(pairs)
    return Speed(decoding, _ratio(of_prompts))


def at_speed(latency: LatencyTable, speed: Speed) -> LatencyTable:
    """`latency` with every cell of the engine's as much slower as its loops were."""
    cells = latency.cells.copy()
    own = cells["model"] != SERVER
    prompts = cells["phase"].isin(OF_PROMPTS)
    by_batch = {batch: speed.at(batch) for batch in cells["batch"].unique().tolist()}
    factors = cells["batch"].map(by_batch).mask(prompts, speed.prompts).where(own, 1.0)
    for column in ("median_s", "spread_s"):
        cells[column] *= factors
    meta = {**latency.meta, "scaled": "by loops of plain decoding"}
    if "control_s" in meta:
        # What a control load says of the machine is in the loops already.
        meta["control_s"] = {k: v for k, v in meta["control_s"].items() if k != "follows"}
    return LatencyTable(cells, meta)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    measured_s, priced = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (1, 1)
    return measured_s / priced
