"""The loads that ``draftsim serve`` runs: batch sizes, rates, or an arrivals file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from commands.common.options import batch_sizes, chosen_executor, positive_numbers
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.executors import Executor
    from simulator.serving import Scenario
    from traces.latency.table import LatencyTable

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

        Raises DraftsimError if a value is impossible, and as `simulator.serving.study.over_loads`.
        """
        from simulator.serving.study import over_loads

        return over_loads(
            base, table, arrivals=self.arrivals, process=self.process,
            concurrency=None if self.batch is None else batch_sizes("--batch", self.batch),
            rate=None if self.rate is None else positive_numbers("--rate", self.rate),
            scale=None if self.scale is None else positive_numbers("--scale", self.scale),
        )  # fmt: skip


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
