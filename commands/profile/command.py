"""``draftsim profile``: its verbs, which measure latencies and record acceptance, and options."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from commands.common import options
from commands.engine.options import MeasuredEngine
from commands.profile import recording
from commands.profile.sources import (
    check_heads_text,
    check_layers_timed,
    profile_sources,
    split_drafters,
)
from profiler.engines.engine import find_engine
from profiler.recording.run import RunInfo, claimed, only_writer
from traces.acceptance.sampling import Sampling
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.latency.table import Grid
    from profiler.profile import Settings

RunOption = Annotated[Path, typer.Option(metavar="RUN", help="Folder for the recordings.")]
TargetOption = Annotated[
    str, typer.Option(metavar="DIR", help="Target model: directory or hub id.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; default float32 on cpu, bfloat16 on cuda."),
]
ThreadsOption = Annotated[
    int, typer.Option(min=1, help="CPU threads; 1 gives the steadiest times.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Record over what the folder holds, finished or not.")
]


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models of a pair, and how they are loaded."""

    heading: ClassVar[str] = "The pair"

    target: TargetOption
    draft: Annotated[str, typer.Option(metavar="DIR", help="Draft model: directory or hub id.")]
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    dtype: DtypeOption = None
    threads: ThreadsOption = 1
    trust_remote_code: options.TrustOption = False

    @property
    def info(self) -> RunInfo:
        """The pair as its run folder names it."""
        return RunInfo(
            kept_name(self.target), kept_name(self.draft), self.device, self.dtype,
            self.threads if self.device == "cpu" else None,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TimedPasses:
    """The sizes of passes that are timed, and how often."""

    heading: ClassVar[str] = "Latencies"

    max_gamma: Annotated[int, typer.Option(min=1, help="Longest draft that can be replayed.")] = 24
    repeats: Annotated[int, typer.Option(min=3, help="Timed sweeps over all latency cells.")] = 15
    batch: Annotated[
        str,
        typer.Option(metavar="B,...", help="Batch sizes whose latencies are measured, 1 included."),
    ] = "1"
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure passes at contexts of up to this many tokens, prompts included. Default: "
            "as many as the recording reaches; `latency`: 512 or more.",
        ),
    ] = None

    @property
    def grid(self) -> Grid:
        """The cells that are timed; DraftsimError if the batch sizes are none."""
        from profiler.latency.table import Grid

        grid = Grid(
            repeats=self.repeats, batches=sorted({1, *options.batch_sizes("--batch", self.batch)})
        )
        return grid.drafting(self.max_gamma)


@dataclass(frozen=True, kw_only=True)
class RecordedTexts:
    """The prompts, and how their outputs are decoded and recorded."""

    heading: ClassVar[str] = "The recording"

    prompts: Annotated[
        Path,
        typer.Option(metavar="FILE", help="JSON lines with prompt and category, or plain lines."),
    ]
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use this many prompts, in turn from each category.")
    ] = None
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Use only the prompts of this category; repeatable."),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Put every prompt into the target's chat template.")
    ] = False
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Output limit per prompt.")] = 128
    temperature: Annotated[
        float,
        typer.Option(help="Also record sampled outputs at this temperature; 0 = greedy only."),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw sampled outputs and drafts from the likeliest tokens alone, as many as "
            "reach this probability; 1 = from all."
        ),
    ] = 1.0
    # Every prompt has a seed of its own, which the generators take up to 2**63.
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of sampled outputs.")] = 0
    record_batch: Annotated[
        int,
        typer.Option(
            "--record-batch",
            min=1,
            help="Decode this many prompts at once while recording: several times faster.",
        ),
    ] = 1

    def settings(self, timing: TimedPasses) -> Settings:
        """Return the settings of a recording with these latencies."""
        from profiler.profile import Settings

        return Settings(
            self.max_new_tokens, timing.max_gamma, Sampling(self.temperature, self.top_p),
            self.seed, timing.grid, self.chat, self.record_batch,
        )  # fmt: skip


def pair(
    models: Models,
    texts: RecordedTexts,
    timing: TimedPasses,
    out: RunOption,
    force: ForceOption = False,
) -> None:
    """Profile a pair: its latency table and acceptance trace, written into a run folder.

    A stopped profile goes on where it stopped when the command is repeated; a finished one is
    recorded over only with --force.
    """
    with _claimed(models, texts, timing, out, force) as job:
        recording.run_profile(job, force)


