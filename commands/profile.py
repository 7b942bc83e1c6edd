"""``draftsim profile``: measure latencies and record acceptance of a model pair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.output import note
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.profile import Settings
    from profiler.run import RunInfo


def profile(
    target: Annotated[str, typer.Option(metavar="DIR", help="Target model: directory or hub id.")],
    draft: Annotated[str, typer.Option(metavar="DIR", help="Draft model: directory or hub id.")],
    prompts: Annotated[
        Path,
        typer.Option(metavar="FILE", help="JSON lines with prompt and category, or plain lines."),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder for the recordings.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16; default float32 on cpu, bfloat16 on cuda."
        ),
    ] = None,
    max_gamma: Annotated[int, typer.Option(min=1, help="Longest draft that can be replayed.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Output limit per prompt.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, help="Also record sampled outputs at this temperature; 0 = greedy only."
        ),
    ] = 0.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use so many prompts, in turn from each category.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed repeats of every latency cell.")] = 25,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; 1 gives the steadiest times.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of sampled outputs.")] = 0,
) -> None:
    """Profile a pair: its latency table and acceptance trace, written into a run folder.

    A stopped profile goes on where it stopped when the command is repeated.
    """
    from profiler.latency import Grid
    from profiler.profile import Settings
    from profiler.run import RunInfo

    settings = Settings(max_new_tokens, max_gamma, temperature, seed, Grid(repeats=repeats))
    info = RunInfo(_kept(target), _kept(draft), device, dtype, threads if device == "cpu" else None)
    run_profile(info, prompts, out, settings, limit)


def run_profile(
    info: RunInfo, prompts: Path, out: Path, settings: Settings, limit: int | None = None
) -> None:
    """Profile the pair of `info` into the folder `out`."""
    from dataclasses import replace

    from profiler.loading import read_prompts
    from profiler.profile import profile_latency, profile_trace, progress_bar
    from profiler.run import write_run

    texts = read_prompts(prompts, limit)
    pair = info.load()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DraftsimError(f"cannot make the run folder {out}: {error.strerror}") from None
    write_run(info, out)
    with progress_bar() as progress:
        greedy = replace(settings, temperature=0.0)
        trace = profile_trace(pair, texts, greedy, out, progress)
        if settings.temperature > 0:
            profile_trace(pair, texts, settings, out, progress)
        profile_latency(pair, settings, out, progress)
    spent = trace.meta["recording_s"]
    note(
        f"recorded {trace.tokens} tokens of {len(trace.requests)} prompts into {out}; "
        f"recording took {spent['all'] / spent['plain']:.2f} times plain decoding"
    )


def _kept(name: str) -> str:
    """A directory as an absolute path, so that the run can be used from anywhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
