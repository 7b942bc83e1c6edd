"""Options of ``draftsim profile`` and ``validate`` that concern a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.common.options import TRACE_VARIABLE, as_named
from traces.store.recordings import DEFAULT_TRACE

MeasuredEngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Instead, measure what an iteration of a serving engine costs (vllm), in the "
        "engine's own environment (`make vllm`); without --draft or --eagle, drafts come from a "
        "proposer of ours, which runs no passes.",
    ),
]
EagleOption = Annotated[
    str | None,
    typer.Option(
        "--eagle",
        metavar="DIR",
        help="With --engine: an EAGLE or EAGLE-3 head that the engine itself drafts with; --draft "
        "is a draft model of its own.",
    ),
]
LongestOption = Annotated[
    int,
    typer.Option("--engine-longest", min=1, help="With --engine: longest draft of a request."),
]
EngineBatchOption = Annotated[
    int, typer.Option("--engine-batch", min=1, help="With --engine: requests that run at a time.")
]
EngineLengthOption = Annotated[
    int,
    typer.Option("--engine-length", min=256, help="With --engine: longest prompt and output."),
]
MinutesOption = Annotated[
    float,
    typer.Option(
        min=0,
        help="With --engine: what was disturbed is measured again, and points are added, as long "
        "as this is not over.",
    ),
]
CheckedEngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Instead, serve the same requests in a real engine (vllm) and in the simulator; "
        "--run is of `draftsim profile --engine`, in whose environment this runs.",
    ),
]
HttpOption = Annotated[
    bool,
    typer.Option(
        "--http",
        help="With --engine: send the requests to the engine's real server instead, and say what "
        "server, streaming and its loop add.",
    ),
]
AcceptanceOption = Annotated[
    str,
    typer.Option(
        "--trace", metavar="T", help="With --engine: the acceptance that drafts are given.",
        envvar=TRACE_VARIABLE, show_default=DEFAULT_TRACE, callback=as_named,
    ),
]  # fmt: skip
LoadOption = Annotated[
    str | None,
    typer.Option(
        "--load",
        metavar="closed:N,...",
        help="With --engine: closed loops. Default without --rate and --arrivals: closed:1,4,8,16.",
    ),
]
RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="R,...", help="With --engine: Poisson loads, requests per second."
    ),
]
EngineArrivalsOption = Annotated[
    Path | None,
    typer.Option(
        "--arrivals",
        metavar="FILE",
        help="With --engine: send requests at the times of a file, as `serve --arrivals` reads it; "
        "their lengths are the recording's.",
    ),
]
RequestsOption = Annotated[
    int, typer.Option("--requests", min=1, help="With --engine: requests of every load.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="With --engine: of arrivals and prompts.")]
AsyncOption = Annotated[
    bool,
    typer.Option(
        "--async-scheduling", help="With --engine: schedule the next iteration during this one."
    ),
]
GraphsOption = Annotated[
    bool, typer.Option("--cuda-graphs", help="With --engine: run captured graphs, not eagerly.")
]
PrefixOption = Annotated[
    bool, typer.Option("--prefix-caching", help="With --engine: keep the cache of known prompts.")
]
DefaultsOption = Annotated[
    bool,
    typer.Option(
        "--defaults",
        help="Of the real engine: also serve the loads without speculation in one with vLLM's own "
        "defaults (asynchronous scheduling, graphs, prefix caching), and tell the speedup over it.",
    ),
]
SyntheticOption = Annotated[
    str | None,
    typer.Option(
        "--synthetic",
        metavar="R,...",
        help="With --engine: instead, let vLLM accept the draft positions with these chances "
        "(rejection_sample_method synthetic, on a GPU), with the drafter of the profile.",
    ),
]