def sources(
    ctx: typer.Context,
    models: Models,
    texts: RecordedTexts,
    timing: TimedPasses,
    out: RunOption,
    exit_layers: Annotated[
        bool,
        typer.Option(
            "--exit-layers",
            help="Record every other draft source: early exit, parallel heads, layer skip; and "
            "measure what their parts cost. Heads are trained where the target has none.",
        ),
    ] = False,
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S",
            help="Record a drafter on the target's features, eagle:model=DIR (EAGLE, EAGLE-3, "
            "MTP), or its trees, eagle2:model=DIR; or follow a setting, like early-exit:tau=0.7, "
            "which implies --exit-layers; repeatable.",
        ),
    ] = None,
    heads_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts to train heads on, as in --prompts. Implies --exit-layers.",
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Record other draft sources along a pair's trace, and measure what they cost.

    The pair is profiled first, unless the folder is complete; such a folder keeps its recordings,
    and only what it lacks of the sources is added.
    """
    drafters, others = split_drafters(source or [], texts.temperature)
    exit_layers = exit_layers or bool(others) or heads_text is not None
    if not (drafters or exit_layers):
        raise DraftsimError(
            "no source is named: add --exit-layers, or a drafter with --source eagle:model=DIR"
        )
    if heads_text is not None:
        check_heads_text(out, heads_text, force)
    with _claimed(models, texts, timing, out, force, _given(ctx)) as job:
        check_layers_timed(job.pair, exit_layers)
        parts = ["early exits, heads, layer skip"] if exit_layers else []
        recording.complete(job, [*parts, *(s.key for s in drafters)], force)
        profile_sources(
            job.pair, job.info, out, exits=exit_layers, drafters=drafters, sources=others,
            text=heads_text, repeats=timing.repeats,
        )  # fmt: skip


def decode(
    ctx: typer.Context,
    models: Models,
    texts: RecordedTexts,
    timing: TimedPasses,
    out: RunOption,
    verify: options.VerifyOption = None,
    policy: Annotated[list[str] | None, options.policy_option("fixed")] = None,
    memory: options.MemoryOption = None,
    split: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Calibrate csd's memory on this share of the prompts of each category, and "
            "decode only the others. Without a rule it means --verify csd.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Decode under this named method with a lossy rule; repeatable."),
    ] = None,
    papers: Annotated[
        bool, typer.Option("--papers", help="Decode what `draftsim papers` compares.")
    ] = False,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Run the Python code in outputs decoded under a rule, and in the greedy ones, "
            "against the tests of the prompts, and keep which pass. It runs in a subprocess: no "
            "environment, an empty folder, limits of time and memory, no network, no further "
            "process. Linux only. Code is never run without this option.",
        ),
    ] = False,
) -> None:
    """Decode the prompts again, for real, under lossy rules; keep rounds and outputs.

    Every --policy is decoded under the rule of --verify.  The pair is profiled first, unless the
    folder is complete; such a folder keeps its recordings, and only these runs are added.

    A stopped command goes on where it stopped when it is repeated.
    """
    if (memory or split is not None) and not (verify or method or papers):
        verify = "csd"  # the rule that has a memory
    again = recording.jobs(verify, policy, method or [], split, papers)
    if policy and not verify:
        raise DraftsimError("--policy says how to decode under --verify: name a rule")
    if not (again or run_code):
        raise DraftsimError("no rule is named: add --verify RULE, --method or --papers")
    if memory and split is not None:
        raise DraftsimError("--memory and --split both give the rule a memory: choose one")
    if run_code:
        recording.check_code(out, texts.prompts, bool(again))
    with _claimed(models, texts, timing, out, given=_given(ctx)) as job:
        runs = [f"{one.policy} under {one.rule}" for one in again]
        recording.complete(job, [*runs, *(["which code passes"] if run_code else [])])
        if again:
            recording.decode_again(job, again, memory, not job.settings.sampling.greedy)
        if run_code:
            recording.score_code(job)


def latency(models: Models, timing: TimedPasses, out: RunOption) -> None:
    """Measure again the latencies of a recorded pair and of its draft sources.

    The recordings of the folder are kept, and its latencies are replaced.
    """
    from profiler.profile import Settings

    settings = Settings(grid=timing.grid)
    with only_writer(out):
        recording.measure_latency(claimed(models.info, out), out, settings, timing.max_context)


def signals(models: Models, out: RunOption) -> None:
    """Add the draft signals that older recordings lack, by passes of the draft model.

    The draft model reads the recorded texts; nothing is decoded again.
    """
    with only_writer(out):
        recording.add_signals(claimed(models.info, out), out)


def engine(
    engine: MeasuredEngine,
    target: TargetOption,
    out: RunOption,
    dtype: DtypeOption = None,
    threads: ThreadsOption = 1,
) -> None:
    """Measure the steps of a serving engine, in the engine's own environment.

    The folder then holds the latencies of synthetic requests by batch, draft length and context.
    Without --draft or --eagle drafts come from a proposer of draftsim, which runs no passes. The
    searches of lookups are timed then, too: `draftsim serve --source ngram` prices them.
    """
    if engine.draft is not None and engine.engine_eagle is not None:
        raise DraftsimError("--draft and --eagle are two drafters: give one of them")
    find_engine(engine.engine).check_installed()  # before what needs torch, which comes with it
    engine.check_graphs()
    from commands.engine.profile import profile_engine

    drafters = (engine.draft, engine.engine_eagle)
    draft, eagle = (None if name is None else kept_name(name) for name in drafters)
    options = engine.options(kept_name(target), draft, eagle, dtype, threads)
    with only_writer(out):
        # An engine without a drafter gains most from graphs: it replays a full one at every step.
        plain = engine.defaults or engine.cudagraph_mode is not None
        profile_engine(engine.engine, options, out, engine.minutes, plain)


@contextmanager
def _claimed(
    models: Models, texts: RecordedTexts, timing: TimedPasses, out: Path, force: bool = False,
    given: Collection[str] = (),
) -> Iterator[recording.RecordingJob]:  # fmt: skip
    """Hold the run folder, and give what is to be recorded into it.

    Raises DraftsimError if the folder is another pair's, or another process writes there.
    """
    settings = texts.settings(timing)
    with only_writer(out):
        yield recording.RecordingJob(
            claimed(models.info, out, force), texts.prompts, out, settings, texts.limit,
            categories=texts.category or [], max_context=timing.max_context, given=given,
        )  # fmt: skip


def _given(ctx: typer.Context) -> set[str]:
    """Return the parameters that a value was given for."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source and source.name != "DEFAULT"}


def kept_name(name: str) -> str:
    """Return a directory as an absolute path, so that the run can be used from anywhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
