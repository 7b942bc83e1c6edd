"""``draftsim validate --engine vllm --http``: the same loads over HTTP, in the real server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from commands.common.output import note
from commands.engine.compare import figures_of, generator_of, row_of, with_speedups
from commands.engine.loads import scenario_of
from traces.errors import DraftsimError, FileError
from traces.store.files import write_latency

if TYPE_CHECKING:
    from profiler.engines.loads import Job
    from profiler.engines.server.client import Answer
    from profiler.engines.server.log import EngineLog
    from profiler.engines.server.process import Server
    from profiler.engines.server.share import ServedRun
    from profiler.engines.start import EngineOptions
    from simulator.serving import Scenario
    from simulator.serving.arrivals import Arrivals
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

SERVED = "latency-http.parquet"
"""File of the run folder with the engine's latencies and the server's share."""
CONTROL, CONTROL_OPEN = 8, 4
"""Requests of a control loop, at least; requests kept in the larger one where loads are open."""
SHOWN = (
    "load", "policy", "rounds_differ", "throughput", "throughput_predicted", "error", "ttft_s",
    "ttft_s_predicted", "tpot_s", "tpot_s_predicted", "e2e_s", "e2e_s_predicted", "speedup",
    "speedup_predicted", "request_s", "request_s_predicted", "iteration_s",
    "iteration_s_predicted", "share", "share_predicted", "busy_error", "machine",
)  # fmt: skip


def compare_served(
    options: EngineOptions, latency: LatencyTable, trace: Trace, chosen: Mapping[str, Any],
    loads: Mapping[str, Arrivals], requests: int, repeats: int, seed: int, run: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every load under every policy, from clients of a real server and in the simulator.

    What the server adds to its engine is measured in loops of plain decoding that are no row, put
    into the table (kept in the `run` folder as `SERVED`), and predicts with it: ``request_s``
    around a request and ``iteration_s`` around an iteration, ``share`` of the requests' time.
    Columns ``_bare`` are predictions of the engine alone.  Speedups are over the first policy.
    """
    from profiler.engines.drafts import Forced
    from profiler.engines.server.process import Server, check_server
    from profiler.engines.server.share import with_server
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
        scenarios = {
            load: scenario_of(arrivals, clients.engine, requests, seed)
            for load, arrivals in loads.items()
        }
        jobs = {load: _jobs(trace, s, seed, requests) for load, s in scenarios.items()}
        note("the engine's own outputs")
        clients.learn({job.sequence for own in jobs.values() for job in own}, seed)
        controls = {}
        for size in control_sizes(loads, options.max_batch):
            note(f"control: plain decoding, closed:{size}")
            controls[size] = [clients.control(size)]
        measured = _measured(clients, scenarios, jobs, chosen, repeats)
    table = with_server(latency, controls)
    try:
        write_latency(table, run / SERVED)
        note(f"wrote {run / SERVED}: `draftsim serve --latency` prices the server with it")
    except FileError as error:
        note(f"the server's share is not kept: {error}")
    rows = [
        _row(load, text, measured[load, text], latency, table, trace, policy, scenario)
        for load, scenario in scenarios.items()
        for text, policy in chosen.items()
    ]
    return with_speedups(rows, next(iter(chosen)))


class Clients:
    """Loads that go to a server, its drafts those of a recording.

    Parameters
    ----------
    server:
        One that has started.
    trace:
        What is accepted; requests are its prompts.
    device:
        The server's, whose speed a control load tells.
    """

    def __init__(self, server: Server, trace: Trace, device: str) -> None:
        import torch

        from profiler.engines.bench import Control
        from profiler.engines.loads import Job
        from profiler.engines.server.log import LogReader

        torch.set_num_threads(server.options.threads)  # of the control load, as in the engine
        self.server, self.trace = server, trace
        self.prompts: dict[int, list[int]] = {0: [3, 3]}
        self._reader = LogReader(server.notes)
        self._control = Control(device)
        self._drafts = ""
        self.run([Job(0, 0.0, 2)], 1)
        about = self._reader.engine
        self.engine: Any = SimpleNamespace(
            options=server.options, blocks=about["blocks"], block_size=about["block_size"]
        )

    def learn(self, sequences: set[int], seed: int) -> None:
        """Let the engine decode these sequences' prompts, and dictate verdicts from now on."""
        from profiler.engines.drafts import Forced
        from profiler.engines.loads import Job
        from profiler.engines.setup import FORCED
        from profiler.engines.texts import prompts_of

        vocabulary = int(self._reader.engine["vocabulary"])
        prompts = prompts_of(self.trace, vocabulary, seed)
        self.prompts = {i: prompt for i, prompt in prompts.items() if i in sequences}
        jobs = [Job(i, 0.0, self.trace.requests[i].tokens) for i in self.prompts]
        answers, _ = self._sent(jobs, self.server.options.max_batch)
        texts = {answer.sequence: answer.tokens for answer in answers}
        forced = Forced(self.trace, texts, vocabulary)
        self._drafts = FORCED + str(forced.write(self.server.folder))
        self.decide("autoregressive")
        self.run(jobs[:1], 1)  # the recording is read before anything is timed

    def decide(self, policy: str) -> None:
        """Put the requests to come under this policy."""
        self.server.decide(policy, self._drafts)

    def run(self, jobs: Sequence[Job], concurrency: int | None) -> ServedRun:
        """Send `jobs`, and wait for what the engine says of them."""
        from profiler.engines.server.share import served_run

        before_s = self._control.seconds()
        answers, log = self._sent(jobs, concurrency)
        return served_run(answers, log, (before_s + self._control.seconds()) / 2)

    def _sent(self, jobs: Sequence[Job], concurrency: int | None) -> tuple[list[Answer], EngineLog]:
        from profiler.engines.server.client import send_load

        try:
            answers = send_load(self.server.url, jobs, self.prompts, concurrency)
            return answers, self._reader.take([answer.name for answer in answers])
        except DraftsimError as error:
            raise self.server.failed(str(error)) from None

    def control(self, size: int) -> ServedRun:
        """Plain decoding of the known prompts, `size` of them at a time."""
        from profiler.engines.loads import Job

        self.decide("autoregressive")
        around = itertools.islice(itertools.cycle(self.prompts), max(CONTROL, 2 * size))
        return self.run([Job(i, 0.0, self.trace.requests[i].tokens) for i in around], size)


