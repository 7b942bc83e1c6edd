"""``draftsim breakeven``: the loads where speculation stops giving a speedup."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.calibrate import check_contexts, fitted, known_target
from commands.common import options
from commands.common.configured import MOST_CONTEXT, MOST_LENGTH
from commands.common.drafted import FORMS, latencies, load_positions, load_recording
from commands.common.output import (
    MEASURE_MORE,
    JsonOption,
    LevelOption,
    OutOption,
    emit,
    note,
    placed,
    remark,
)
from commands.common.progress import working
from commands.common.written import Shown
from traces.digits import counted
from traces.errors import DraftsimError
from traces.store.recordings import DEFAULT_TRACE, given_name

if TYPE_CHECKING:
    import pandas as pd

    from simulator.aggregate.positions import Positions
    from simulator.aggregate.server import ServerFit
    from simulator.tune.breakeven import SurfaceCell
    from traces.latency.table import LatencyTable

SHOWN = ("batch", "context", "k", "speedup", "low", "high", "emitted", "needed", "needed_rate")
DEFAULT_KS = "1,2,3,4,6,8"
FIGURES = (".png", ".svg", ".pdf")


def placed_figure(path: Path | None) -> Path | None:
    """Return the path of a figure; raise DraftsimError for a suffix that is not drawn."""
    if path is not None and path.suffix.lower() not in ("", *FIGURES):
        raise DraftsimError(f"--plot {path}: the suffix is not one of {', '.join(FIGURES)}")
    return placed(path)


def breakeven(
    trace: options.TraceOption = DEFAULT_TRACE,
    latency: options.LatencyOption = None,
    source: options.DraftedOption = None,
    acceptance: Annotated[
        str | None,
        typer.Option(metavar="A", help=f"Acceptance instead of the recording's: {FORMS}."),
    ] = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(
            "--bench",
            metavar="RUNS",
            help="Runs of your server instead of latencies: CSV as `calibrate` reads, or benchmark "
            "files as `recommend` reads. Their acceptance may be dictated (vLLM's "
            "rejection_sample_method synthetic). Repeatable.",
        ),
    ] = None,
    always_draft: options.AlwaysOption = None,
    gpu: options.GpuOption = None,
    weights: options.WeightsOption = None,
    assume_batch_free: options.AssumeOption = False,
    batch: Annotated[
        str | None, typer.Option(metavar="B,...", help="Default: those measured.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="N,...", help="Default: those measured.")
    ] = None,
    k: Annotated[
        str | None, typer.Option("--k", metavar="K,...", help=f"Default: {DEFAULT_KS}.")
    ] = None,
    passes: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --bench or --plan: drafter passes in every step that drafts."
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Instead, name the fewest runs that determine the surface, with dictated "
            "acceptance. With --bench, name those still missing.",
        ),
    ] = False,
    level: LevelOption = 0.8,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=placed_figure, help="Draw the surface, as .png, .svg or .pdf."
        ),
    ] = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Find where speculation stops giving a speedup, by batch size, context and draft length.

    A row is the best draft length at a load; --out and --json hold all draft lengths. `needed` is
    the acceptance length that breaks even. The last lines are vLLM's tables by batch size and by
    sequence length, and what each loses against the best draft length of every load.
    """
    from simulator.tune.breakeven import grid, measured_surface, pays_to, vllm_tables
    from simulator.tune.formats import check_settings

    lengths = options.batch_sizes("--k", k or DEFAULT_KS, MOST_LENGTH)
    costs = {
        "--latency": latency, "--gpu": gpu, "--weights": weights, "--always-draft": always_draft,
        "--assume-batch-free": assume_batch_free or None,
    }  # fmt: skip
    drafter = {"--trace": given_name(trace), "--source": source}
    if bench is None and not plan:
        if passes is not None:
            raise DraftsimError("--passes is of a server's runs: add --bench or --plan, or drop it")
        if acceptance is not None and latency is not None and not (source or gpu or weights):
            options.refuse(drafter, "--acceptance and --latency need no recording")
    elif plan:
        options.refuse(costs, "--plan chooses runs of a server, which has its own costs")
        if plot is not None:
            raise DraftsimError("--plan prints runs and draws nothing: drop --plot")
    else:
        options.refuse(costs, "--bench tells the costs")
        options.refuse(drafter, "--bench tells the acceptance")
    server, model = (None, None) if bench is None else _server(bench, passes)
    if plan:
        given = None
        if acceptance is not None:
            given = load_positions(acceptance)
        elif server is None or any(drafter.values()):
            given = load_positions(trace, source=source)
        loads = grid(*_axes(batch, context, server, None, lengths), lengths)
        _plan(loads, given, server, passes, out, json)
        return
    if server is not None:
        own = None if acceptance is None else load_positions(acceptance)
        batches, contexts = _axes(batch, context, server, None, lengths)
        check_contexts(server, contexts)
        loads = grid(batches, contexts, sorted({0, *lengths}))
        with working(f"pricing {len(loads)} loads"):
            surface = measured_surface(server, own, loads, level)
        name = ", ".join(filter(None, (model, *(bench or ()))))
    else:
        surface, name = _priced(
            trace, latency, source, acceptance, (batch, context), lengths, level,
            always_draft, gpu, weights, assume_batch_free,
        )  # fmt: skip
    tables = vllm_tables(surface)
    for table in tables.values():
        if table.document is not None:
            check_settings("vllm", table.document)
    rows = surface.to_dict("records")
    best = surface.loc[surface[surface["k"] > 0].groupby(["batch", "context"])["speedup"].idxmax()]
    exact = (surface["low"] == surface["high"]).all()
    shown = [n for n in SHOWN if not (exact and n in ("low", "high"))]
    more: dict[str, Any] = {f"vllm_by_{name}": table.document for name, table in tables.items()}
    more |= {f"loses_by_{name}": table.loses for name, table in tables.items()}
    # Runs of a server read prompts, too; a latency table prices steps that decode.
    what = "speculation" if server is not None else "decoding with speculation"
    pays = f"{name}: {what} is faster {pays_to(surface, 'batch', 'requests')}"
    if surface["context"].nunique() > 1:
        pays += f"; by context, {pays_to(surface, 'context', 'tokens')}"
    note(pays)
    emit(
        "breakeven", rows, json, more=more, out=out,
        tables=lambda: [
            Shown(best.to_dict("records"), f"{name}: best draft length at each load", shown)
        ],
    )  # fmt: skip
    for table in tables.values():
        said = "no table with K above 0 is faster"
        if table.document is not None:  # without blanks, at which it would be broken
            said = dumps(table.document, separators=(",", ":"))
        note(f"{said}  (loses {table.loses:.1%} against the best K of every load)")
    if plot is not None:
        from simulator.plots.look import save
        from simulator.plots.whatif import plot_surface

        note(f"wrote {save(plot_surface(surface), plot, title=name)}")


