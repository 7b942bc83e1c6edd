"""``draftsim sweep``: what-if grids, break-even maps and the ladder of policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from commands.common import options
from commands.common.configured import MOST_BATCH, MOST_CONTEXT, MOST_LENGTH
from commands.common.drafted import gpu_names, weight_formats
from commands.common.output import (
    MEASURE_MORE,
    JsonOption,
    OutOption,
    PlotsOption,
    emit,
    note,
    placed_table,
    remark,
    say_drawn,
)
from commands.common.printed import print_table
from commands.common.progress import progress_bar, working
from commands.common.written import BEGINS, TABLES, Shown, check_place, write_rows
from policies.registry import NO_SPECULATION, is_bound
from simulator.chosen import load_policies, named, say_unfitted
from simulator.recording import Recording
from simulator.unmeasured import said_free
from simulator.whatif.axes import axis_settings, expand, number, parse_axis, search_space
from simulator.whatif.breakeven import VARYING, fastest, overview, some_points, thresholds
from simulator.whatif.cells import Prices, carried_words
from simulator.whatif.grid import Axes, answer, grid_sweep, said_assumed
from simulator.whatif.ladder import ladder as climb
from simulator.whatif.sweep import thresholds_path, write_thresholds
from simulator.whatif.tuning import tuned_rows
from traces.digits import three_digits
from traces.errors import FileError
from traces.latency.table import BATCH_FREE_SAID
from traces.store.parquet import kind_of
from traces.store.writing import is_device

SHOWN = (
    "gpu", "scaled", "scale_error", "fit_error", "policy", "points", "mean_speedup", "carried_lo",
    "carried_hi", "speedup_above_1", "interval_above_1", "share_below_1", "regret_fixed",
    "regret_oracle", "adapting", "outside", "tilt_error", "tilt_tried", "assumed", "drafts",
)  # fmt: skip
RUNGS = (
    "rung", "policy", "speedup", "speedup_lo", "speedup_hi", "share", "block_efficiency",
    "lost_draft", "lost_verify", "lost_signal", "lost_host",
)  # fmt: skip
AXIS = "a:b:N, a:b:Nlog, a..b or a,b,c"
SweptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", metavar="P",
        help="name[:key=value,...]; {1..12} or {0.3,0.5} is one policy per value. Repeatable; all "
        "= every policy. Default: `grid` has fixed:gamma={1..LONGEST} and the oracle, `ladder` "
        "all.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class SweepInputs(options.CarriedInputs):
    """The inputs of a sweep, which takes several tables."""

    latency: Annotated[
        list[str] | None,
        typer.Option(
            "--latency",
            metavar="L",
            help="Latency file, run folder, bundled recording's name, const:..., or FILE:PAIR/MODE "
            "for a table of the GPU suite. Repeatable, one per device. Default: the trace's own, "
            "unless --c is given.",
        ),
    ] = None  # type: ignore[assignment]
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME,...",
            help="Extrapolate latencies measured on another GPU to each of these, approximately "
            "(`draftsim list devices`).",
        ),
    ] = None


@dataclass(frozen=True)
class Resampling:
    """Options for what is drawn at random."""

    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples over prompts.")] = 200
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything drawn.")] = 0


def grid(
    inputs: SweepInputs,
    *,
    policy: SweptOption = None,
    c: Annotated[
        str | None,
        typer.Option(
            "--c",
            metavar="AXIS[,verify=R]",
            help=f"Cost ratios T_draft / T_target: {AXIS}. A verification costs R target passes, "
            "by default 1.",
        ),
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS[,tilt=HOW]",
            help="Acceptance rates, by reweighting the recording. HOW is coupled (default), redraw "
            "or iid, which draws every token independently. Default: as recorded.",
        ),
    ] = None,
    gamma: Annotated[
        str | None,
        typer.Option(metavar="AXIS", help="Draft lengths of every policy with a parameter gamma."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="AXIS", help="Requests decoded together.")] = "1",
    context: Annotated[
        str | None, typer.Option(metavar="AXIS", help="Prompt tokens. Default: as recorded.")
    ] = None,
    # Parts of --c and --alpha, as older commands give them.
    verify_ratio: Annotated[float, typer.Option(hidden=True)] = 1.0,
    tilt: Annotated[str, typer.Option(hidden=True)] = "coupled",
    drawn: Resampling,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed_table,
            help="Write the table as Parquet (a name in .csv, .tex or .json: as that, too), and "
            "every policy's break-even points as NAME.breakeven.parquet. An interrupted sweep "
            "continues.",
        ),
    ] = None,
    jobs: options.JobsOption = None,
    cluster: options.ClusterOption = None,
    plots: PlotsOption = None,
    json: JsonOption = None,
) -> None:
    """Ask what if: any grid over cost ratio, acceptance, policies, batch, context, device.

    Policies are by default fixed:gamma={1..12}, as far as drafts were recorded, and the oracle.
    Regrets are against the best fixed length from 1 to 12 and against the oracle, even if these are
    not swept. The second table says where each policy stops giving a speedup. Above batch 1 at most
    30 resamples are drawn.
    """
    table_at = ends_at = None
    if out is not None:
        table_at = out.with_suffix(".parquet") if out.suffix in TABLES else out
        # No file belongs next to a device.
        ends_at = None if is_device(table_at) else thresholds_path(table_at)
        _check_places(out, table_at, ends_at)
    c, of_c = axis_settings(c, "c", ["verify"])
    alpha, of_alpha = axis_settings(alpha, "alpha", ["tilt"])
    if of_c:
        options.refuse({"--verify-ratio": None if verify_ratio == 1 else 1}, "--c says verify")
    if of_alpha:
        options.refuse({"--tilt": None if tilt == "coupled" else tilt}, "--alpha says tilt")
    if "verify" in of_c:
        cost = "verify of --c is the cost of a verification, in target passes"
        verify_ratio = number(of_c["verify"], cost)

    def whole(text: str | None, name: str, low: int, high: int) -> list[int]:
        return [int(n) for n in parse_axis(text, name, low=low, high=high, whole=True)]

    axes = Axes(
        parse_axis(c, "c", low=0.0), parse_axis(alpha, "alpha", low=1e-6, high=1 - 1e-6),
        whole(gamma, "gamma", 0, MOST_LENGTH), whole(batch, "batch", 1, MOST_BATCH),
        whole(context, "context", 0, MOST_CONTEXT) or [None], gpu_names(inputs.gpu),
        weight_formats(inputs.weights), verify_ratio, of_alpha.get("tilt", tilt),
        inputs.always_draft or 0,
    )  # fmt: skip
    recording = inputs.load(chooses="sweep", by_ratio=axes.by_ratio, one=False)
    study = grid_sweep(recording, policy, axes, **vars(drawn), say=remark)
    prices = study.runner.prices
    title = titled(recording, prices)
    with progress_bar() as bar:
        task = bar.add_task(f"sweeping {study.rows} points", total=len(study.parts))
        frame = study.run(
            options.chosen_executor(jobs, cluster), out=table_at,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    found = answer(study, frame)
    fit, assumed = found.rows, found.assumed
    rows, ends = overview(fit), thresholds(fit)
    also = None if out == table_at else out
    if also is not None:
        shown = Shown(rows.to_dict("records"), title, [n for n in SHOWN if n in rows])
        write_rows(also, frame.to_dict("records"), "sweep", tables=lambda: [shown])
    if recording.source is not None:
        rows["drafts"] = recording.trace.source
    best = fastest(fit)
    note(f"{title}: {headline(best)}")
    if assumed:
        by = [name for name in ("gpu", "policy") if name in rows]
        own = {tuple(map(str, key)) for key in fit[fit["latency"].isin(assumed)][by].to_numpy()}
        rows["assumed"] = [
            BATCH_FREE_SAID if tuple(map(str, key)) in own else None for key in rows[by].to_numpy()
        ]
    for line in found.first:
        note(line)
    more = {"break_even": ends.to_dict("records"), "fastest": best.to_dict("records")}

    def printed() -> None:
        print_table(rows.to_dict("records"), [n for n in SHOWN if n in rows])
        each = "--out FILE.csv writes each point" if out is None else f"each point is in {out}"
        note(f"means over a row's points; {each}; `draftsim list columns` explains the columns")
        print_thresholds(ends, ends_at)

    emit("sweep", rows, json, more=more, printed=printed)
    if also is not None:
        note(f"wrote {also}")
    if table_at is not None:
        said = f"wrote {len(frame)} rows to {table_at}"
        if ends_at is not None:
            write_thresholds(ends, table_at, study.description)
            said += f" and {len(ends)} to {ends_at}"
        note(said)
    for line in (*(f"{line}; {MEASURE_MORE}" for line in found.outside), *found.notes):
        note(line)
    if plots is not None:
        _draw(fit, plots, recording, prices, assumed)


def _check_places(out: Path, table: Path, ends: Path | None) -> None:
    """Raise FileError if the files of a sweep into `out` would replace something else."""
    check_place(table, BEGINS[".parquet"])
    for path in filter(None, (table if table != out else None, ends)):
        # Not named by the user: it must be a sweep's own.
        check_place(path, BEGINS[".parquet"])
        if path.is_file() and path.stat().st_size and kind_of(path) not in ("sweep", "break-even"):
            raise FileError(
                f"{path}: the sweep writes this file too, and it holds something else: name "
                "another --out, or remove it"
            )


def _draw(
    rows: pd.DataFrame, plots: Path, recording: Recording, prices: Prices, assumed: Sequence[str]
) -> None:
    """Draw the maps of a sweep into `plots`, each with the pair and device that it is of.

    ``assumed`` are the latencies that are taken to cost the same at every batch.
    """
    from simulator.plots.look import save_all_kinds
    from simulator.plots.whatif import NOTHING, figures, tables_of

    drawn = figures(rows)
    if not drawn:
        note(NOTHING)
    ends = {end: at for end, at in tables_of(rows).items() if end}
    paths = []
    for name, figure in drawn.items():
        latency, gpu = next((at for end, at in ends.items() if name.endswith(end)), (None, None))
        of, taken = recording, assumed
        if latency is not None:  # the figure is of one table
            of = replace(recording, tables={latency: recording.tables[latency]})
            taken = [one for one in assumed if one == latency]
        label = said_assumed(taken, prices) if taken else ""
        paths.append(save_all_kinds(figure, plots / f"{name}.png", label, titled(of, prices, gpu)))
    say_drawn(paths)


def titled(recording: Recording, prices: Prices, gpu: str | None = None) -> str:
    """Return the recording with its models and device, and the GPUs and weights of `prices`.

    ``gpu``: only this one of them.
    """
    own = [at for at in prices.tables if gpu in (None, at.gpu)]
    said = ", ".join([recording.said, *carried_words(own)])
    both = len(prices.ratios) and prices.latencies and gpu is None
    return f"{said}, and at given cost ratios" if both else said


def tune(
    inputs: options.BatchInputs,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="P",
            help="A policy with the values to search in braces: gammatune:eta={0.1,0.3},"
            "gamma={1..6}. Repeatable.",
        ),
    ] = None,
    drawn: Resampling,
    jobs: options.JobsOption = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Search the parameters of policies on part of the prompts; judge them on the others.

    Rows are no speculation, then of every --policy the best setting and the default.
    """
    recording = inputs.load(chooses="sweep")
    table, trace, texts = inputs.priced(recording), recording.trace, policy or []
    with working("searching settings"):
        found = tuned_rows(
            trace, table, texts, resamples=drawn.resamples, seed=drawn.seed, jobs=jobs or 1
        )
    say_unfitted(load_policies([search_space(text)[0] for text in texts], trace), remark)
    if json is None:
        real = [row for row in found if not is_bound(row["policy"])]
        first = max(real, key=lambda row: row["speedup"])
        ends = [first[f"speedup_{end}"] for end in ("lo", "hi")]
        span = "" if None in ends else f" ({' to '.join(map(three_digits, ends))})"
        best = "no policy is faster than no speculation"
        if first["speedup"] > 1 + 1e-12:
            name = first["policy"] + (" (the default)" if first["tried"] is None else "")
            best = f"{name} is fastest, {three_digits(first['speedup'])}x no speculation"
            best += span
        note(f"{recording.said}: on held-out prompts {best}")
    emit("sweep", found, json, show=SEARCHED, out=out)
    for line in said_free(what for row in found for what in row["unpriced"]):
        note(line)


