"""The loads that ``draftsim serve`` runs: batch sizes, rates, or an arrivals file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.inputs import batch_sizes, positive_numbers
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.serving import Arrivals, Scenario
    from traces.latency.table import LatencyTable

BATCHES = [1, 2, 4, 8, 16, 32, 64]
"""Served where no load is named and passes are taken to cost the same at every batch."""
ONE_STREAM = ("pearl", "dsi")
MaxBatchOption = Annotated[
    int | None,
    typer.Option(
        show_default="the measured engine's, else 64",
        help="Requests running at a time in an engine, where no batch size is given.",
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(show_default="the measured engine's, else 8192", help="Tokens of one iteration."),
]
AsyncOption = Annotated[
    bool,
    typer.Option(
        "--async-scheduling",
        help="Plan an iteration while the one before it runs, as recent vLLM does by default.",
    ),
]

PromptOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Prompt tokens of a request, with --acceptance or plain decoding alone. Default: the "
        "server's, else 256.",
    ),
]
OutputOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, help="Output tokens of a request, likewise."),
]


def sizes_of(
    prompt: int | None, output: int | None, arrivals: Path | None
) -> dict[str, int] | None:  # fmt: skip
    """Return the lengths named, by the fields of `trace_by_position`; None with arrivals.

    Raises DraftsimError if a file of arrivals has lengths of its own.
    """
    named = {"prompt_length": prompt, "tokens": output}
    found = {name: value for name, value in named.items() if value is not None}
    if found and arrivals is not None:
        raise DraftsimError(f"{arrivals} has the requests' lengths: drop --prompt and --output")
    return found if arrivals is None else None


def requests_of(scenarios: Sequence[Scenario]) -> int:
    """Requests of all scenarios and replications together, under one policy."""
    total = 0
    for scenario in scenarios:
        each = scenario.requests or 0
        if (lengths := getattr(scenario.arrivals, "rows", None)) is not None:
            each = min(each, len(lengths[0])) or len(lengths[0])
        total += each * scenario.replications
    return total


def arrivals_of(rate: float | None, arrivals: Path | None, process: str | None) -> Arrivals:
    """A file of arrivals, or those of a process at `rate`.

    Raises DraftsimError if the options contradict each other or say neither.
    """
    from simulator.serving import ArrivalFile, Deterministic, Poisson

    kinds: Mapping[str, Any] = {"poisson": Poisson, "deterministic": Deterministic}
    if process is not None and (rate is None or arrivals is not None):
        raise DraftsimError("--process shapes the arrivals of --rate: give --rate, and no file")
    if arrivals is not None:
        return ArrivalFile(arrivals)
    if rate is None:
        raise DraftsimError("there is no load: give --rate or --arrivals")
    process = process or "poisson"
    if process not in kinds:
        raise DraftsimError(f"--process is {process!r}, expected poisson or deterministic")
    made: Arrivals = kinds[process](rate)
    return made


def load_scenarios(
    base: Scenario,
    batch: str | None,
    rate: str | None,
    arrivals: Path | None,
    scale: str | None,
    process: str | None,
    table: LatencyTable,
) -> list[Scenario]:
    """The loads that the options name, one scenario each; with none, the batches of `table`.

    Raises DraftsimError if they contradict each other or hold an impossible value.
    """
    from simulator.serving import over_batches, over_rates
    from simulator.tune import default_batches

    if batch is not None and (rate is not None or arrivals is not None):
        raise DraftsimError("--batch keeps the engine full: drop --rate and --arrivals, or --batch")
    if scale is not None and (arrivals is None or rate is not None):
        raise DraftsimError("--scale speeds up --arrivals: give a file, and no --rate")
    if process is not None or arrivals is not None or rate is not None:
        of = arrivals_of(None if rate is None else 1.0, arrivals, process)
        if rate is not None:
            return over_rates(replace(base, arrivals=of), positive_numbers("--rate", rate))
        scales = positive_numbers("--scale", scale or "1")
        return [replace(base, arrivals=of.scaled(s)) for s in scales]  # type: ignore[attr-defined]
    one_stream = base.mode in ONE_STREAM
    if batch is not None:
        sizes = batch_sizes("--batch", batch)
    else:
        sizes = [1] if one_stream else BATCHES if table.batch_free else default_batches(table)
    if one_stream and sizes != [1]:
        raise DraftsimError(
            f"mode {base.mode!r} serves one stream at a time: use --batch 1, --rate or --arrivals"
        )
    return over_batches(base, sizes)