def _priced(
    trace: str, latency: str | None, source: str | None, acceptance: str | None,
    axes: tuple[str | None, str | None], lengths: list[int], level: float,
    always: int | None, gpu: str | None, weights: str | None, batch_free: bool,
) -> tuple[pd.DataFrame, str]:  # fmt: skip
    """Return the surface by a latency table, and whose it is."""
    from simulator.aggregate.positions import of_trace
    from simulator.pricing import missing_hosts
    from simulator.recording import load_tables, said_costs
    from simulator.serving.cost import TableCost
    from simulator.tune.breakeven import grid, priced_surface
    from simulator.tune.costs import longest_draft
    from simulator.unmeasured import said_free
    from traces.replay.calls import drafting_always

    if acceptance is not None and latency is not None and not (source or gpu or weights):
        # No recording is needed: acceptance and costs are both given.
        [table] = load_tables(latencies([latency]), trace, False, batch_free, remark).values()
        own, name = None, said_costs(latency, table)
    else:
        recording = load_recording(
            trace, latency, source, chooses="breakeven", gpu=gpu, weights=weights,
            assume_batch_free=batch_free,
        )  # fmt: skip
        table, own, name = recording.priced(), recording.trace, recording.said
    if acceptance is not None:
        positions = load_positions(acceptance)
        name = f"{name}, acceptance {acceptance}"
    else:
        assert own is not None
        most = longest_draft(own) or max(lengths)
        if max(lengths) > most:
            remark(
                f"recorded drafts have at most {counted(most, 'token')}: longer ones are "
                "extrapolated"
            )
        positions = of_trace(trace, own, min(max(lengths), most))
        if own.drafts_end:
            remark(
                "a round in which the drafter proposes nothing is priced like one that verifies K "
                "tokens: speedups are lower bounds"
            )
    batches, contexts = _axes(*axes, None, table, lengths)
    table.check_sizes("target", "forward", max(batches), 1)
    loads = grid(batches, contexts, sorted({0, *lengths}))
    cost = TableCost(drafting_always(table, always))
    plain = TableCost(table, speculates=False)
    with working(f"pricing {len(loads)} loads"):
        surface = priced_surface(cost, plain, positions, loads, level)
    passes = [one for priced in (cost, plain) for one in priced.coverage]
    if outside := sum(one.passes for one in passes if one.origin == "extrapolated"):
        total = sum(one.passes for one in passes)
        remark(
            f"{outside:,} of {total:,} passes are outside the measured sizes, priced by a fitted "
            f"roofline: {MEASURE_MORE}"
        )
    for line in said_free(missing_hosts(table, False)):
        remark(line)
    if said := table.said_batch_free(max(batches)):
        remark(said)
    return surface, name


