"""``draftsim profile``: measure latencies and record acceptance of a model pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.inputs import (
    MemoryOption,
    PolicyOption,
    TrustOption,
    VerifyOption,
    batch_sizes,
)
from commands.common.output import note
from commands.engine.options import (
    EagleOption,
    EngineBatchOption,
    EngineLengthOption,
    LongestOption,
    MeasuredEngineOption,
)
from commands.profile.drafters import profile_drafters, split_drafters
from commands.profile.redecode import decode_again, jobs
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.models.loading import Pair
    from profiler.profile import Settings
    from profiler.prompts import Prompt
    from profiler.recording.run import RunInfo


@dataclass(frozen=True)
class Recording:
    """What to record of the pair of `info`, and the run folder it goes to.

    ``pair`` is that pair where it is loaded already; ``limit`` prompts are used, or all.
    """

    info: RunInfo
    prompts: Path
    out: Path
    settings: Settings
    limit: int | None = None
    pair: Pair | None = None

    def texts(self) -> list[Prompt]:
        """The prompts, read from their file."""
        from profiler.prompts import read_prompts

        return read_prompts(self.prompts, self.limit)

    def load(self) -> Pair:
        """The pair, loaded unless it is."""
        return self.info.load() if self.pair is None else self.pair


def profile(
    target: Annotated[str, typer.Option(metavar="DIR", help="Target model: directory or hub id.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder for the recordings.")],
    draft: Annotated[
        str | None, typer.Option(metavar="DIR", help="Draft model: directory or hub id.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with prompt and category, or plain lines."),
    ] = None,
    engine: MeasuredEngineOption = None,
    engine_eagle: EagleOption = None,
    engine_longest: LongestOption = 8,
    engine_batch: EngineBatchOption = 16,
    engine_length: EngineLengthOption = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16; default float32 on cpu, bfloat16 on cuda."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put every prompt into the target's chat template."),
    ] = False,
    max_gamma: Annotated[int, typer.Option(min=1, help="Longest draft that can be replayed.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Output limit per prompt.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(help="Also record sampled outputs at this temperature; 0 = greedy only."),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw sampled outputs and drafts from the likeliest tokens alone, as many as "
            "reach this probability; 1 = from all."
        ),
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use so many prompts, in turn from each category.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed sweeps over all latency cells.")] = 15,
    batch: Annotated[
        str,
        typer.Option(metavar="B,...", help="Batch sizes whose latencies are measured, 1 included."),
    ] = "1",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; 1 gives the steadiest times.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of sampled outputs.")] = 0,
    verify: VerifyOption = None,
    policy: PolicyOption = None,
    memory: MemoryOption = None,
    exit_layers: Annotated[
        bool,
        typer.Option(
            "--exit-layers",
            help="Also record every other draft source: early exit, parallel heads, layer skip; "
            "and measure what their parts cost. Heads are trained where the target has none.",
        ),
    ] = False,
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S",
            help="Also record a drafter on the target's features, eagle:model=DIR (EAGLE, EAGLE-3, "
            "MTP); of --exit-layers: also follow a setting, like early-exit:tau=0.7; repeatable.",
        ),
    ] = None,
    heads_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of --exit-layers: texts to train heads on, as in --prompts."
        ),
    ] = None,
    latency_only: Annotated[
        bool,
        typer.Option(
            "--latency-only", help="Measure the latencies of the run folder again, and no more."
        ),
    ] = False,
    split: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Calibrate csd's memory on this share of the prompts of each category, and "
            "decode only the others under --verify or --method.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Also decode under this named method with a lossy rule; repeatable."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Record over what the folder holds, finished or not."),
    ] = False,
    papers: Annotated[
        bool,
        typer.Option("--papers", help="Also decode for real what `draftsim papers` compares."),
    ] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Profile a pair: its latency table and acceptance trace, written into a run folder.

    A stopped profile goes on where it stopped when the command is repeated; a finished one is
    recorded over only with --force.

    With --exit-layers everything that other draft sources need is recorded along the trace.

    With --verify, --method or --papers the prompts are decoded again under the lossy rule and each
    --policy, and the rounds and outputs are kept in the folder; a folder that is already
    complete keeps its recordings, and only those are added.
    """
    from profiler.recording.folder import claimed, only_writer

    if engine is not None:
        if draft is not None and engine_eagle is not None:
            raise DraftsimError("--draft and --eagle are two drafters: give one of them")
        if prompts is not None:
            raise DraftsimError("--engine measures iterations of made-up prompts: drop --prompts")
        from commands.engine.profile import profile_engine
        from profiler.engines.engine import EngineOptions

        options = EngineOptions(
            _kept(target), draft=None if draft is None else _kept(draft),
            eagle=None if engine_eagle is None else _kept(engine_eagle),
            longest=engine_longest, max_batch=engine_batch, max_model_len=engine_length,
            dtype=dtype or "auto", threads=threads,
        )  # fmt: skip
        profile_engine(engine, options, out)
        return
    if draft is None or prompts is None:
        missing = "--draft" if draft is None else "--prompts"
        raise DraftsimError(f"{missing} is missing: a pair is profiled on prompts, or an --engine")
    from profiler.latency.table import Grid
    from profiler.profile import Settings
    from profiler.recording.run import RunInfo
    from traces.acceptance.sampling import Sampling

    grid = Grid(repeats=repeats, batches=sorted({1, *batch_sizes("--batch", batch)}))
    settings = Settings(max_new_tokens, max_gamma, Sampling(temperature, top_p), seed, grid, chat)
    info = RunInfo(
        _kept(target), _kept(draft), device, dtype, threads if device == "cpu" else None,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    again = jobs(verify, policy, method or [], split, papers)
    if policy and not verify:
        raise DraftsimError("--policy says how to decode under --verify: name a rule")
    if not again and (memory or split is not None):
        raise DraftsimError("--memory and --split say how to decode under --verify: name a rule")
    if memory and split is not None:
        raise DraftsimError("--memory and --split both give the rule a memory: choose one")
    drafters, others = split_drafters(source or [])
    if (others or heads_text) and not exit_layers:
        raise DraftsimError(
            "--source (but eagle:model=DIR) and --heads-text belong to --exit-layers: add it"
        )
    if latency_only and (again or exit_layers or drafters or force):
        raise DraftsimError("--latency-only records nothing: drop what asks for recordings")
    if force and again:
        raise DraftsimError("--verify, --method and --papers add to a folder: drop --force")
    with only_writer(out):
        info = claimed(info, out, force)
        if latency_only:
            measure_again(info, out, settings)
            return
        pair = None
        if exit_layers or drafters:
            from commands.profile.source_runs import check_layers

            pair = info.load()
            check_layers(pair)
        recording = Recording(info, prompts, out, settings, limit, pair)
        if force or not ((again or pair is not None) and is_complete(out)):
            run_profile(recording, force)
        elif not settings.sampling.greedy:
            add_sampled(recording)
        if pair is not None and exit_layers:
            from commands.profile.source_runs import profile_sources

            profile_sources(pair, info, out, sources=others, text=heads_text, repeats=repeats)
        if pair is not None and drafters:
            profile_drafters(pair, out, drafters, repeats=repeats)
        if again:
            decode_again(info, out, again, memory, not settings.sampling.greedy)


def measure_again(info: RunInfo, out: Path, settings: Settings) -> None:
    """Measure the latency table of a complete run folder anew, the parts of sources included."""
    from commands.profile.source_runs import has_sources, remeasure
    from profiler.profile import profile_latency, progress_bar
    from traces.store.files import read_trace

    if not is_complete(out):
        raise DraftsimError(f"{out} holds no complete profile: make one without --latency-only")
    pair, requests = info.load(), read_trace(out / "trace.parquet").requests
    longest = max(r.prompt_length for r in requests), max(r.max_new_tokens for r in requests)
    settings = replace(settings, grid=settings.grid.reaching(*longest))
    with progress_bar() as progress:
        profile_latency(pair, settings, out, progress)
    if has_sources(out):
        remeasure(pair, info, out, repeats=settings.grid.repeats)


def add_sampled(recording: Recording) -> None:
    """Record the sampled outputs that a complete run folder lacks; what it holds is kept.

    Raises DraftsimError if it holds outputs sampled otherwise.
    """
    from profiler.profile import profile_trace, progress_bar
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
    with progress_bar() as progress:
        profile_trace(recording.load(), recording.texts(), settings, out, progress)


def is_complete(out: Path) -> bool:
    """Whether the folder holds a finished profile."""
    if not all((out / f"{n}.parquet").is_file() for n in ("trace", "latency")):
        return False
    note(f"{out} is complete: what it holds is kept")
    return True


def run_profile(recording: Recording, force: bool = False) -> None:
    """Profile the pair into its run folder; what is finished of it is kept, unless `force`."""
    from profiler.models.seq2seq_settings import is_seq2seq
    from profiler.profile import (
        latency_options,
        profile_latency,
        profile_trace,
        progress_bar,
        trace_options,
    )
    from profiler.recording.folder import begin, is_done
    from traces.acceptance.sampling import GREEDY
    from traces.store.files import read_trace
    from traces.store.parquet import read_meta

    out, settings = recording.out, recording.settings
    texts, pair = recording.texts(), recording.load()
    longest = max(len(pair.encode(text.text, settings.chat)) for text in texts)
    settings = replace(settings, grid=settings.grid.reaching(longest, settings.max_new_tokens))
    if is_seq2seq(pair.target) and max(settings.grid.batches) > 1:
        raise DraftsimError(
            "--batch: encoder-decoder pairs are decoded one request at a time: use --batch 1"
        )

    def is_kept(name: str, options: dict[str, Any]) -> bool:
        path = out / f"{name}.parquet"
        return not force and path.is_file() and is_done(path, read_meta(path), options)

    stages = {"trace": replace(settings, sampling=GREEDY)}
    if not settings.sampling.greedy:
        stages["sampled"] = settings
    kept = [n for n, s in stages.items() if is_kept(n, trace_options(pair, texts, s))]
    timed = is_kept("latency", latency_options(pair, settings))
    begin(recording.info, out, force)
    with progress_bar() as progress:
        for name in (n for n in stages if n not in kept):
            profile_trace(pair, texts, stages[name], out, progress)
        if not timed:
            profile_latency(pair, settings, out, progress)
    trace = read_trace(out / "trace.parquet")
    if timed and len(kept) == len(stages):
        note(f"{out} is finished and kept as it is: --force records it anew")
        return
    spent = trace.meta["recording_s"]
    note(
        f"recorded {trace.tokens} tokens of {len(trace.requests)} prompts into {out}; "
        f"recording took {spent['all'] / spent['plain']:.2f} times plain decoding"
    )


def _kept(name: str) -> str:
    """A directory as an absolute path, so that the run can be used from anywhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
