"""The loads that ``draftsim serve`` runs: batch sizes, rates, or an arrivals file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from commands.common.options import batch_sizes, chosen_executor, positive_numbers
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.executors import Executor
    from simulator.serving import Arrivals, Scenario
    from traces.latency.table import LatencyTable

BATCHES = [1, 2, 4, 8, 16, 32, 64]
"""Served where no load is named and passes are taken to cost the same at every batch."""
ONE_STREAM = ("pearl", "dsi")
MANY = 50_000
"""Requests from which on starting processes for them pays."""
ProcessOption = Annotated[
    str | None,
    typer.Option(help="Gaps between arrivals of --rate: poisson (default) or deterministic."),
]


@dataclass(frozen=True)
class Loads:
    """Options for the requests that arrive."""

    heading: ClassVar[str] = "Load"

    batch: Annotated[
        str | None,
        typer.Option(
            metavar="B,...",
            help="Batch sizes, each kept full: concurrency. Default where no load is named: powers "
            "of two, as far as the latencies were measured.",
        ),
    ] = None
    rate: Annotated[
        str | None, typer.Option(metavar="R,...", help="Offered loads, requests per second.")
    ] = None
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens, the result of `vllm bench "
            "serve --save-detailed`, or requests.jsonl of LLMServingSim's bench; the first "
            "--requests of it. What was measured is shown next to the prediction.",
        ),
    ] = None
    prompt: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1,
            help="Prompt tokens of a request, with --acceptance or plain decoding alone. Default: "
            "the server's, else 256.",
        ),
    ] = None  # fmt: skip
    output: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Output tokens of a request, likewise."),
    ] = None
    scale: Annotated[
        str | None, typer.Option(metavar="S,...", help="Speed the arrivals file up by these.")
    ] = None
    process: ProcessOption = None

    @property
    def sizes(self) -> dict[str, int] | None:
        """The lengths named, by the fields of `trace_by_position`; None with a file of arrivals.

        Raises DraftsimError if both are named.
        """
        named = {"prompt_length": self.prompt, "tokens": self.output}
        found = {name: value for name, value in named.items() if value is not None}
        if found and self.arrivals is not None:
            raise DraftsimError(
                f"{self.arrivals} has the requests' lengths: drop --prompt and --output"
            )
        return found if self.arrivals is None else None

    def scenarios(self, base: Scenario, table: LatencyTable) -> list[Scenario]:
        """Return a scenario for each load that is named; with none, for the batches of `table`.

        Raises DraftsimError if loads contradict each other or hold an impossible value.
        """
        from simulator.serving import over_batches, over_rates
        from simulator.tune.costs import default_batches

        batch, rate, arrivals = self.batch, self.rate, self.arrivals
        if batch is not None and (rate is not None or arrivals is not None):
            raise DraftsimError(
                "--batch keeps the engine full: drop --rate and --arrivals, or --batch"
            )
        if self.scale is not None and (arrivals is None or rate is not None):
            raise DraftsimError("--scale speeds up --arrivals: give a file, and no --rate")
        if self.process is not None or arrivals is not None or rate is not None:
            of = arrivals_of(None if rate is None else 1.0, arrivals, self.process)
            if rate is not None:
                return over_rates(replace(base, arrivals=of), positive_numbers("--rate", rate))
            scales = positive_numbers("--scale", self.scale or "1")
            return [replace(base, arrivals=of.scaled(s)) for s in scales]  # type: ignore[attr-defined]
        one_stream = base.mode in ONE_STREAM
        if batch is not None:
            sizes = batch_sizes("--batch", batch)
        else:
            sizes = [1] if one_stream else BATCHES if table.batch_free else default_batches(table)
        if one_stream and sizes != [1]:
            raise DraftsimError(
                f"mode {base.mode!r} serves one stream at a time: use --batch 1, --rate or "
                "--arrivals"
            )
        return over_batches(base, sizes)


def arrivals_of(rate: float | None, arrivals: Path | None, process: str | None) -> Arrivals:
    """Return a file of arrivals, or those of a process at `rate`.

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


def requests_of(scenarios: Sequence[Scenario]) -> int:
    """Return requests of all scenarios and replications together, under one policy."""
    total = 0
    for scenario in scenarios:
        each = scenario.requests or 0
        if (lengths := getattr(scenario.arrivals, "rows", None)) is not None:
            each = min(each, len(lengths[0])) or len(lengths[0])
        total += each * scenario.replications
    return total


def where(
    jobs: int | None, cluster: str | None, requests: int, timeline: Path | None
) -> Executor | None:
    """Return where that many requests are simulated; None: in this process."""
    if timeline is not None and (cluster is not None or (jobs or 1) > 1):
        raise DraftsimError("--timeline is drawn by this process: drop --jobs and --cluster")
    if cluster is None and (jobs == 1 or timeline is not None or (not jobs and requests < MANY)):
        return None
    return chosen_executor(jobs, cluster)