def control_sizes(loads: Mapping[str, Arrivals], most: int) -> list[int]:
    """Requests that control loops keep: the ends of what the loads do."""
    closed = [a.concurrency for a in loads.values() if a.concurrency is not None]
    opened = [1, min(CONTROL_OPEN, most)] if len(closed) < len(loads) else []
    return sorted({min([*closed, *opened]), max([*closed, *opened])})


def _measured(
    clients: Clients, scenarios: Mapping[str, Scenario], jobs: Mapping[str, Sequence[Job]],
    chosen: Mapping[str, Any], repeats: int,
) -> dict[tuple[str, str], list[ServedRun]]:  # fmt: skip
    """The loads under the policies; arms take turns."""
    measured: dict[tuple[str, str], list[ServedRun]] = {}
    for repeat in range(repeats):
        for load, scenario in scenarios.items():
            first = repeat % len(chosen)
            for text in [*list(chosen)[first:], *list(chosen)[:first]]:
                note(f"{load} under {text}, repeat {repeat + 1}")
                clients.decide(text)
                found = clients.run(jobs[load], scenario.arrivals.concurrency)
                measured.setdefault((load, text), []).append(found)
    return measured


def _jobs(trace: Trace, scenario: Scenario, seed: int, requests: int) -> list[Job]:
    from profiler.engines.loads import Job

    drawn = scenario.arrivals.jobs(trace, generator_of(seed), requests)
    return [Job(j.sequence, j.arrival_s, j.output_tokens) for j in drawn]


def _row(
    load: str, text: str, runs: Sequence[ServedRun], latency: LatencyTable, table: LatencyTable,
    trace: Trace, policy: Any, scenario: Scenario,
) -> dict[str, Any]:  # fmt: skip
    from profiler.engines.server.share import added
    from simulator.serving import simulate
    from simulator.serving.cost.host import HostCost

    row = row_of(load, text, [r.load for r in runs], table, trace, policy, scenario)
    bare = simulate(trace, latency, policy, scenario, name=text)
    alone = figures_of(bare.requests)
    row |= {f"{key}_bare": alone[key] for key in ("throughput", "ttft_s", "tpot_s", "e2e_s")}
    each = [added(r, latency) for r in runs]
    row |= {key: float(np.mean([own[key] for own in each])) for key in each[0]}
    recorder = bare.recorder
    running = scenario.arrivals.concurrency or round(recorder.batch.integral / recorder.busy_s)
    around = HostCost(table, reads=False)
    return row | {
        "request_s_predicted": around.around_request_s(running),
        "iteration_s_predicted": around.around_iteration_s(running),
        "share_predicted": 1 - alone["e2e_s"] / row["e2e_s_predicted"],
    }


def say_shares(rows: Sequence[Mapping[str, Any]]) -> None:
    """What the server adds, measured and predicted, by load."""
    for load in dict.fromkeys(row["load"] for row in rows):
        own = [row for row in rows if row["load"] == load]
        low, high = min(r["share"] for r in own), max(r["share"] for r in own)
        told = [r["share_predicted"] for r in own]
        note(
            f"{load}: server, streaming and its loop take {low:.1%} to {high:.1%} of the requests' "
            f"time, predicted {min(told):.1%} to {max(told):.1%}"
        )
