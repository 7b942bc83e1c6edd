"""Recording a pair into its run folder: all of it, what it lacks, or its latencies again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.common.progress import progress_bar
from traces.digits import counted
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.models.loading import Pair
    from profiler.profile import Settings
    from profiler.prompts import Prompt
    from profiler.recording.run import RunInfo


SOURCES = ("*exits*", "*starts-*", "trees-*", "sampled")
"""Recordings that a folder may hold in addition to its trace and latencies."""


@dataclass(frozen=True)
class RecordingJob:
    """The pair of `info`, what to record of it, and the run folder it goes to.

    ``pair`` is that pair where it is loaded already; ``limit`` prompts are used, or all, of the
    ``categories`` if any are named.  Latencies are measured at contexts that the recording reaches,
    and up to ``max_context``.
    """

    info: RunInfo
    prompts: Path
    out: Path
    settings: Settings
    limit: int | None = None
    pair: Pair | None = None
    categories: Sequence[str] = ()
    max_context: int | None = None

    def texts(self) -> list[Prompt]:
        """Return the prompts, read from their file."""
        from profiler.prompts import read_prompts

        return read_prompts(self.prompts, self.limit, self.categories)

    def load(self) -> Pair:
        """Return the pair, loaded unless it is."""
        return self.info.load() if self.pair is None else self.pair


def run_profile(recording: RecordingJob, force: bool = False, *, wide: bool = False) -> None:
    """Profile the pair into its run folder; what is finished of it is kept, unless `force`.

    With `wide`, passes wider than the verification of the longest draft are measured too: other
    draft sources make them.
    """
    from profiler.checks.differences import answers_to, score
    from profiler.models.seq2seq import is_seq2seq
    from profiler.profile import (
        latency_options,
        profile_latency,
        profile_trace,
        trace_options,
    )
    from profiler.recording.run import begin, is_done
    from traces.acceptance.sampling import GREEDY
    from traces.store.files import read_trace
    from traces.store.parquet import read_meta

    out, settings = recording.out, recording.settings
    texts, pair = recording.texts(), recording.load()
    longest = max(len(pair.encode(text.text, settings.chat)) for text in texts)
    sizes = longest, settings.max_new_tokens
    whole = settings.grid.reaching(*sizes)
    cut = settings.grid.covering(*sizes, recording.max_context or 0)
    settings = replace(settings, grid=cut if wide else cut.narrow())
    if is_seq2seq(pair.target) and max(settings.grid.batches) > 1:
        raise DraftsimError(
            "--batch: encoder-decoder pairs are decoded one request at a time: use --batch 1"
        )

    def is_kept(name: str, *options: dict[str, Any]) -> bool:
        path = out / f"{name}.parquet"
        return not force and path.is_file() and is_done(path, read_meta(path), *options)

    stages = {"trace": replace(settings, sampling=GREEDY)}
    if not settings.sampling.greedy:
        stages["sampled"] = settings
    kept = [n for n, s in stages.items() if is_kept(n, trace_options(pair, texts, s))]
    # A table of more cells will do: that of `profile latency`, or made for other draft sources.
    grids = settings.grid, cut, whole
    timed = is_kept("latency", *(latency_options(pair, replace(settings, grid=g)) for g in grids))
    begin(recording.info, out, force)
    with progress_bar() as progress:
        for name in (n for n in stages if n not in kept):
            profile_trace(pair, texts, stages[name], out, progress)
        if not timed:
            if settings.grid != whole and recording.max_context is None:
                note(
                    "latencies are measured as far as the recording reaches: contexts of up to "
                    f"{max(settings.grid.contexts)} tokens, passes over up to "
                    f"{max(settings.grid.widths)}; `draftsim profile latency --max-context N` "
                    "measures more"
                )
            profile_latency(pair, settings, out, progress)
    trace = read_trace(out / "trace.parquet")
    if timed and len(kept) == len(stages):
        note(f"{out} is finished and kept: --force records it again")
    else:
        spent = trace.meta["recording_s"]
        took = (
            f"{spent['all'] / 60:.0f} minutes" if spent["plain"] is None
            else f"{spent['all'] / spent['plain']:.2f} times plain decoding"
        )  # fmt: skip
        note(
            f"recorded {counted(trace.tokens, 'token')} of "
            f"{counted(len(trace.requests), 'prompt')} into {out}; "
            f"recording took {took}"
        )
    if answers := answers_to(trace, texts):
        note(f"the target {score(pair, trace, answers)}")


def measure_latency(
    info: RunInfo, out: Path, settings: Settings, max_context: int | None = None
) -> None:
    """Measure the latency table of a folder that holds a recording, the parts of sources included.

    A table that it already holds is replaced.  ``max_context``: measure contexts of up to this many
    tokens, or those that the recording reaches if they are longer.

    Raises
    ------
    DraftsimError
        If the folder holds no recording of greedy outputs.
    """
    from commands.profile.sources import remeasure
    from profiler.latency.table import sizes_of
    from profiler.profile import profile_latency
    from traces.store.files import read_trace

    if not (out / "trace.parquet").is_file():
        raise DraftsimError(f"{out} holds no recording: make one with `draftsim profile pair`")
    again = " again" if (out / "latency.parquet").is_file() else ""
    note(f"the latencies of {out} are measured{again}, its recordings are kept")
    pair, requests = info.load(), read_trace(out / "trace.parquet").requests
    sizes = sizes_of(requests)
    grid = (
        settings.grid.reaching(*sizes) if max_context is None
        else settings.grid.covering(*sizes, max_context)
    )  # fmt: skip
    settings = replace(settings, grid=grid)
    with progress_bar() as progress:
        profile_latency(pair, settings, out, progress)
    remeasure(pair, info, out, repeats=settings.grid.repeats)


def add_sampled(recording: RecordingJob) -> None:
    """Record the sampled outputs that a complete run folder lacks; what it holds is kept.

    Raises DraftsimError if it holds outputs sampled otherwise.
    """
    from profiler.profile import profile_trace
    from traces.store.files import read_trace

    out, settings = recording.out, recording.settings
    path = out / "sampled.parquet"
    if path.is_file():
        if (held := read_trace(path).sampling) != settings.sampling:
            raise DraftsimError(
                f"{out} holds outputs sampled at {held.label}: name another --out for "
                f"{settings.sampling.options}"
            )
        return
    texts = recording.texts()
    note(
        f"recording outputs sampled at {settings.sampling.label} of {counted(len(texts), 'prompt')}"
    )
    with progress_bar() as progress:
        profile_trace(recording.load(), texts, settings, out, progress)


def add_signals(info: RunInfo, out: Path) -> None:
    """Add the draft signals that the recordings of a run folder lack.

    Raises DraftsimError if it holds none, or the pair's weights are others than recorded.
    """
    from profiler.recording.trace import lacking, with_signals
    from traces.store.files import read_trace, write_trace
    from traces.store.identity import check_together

    paths = [path for name in ("trace", "sampled") if (path := out / f"{name}.parquet").is_file()]
    if not paths:
        raise DraftsimError(f"{out} holds no recording: make one with `draftsim profile pair`")
    pair = info.load()
    for path in paths:
        trace = read_trace(path)
        check_together({str(path): trace.meta, "the pair": pair.meta})
        if not (columns := lacking(trace)):
            note(f"{path} has all draft signals already")
            continue
        with progress_bar() as progress:
            task = progress.add_task("adding signals", total=len(trace.requests))
            trace = with_signals(trace, pair.draft, lambda: progress.advance(task))  # noqa: B023
        write_trace(trace, path)
        note(f"added {', '.join(columns)} to {path}")


def complete(recording: RecordingJob, asked: Sequence[str], force: bool = False) -> None:
    """Profile the pair, unless its folder holds a finished profile and `force` is False.

    A finished profile is kept, with outputs sampled now where it lacks them; `asked` is what will
    be recorded next.
    """
    out, drawn = recording.out, recording.settings.sampling
    if force or not all((out / f"{n}.parquet").is_file() for n in ("trace", "latency")):
        run_profile(recording, force, wide=True)
        return
    say_complete(out, [*([] if drawn.greedy else [f"outputs sampled at {drawn.label}"]), *asked])
    if not drawn.greedy:
        add_sampled(recording)


def say_complete(out: Path, asked: Sequence[str]) -> None:
    """Say what a complete folder keeps, and what is to be recorded into it besides."""
    from traces.store.files import read_trace

    trace = read_trace(out / "trace.parquet")
    found = {path.stem for name in SOURCES for path in out.glob(f"{name}.parquet")}
    besides = f" (it also holds {', '.join(sorted(found))})" if found else ""
    note(
        f"{out} is complete: its trace of {counted(len(trace.requests), 'prompt')} and its "
        f"latencies are kept{besides}; recording what is missing of: {', '.join(asked)}"
    )
