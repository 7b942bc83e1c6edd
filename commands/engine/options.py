"""Options of ``draftsim profile engine`` and ``validate engine``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from commands.common.options import as_named, batch_sizes, rates
from profiler.engines.engine import EngineOptions, find_engine
from simulator.serving import ArrivalFile, ArrivalTimes, ClosedLoop, Poisson
from simulator.serving.arrivals import Arrivals
from traces.errors import DraftsimError
from traces.latency.table import ENGINE_MODES
from traces.store.recordings import DEFAULT_TRACE, TRACE_VARIABLE


def _as_mode(value: str | None) -> str | None:
    if value is not None and value.upper() not in ENGINE_MODES:
        raise DraftsimError(f"--cudagraph-mode is {value!r}, expected {', '.join(ENGINE_MODES)}")
    return None if value is None else value.upper()


DefaultsOption = Annotated[
    bool,
    typer.Option(
        "--defaults",
        help="Also serve the loads in an engine with vLLM's own defaults (asynchronous scheduling, "
        "graphs, prefix caching) and no drafter, and print the speedup over it.",
    ),
]


@dataclass(frozen=True)
class MeasuredEngine:
    """The options of a serving engine that is measured."""

    heading: ClassVar[str] = "The engine"

    engine: Annotated[
        str, typer.Option(metavar="NAME", help="A serving engine, installed here (`make vllm`).")
    ] = "vllm"
    draft: Annotated[
        str | None, typer.Option(metavar="DIR", help="Draft model that the engine drafts with.")
    ] = None
    engine_eagle: Annotated[
        str | None,
        typer.Option(
            "--eagle", metavar="DIR",
            help="EAGLE or EAGLE-3 head that the engine drafts with.",
        ),
    ] = None  # fmt: skip
    engine_longest: Annotated[
        int, typer.Option(min=1, help="Longest draft of a request: num_speculative_tokens.")
    ] = 8
    engine_batch: Annotated[
        int, typer.Option(min=1, help="Requests that run at a time: max_num_seqs.")
    ] = 16
    engine_length: Annotated[
        int, typer.Option(min=256, help="Longest prompt and output: max_model_len.")
    ] = 2048
    async_scheduling: Annotated[
        bool, typer.Option("--async-scheduling", help="Schedule the next step during this one.")
    ] = False
    cudagraph_mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help=f"Run captured CUDA graphs: {', '.join(ENGINE_MODES)}. The first is vLLM's own "
            "default, with full graphs for the longest drafts alone. Implies --defaults: an engine "
            "without a drafter replays more full graphs.",
            callback=_as_mode,
        ),
    ] = None
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="Reuse the cache of shared prefixes.")
    ] = False
    defaults: DefaultsOption = False
    minutes: Annotated[
        float,
        typer.Option(
            min=0,
            help="Minutes of measuring. Every cell is measured once, even beyond this; the rest of "
            "the time goes to repeats and sizes in between.",
        ),
    ] = 10.0

    def check_graphs(self) -> None:
        """Raise DraftsimError if CUDA graphs are asked for and no CUDA device is here."""
        if self.cudagraph_mode is None:
            return
        import torch

        if not torch.cuda.is_available():
            raise DraftsimError(
                f"--cudagraph-mode {self.cudagraph_mode}: no CUDA device is found: leave it out"
            )

    def options(
        self, target: str, draft: str | None, eagle: str | None, dtype: str | None, threads: int
    ) -> EngineOptions:
        """Return how the engine is started."""
        more = find_engine(self.engine).settings(
            self.async_scheduling, self.cudagraph_mode, self.prefix_caching
        )
        return EngineOptions(
            target, draft=draft, eagle=eagle, longest=self.engine_longest,
            max_batch=self.engine_batch, max_model_len=self.engine_length, dtype=dtype or "auto",
            threads=threads, more=more,
        )  # fmt: skip


@dataclass(frozen=True)
class CheckedEngine:
    """The options of a serving engine that the simulator is compared with."""

    heading: ClassVar[str] = "The engine and its load"

    engine: Annotated[
        str, typer.Option(metavar="NAME", help="The engine that --run was measured with.")
    ] = "vllm"
    http: Annotated[
        bool,
        typer.Option(
            "--http",
            help="Send the requests to the engine's HTTP server, and print what server and "
            "streaming add.",
        ),
    ] = False
    defaults: DefaultsOption = False
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="R,...",
            help="Let vLLM alone accept the draft positions with these chances "
            "(rejection_sample_method synthetic, on a GPU), with the drafter of the profile.",
        ),
    ] = None
    trace: Annotated[
        str,
        typer.Option(
            metavar="T", help="Recording that decides what is accepted.", envvar=TRACE_VARIABLE,
            show_default=DEFAULT_TRACE, callback=as_named,
        ),
    ] = DEFAULT_TRACE  # fmt: skip
    load: Annotated[
        str | None,
        typer.Option(
            metavar="closed:N,...",
            help="Closed loops. Default without --rate and --arrivals: those of closed:1,4,8,16 "
            "that fit into --engine-batch of the profile.",
        ),
    ] = None
    rate: Annotated[
        str | None, typer.Option(metavar="R,...", help="Poisson loads, requests per second.")
    ] = None
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Send requests at the times of a file, as `serve --arrivals` reads it; their "
            "lengths are the recording's.",
        ),
    ] = None
    requests: Annotated[int, typer.Option(min=1, help="Requests in every load.")] = 40
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and prompts.")] = 0

    def check(self, policy: list[str] | None, remeasure: bool) -> None:
        """Raise DraftsimError if one option excludes another.

        ``policy`` and ``remeasure`` are those options of the verb.
        """
        if self.synthetic is not None and (self.http or remeasure or self.defaults or policy):
            raise DraftsimError(
                "--synthetic compares vLLM's synthetic acceptance alone: drop --http, --remeasure, "
                "--defaults and --policy"
            )
        if self.http and self.defaults:
            raise DraftsimError(
                "--defaults runs the engine without a server: drop --http or --defaults"
            )
        if self.http and remeasure:
            raise DraftsimError(
                "--http measures the engine's speed by control runs of its own: drop --remeasure"
            )


def named_loads(
    load: str | None, rate: str | None = None, file: Path | None = None
) -> dict[str, Arrivals]:
    """Return loads by name: ``closed:4``, ``rate:2.5``, ``arrivals:FILE`` for the times of a file.

    Raises DraftsimError naming what is wrong with the options, or with the file.
    """
    kind, _, sizes = (load or ("" if rate or file else "closed:1,4,8,16")).partition(":")
    if load is not None and kind != "closed":
        raise DraftsimError(
            f"--load is {load!r}, expected closed:N,...; open loads are --rate and --arrivals"
        )
    found: dict[str, Arrivals] = {}
    if kind:
        found |= {f"closed:{n}": ClosedLoop(n) for n in batch_sizes("--load", sizes)}
    if rate:
        found |= {f"rate:{r:g}": Poisson(r) for r in rates("--rate", rate)}
    if file:
        timed = ArrivalFile(file)
        _ = timed.read  # read now: refused before an engine is started
        found[f"arrivals:{file.name}"] = ArrivalTimes(timed)
    return found
