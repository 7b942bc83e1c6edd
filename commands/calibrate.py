"""``draftsim calibrate``: a server's costs from a handful of its own runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.output import JsonOption, emit, note, placed_recording
from commands.common.printed import print_table

if TYPE_CHECKING:
    from simulator.aggregate import Interval
    from simulator.aggregate.advice import Load


def calibrate(
    runs: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS",
            help="CSV (or .jsonl) of runs: batch,k,tokens_per_s[,context][,emitted][,acceptance]. "
            "k is the draft length, 0 speculation off; emitted the tokens a round; acceptance the "
            "chances that the first 1, 2, ... drafted tokens are accepted, separated by blanks.",
        ),
    ],
    noise: Annotated[
        float | None,
        typer.Option(min=1e-4, help="Relative spread of a run's tokens/s, if you repeated runs."),
    ] = None,
    level: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Level of the intervals, all together.")
    ] = 0.95,
    threshold: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens an iteration above which another kernel runs, if known."),
    ] = None,
    always: Annotated[
        int | None,
        typer.Option(
            min=1, help="Draft passes of every iteration, where the engine always drafts."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed_recording,
            help="Write the costs as a latency table, for --latency.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Fit fixed, per-token, per-cached-token and draft costs to tokens/s of your own server.

    Each cost has an interval; what the runs do not determine is named, and so is the run that
    would narrow the predictions most.
    """
    from simulator.aggregate.advice import candidates, next_run, predicted
    from simulator.aggregate.fit import calibrate as fit
    from simulator.aggregate.table import latency_table, read_runs
    from traces.store.files import write_latency

    measured = read_runs(runs)
    found = fit(measured, noise=noise, level=level, threshold=threshold, always=always)
    loads = predicted(found, measured, candidates(measured))
    suggestion = next_run(found, measured)
    if json is None:
        print_table([_cost(name, one) for name, one in found.intervals.items()])
        print_table([_load(load) for load in loads])
    else:
        rows = [
            {"cost": name, "value": i.value, "low": i.low, "high": i.high}
            for name, i in found.intervals.items()
        ]
        more = {
            "undetermined": list(found.undetermined), "noise": found.noise,
            "threshold": found.server.threshold, "misses": list(found.misses),
            "next_run": suggestion._asdict(),
            "predictions": [_flat(load) for load in loads],
        }  # fmt: skip
        emit("calibrate", rows, json, more=more)
    if found.server.threshold is not None:
        note(f"above {found.server.threshold} tokens an iteration another kernel runs (step_s)")
    worst = max(found.misses, key=abs)
    note(f"runs scatter by {found.noise:.1%} about the fit, the worst by {worst:+.1%}")
    if found.undetermined:
        note(f"not determined by these runs: {', '.join(found.undetermined)}")
    note(
        f"measure next: batch {suggestion.batch}, k = {suggestion.k}, context "
        f"{suggestion.context:g}: takes away {suggestion.narrows:.0%} of what is uncertain"
    )
    if out is not None:
        write_latency(latency_table(found, measured), out)
        note(f"wrote {out}")


def _cost(name: str, value: Interval) -> Mapping[str, str]:
    scale, unit = (1e3, " ms") if name.endswith("_s") else (1.0, "")
    low, middle, high = (f"{scale * v:.4g}{unit}" for v in (value.low, value.value, value.high))
    return {"cost": name.removesuffix("_s"), "value": middle, "from": low, "to": high}


def _load(load: Load) -> Mapping[str, str]:
    def span(value: Interval) -> str:
        return f"{value.low:.3g} to {value.high:.3g}"

    return {
        "batch": str(load.batch), "k": str(load.k), "context": f"{load.context:g}",
        "tokens/s": f"{load.tokens_per_s.value:.4g}", "interval": span(load.tokens_per_s),
        "speedup": f"{load.speedup.value:.3g}", "from, to": span(load.speedup),
    }  # fmt: skip


def _flat(load: Load) -> Mapping[str, float]:
    parts = {"tokens_per_s": load.tokens_per_s, "speedup": load.speedup}
    row: dict[str, float] = {"batch": load.batch, "k": load.k, "context": load.context}
    for name, value in parts.items():
        row |= {name: value.value, f"{name}_lo": value.low, f"{name}_hi": value.high}
    return row
