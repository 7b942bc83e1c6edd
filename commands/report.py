"""``draftsim report``: everything a run shows, as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.common.devices import one_latency
from commands.common.inputs import (
    DEFAULT_TRACE,
    TRACE_VARIABLE,
    GpuOption,
    LatencyOption,
    PolicyOption,
    load_trace,
)
from commands.common.output import note
from commands.common.ranking import rank


def report(
    run: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="RUN",
            envvar=TRACE_VARIABLE,
            help="Run folder of `draftsim profile`, or bundled recording.",
        ),
    ] = DEFAULT_TRACE,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    latency: LatencyOption = None,
    policy: PolicyOption = None,
    gpu: GpuOption = None,
    serve: Annotated[
        bool, typer.Option(help="Also serve batches in simulated time, where they were measured.")
    ] = True,
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples over prompts.")] = 2000,
) -> None:
    """Write one HTML page to hand on: no network, sliders that recompute in the page."""
    from simulator.report import build_report, write_report
    from traces.store.measured import read_measured

    trace, table = load_trace(run, "the report"), one_latency(latency, run, gpu)
    ranking = rank(trace, table, policy)
    # Times measured on another device are no check of what is predicted for this one.
    other = latency is not None or table.meta.get("scaled")
    file = None if other else measured_file(run)
    measured = None if file is None else read_measured(file)
    page = build_report(
        trace, table, ranking.logs, notes=ranking.notes, measured=measured,
        title=Path(run).name, serve=serve, resamples=resamples,
    )  # fmt: skip
    write_report(page, out)
    note(f"wrote {out}, {out.stat().st_size / 1e3:.0f} kB")


def measured_file(run: str) -> Path | None:
    """Measured times beside the trace of a run folder or bundled recording, if there are any."""
    from traces.store.recordings import BUNDLED as FOLDER
    from traces.store.recordings import trace_folder

    for folder in (FOLDER / run, Path(run)):
        if (trace_folder(folder) / "trace.parquet").is_file():
            file = folder / "measured.parquet"
            return file if file.is_file() else None
    return None
