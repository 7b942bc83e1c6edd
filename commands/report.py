"""``draftsim report``: everything a run shows, as one self-contained page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from commands.common import options
from commands.common.drafted import load_recording
from commands.common.output import note, placed_as, remark, say_remarks, waiting_remarks
from commands.common.progress import working
from commands.simulate.table import headline
from simulator.hardware.scaling import said_calibrate
from simulator.predict import compare, split_asked
from simulator.pricing import always_drafted
from traces.errors import DraftsimError
from traces.replay.calls import drafting_always, passes_always
from traces.store.engine_runs import read_measured
from traces.store.recordings import BUNDLED, DEFAULT_TRACE, TRACE_VARIABLE, trace_folder
from traces.store.writing import write_atomically


def report(
    run: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="RUN",
            envvar=TRACE_VARIABLE,
            callback=options.as_named,
            help="Run folder of `draftsim profile`, or bundled recording.",
        ),
    ] = DEFAULT_TRACE,
    out: Annotated[
        Path, typer.Option(metavar="FILE", callback=placed_as(b"<"), help="The page to write.")
    ] = Path("report.html"),
    latency: options.LatencyOption = None,
    policy: Annotated[list[str] | None, options.policy_option("all")] = None,
    source: options.DraftedOption = None,
    always_draft: options.AlwaysOption = None,
    gpu: options.GpuOption = None,
    weights: options.WeightsOption = None,
    serve: Annotated[
        bool, typer.Option(help="Also serve batches in simulated time, where they were measured.")
    ] = True,
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples over prompts.")] = 2000,
) -> None:
    """Write one HTML page to share: it needs no network, and its sliders recompute every speedup.

    The page ranks the same policies and named methods as `simulate`, and recommends the same one.
    """
    from simulator.report.data import against_fixed, carried_spans, names_of, render, report_data

    recording = load_recording(run, latency, source, chooses="the report", gpu=gpu, weights=weights)
    if recording.trace.drafts_end:
        raise DraftsimError(
            f"the page's sliders assume that a draft can be of any length, and drafts of "
            f"{recording.trace.source} end by themselves: price it with `draftsim simulate "
            "--source`"
        )
    table = drafting_always(recording.priced(), always_draft)
    for line in said_calibrate([table], 2 if serve and table.knows_batches else 1):
        remark(line)
    # Times measured on another device are no check of what is predicted for this one.
    other = (
        latency is not None or table.meta.get("scaled") or always_draft is not None
        or recording.source is not None
    )  # fmt: skip
    file = None if other else measured_file(run)
    measured = None if file is None else read_measured(file)
    asked = split_asked(policy)
    if asked.ruled:
        raise DraftsimError(
            f"{asked.ruled[0]!r} changes the text, and the page ranks lossless policies: price it "
            "with `draftsim simulate`"
        )
    with working("replaying policies", alone=True) as progress:
        compared = compare(
            recording, table, asked, lossy=False, always=always_draft is not None, say=remark,
            progress=partial(progress, "replaying policies"),
        )  # fmt: skip
        ranking, table = compared.ranking, compared.latency
        notes = {**ranking.notes}
        for name, span in carried_spans(ranking.logs, table).items():
            notes[name] = "; ".join(filter(None, (notes.get(name), span)))
        logs = [
            always_drafted(log, passes_always(table)) for log in (*ranking.logs, *compared.more)
        ]
        said = waiting_remarks()
        # The remark on whose acceptance is priced at whose costs names the pair as well.
        if recording.said_free or not any(line.startswith("acceptance of ") for line in said):
            said.insert(0, recording.said)
        if always_draft is not None:
            said.append(f"--always-draft {always_draft}: the fewest draft passes of every round")
        data = report_data(
            recording.trace, table, logs, notes=notes, measured=measured, pair=names_of(recording),
            said=said, serve=serve, resamples=resamples, progress=progress,
        )  # fmt: skip
    for line in data["about"]["free"]:
        remark(line)
    write_atomically(out, render(data, Path(run).name).encode())
    note(headline(against_fixed(data), recording.said))
    say_remarks()
    note(f"wrote {out}, {out.stat().st_size / 1e3:.0f} kB")


def measured_file(run: str) -> Path | None:
    """Return the measured times recorded with the trace of a run folder or recording, if any."""
    for folder in (BUNDLED / run, Path(run)):
        if (trace_folder(folder) / "trace.parquet").is_file():
            file = folder / "measured.parquet"
            if not (file.exists() or file.is_symlink()):
                return None
            if not file.is_file():
                raise DraftsimError(f"{file}: is no regular file: remove it, or copy it again")
            return file
    return None
