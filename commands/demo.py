"""``draftsim demo``: the whole path on the bundled pair, from profile to checked prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.common.output import JsonOption, emit, note
from commands.common.quiet import columns_shown
from commands.common.ranking import rank
from commands.simulate.table import compared, print_ranked
from commands.validate.spot_check import say_verdict, spot_check


def demo(
    out: Annotated[
        Path, typer.Option(metavar="RUN", help="Folder for everything it makes.")
    ] = Path("demo"),
    limit: Annotated[int, typer.Option(min=4, help="Use so many prompts.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Real runs of every arm and prompt.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Output limit per prompt.")] = 96,
    json: JsonOption = None,
) -> None:
    """Profile the bundled pair here, predict every policy, and check against real decoding."""
    from commands.common.figures import save_all
    from commands.profile.recording import Recording, run_profile
    from profiler.checks.unfinished import PLACE
    from profiler.latency.table import Grid
    from profiler.profile import Settings
    from profiler.recording.folder import claimed, only_writer
    from profiler.recording.run import BUNDLED, RunInfo
    from simulator.summary import price_all, summarize_runs, to_rows
    from traces.store.files import read_latency, read_trace

    info = RunInfo("bundled", "bundled", threads=1)
    settings = Settings(max_new_tokens=max_new_tokens, grid=Grid())
    with only_writer(out):
        # A folder of another pair is refused; an earlier demo's is measured anew, here and now, but
        # one that was stopped while it decoded goes on.
        info, anew = claimed(info, out), not any(out.glob(f"{PLACE}-*"))
        if anew:
            info = claimed(info, out, force=True)
        recording = Recording(info, BUNDLED / "prompts.jsonl", out, settings, limit)
        run_profile(recording, force=anew)
    trace, latency = read_trace(out / "trace.parquet"), read_latency(out / "latency.parquet")
    ranking = rank(trace, latency, None)
    runs = price_all(ranking.logs, latency)
    summary = ranking.noted(to_rows(summarize_runs(runs)))
    with only_writer(out):
        rows = spot_check(out, repeats=repeats, remeasure=True)
    if json is None:
        note("Predicted from the recording:")
        print_ranked(compared(summary, runs, latency, None, 2000), recording=f"{out}")
    emit("demo", rows, json, show=columns_shown(rows))
    say_verdict(rows)
    drawn = save_all(trace, latency, ranking.logs, out / "plots", rows)
    for line in (*(f"wrote {path}" for path in drawn.paths), *drawn.left_out):
        note(line)