def ladder(
    inputs: options.BatchInputs,
    *,
    policy: SweptOption = None,
    drawn: Resampling,
    plots: PlotsOption = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Compare no speculation, the best fixed length, policies, rate-optimal and the oracle.

    The best fixed length and rate-optimal are fitted on half of the prompts, and all policies are
    judged on the others. They are by default those whose signals were recorded. `share` is the
    share of the oracle's gain that a policy reaches.
    """
    from simulator.plots.look import save_all_kinds
    from simulator.plots.whatif import plot_ladder

    recording = inputs.load(chooses="sweep")
    table, trace, chosen = inputs.priced(recording), recording.trace, None
    if policy:
        chosen = dict(named(load_policies(expand(policy), trace, say=remark, latency=table)))
    with working("splitting the prompts") as say:
        rungs = climb(trace, table, policies=chosen, **vars(drawn), progress=say)
    as_given = set(rungs.loc[rungs["rung"] == "policy", "policy"])
    say_unfitted([pair for pair in (chosen or {}).items() if pair[0] in as_given], remark)
    note(f"{recording.said}: {_climbed(rungs)}")
    title = f"{recording.said}: policies on held-out prompts"
    emit(
        "sweep", rungs, json, out=out,
        tables=lambda: [Shown(rungs.to_dict("records"), title, RUNGS)],
    )  # fmt: skip
    for line in said_free(what for unpriced in rungs["unpriced"] for what in unpriced):
        note(line)
    if plots is not None:
        figure = plot_ladder(rungs)
        say_drawn([save_all_kinds(figure, plots / "ladder.png", title=recording.said)])


def _climbed(rungs: pd.DataFrame) -> str:
    """Return in one sentence how far the best policy gets; rows of `whatif.ladder.ladder`."""
    best = rungs[~rungs["policy"].map(is_bound)].iloc[-1]
    oracle = rungs[rungs["rung"] == "oracle"].iloc[0]
    if not best["speedup"] > 1 + 1e-12:
        return f"no policy is faster than no speculation; the oracle gives {oracle['speedup']:.3g}x"
    return (
        f"fastest: {best['policy']} ({_figures(best.to_frame().T)}), which is {best['share']:.0%} "
        f"of the oracle's gain ({oracle['speedup']:.3g}x)"
    )


SEARCHED = (
    "policy", "tried", "train_speedup", "speedup", "speedup_lo", "speedup_hi",
    "block_efficiency", "share_below_1",
)  # fmt: skip


def headline(best: pd.DataFrame) -> str:
    """Return which policy is fastest where, in one sentence; rows of `breakeven.fastest`.

    Along a single axis every value is named, neighbours with one winner together; over several
    axes the winners are counted, and the largest speedup is named. In brackets are the speedups
    and the ends of their 95% intervals.
    """
    axes = [n for n in ("alpha_asked", *VARYING[1:]) if best[n].nunique(dropna=False) > 1]
    if best.empty:
        return "nothing was swept but the oracle"
    if len(axes) > 1:
        counts = best["policy"].value_counts()
        said = ", ".join(f"{name} ({n / len(best):.0%})" for name, n in counts.head(4).items())
        most = best.iloc[int(best["speedup"].to_numpy(float).argmax())]
        if most["policy"] == NO_SPECULATION:
            return f"fastest over {len(best)} points: {said}"
        at = ", ".join(_along(name, [most[name]]) for name in axes)
        return (
            f"fastest over {len(best)} points: {said}; largest speedup: {most['policy']} at {at} "
            f"({_figures(most.to_frame().T)})"
        )
    best = best.sort_values(axes)  # an axis may be given in any order
    parts: list[str] = []
    runs = (best["policy"] != best["policy"].shift()).cumsum()
    for _, part in best.groupby(runs, sort=False):
        name = part["policy"].iloc[0]
        where = "" if not axes else f" at {_along(axes[0], part[axes[0]].tolist())}"
        parts.append(f"{name}{where}" + ("" if name == NO_SPECULATION else f" ({_figures(part)})"))
    return f"fastest: {'; '.join(parts)}"


def _figures(part: pd.DataFrame) -> str:
    """Return the speedups of some points, and the ends of their intervals where known."""
    ends = [float(value) for value in (part["speedup"].min(), part["speedup"].max())]
    said = " to ".join(dict.fromkeys(f"{three_digits(value)}x" for value in ends))
    low, high = float(part["speedup_lo"].min()), float(part["speedup_hi"].max())
    if math.isnan(low) or math.isnan(high):
        return said
    return f"{said}, 95% {three_digits(low)} to {three_digits(high)}"


def _along(axis: str, values: list[object]) -> str:
    """Return the values of an axis in words: its ends, or the one there is."""

    def figure(value: object) -> str:
        if isinstance(value, float):
            return "as recorded" if math.isnan(value) else f"{value:.4g}"
        return str(value)

    name = axis.removesuffix("_asked")
    ends = dict.fromkeys(figure(value) for value in (values[0], values[-1]))
    return f"{name} {' to '.join(ends)}"


def print_thresholds(rows: pd.DataFrame, path: Path | None) -> None:
    """Print the table of `simulator.whatif.breakeven`, or some of its points; `path` has all."""
    if rows.empty:
        return
    shown = some_points(rows)
    axes = [n for n in VARYING if rows[n].nunique(dropna=False) > 1]
    columns = ["along", "policy", *axes, "side", "says", "share_below_1", "adapting"]
    title = "Where speedup is 1, with its interval over prompts"
    print_table(shown.to_dict("records"), [*columns, "adapting_most"], title)
    if len(shown) < len(rows):
        where = "" if path is None else f" and in {path.name}"
        note(f"{len(shown)} of {len(rows)} break-even points shown; all with --json{where}")
