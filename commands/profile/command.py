"""``draftsim profile``: measure latencies and record acceptance of a model pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.common.options import (
    MemoryOption,
    PolicyOption,
    TrustOption,
    VerifyOption,
    batch_sizes,
)
from commands.engine.options import MeasuredEngine
from commands.profile.recording import (
    RecordingJob,
    add_sampled,
    add_signals,
    is_complete,
    measure_latency,
    run_profile,
    say_complete,
)
from commands.profile.redecode import check_code, decode_again, jobs, score_code
from commands.profile.sources import (
    check_layers,
    profile_drafters,
    profile_sources,
    split_drafters,
)
from traces.errors import DraftsimError


def profile(
    target: Annotated[str, typer.Option(metavar="DIR", help="Target model: directory or hub id.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder for the recordings.")],
    engine: MeasuredEngine,
    draft: Annotated[
        str | None, typer.Option(metavar="DIR", help="Draft model: directory or hub id.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with prompt and category, or plain lines."),
    ] = None,
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
        int | None, typer.Option(min=1, help="Use this many prompts, in turn from each category.")
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Use only the prompts of this category; repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed sweeps over all latency cells.")] = 15,
    batch: Annotated[
        str,
        typer.Option(metavar="B,...", help="Batch sizes whose latencies are measured, 1 included."),
    ] = "1",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; 1 gives the steadiest times.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of sampled outputs.")] = 0,
    record_batch: Annotated[
        int,
        typer.Option(
            "--record-batch",
            min=1,
            help="Decode this many prompts at once while recording: several times faster.",
        ),
    ] = 1,
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
            "MTP), or its trees, eagle2:model=DIR; of --exit-layers: also follow a setting, like "
            "early-exit:tau=0.7; repeatable.",
        ),
    ] = None,
    heads_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --exit-layers: texts to train heads on, as in --prompts."
        ),
    ] = None,
    latency_only: Annotated[
        bool,
        typer.Option(
            "--latency-only",
            help="Measure only the latencies, for what the run folder holds recorded.",
        ),
    ] = False,
    signals_only: Annotated[
        bool,
        typer.Option(
            "--signals-only",
            help="Add the draft signals that older recordings of the run folder lack, by passes of "
            "the draft model over their texts, and no more.",
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
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Run the Python code in outputs decoded under --verify, and in the greedy ones, "
            "against the tests of the prompts, and keep which pass. It runs in a subprocess: no "
            "environment, an empty folder, limits of time and memory, no network, no further "
            "process. Linux only. Code is never run without this option.",
        ),
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
    from profiler.recording.run import claimed, only_writer

    if engine.engine is not None:
        if draft is not None and engine.engine_eagle is not None:
            raise DraftsimError("--draft and --eagle are two drafters: give one of them")
        if prompts is not None:
            raise DraftsimError("--engine measures iterations of made-up prompts: drop --prompts")
        from profiler.engines.engine import find_engine

        find_engine(engine.engine).check_installed()  # before what needs torch, which comes with it
        from commands.engine.profile import profile_engine

        drafter, eagle = (None if m is None else _kept(m) for m in (draft, engine.engine_eagle))
        options = engine.options(_kept(target), drafter, eagle, dtype, threads)
        with only_writer(out):
            profile_engine(engine.engine, options, out, engine.minutes, engine.defaults)
        return
    engine.check_unused()
    if draft is None or (prompts is None and not latency_only and not signals_only):
        missing = "--draft" if draft is None else "--prompts"
        raise DraftsimError(f"{missing} is missing: a pair is profiled on prompts, or an --engine")
    from profiler.latency.table import Grid
    from profiler.profile import Settings
    from profiler.recording.run import RunInfo
    from traces.acceptance.sampling import Sampling

    grid = Grid(repeats=repeats, batches=sorted({1, *batch_sizes("--batch", batch)}))
    grid = grid.drafting(max_gamma)
    settings = Settings(
        max_new_tokens, max_gamma, Sampling(temperature, top_p), seed, grid, chat, record_batch
    )
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
    drafters, others = split_drafters(source or [], temperature)
    if (others or heads_text) and not exit_layers:
        raise DraftsimError(
            "--source (but eagle and eagle2:model=DIR) and --heads-text belong to --exit-layers: "
            "add it"
        )
    for only, name in ((latency_only, "--latency-only"), (signals_only, "--signals-only")):
        if only and (again or exit_layers or drafters or force):
            raise DraftsimError(f"{name} records nothing: drop what asks for recordings")
    if latency_only and signals_only:
        raise DraftsimError("--latency-only and --signals-only: run one after the other")
    if run_code and not force:
        check_code(out, prompts, bool(again))
    if force and again:
        raise DraftsimError("--verify, --method and --papers add to a folder: drop --force")
    with only_writer(out):
        info = claimed(info, out, force)
        if signals_only:
            add_signals(info, out)
            return
        if latency_only:
            measure_latency(info, out, settings)
            return
        assert prompts is not None
        pair = None
        if exit_layers or drafters:
            pair = info.load()
            check_layers(pair)
        recording = RecordingJob(info, prompts, out, settings, limit, pair, category or [])
        if force or not ((again or run_code or pair is not None) and is_complete(out)):
            run_profile(recording, force)
        else:
            drawn = settings.sampling
            sampled = [] if drawn.greedy else [f"outputs sampled at {drawn.label}"]
            parts = ["early exits, heads, layer skip"] if exit_layers else []
            runs = [f"{job.policy} under {job.rule}" for job in again]
            say_complete(out, [*sampled, *parts, *(s.key for s in drafters), *runs])
            if sampled:
                add_sampled(recording)
        if pair is not None and exit_layers:
            profile_sources(pair, info, out, sources=others, text=heads_text, repeats=repeats)
        if pair is not None and drafters:
            profile_drafters(pair, out, drafters, repeats=repeats)
        if again:
            decode_again(recording, again, memory, not settings.sampling.greedy)
        if run_code:
            score_code(out, prompts)


def _kept(name: str) -> str:
    """Return a directory as an absolute path, so that the run can be used from anywhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
