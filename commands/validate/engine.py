"""``draftsim validate engine``: the same requests in a real engine or server, and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from commands.common.drafted import load_recording
from commands.common.output import note
from commands.common.progress import working
from commands.common.quiet import say_texts
from commands.engine import check
from commands.engine.options import CheckedEngine, named_loads
from profiler.engines.engine import EngineKind, EngineOptions, find_engine
from profiler.engines.session import Setup
from simulator.engines import Workload, synthetic_rows, with_defaults
from simulator.served import control_sizes, served_rows, with_server
from simulator.validation import noise_said
from traces.errors import DraftsimError, FileError
from traces.latency.table import LatencyTable
from traces.store.checkpoint import Checkpoint, once
from traces.store.engine_runs import ServedRun
from traces.store.files import CHECKED, read_latency, write_latency

if TYPE_CHECKING:
    from profiler.engines.loads import PlannedLoad
    from profiler.engines.served import Clients

SERVED = "latency-http.parquet"
"""File of the run folder with the engine's latencies and the server's share."""
SHOWN = (
    "load", "policy", "iterations", "iterations_predicted", "iterations_differ", "rounds_differ",
    "texts_diverged", "throughput", "throughput_predicted", "error", "noise", "busy_error",
    "ttft_s", "ttft_s_predicted", "tpot_s", "tpot_s_predicted", "speedup", "speedup_predicted",
    "speedup_error", "speedup_noise", "machine",
)  # fmt: skip
"""Columns that are printed of a check in an engine stepped by hand."""
SHOWN_HTTP = (
    "load", "policy", "rounds_differ", "texts_diverged", "throughput", "throughput_predicted",
    "error", "noise", "ttft_s", "ttft_s_predicted", "tpot_s", "tpot_s_predicted", "e2e_s",
    "e2e_s_predicted", "speedup", "speedup_predicted", "speedup_error", "speedup_noise",
    "request_s", "request_s_predicted", "iteration_s", "iteration_s_predicted", "share",
    "share_predicted", "busy_error", "profile_busy_error", "slowdown", "machine",
)  # fmt: skip
"""Columns that are printed of a check over HTTP."""


def engine_check(
    served: CheckedEngine, run: Path, source: str | None, policies: Sequence[str] | None,
    repeats: int, limit: int | None, remeasure: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of `validate engine`, one per load and policy.

    With `remeasure` the table is measured once more between the runs, predicts instead of the
    profile's own, and is kept with it (`CHECKED`).  The same call continues with the runs of a
    stopped check, and adds `repeats` to those of a finished one.
    """
    from profiler.engines.loads import SLICE_S
    from profiler.engines.measure import EngineTable

    loads = named_loads(served.load, served.rate, served.arrivals)
    kind = find_engine(served.engine)
    latency = read_latency(run / "latency.parquet")
    if latency.meta.get("kind") != "engine":
        raise DraftsimError(
            f"{run} holds no engine's latencies: `draftsim profile engine --engine {served.engine}`"
        )
    recording = load_recording(served.trace, str(run), source)
    if latency.meta["engine"].get("own_drafter"):
        recording.priced()  # refuses latencies of drafting with another
    trace = recording.trace
    if limit is not None:
        trace = trace.select(range(min(limit, len(trace.requests))))
    longest, options = latency.meta["engine"]["longest"], check.engine_options(latency, trace, kind)
    for load in [one for one, own in loads.items() if (own.concurrency or 0) > options.max_batch]:
        if served.load is not None:
            raise DraftsimError(
                f"--load {load} is more than the {options.max_batch} requests the engine runs"
            )
        del loads[load]
    work = Workload(trace, {}, loads, served.requests, repeats, served.seed)
    if served.synthetic is not None:
        rates = check.chances(served.synthetic)
        apart = check.run_apart(kind, options, work, rates)
        return synthetic_rows(latency, work, apart, rates)
    if not policies:
        policies = check.policies_predicted(latency, work, longest)
    chosen = check.runnable(policies, trace, longest, latency if not served.http else None)
    work = replace(work, policies=chosen)
    # Before the engine that is stepped by hand: a GPU holds one of them.
    plain = check.run_apart(kind, options, work) if served.defaults else None
    if served.http:
        return compare_over_http(kind, options, latency, work, run)
    from profiler.checks.interleaved import unfinished  # loads torch, which an engine has

    engine = kind.start(options)
    grid = check.grid_of(options, work, latency) if remeasure else None
    key = check.check_key(
        engine, latency, work, meta=engine.meta, grid=None if grid is None else vars(grid),
        turn_s=SLICE_S,
    )  # fmt: skip
    total = repeats * len(loads) * len(chosen)
    with unfinished(run, key, total, note, grows=True) as kept:
        between = None
        if grid is not None:
            between = EngineTable(engine, grid, work.seed, kept.within("cells"))
        rows = check.compare_loads(engine, latency, work, between, kept)
        if between is not None:
            write_latency(between.table(), run / CHECKED)
    if plain is not None:
        rows = with_defaults(rows, plain)
        check.say_defaults(rows, plain)
    return rows


