"""``draftsim calibrate``: a server's costs from a handful of its own runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
            help="CSV (or .jsonl) of runs: batch,k,tokens_per_s[,context][,emitted][,acceptance], "
            "or vLLM's max_concurrency, num_speculative_tokens, output_throughput and "
            "mean_acceptance_length. k is the draft length, 0 without speculation; emitted the "
            "tokens a round; acceptance the chances that the first 1, 2, ... drafted tokens are "
            "accepted, separated by blanks.",
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

    Prints the fastest draft length at each concurrency, the predicted tokens/s at every draft
    length up to the longest measured, and the costs with their intervals.  What the runs do not
    determine is named, and so is the run that would narrow the predictions most.
    """
    from simulator.aggregate.advice import best_lengths, loads_of, next_run, predicted
    from simulator.aggregate.fit import calibrate as fit
    from simulator.aggregate.table import latency_table, read_runs
    from traces.store.files import write_latency

    measured = read_runs(runs)
    found = fit(measured, noise=noise, level=level, threshold=threshold, always=always)
    loads = predicted(found, measured, loads_of(measured))
    best = best_lengths(loads)
    suggestion = next_run(found, measured)
    if json is None:
        print(_answer(best))
        print_table([_load(load) for load in loads], title="Predicted")
        print_table([_cost(name, one) for name, one in found.intervals.items()], title="Costs")
    else:
        rows = [
            {"cost": name, "value": i.value, "low": i.low, "high": i.high}
            for name, i in found.intervals.items()
        ]
        more = {
            "undetermined": list(found.undetermined), "noise": found.noise,
            "threshold": found.server.threshold, "misses": list(found.misses),
            "next_run": suggestion._asdict(), "best": [_flat(load) for load in best],
            "predictions": [_flat(load) for load in loads],
        }  # fmt: skip
        emit("calibrate", rows, json, more=more)
        note(_answer(best))
    largest = max(run.batch for run in measured)
    if beyond := sorted({load.batch for load in loads if load.batch > largest}):
        note(f"batch {', '.join(map(str, beyond))} is beyond the runs: extrapolated")
    contexts = sorted({load.context for load in loads})
    note(
        f"predicted at the runs' own context {' and '.join(f'{c:g}' for c in contexts)} only"
        if contexts != [0] else
        "the runs name no context: predictions hold for requests as long as theirs"
    )  # fmt: skip
    if found.server.threshold is not None:
        note(f"above {found.server.threshold} tokens an iteration another kernel runs (step_s)")
    worst = max(found.misses, key=abs)
    note(f"runs scatter by {found.noise:.1%} about the fit, the worst by {worst:+.1%}")
    if found.undetermined:
        note(f"not determined by these runs, and taken as 0: {', '.join(found.undetermined)}")
    narrows = f"{min(suggestion.narrows, 0.99):.0%}"
    note(
        f"measure next: batch {suggestion.batch}, k = {suggestion.k}, context "
        f"{suggestion.context:g}: it would take away {narrows} of the predictions' variance"
    )
    if out is not None:
        write_latency(latency_table(found, measured), out)
        note(f"wrote {out}")


def _answer(best: Sequence[Load]) -> str:
    """The fastest draft length at each concurrency, in one sentence."""
    contexts = sorted({load.context for load in best})
    parts = []
    for context in contexts:
        where = f" at context {context:g}" if contexts != [0] else ""
        each = [
            f"K = {load.k} at {load.batch} ({load.speedup.value:.2f}x, {_span(load.speedup)})"
            if load.k else f"no speculation at {load.batch}"
            for load in best if load.context == context
        ]  # fmt: skip
        parts.append(f"fastest by concurrency{where}: {', '.join(each)}")
    said = "; ".join(parts)
    return said[0].upper() + said[1:]


def _cost(name: str, value: Interval) -> Mapping[str, str]:
    scale, unit = (1e3, " ms") if name.endswith("_s") else (1.0, "")
    low, middle, high = (f"{scale * v:.4g}{unit}" for v in (value.low, value.value, value.high))
    return {"cost": name.removesuffix("_s"), "value": middle, "from": low, "to": high}


def _load(load: Load) -> Mapping[str, str]:
    return {
        "batch": str(load.batch), "K": str(load.k), "context": f"{load.context:g}",
        "tokens/s": _figure(load.tokens_per_s.value), "interval": _span(load.tokens_per_s),
        "speedup": _figure(load.speedup.value), "from, to": _span(load.speedup),
    }  # fmt: skip


def _span(value: Interval) -> str:
    return f"{_figure(value.low)} to {_figure(value.high)}"


def _figure(value: float) -> str:
    """Three figures, and all of a whole number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _flat(load: Load) -> Mapping[str, float]:
    parts = {"tokens_per_s": load.tokens_per_s, "speedup": load.speedup}
    row: dict[str, float] = {"batch": load.batch, "k": load.k, "context": load.context}
    for name, value in parts.items():
        row |= {name: value.value, f"{name}_lo": value.low, f"{name}_hi": value.high}
    return row
