"""``draftsim breakeven``: the loads where speculation stops giving a speedup."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from commands.calibrate import check_contexts, fitted, known_target, runs_in
from commands.common import options
from commands.common.configured import MOST_CONTEXT, MOST_LENGTH
from commands.common.drafted import FORMS, latencies, load_positions
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
from simulator.aggregate.advice import concurrencies
from simulator.aggregate.positions import of_trace
from simulator.aggregate.server import GUESSED, ServerFit
from simulator.pricing import extras_of, missing_parts
from simulator.recording import load_tables, said_costs
from simulator.serving.cost import TableCost
from simulator.tune.breakeven import (
    EXACT,
    faster_up_to,
    grid,
    measured_surface,
    priced_surface,
    vllm_tables,
)
from simulator.tune.breakeven import plan as chosen_runs
from simulator.tune.costs import default_contexts, longest_draft
from simulator.tune.formats import check_settings
from simulator.unmeasured import said_free
from traces.digits import counted
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import drafting_always, in_one_pass
from traces.store.recordings import DEFAULT_TRACE, given_name

SHOWN = ("batch", "context", "k", "speedup", "low", "high", "emitted", "needed", "needed_rate")
DEFAULT_KS = "1,2,3,4,6,8"
FIGURES = (".png", ".svg", ".pdf")


def placed_figure(path: Path | None) -> Path | None:
    """Return the path of a figure; raise DraftsimError for a suffix that is not drawn."""
    if path is not None and path.suffix.lower() not in ("", *FIGURES):
        raise DraftsimError(f"--plot {path}: the suffix is not one of {', '.join(FIGURES)}")
    return placed(path)


PositionsOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance", metavar="A",
        help=f"Acceptance instead of that recorded or of the runs: {FORMS}.",
    ),
]  # fmt: skip
RUNS = "CSV as `calibrate` reads, or benchmark files as `recommend` reads."
"""Forms of a server's runs, as help texts list them."""


@dataclass(frozen=True)
class SurfaceInputs(options.CarriedInputs):
    """The inputs of a surface, for which acceptance by position suffices."""

    acceptance: PositionsOption = None

    @property
    def told(self) -> bool:
        """True if acceptance and costs are both given, so that no recording is needed."""
        given = self.acceptance is not None and self.latency is not None
        return given and not (self.source or self.gpu or self.weights)


