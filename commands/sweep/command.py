"""``draftsim sweep``: what-if grids, break-even maps and the ladder of policies."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.bounds import MOST_BATCH, MOST_LENGTH
from commands.common.devices import (
    AlwaysOption,
    GpuOption,
    OnePassOption,
    WeightsOption,
    in_batches,
    say_calibrate,
    say_scaling,
)
from commands.common.drafted import DraftedOption, load_recording
from commands.common.inputs import (
    DEFAULT_TRACE,
    AcceptanceOption,
    AssumeOption,
    TraceOption,
    load_policies,
)
from commands.common.latex import Shown, as_latex
from commands.common.output import JsonOption, emit, note, placed_folder, placed_table, say_drawn
from commands.common.progress import progress_bar
from commands.common.ranking import named
from commands.common.workers import ClusterOption, JobsOption, chosen_executor
from commands.common.written import TABLES, write_rows
from commands.sweep.grid import axis, prices_of
from commands.sweep.held_out import SEARCHED, tuned_rows
from commands.sweep.maps import draw_maps
from commands.sweep.notes import headline, print_thresholds, say_outside, say_tilt, say_untried
from traces.errors import DraftsimError
from traces.store.writing import write_atomically

if TYPE_CHECKING:
    import pandas as pd

    from commands.common.drafted import Recording
    from policies.core import DraftPolicy
    from simulator.executors import Executor
    from simulator.whatif.sweep.run import Sweep
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

SHOWN = (
    "gpu", "scaled", "scale_error", "fit_error", "policy", "points", "mean_speedup", "carried_lo",
    "carried_hi", "pays",
    "surely_pays", "below_1", "regret_fixed", "regret_oracle", "adapting", "outside", "tilt_error",
    "tilt_tried", "assumed", "drafts",
)  # fmt: skip
RUNGS = (
    "rung", "policy", "speedup", "speedup_lo", "speedup_hi", "share", "block_efficiency",
    "lost_draft", "lost_verify", "lost_signal", "lost_host",
)  # fmt: skip
LONGEST = 12
"""Longest fixed draft length swept by default."""
AXIS = "a:b:N, a:b:Nlog, a..b or a,b,c"


class Tilting(StrEnum):
    """How an acceptance rate other than the recorded one is made."""

    COUPLED = "coupled"
    REDRAW = "redraw"
    IID = "iid"


def sweep(
    trace: TraceOption = DEFAULT_TRACE,
    acceptance: AcceptanceOption = None,
    latency: Annotated[
        list[str] | None,
        typer.Option(
            "--latency",
            metavar="L",
            help="Latency file, run folder, bundled recording's name, or const:...; repeatable, "
            "one device each; FILE:PAIR/MODE of a GPU suite's table. Default: the trace's own, "
            "unless --c is given.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="P",
            help="name[:key=value,...], a value {1..12} or {0.3,0.5} standing for each; "
            "repeatable; all = every policy. Default: fixed:gamma={1..12}, as far as drafts were "
            "recorded, and oracle.",
        ),
    ] = None,
    source: DraftedOption = None,
    c: Annotated[
        str | None,
        typer.Option("--c", metavar="AXIS", help=f"Cost ratios T_draft / T_target: {AXIS}."),
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(metavar="AXIS", help="Acceptance rates to tilt to. Default: as recorded."),
    ] = None,
    gamma: Annotated[
        str | None,
        typer.Option(metavar="AXIS", help="Draft lengths of every policy with a gamma."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="AXIS", help="Sequences decoded together.")] = "1",
    context: Annotated[
        str | None,
        typer.Option(metavar="AXIS", help="Prompt tokens to price at. Default: as recorded."),
    ] = None,
    always_draft: AlwaysOption = None,
    one_pass: OnePassOption = False,
    gpu: GpuOption = None,
    weights: WeightsOption = None,
    assume_batch_free: AssumeOption = False,
    verify_ratio: Annotated[
        float, typer.Option(help="With --c: target passes that a verification costs.")
    ] = 1.0,
    tilt: Annotated[
        Tilting, typer.Option(help="How to change alpha; iid is the textbook baseline.")
    ] = Tilting.COUPLED,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed_table,
            help="Write the table as Parquet (and as .csv, .tex or .json, if so named), and where "
            "each policy stops paying as NAME.breakeven.parquet beside it; an interrupted "
            "sweep goes on where it was.",
        ),
    ] = None,
    jobs: JobsOption = None,
    cluster: ClusterOption = None,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples over prompts.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            help="Instead: policies from plain decoding to the oracle, on held-out prompts.",
        ),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Instead: search the values in braces of every --policy on part of the prompts, "
            "and judge the best on the others.",
        ),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=placed_folder,
            help="Also draw the maps into this folder: PNG, SVG and PDF.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Ask what if: any grid over cost ratio, acceptance, policies, batch, context, device.

    Regrets are against the best of the fixed lengths 1 to 12 and against the oracle, whichever
    policies are swept.  The second table says where each policy stops paying.
    """
    from simulator.whatif.breakeven import fastest, overview
    from simulator.whatif.sweep.file import write_thresholds
    from simulator.whatif.sweep.run import Sweep
    from simulator.whatif.sweep.thresholds import thresholds
    from traces.replay.always import drafting_always

    ratios = axis(c, "c", low=0.0)
    by_ratio = bool(ratios) and gpu is None and weights is None and not (ladder or tune)
    recording = load_recording(
        trace, latency, source, acceptance=acceptance, chooses="sweep", gpu=gpu, weights=weights,
        assume_batch_free=assume_batch_free, by_ratio=by_ratio, one=False, one_pass=one_pass,
    )  # fmt: skip
    recording.check_ratios(ratios)
    if one_pass and (gpu is not None or weights is not None):
        raise DraftsimError(
            "--one-pass: --gpu and --weights carry passes over by the models' shapes, and "
            "that drafter's is not known: leave them out"
        )
    recorded = recording.trace
    sizes = [int(b) for b in axis(batch, "batch", low=1, high=MOST_BATCH, whole=True)]
    tables = {name: recording.priced(max(sizes), t) for name, t in recording.tables.items()}
    assumed = in_batches(tables, ratios, max(sizes), assume_batch_free)
    if ladder or tune:
        mode = "--ladder" if ladder else "--tune"
        carried = "--gpu" if gpu is not None else "--weights" if weights is not None else ""
        if carried or (ladder and tune):
            other = carried or "--tune"
            raise DraftsimError(f"{mode} prices policies on the device measured: leave out {other}")
        table = drafting_always(_one(tables, mode), always_draft)
        if ladder:
            _ladder(recording, table, policy, resamples, seed, plots, json, out)
            return
        found = tuned_rows(
            recorded, table, policy or [], resamples=resamples, seed=seed, jobs=jobs or 1
        )
        if not found:
            raise DraftsimError("--tune needs a --policy with values in braces")
        emit("sweep", found, json, show=SEARCHED, out=out)
        return
    study = Sweep(
        recorded,
        _policies(policy, gamma, recorded),
        prices_of(ratios, tables, context, verify_ratio, gpu, weights, always_draft),
        axis(alpha, "alpha", low=1e-6, high=1 - 1e-6),
        sizes,
        method=tilt.value, resamples=resamples, seed=seed,
    )  # fmt: skip
    say_tilt(study)
    say_scaling(study.bench.prices)
    say_calibrate((at.table for at in study.bench.prices.tables), max(sizes))
    wanted = out
    if out is not None and out.suffix in TABLES:
        out = out.with_suffix(".parquet")  # what an interrupted sweep goes on from
    frame = _run(study, chosen_executor(jobs, cluster), out)
    rows, ends = overview(frame), thresholds(frame)
    if wanted is not None and wanted != out:
        if wanted.suffix == ".tex":
            columns = [n for n in SHOWN if n in rows]
            table = Shown(rows.to_dict("records"), recording.said, columns)
            write_atomically(wanted, as_latex([table]).encode())
        else:
            write_rows(wanted, frame.to_dict("records"), "sweep")
        note(f"wrote {wanted}")
    if recording.source is not None:
        rows["drafts"] = recorded.source
    if assumed:
        rows["assumed"] = assumed
        note(f"taken to cost nothing: {assumed}")
    if out is not None:
        beside = write_thresholds(ends, out, study.description)
        note(f"wrote {len(frame)} rows to {out} and {len(ends)} to {beside}")
    best = fastest(frame)
    note(f"{recording.said}: {headline(best)}")
    more = {"break_even": ends.to_dict("records"), "fastest": best.to_dict("records")}
    emit("sweep", rows, json, show=[n for n in SHOWN if n in rows], more=more)
    if json is None:
        print_thresholds(ends, out)
    say_untried(study, frame)
    say_outside(frame)
    if plots is not None:
        label = f"taken to cost nothing: {assumed}" if assumed else ""
        say_drawn(draw_maps(frame, plots, label, recording.said))