def compare_over_http(
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
    from profiler.checks.interleaved import unfinished, version
    from profiler.engines.drafts import Forced
    from profiler.engines.served import Clients
    from profiler.engines.texts import policy_runs

    trace, chosen = work.trace, work.policies
    for policy in chosen.values():
        Setup(policy, Forced(trace, {}, 1))  # refused now if it reads what was not recorded
    note(f"starting {kind.NAME}'s server with {options.target}")
    with (
        TemporaryDirectory(prefix="draftsim-server-") as room,
        kind.serve(options, Path(room)) as server,
    ):
        clients = Clients(server, trace, latency.meta["device"])
        key = check.check_key(
            clients.engine, latency, work, options=vars(options), device=latency.meta["device"],
            **{kind.NAME: version(kind.NAME)},
        )  # fmt: skip
        total = work.repeats * len(work.loads) * len(chosen)
        with unfinished(run, key, total, note, grows=True) as kept:
            sizes = control_sizes(work.loads, options.max_batch)
            measured, controls = _measured(clients, work, sizes, kept)
            loaded = {key: [one.load for one in runs] for key, runs in measured.items()}
            own = policy_runs(loaded, trace, clients.texts, latency.meta["dtype"])
            try:
                write_latency(with_server(latency, controls), run / SERVED)
                note(f"wrote {run / SERVED}: `draftsim serve --latency` prices the server with it")
            except FileError as error:
                note(f"the server's share of the time could not be written: {error}")
            scenarios = check.scenarios_in(clients.engine, work)
            return served_rows(measured, own, controls, latency, trace, chosen, scenarios)


def _measured(
    clients: Clients, work: Workload, sizes: Sequence[int], kept: Checkpoint
) -> tuple[dict[tuple[str, str], list[ServedRun]], dict[int, list[ServedRun]]]:  # fmt: skip
    """Return the runs by load and policy, and the control loops by size; what is `kept` is read."""
    from profiler.engines.loads import planned_loads

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
    for done, planned in enumerate(planned_loads(loads, texts, work.repeats)):
        repeat, place = divmod(done, len(loads) * len(texts))
        if place == 0:
            run_controls(f"before-{repeat:03d}")

        def run(one: PlannedLoad = planned) -> dict[str, Any]:
            note(f"{one.load} under {one.policy}, repeat {one.repeat + 1}")
            clients.decide(one.policy)
            with working(f"serving {one.load}"):
                return clients.run(work.demands[one.load]).written()

        found = once(kept, planned.name, run)
        measured.setdefault((planned.load, planned.policy), []).append(ServedRun.read(found))
    # With fewer repeats, later loops are not counted: each repeat is to have as many.
    run_controls(f"after-{work.repeats:03d}")
    return measured, controls


def columns_of(served: CheckedEngine, remeasure: bool) -> Sequence[str]:
    """Return the columns that the printed table of a check has."""
    if served.synthetic is not None:
        return check.SYNTHETIC
    if served.http:
        return SHOWN_HTTP
    again = ("profile_error", "profile_speedup_error") if remeasure else ()
    return (*SHOWN, *again, *(check.WITH_DEFAULTS if served.defaults else ()))


def say_checked(served: CheckedEngine, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what the rows of a check amount to."""
    if served.synthetic is not None:
        return
    if served.http:
        for load in dict.fromkeys(row["load"] for row in rows):
            own = [row for row in rows if row["load"] == load]
            shares, told = ([r[name] for r in own] for name in ("share", "share_predicted"))
            note(
                f"{load}: the server and streaming take {min(shares):.1%} to {max(shares):.1%} of "
                f"the requests' time (predicted {min(told):.1%} to {max(told):.1%})"
            )
    else:
        for row in rows:  # each kind of iteration's share of the error
            parts = ", ".join(
                f"{k['kind']} {k['error']:+.1%} of {k['measured_s']:.2f} s" for k in row["kinds"]
            )
            note(f"{row['load']} {row['policy']}: {parts}")
        say_slower(rows)
    say_texts(rows)
    if (said := noise_said(rows, rows[0]["policy"])) is not None:
        note(said)


def say_slower(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say so where the latencies were measured on a machine that was much faster."""
    slower = float(np.median([row["machine"] for row in rows]))
    if "profile_error" not in rows[0] and slower > 1.25:
        note(
            f"the machine was {slower:.1f} times slower than when the engine was measured, so the "
            "errors in seconds are the machine's as well: repeat with --remeasure"
        )
