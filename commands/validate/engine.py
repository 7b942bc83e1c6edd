"""``draftsim validate engine``: the same requests in a real engine and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commands.common.drafted import load_recording
from commands.common.output import note
from commands.common.quiet import say_texts
from commands.engine import apart, http
from commands.engine.check import (
    arms,
    check_key,
    compare_loads,
    engine_options,
    grid_of,
    predicted,
)
from commands.engine.options import named_loads
from traces.errors import DraftsimError
from traces.store.files import CHECKED, read_latency, write_latency

if TYPE_CHECKING:
    from commands.engine.options import CheckedEngine

SLOWER = 1.25
"""Slowdown of the machine since the latencies were measured from which `say_slower` names it."""
SHOWN = (
    "load", "policy", "iterations", "iterations_predicted", "iterations_differ", "rounds_differ",
    "texts_diverged", "throughput", "throughput_predicted", "error", "noise", "busy_error",
    "ttft_s", "ttft_s_predicted", "tpot_s", "tpot_s_predicted", "speedup", "speedup_predicted",
    "speedup_error", "speedup_noise", "machine",
)  # fmt: skip


def engine_check(
    served: CheckedEngine, run: Path, source: str | None, policies: Sequence[str] | None,
    repeats: int, limit: int | None, remeasure: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of `validate engine`, one per load and policy.

    With ``defaults`` an engine with its own settings serves the loads too; with ``synthetic``
    nothing but the engine's synthetic acceptance is run (`commands.engine.apart`).

    The drafts of `source`, recorded along the trace, decide what is accepted; by default those of
    the drafter that the engine was measured with.
    With `remeasure` the table is measured once more between the runs, predicts instead of the
    profile's own, and is kept with it (`CHECKED`).  With ``http`` the engine runs in its HTTP
    server (`commands.engine.http`).  The runs of a stopped check are kept in the run folder; the
    same call continues with them.  More `repeats` are added to the runs of a finished check.
    """
    from profiler.checks.unfinished import unfinished
    from profiler.engines.engine import find_engine
    from profiler.engines.loads import TURN_S
    from profiler.engines.measure import BetweenTable
    from simulator.engines import Workload, synthetic_rows, with_defaults

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
    longest, options = latency.meta["engine"]["longest"], engine_options(latency, trace, kind)
    work = Workload(trace, {}, loads, served.requests, repeats, served.seed)
    if not policies:
        policies = predicted(latency, work, longest)
    chosen = arms(policies, trace, longest, latency if not served.http else None)
    work = replace(work, policies=chosen)
    for load, arrivals in loads.items():
        if (arrivals.concurrency or 0) > options.max_batch:
            raise DraftsimError(
                f"--load {load} is more than the {options.max_batch} requests the engine runs"
            )
    # Before the engine that is stepped by hand: a GPU holds one of them.
    plain = None
    if served.synthetic is not None or served.defaults:
        rates = None if served.synthetic is None else apart.chances(served.synthetic)
        plain = apart.run_apart(kind, options, work, rates)
        if rates is not None:
            return synthetic_rows(latency, work, plain, rates)
    if served.http:
        return http.compare_served(kind, options, latency, work, run)
    engine = kind.start(options)
    grid = grid_of(options, work, latency) if remeasure else None
    key = check_key(
        engine, latency, work, meta=engine.meta, grid=None if grid is None else vars(grid),
        turn_s=TURN_S,
    )  # fmt: skip
    total = repeats * len(loads) * len(chosen)
    with unfinished(run, key, total, note, grows=True) as kept:
        between = None
        if grid is not None:
            between = BetweenTable(engine, grid, work.seed, kept.within("table"))
        rows = compare_loads(engine, latency, work, between, kept)
        if between is not None:
            write_latency(between.table(), run / CHECKED)
    if plain is not None:
        rows = with_defaults(rows, plain)
        apart.say_defaults(rows, plain)
    return rows


def columns_of(served: CheckedEngine, remeasure: bool) -> Sequence[str]:
    """Return the columns that the printed table of a check has."""
    if served.synthetic is not None:
        return apart.SHOWN_SYNTHETIC
    if served.http:
        return http.SHOWN
    again = ("profile_error", "profile_speedup_error") if remeasure else ()
    return (*SHOWN, *again, *(apart.SHOWN if served.defaults else ()))


def say_checked(served: CheckedEngine, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what the rows of a check amount to."""
    from simulator.validation import noise_said

    if served.synthetic is not None:
        return
    if served.http:
        http.say_shares(rows)
    else:
        say_kinds(rows)
        say_slower(rows)
    say_texts(rows)
    if (said := noise_said(rows, rows[0]["policy"])) is not None:
        note(said)


def say_slower(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say so where the latencies were measured on a machine that was much faster."""
    slower = float(np.median([row["machine"] for row in rows]))
    if "profile_error" not in rows[0] and slower > SLOWER:
        note(
            f"the machine was {slower:.1f} times slower than when the engine was measured, so the "
            "errors in seconds are the machine's as well: repeat with --remeasure"
        )


def say_kinds(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print each kind of iteration's share of the error."""
    for row in rows:
        parts = ", ".join(
            f"{k['kind']} {k['error']:+.1%} of {k['measured_s']:.2f} s" for k in row["kinds"]
        )
        note(f"{row['load']} {row['policy']}: {parts}")