def _policies(texts: list[str] | None, gamma: str | None, trace: Trace) -> dict[str, DraftPolicy]:
    from simulator.whatif.sweep.grid import expand, with_gammas

    longest = min(LONGEST, trace.max_gamma or LONGEST)
    names = expand(texts or (f"fixed:gamma={{1..{longest}}}", "oracle"))
    if gamma is not None:
        lengths = [int(g) for g in axis(gamma, "gamma", low=0, high=MOST_LENGTH, whole=True)]
        if "all" in names:
            names = [n for n in names if n != "all"] + [n for n, _ in load_policies(None, trace)]
        names = with_gammas(names, lengths)
    return dict(named(load_policies(names, trace)))


def _run(study: Sweep, executor: Executor, out: Path | None) -> Any:
    with progress_bar() as bar:
        task = bar.add_task(f"sweeping {study.rows} points", total=len(study.parts))
        return study.run(
            executor, out=out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip


def _one(tables: dict[str, LatencyTable], mode: str) -> LatencyTable:
    if len(tables) != 1:
        raise DraftsimError(f"{mode} takes one latency table, got {len(tables)}")
    return next(iter(tables.values()))


def _ladder(
    recording: Recording, table: LatencyTable, policy: list[str] | None, resamples: int,
    seed: int, plots: Path | None, json: str | None, out: Path | None,
) -> None:  # fmt: skip
    from simulator.plots import save_all_kinds
    from simulator.whatif.ladder import ladder as climb
    from simulator.whatif.plots import plot_ladder
    from simulator.whatif.sweep.grid import expand

    trace = recording.trace
    chosen = dict(named(load_policies(expand(policy), trace))) if policy else None
    rungs = climb(trace, table, policies=chosen, resamples=max(resamples, 1), seed=seed)
    note(f"{recording.said}: {_climbed(rungs)}")
    emit("sweep", rungs, json, show=RUNGS, out=out)
    if plots is not None:
        figure = plot_ladder(rungs)
        say_drawn([save_all_kinds(figure, plots / "ladder.png", title=recording.said)])


def _climbed(rungs: pd.DataFrame) -> str:
    """How far the best policy gets, in one sentence; rows of `simulator.whatif.ladder.ladder`."""
    best = rungs[rungs["rung"] != "oracle"].iloc[-1]
    oracle = rungs[rungs["rung"] == "oracle"].iloc[0]
    if not best["speedup"] > 1 + 1e-12:
        return f"no policy is faster than no speculation; the oracle gives {oracle['speedup']:.3g}x"
    return (
        f"fastest: {best['policy']}, {best['speedup']:.3g}x, which is {best['share']:.0%} of the "
        f"oracle's gain ({oracle['speedup']:.3g}x)"
    )