def _axes(
    batch: str | None, context: str | None, server: ServerFit | None, table: LatencyTable | None,
    lengths: list[int],
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Return the batch sizes and contexts asked for, or measured, or usual ones for a plan."""
    from simulator.tune.costs import default_contexts

    batches = None if batch is None else options.batch_sizes("--batch", batch)
    contexts = None if context is None else options.batch_sizes("--context", context, MOST_CONTEXT)
    if table is not None:
        held = [0] if table.is_constant else default_contexts(table, max(lengths))
        # Engines are timed at contexts a few tokens apart: one of them says what the others do.
        far = [c for i, c in enumerate(held) if i == 0 or c > 1.3 * held[i - 1]]
        return batches or table.usual_batches, contexts or far
    if server is not None:
        from simulator.aggregate.advice import concurrencies

        held = sorted({int(run.held) for run in server.runs})
        return batches or concurrencies(server.runs), contexts or held
    return batches or [1, 4, 16, 64, 256], contexts or [1024, 8192, 65536]


def _server(bench: list[str], passes: int | None) -> tuple[ServerFit, str | None]:
    """Return what the runs determine, and their model where they name it."""
    from simulator.aggregate.benches import read_benches

    found = read_benches(bench)
    for line in found.notes:
        remark(line)
    target = known_target(None, None, found.model)
    return fitted(found.runs, target, None, passes), found.model


def _plan(
    loads: list[SurfaceCell], own: Positions | None, server: ServerFit | None, passes: int | None,
    out: Path | None, json: str | None,
) -> None:  # fmt: skip
    from simulator.tune.breakeven import EXACT, plan

    with working("choosing runs"):
        runs = plan(loads, own, server, passes)
    rows = [{**run._asdict(), **run.commands()} for run in runs]
    if runs:
        left = runs[-1].uncertain
        above = "" if left <= EXACT else f", above {EXACT:.0%}"
        note(
            f"{len(runs)} runs ({len({run.k for run in runs})} server starts) leave speedups with "
            f"a standard deviation of {left:.0%}{above}"
        )
    else:
        note("nothing to measure: the speedups are known well enough")
    emit("breakeven", rows, json, out=out, show=["batch", "context", "k", "emitted", "uncertain"],
         title="Runs to measure, most informative first")  # fmt: skip
    if json is None:
        for k in sorted({run.k for run in runs}):
            note(next(row["serve"] for row in rows if row["k"] == k), whole=True)
    if runs:
        note("then run: draftsim breakeven --bench RESULTS")
