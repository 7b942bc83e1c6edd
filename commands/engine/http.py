"""``draftsim validate engine --http``: the same loads over HTTP, in the real server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.common.progress import working
from commands.engine.check import check_key, scenarios_in
from traces.errors import FileError
from traces.store.files import write_latency

if TYPE_CHECKING:
    from profiler.engines.engine import EngineKind, EngineOptions
    from profiler.engines.loads import Turn
    from profiler.engines.served import Clients
    from simulator.engines import Workload
    from traces.latency.table import LatencyTable
    from traces.store.checkpoint import Checkpoint
    from traces.store.engine_runs import ServedRun

SERVED = "latency-http.parquet"
"""File of the run folder with the engine's latencies and the server's share."""
SHOWN = (
    "load", "policy", "rounds_differ", "texts_diverged", "throughput", "throughput_predicted",
    "error", "noise", "ttft_s", "ttft_s_predicted", "tpot_s", "tpot_s_predicted", "e2e_s",
    "e2e_s_predicted", "speedup", "speedup_predicted", "speedup_error", "speedup_noise",
    "request_s", "request_s_predicted", "iteration_s", "iteration_s_predicted", "share",
    "share_predicted", "busy_error", "profile_busy_error", "slowdown", "machine",
)  # fmt: skip


def compare_served(
    kind: EngineKind, options: EngineOptions, latency: LatencyTable, work: Workload, run: Path
) -> list[dict[str, Any]]:
    """Run every load under every policy, from clients of a real server and in the simulator.

    The server's own time is measured in loops of plain decoding, which get no row, before every
    repeat and after the last.  It is put into the table (kept in the `run` folder as `SERVED`),
    which predicts with it: ``request_s`` around a request, ``iteration_s`` around an iteration, and
    ``share`` of the requests' time.  The same loops tell how much slower the engine is than its
    table says (``slowdown``, from decoding as many requests); every cell of the table is predicted
    longer by that factor (`simulator.served.served_rows`).  A stopped check continues from what
    `run` keeps of it, as without a server.
    """
    from profiler.checks.unfinished import unfinished, version
    from profiler.engines.drafts import Forced
    from profiler.engines.served import Clients
    from profiler.engines.session import Setup
    from profiler.engines.texts import policy_runs
    from simulator.served import control_sizes, served_rows, with_server

    trace, chosen = work.trace, work.policies
    for policy in chosen.values():
        Setup(policy, Forced(trace, {}, 1))  # refused now if it reads what was not recorded
    note(f"starting {kind.NAME}'s server with {options.target}")
    with (
        TemporaryDirectory(prefix="draftsim-server-") as room,
        kind.serve(options, Path(room)) as server,
    ):
        clients = Clients(server, trace, latency.meta["device"])
        key = check_key(
            clients.engine, latency, work, options=vars(options), device=latency.meta["device"],
            **{kind.NAME: version(kind.NAME)},
        )  # fmt: skip
        total = work.repeats * len(work.loads) * len(chosen)
        with unfinished(run, key, total, note, grows=True) as kept:
            sizes = control_sizes(work.loads, options.max_batch)
            measured, controls = _measured(clients, work, sizes, kept)
            loaded = {key: [one.load for one in runs] for key, runs in measured.items()}
            own = policy_runs(loaded, trace, clients.texts, latency.meta["dtype"])
            _write_share(with_server(latency, controls), run / SERVED)
            scenarios = scenarios_in(clients.engine, work)
            return served_rows(measured, own, controls, latency, trace, chosen, scenarios)


def _measured(
    clients: Clients, work: Workload, sizes: Sequence[int], kept: Checkpoint
) -> tuple[dict[tuple[str, str], list[ServedRun]], dict[int, list[ServedRun]]]:  # fmt: skip
    """Return the runs by load and policy, and the control loops by size; what is `kept` is read."""
    from profiler.engines.loads import in_turn
    from traces.store.checkpoint import once
    from traces.store.engine_runs import ServedRun

    note("decoding outputs in the server, as reference")
    during_runs = kept.within("during_runs")
    clients.learn(work.sequences, work.seed, during_runs)
    controls: dict[int, list[ServedRun]] = {}

    def run_controls(when: str) -> None:
        for size in sizes:

            def control(size: int = size) -> dict[str, Any]:
                note(f"control run without speculation, closed:{size}")
                return clients.control(size).written()

            found = once(during_runs, f"{when}-{size}", control)
            controls.setdefault(size, []).append(ServedRun.read(found))

    measured: dict[tuple[str, str], list[ServedRun]] = {}
    loads, texts = list(work.loads), list(work.policies)
    for done, turn in enumerate(in_turn(loads, texts, work.repeats)):
        repeat, place = divmod(done, len(loads) * len(texts))
        if place == 0:
            run_controls(f"before-{repeat:03d}")

        def run(turn: Turn = turn) -> dict[str, Any]:
            note(f"{turn.load} under {turn.text}, repeat {turn.repeat + 1}")
            clients.decide(turn.text)
            with working(f"serving {turn.load}"):
                return clients.run(work.demands[turn.load]).written()

        found = once(kept, turn.name, run)
        measured.setdefault((turn.load, turn.text), []).append(ServedRun.read(found))
    # With fewer repeats, later loops are not counted: each repeat is to have as many.
    run_controls(f"after-{work.repeats:03d}")
    return measured, controls


def _write_share(table: LatencyTable, path: Path) -> None:
    """Keep the table with the server's share, if the folder takes it."""
    try:
        write_latency(table, path)
        note(f"wrote {path}: `draftsim serve --latency` prices the server with it")
    except FileError as error:
        note(f"the server's share of the time could not be written: {error}")


def say_shares(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the server's own time, measured and predicted, by load."""
    for load in dict.fromkeys(row["load"] for row in rows):
        own = [row for row in rows if row["load"] == load]
        low, high = min(r["share"] for r in own), max(r["share"] for r in own)
        told = [r["share_predicted"] for r in own]
        note(
            f"{load}: the server and streaming take {low:.1%} to {high:.1%} of the requests' time "
            f"(predicted {min(told):.1%} to {max(told):.1%})"
        )
