"""``draftsim demo``: the whole path on the bundled pair, from prediction to profile to check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from commands.common.drafted import load_recording
from commands.common.output import JsonOption, emit, note, say_drawn
from commands.common.quiet import columns_shown
from commands.profile.recording import RecordingJob, run_profile
from commands.simulate.table import headline, print_ranked
from commands.validate.flow import CheckedPair
from commands.validate.spot_check import SpotCheck, say_verdict
from profiler.recording.run import BUNDLED, RunInfo, claimed, only_writer
from simulator.whatif.ranking import Ranking, rank, ranked_rows
from traces.acceptance.trace import Trace
from traces.store.engine_runs import read_measured
from traces.store.files import CHECKED, read_latency, read_trace
from traces.store.writing import write_atomically


class Size(NamedTuple):
    """The amount that a demo decodes and measures; every size makes the same checks."""

    prompts: int
    tokens: int
    repeats: int
    sweeps: int
    """Over the latencies, of the profile."""
    takes: str


QUICK = Size(14, 48, 2, 4, "three minutes")
FULL = Size(40, 96, 2, 15, "nine minutes")


def demo(
    out: Annotated[
        Path, typer.Option(metavar="RUN", help="Folder for everything it makes.")
    ] = Path("demo"),
    full: Annotated[
        bool, typer.Option("--full", help="Decode and measure about four times as much.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=4,
            help=f"Use this many prompts. Default: {QUICK.prompts}; {FULL.prompts} with --full.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Real runs of every policy and prompt. Default: {QUICK.repeats}."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Output limit per prompt. Default: {QUICK.tokens}; {FULL.tokens} with --full.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Predict from a recording, then profile the bundled pair here and check by real decoding."""
    say_recorded()
    size = FULL if full else QUICK
    size = size._replace(
        prompts=limit or size.prompts, tokens=max_new_tokens or size.tokens,
        repeats=repeats or size.repeats,
    )  # fmt: skip
    _profiled(out, size)

    from simulator.plots.recording import save_all

    trace, latency = read_trace(out / "trace.parquet"), read_latency(out / "latency.parquet")
    ranking = rank(trace, latency, None, say=note)
    ranked = ranked_rows(ranking, latency, trace)
    if json is None:
        note("Predicted for this machine, from its own recording:")
        print_ranked(ranked, recording=str(out))
    note(f"now {size.prompts} prompts are decoded for real, under the policies below:")
    with only_writer(out):
        checked = SpotCheck(CheckedPair(run=out, repeats=size.repeats)).rows(remeasure=True)
    emit("demo", checked, json, show=columns_shown(checked))
    say_verdict(checked)
    paths, left_out = save_all(
        trace, latency, ranking.logs, out / "plots", checked,
        title=f"{out.name}, {latency.meta['device']}",
    )  # fmt: skip
    say_drawn(paths)
    for line in left_out:
        note(line)
    note(f"wrote {_page(out, trace, ranking)}: a report of all this, for a browser")


def say_recorded() -> None:
    """Say which policy is fastest on the machine that the bundled recording is of."""
    recording = load_recording("bundled", None)
    trace, latency = recording.trace, recording.latency
    rows = ranked_rows(rank(trace, latency, None, say=note), latency, trace)
    note(f"Predicted for the recorded machine ({latency.meta['device']}): {headline(rows)}")


def _profiled(out: Path, size: Size) -> None:
    """Record and measure the bundled pair into the folder `out`."""
    from profiler.checks.interleaved import PLACE
    from profiler.latency.table import Grid
    from profiler.profile import Settings

    note(
        f"now the same pair here: {size.prompts} prompts of up to {size.tokens} tokens are "
        f"recorded, then decoded for real; about {size.takes} on an idle machine"
    )
    info = RunInfo("bundled", "bundled", threads=1)
    settings = Settings(max_new_tokens=size.tokens, grid=Grid(repeats=size.sweeps))
    with only_writer(out):
        # A folder of another pair is refused; an earlier demo's is measured again, here and now,
        # but one that was stopped while it decoded goes on.
        info, anew = claimed(info, out), not any(out.glob(f"{PLACE}-*"))
        if anew:
            info = claimed(info, out, force=True)
        recording = RecordingJob(info, BUNDLED / "prompts.jsonl", out, settings, size.prompts)
        run_profile(recording, force=anew)


def _page(out: Path, trace: Trace, ranking: Ranking) -> Path:
    """Write the report of a demo: its predictions are from latencies measured during the runs."""
    from simulator.report.data import render, report_data

    data = report_data(
        trace, read_latency(out / CHECKED), ranking.logs, notes=ranking.notes,
        measured=read_measured(out / "measured.parquet"),
    )  # fmt: skip
    page = out / "report.html"
    write_atomically(page, render(data, f"draftsim demo: {out.name}").encode())
    return page