@dataclass(frozen=True)
class SurfaceLoads(options.AskedLoads):
    """The loads and draft lengths of a surface."""

    k: Annotated[str, typer.Option("--k", metavar="N,...", help="Draft lengths.")] = DEFAULT_KS

    @property
    def lengths(self) -> list[int]:
        """The draft lengths, ascending."""
        return options.batch_sizes("--k", self.k, MOST_LENGTH)

    def axes(
        self, server: ServerFit | None = None, table: LatencyTable | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the batch sizes and contexts asked for, or measured, or usual ones for a plan."""
        text = self.batch
        batches = None if text is None else options.batch_sizes("--batch", text)
        text = self.context
        contexts = None if text is None else options.batch_sizes("--context", text, MOST_CONTEXT)
        if table is not None:
            held = [0] if table.is_constant else default_contexts(table, max(self.lengths))
            # Engines are timed at contexts a few tokens apart: one of them says what the others do.
            far = [c for i, c in enumerate(held) if i == 0 or c > 1.3 * held[i - 1]]
            return batches or table.usual_batches, contexts or far
        if server is not None:
            held = sorted({int(run.held) for run in server.runs})
            return batches or concurrencies(server.runs), contexts or held
        return batches or [1, 4, 16, 64, 256], contexts or [1024, 8192, 65536]


@dataclass(frozen=True)
class ShownSurface:
    """Options for what is printed, written and drawn of a surface."""

    level: LevelOption = 0.8
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=placed_figure, help="Draw the surface, as .png, .svg or .pdf."
        ),
    ] = None
    out: OutOption = None
    json: JsonOption = None

    def emit(self, surface: pd.DataFrame, said: str, name: str, least: bool = False) -> None:
        """Print or write the surface of `name`, which `said` begins, and vLLM's tables; draw it.

        ``least`` says that speedups are lower bounds: then no load is said to be slower.
        """
        tables = vllm_tables(surface)
        for table in tables.values():
            if table.document is not None:
                check_settings("vllm", table.document)
        rows = surface.to_dict("records")
        drafting = surface[surface["k"] > 0].groupby(["batch", "context"])
        best = surface.loc[drafting["speedup"].idxmax()]
        exact = (best["low"] == best["high"]).all()
        shown = [n for n in SHOWN if not (exact and n in ("low", "high"))]
        more: dict[str, Any] = {f"vllm_by_{name}": table.document for name, table in tables.items()}
        more |= {f"loses_by_{name}": table.loses for name, table in tables.items()}
        where = f"{said} {faster_up_to(surface, 'batch', 'requests')}"
        if surface["context"].nunique() > 1:
            where += f"; by context, {faster_up_to(surface, 'context', 'tokens')}"
        note(where + " (speedups here are lower bounds)" * least)
        emit(
            "breakeven", rows, self.json, more=more, out=self.out,
            tables=lambda: [
                Shown(best.to_dict("records"), f"{name}: best draft length at each load", shown)
            ],
        )  # fmt: skip
        for along, table in tables.items():
            line = f"no table with K above 0 is {'sure to be ' * least}faster"
            if table.document is not None:  # without blanks, at which it would be broken
                line = dumps(table.document, separators=(",", ":"))
            note(f"{line}  (loses {table.loses:.1%} against the best K of every load)")
            axis, other = ("batch", "context") if along == "batch" else ("context", "batch")
            over = f" (means over every {other})" if surface[other].nunique() > 1 else ""
            if not least and (slower := table.said_slower(axis, over)):
                note(slower)
        if self.plot is not None:
            from simulator.plots.look import save
            from simulator.plots.whatif import plot_surface

            note(f"wrote {save(plot_surface(surface), self.plot, title=name)}")


def surface(inputs: SurfaceInputs, loads: SurfaceLoads, shown: ShownSurface) -> None:
    """Find where speculation stops giving a speedup, by batch size, context and draft length.

    A row is the best draft length at a load; --out and --json hold all draft lengths. `needed` is
    the acceptance length that breaks even. The last lines are vLLM's tables by batch size and by
    sequence length, and what each loses against the best draft length of every load.
    """
    if inputs.told:
        given = {"--trace": given_name(inputs.trace)}
        options.refuse(given, "--acceptance and --latency need no recording")
    rows, name, least = _priced(inputs, loads, shown.level)
    # A latency table prices steps that decode; a server's runs read prompts, too.
    faster = "sure to be faster" if least else "faster"
    shown.emit(rows, f"{name}: decoding with speculation is {faster}", name, least)


def bench(
    bench: Annotated[list[str], typer.Argument(metavar="RUNS...", help=RUNS)],
    *,
    loads: SurfaceLoads,
    acceptance: PositionsOption = None,
    passes: options.PassesOption = None,
    shown: ShownSurface,
) -> None:
    """Find where speculation stops giving a speedup on your server, from its benchmark runs.

    Their acceptance may be dictated (vLLM's rejection_sample_method synthetic). The table and the
    last lines are those of `draftsim breakeven surface`.
    """
    server, model = _server(bench, passes)
    own = None if acceptance is None else load_positions(acceptance)
    if own is not None and server.guessed:
        remark(GUESSED)
    batches, contexts = loads.axes(server)
    check_contexts(server, contexts)
    cells = grid(batches, contexts, sorted({0, *loads.lengths}))
    with working(f"pricing {len(cells)} loads"):
        rows = measured_surface(server, own, cells, shown.level)
    name = ", ".join(filter(None, (model, *bench)))
    shown.emit(rows, f"{name}: speculation is faster", name)


def plan(
    loads: SurfaceLoads,
    bench: Annotated[
        list[str] | None,
        typer.Option(
            "--bench",
            metavar="RUNS",
            help=f"Name only the runs missing next to these: {RUNS} Repeatable.",
        ),
    ] = None,
    trace: options.TraceOption = DEFAULT_TRACE,
    source: options.DraftedOption = None,
    acceptance: PositionsOption = None,
    passes: options.PassesOption = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Choose the fewest runs of your server that determine the surface, with dictated acceptance.

    The acceptance to dictate is that of the runs of --bench, if --trace, --source and --acceptance
    name no other. The last lines start the server; `draftsim breakeven bench` reads the results.
    """
    server = None if bench is None else _server(bench, passes)[0]
    own = None
    if acceptance is not None:
        own = load_positions(acceptance)
    elif server is None or given_name(trace) is not None or source is not None:
        own = load_positions(trace, source=source)
    cells = grid(*loads.axes(server), loads.lengths)
    with working("choosing runs"):
        runs = chosen_runs(cells, own, server, passes)
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
        note("then run: draftsim breakeven bench RESULTS")


def _priced(
    inputs: SurfaceInputs, loads: SurfaceLoads, level: float
) -> tuple[pd.DataFrame, str, bool]:
    """Return the surface by a latency table, whose it is, and True if its speedups are bounds."""
    lengths, acceptance = loads.lengths, inputs.acceptance
    least = False
    if inputs.told:
        assert inputs.latency is not None
        given, free = latencies([inputs.latency]), inputs.assume_batch_free
        [table] = load_tables(given, inputs.trace, False, free, remark).values()
        own, name = None, said_costs(inputs.latency, table)
        table = in_one_pass(table) if inputs.one_pass else table
    else:
        recording = inputs.load(acceptance=None, chooses="breakeven")
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
        positions = of_trace(inputs.trace, own, min(max(lengths), most))
        if least := own.drafts_end:
            remark(
                "a round in which the drafter proposes nothing is priced like one that verifies K "
                "tokens: speedups are lower bounds (`draftsim simulate --source` has that of one "
                "request)"
            )
    batches, contexts = loads.axes(table=table)
    table.check_sizes("target", "forward", max(batches), 1)
    cells = grid(batches, contexts, sorted({0, *lengths}))
    extras = extras_of() if own is None else extras_of(sampling=own.sampling)
    cost = TableCost(drafting_always(table, inputs.always_draft), extras)
    plain = TableCost(table, extras, speculates=False)
    with working(f"pricing {len(cells)} loads"):
        surface = priced_surface(cost, plain, positions, cells, level)
    passes = [one for priced in (cost, plain) for one in priced.coverage]
    if outside := sum(one.passes for one in passes if one.origin == "extrapolated"):
        total = sum(one.passes for one in passes)
        remark(
            f"{outside:,} of {total:,} passes are outside the measured sizes, priced by a fitted "
            f"roofline: {MEASURE_MORE}"
        )
    for line in said_free(missing_parts(table, extras)):
        remark(line)
    if said := table.said_batch_free(max(batches)):
        remark(said)
    return surface, name, least


def _server(bench: list[str], passes: int | None) -> tuple[ServerFit, str | None]:
    """Return what the runs determine, and their model where they name it."""
    runs, model = runs_in(bench)
    return fitted(runs, known_target(None, None, model), None, passes), model
