"""Recording a pair into its run folder, and decoding its prompts again under lossy rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commands.common.output import note, say_memory
from commands.common.progress import clock, progress_bar
from commands.profile.sources import remeasure
from policies.from_file import file_of
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from profiler.checks.sandbox import judge_code
from profiler.prompts import CodeTask, Prompt, chosen_of, prompts_held, read_prompts
from profiler.recording.run import RunInfo, begin, is_done
from simulator.chosen import load_policies, load_rule
from simulator.papers.compare import REAL_RUNS
from traces.acceptance.sampling import GREEDY
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError, FileError
from traces.replay.corrections import calibrated, split_requests
from traces.sources.methods import Method, method, resolved
from traces.sources.registry import DRAFT_MODEL
from traces.store.files import read_trace, write_trace
from traces.store.identity import check_together
from traces.store.outputs import (
    Output,
    find_run,
    find_runs,
    quality_of_code,
    read_run,
    write_outputs,
    write_run,
)
from traces.store.parquet import read_meta

if TYPE_CHECKING:
    from profiler.checks.spot_check import PlannedPolicy
    from profiler.latency.table import Grid
    from profiler.models.loading import Pair
    from profiler.profile import Settings


SOURCES = ("*exits*", "*starts-*", "trees-*", "sampled")
"""Recordings that a folder may hold in addition to its trace and latencies."""


@dataclass(frozen=True)
class RecordingJob:
    """The pair of `info`, what to record of it, and the run folder it goes to.

    ``limit`` prompts are used, or all, of the ``categories`` if any are named.  Latencies are
    measured at contexts that the recording reaches, and up to ``max_context``.  ``given`` are the
    parameters that the command line has values for.
    """

    info: RunInfo
    prompts: Path
    out: Path
    settings: Settings
    limit: int | None = None
    categories: Sequence[str] = ()
    max_context: int | None = None
    given: Collection[str] = ()

    def texts(self) -> list[Prompt]:
        """Return the prompts, read from their file."""
        return read_prompts(self.prompts, self.limit, self.categories)

    @cached_property
    def pair(self) -> Pair:
        """The pair, loaded when it is first asked for."""
        return self.info.load()


def run_profile(recording: RecordingJob, force: bool = False, *, wide: bool = False) -> None:
    """Profile the pair into its run folder; what is finished of it is kept, unless `force`.

    With `wide`, passes wider than the verification of the longest draft are measured too: other
    draft sources make them.
    """
    from profiler.checks.differences import answers_to, score
    from profiler.models.loading import IGNORED
    from profiler.profile import (
        encoded_prompts,
        fitted_grid,
        held_grid,
        latency_options,
        profile_latency,
        profile_trace,
        trace_options,
    )

    out, settings = recording.out, recording.settings
    texts, pair = recording.texts(), recording.pair
    lengths = [len(ids) for ids in encoded_prompts(pair, texts, settings)]
    sizes, grid = (max(lengths), settings.max_new_tokens), settings.grid.beginning(min(lengths))
    cut = grid.covering(*sizes, recording.max_context or 0)
    asked = cut if wide else cut.narrow()
    settings = replace(settings, grid=fitted_grid(pair, asked))

    def is_kept(name: str, *options: dict[str, Any]) -> bool:
        path = out / f"{name}.parquet"
        return not force and path.is_file() and is_done(path, read_meta(path), *options)

    stages = {"trace": replace(settings, sampling=GREEDY)}
    if not settings.sampling.greedy:
        stages["sampled"] = settings
    kept = [n for n, s in stages.items() if is_kept(n, trace_options(pair, texts, s))]
    for path in (out / f"{name}.parquet" for name in kept):
        if prompts_held(read_trace(path), texts, pair) != texts:
            raise DraftsimError(
                f"{path} was recorded on other texts or categories than {recording.prompts} has: "
                "name another --out, or --force to record over it"
            )
    # A table of more cells will do: that of `profile latency`, or made for other draft sources.
    path = out / "latency.parquet"
    held = held_grid(pair, settings, read_meta(path)) if path.is_file() else settings.grid
    timed = is_kept("latency", latency_options(pair, replace(settings, grid=held)))
    begin(recording.info, out, force)
    for role in ("target", "draft"):
        if ignored := pair.meta[role].get(IGNORED):
            named = ", ".join(f"{name} {value}" for name, value in ignored.items())
            note(f"the {role}'s generation settings are not followed, which change texts: {named}")
    with progress_bar() as progress:
        for name in (n for n in stages if n not in kept):
            profile_trace(pair, texts, stages[name], out, progress)
        if not timed:
            if settings.grid.contexts != asked.contexts:
                _say_cut(settings.grid)
            elif asked != grid.reaching(*sizes) and recording.max_context is None:
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
            clock(spent["all"]) if spent["plain"] is None
            else f"{spent['all'] / spent['plain']:.2f} times plain decoding"
        )  # fmt: skip
        note(
            f"recorded {counted(trace.tokens, 'token')} of "
            f"{counted(len(trace.requests), 'prompt')} into {out}; "
            f"recording took {took}"
        )
    if answers := answers_to(trace, texts):
        note(f"the target {score(pair, trace, answers)}")


def _say_cut(grid: Grid) -> None:
    """Print the longest context measured, where the pair has no positions for a longer one."""
    note(
        f"latencies are measured at contexts of up to {max(grid.contexts)} tokens: the pair has no "
        f"positions for a pass of {grid.widest} tokens after a longer one"
    )


def measure_latency(
    info: RunInfo, out: Path, settings: Settings, max_context: int | None = None
) -> None:
    """Measure the latency table of a folder that holds a recording, the parts of sources included.

    Contexts are measured as far as the recording reaches, or up to ``max_context`` tokens if that
    is longer.  Raises DraftsimError if the folder holds no recording of greedy outputs.
    """
    from profiler.latency.table import sizes_of
    from profiler.profile import fitted_grid, profile_latency

    if not (out / "trace.parquet").is_file():
        raise DraftsimError(f"{out} holds no recording: make one with `draftsim profile pair`")
    again = " again" if (out / "latency.parquet").is_file() else ""
    note(f"the latencies of {out} are measured{again}, its recordings are kept")
    pair, requests = info.load(), read_trace(out / "trace.parquet").requests
    sizes, shortest = sizes_of(requests), min(r.prompt_length for r in requests)
    grid = settings.grid.beginning(shortest)
    asked = grid.reaching(*sizes) if max_context is None else grid.covering(*sizes, max_context)
    settings = replace(settings, grid=fitted_grid(pair, asked))
    if settings.grid.contexts != asked.contexts:
        _say_cut(settings.grid)
    with progress_bar() as progress:
        profile_latency(pair, settings, out, progress)
    remeasure(pair, info, out, repeats=settings.grid.repeats)


def add_signals(info: RunInfo, out: Path) -> None:
    """Add the draft signals that the recordings of a run folder lack.

    Raises DraftsimError if it holds none, or the pair's weights are others than recorded.
    """
    from profiler.recording.trace import lacking, with_signals

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
    be recorded next.  Raises DraftsimError if an option that was given, or a prompt, is not that of
    the finished profile.
    """
    from profiler.profile import profile_trace

    out, drawn = recording.out, recording.settings.sampling
    if force or not all((out / f"{n}.parquet").is_file() for n in ("trace", "latency")):
        run_profile(recording, force, wide=True)
        return
    trace = read_trace(out / "trace.parquet")
    held: dict[str, Any] = {
        "max_new_tokens": trace.requests[0].max_new_tokens, "max_gamma": trace.max_gamma,
        "chat": bool(trace.meta.get("chat_template")),
    }  # fmt: skip
    _refuse_other(recording, held)
    if recording.prompts.is_file():  # if all is recorded, the file may be gone
        texts = recording.texts()
        known = {text.id for text in prompts_held(trace, texts, recording.pair)}
        if missing := [text.id for text in texts if text.id not in known]:
            raise DraftsimError(
                f"{out} is complete, and was not recorded on prompt {missing[0]!r} of "
                f"{recording.prompts}: give the same prompts and --limit, or name another --out"
            )
    if not drawn.greedy:
        asked = [f"outputs sampled at {drawn.label}", *asked]
    found = {path.stem for name in SOURCES for path in out.glob(f"{name}.parquet")}
    besides = f" (it also holds {', '.join(sorted(found))})" if found else ""
    prompts = counted(len(trace.requests), "prompt")
    note(
        f"{out} is complete: its trace of {prompts} and its latencies are kept{besides}; "
        f"recording what is missing of: {', '.join(asked)}"
    )
    if drawn.greedy:
        return
    if (path := out / "sampled.parquet").is_file():
        made = read_trace(path)
        if made.sampling != drawn:
            raise DraftsimError(
                f"{out} holds outputs sampled at {made.sampling.label}: name another --out for "
                f"{drawn.options}"
            )
        _refuse_other(recording, {"seed": made.meta["sampling"].get("seed", 0)})
        if other := {r.id for r in made.requests} - {r.id for r in trace.requests}:
            raise DraftsimError(
                f"{path} has outputs of prompt {min(other)!r}, which the trace lacks: remove that "
                "file and repeat the command"
            )
        return
    texts = recording.texts()
    note(f"recording outputs sampled at {drawn.label} of {counted(len(texts), 'prompt')}")
    with progress_bar() as progress:
        profile_trace(recording.pair, texts, replace(recording.settings, **held), out, progress)


def _refuse_other(recording: RecordingJob, held: Mapping[str, Any]) -> None:
    """Raise DraftsimError if an option of `held` was given with another value than recorded."""
    for name, value in held.items():
        if name in recording.given and getattr(recording.settings, name) != value:
            option = f"--{name.replace('_', '-')}"
            was = "without it" if value is False else f"with {option} {value}"
            raise DraftsimError(
                f"{option}: {recording.out} is complete, and was recorded {was}: leave {option} "
                "out, or name another --out"
            )


class RunToRecord(NamedTuple):
    """One run to record."""

    policy: str
    rule: str
    split: float | None = None
    """Share of the prompts to calibrate a memory on; only the others are then decoded."""


def jobs(
    verify: str | None,
    policies: Sequence[str] | None,
    methods: Sequence[str],
    split: float | None,
    papers: bool,
) -> list[RunToRecord]:
    """Return the jobs that the options of `profile` ask for."""
    wanted = [RunToRecord(policy, verify, split) for policy in policies or ["fixed"] if verify]
    for name in methods:
        chosen = method(name)
        if chosen.source != DRAFT_MODEL or chosen.rule == "exact":
            raise DraftsimError(
                f"method {name!r} is lossless: its rounds are those of a replay, which is exact "
                "(`draftsim simulate`)"
            )
        wanted.append(RunToRecord(chosen.policy, chosen.rule, split))
    if papers:
        wanted += [RunToRecord(*run) for run in REAL_RUNS]
    return wanted


def decode_again(
    recording: RecordingJob,
    wanted: Sequence[RunToRecord],
    memory: Path | None = None,
    sampled: bool = False,
) -> None:
    """Decode the recorded prompts under every job; keep rounds and outputs.

    Finished runs of the folder are kept, and a stopped one goes on with its next prompt; under
    a `memory`, which may have changed since, finished runs are decoded again.
    """
    from profiler.checks.differences import answers_to
    from profiler.checks.interleaved import check_options, rule_conditions, unfinished
    from profiler.checks.spot_check import real_run, run_requests

    out, file, pair = recording.out, recording.prompts, recording.pair
    greedy = read_trace(out / "trace.parquet")
    everything = read_trace(out / "sampled.parquet") if sampled else greedy
    chosen, part = part_of(everything, recording.limit, recording.categories)
    texts = prompts_held(greedy, read_prompts(file), pair) if file.is_file() else ()
    answers = answers_to(greedy, texts)
    planned = [_planned_run(job, chosen, memory) for job in wanted]
    if memory is None:
        planned = [job for job in planned if not _is_kept(out, *job[:2])]
    if not planned:
        return
    for one, trace, _ in planned:
        note(f"decoding {counted(len(trace.requests), 'prompt')} with {one.label}")
    with progress_bar() as progress:
        for one, trace, calibrated_on in planned:
            task = progress.add_task(f"decoding {one.label}", total=len(trace.requests))
            advance = partial(progress.advance, task)
            assert one.rule is not None
            options = check_options(
                pair, trace, [], repeats=1, arm=one.label, file=file_of(one.policy),
                calibrated_on=calibrated_on, **rule_conditions(one.rule),
            )  # fmt: skip
            with unfinished(out, options, len(trace.requests), note) as kept:
                measured = run_requests(pair, trace, [one], repeats=1, advance=advance, kept=kept)
                provenance = {
                    "run": out.name, "memory_file": memory.name if memory else None,
                    "calibrated_on": calibrated_on, "sampling": trace.sampling.meta,
                }  # fmt: skip
                provenance |= {"part": part} if part else {}
                run = real_run(pair, greedy, one, measured, provenance, answers)
                note(f"wrote {write_run(run, out)}")
            say_memory([run.log])


def check_code(out: Path, prompts: Path | None, decodes: bool) -> None:
    """Raise DraftsimError unless `--run-code` has outputs to run and tests to run them with."""
    if not decodes and not (out.is_dir() and find_runs(out)):
        raise DraftsimError(
            f"--run-code: {out} has no outputs decoded under a rule: add --verify RULE"
        )
    if prompts is None or not _tasks(read_prompts(prompts)):
        raise DraftsimError(
            f"--run-code: no prompt of {prompts} has tests: give unit_tests, or solution and "
            "mutant, to some (docs/profile.md)"
        )


def score_code(recording: RecordingJob) -> None:
    """Run the code of every output kept in the folder whose prompt has tests; keep which pass."""
    out, trace = recording.out, read_trace(recording.out / "trace.parquet")
    tasks = _tasks(prompts_held(trace, read_prompts(recording.prompts), recording.pair))

    @cache  # a rule seldom changes every text
    def passes(id: str, text: str) -> bool:
        return judge_code(tasks[id][1], text).passed

    def judged(output: Output, category: str) -> Output:
        if output.id not in tasks or tasks[output.id][0] != category:
            return output
        own, greedy = (passes(output.id, text) for text in (output.text, output.reference))
        return replace(output, passed=own, greedy_passed=greedy)

    runs = {file: read_run(file) for file in find_runs(out)}
    with progress_bar() as progress:
        task = progress.add_task("running code", total=sum(len(r.outputs) for r in runs.values()))
        for file, run in runs.items():
            outputs = []
            for output, request in zip(run.outputs, run.log.requests, strict=True):
                outputs.append(judged(output, request.category))
                progress.advance(task)
            write_outputs(replace(run, outputs=outputs), file)
            tested, own, greedy = quality_of_code(outputs)
            note(
                f"{run.log.policy} under {run.log.verify}: code passes for {own} of {tested} "
                f"prompts (greedy {greedy})"
            )


def _tasks(prompts: Iterable[Prompt]) -> dict[str, tuple[str, CodeTask]]:
    """Return category and tests of the prompts that have tests, by id."""
    return {p.id: (p.category, p.code) for p in prompts if p.code is not None}


def part_of(
    trace: Trace, limit: int | None, categories: Collection[str]
) -> tuple[Trace, str | None]:
    """Return the chosen requests in the trace's order, and what they are; None if all are."""
    chosen = {r.id for r in chosen_of(trace.requests, "the recording", limit, categories)}
    keep = [i for i, request in enumerate(trace.requests) if request.id in chosen]
    if len(keep) == len(trace.requests):
        return trace, None
    limited = [] if limit is None else [f"{len(keep)}-prompts"]
    return trace.select(keep), "+".join([*categories, *limited])


def _is_kept(out: Path, planned: PlannedPolicy, trace: Trace) -> bool:
    """Return True if the run folder holds what `planned` decodes of `trace`."""
    assert planned.rule is not None
    for file in find_runs(out):
        try:
            run = read_run(file)
        except FileError:
            continue  # damaged: decoded again
        if find_run([run], planned.policy, planned.rule, trace) is not None:
            note(f"{file} is finished and kept: delete it to decode again")
            return True
    return False


def _planned_run(
    job: RunToRecord, trace: Trace, memory: Path | None
) -> tuple[PlannedPolicy, Trace, list[str] | None]:
    """Return the run of a job, the requests it decodes, and those its memory was calibrated on."""
    from profiler.checks.spot_check import PlannedPolicy

    [(name, policy)] = load_policies([job.policy], trace, say=note)
    job = job._replace(rule=resolved(Method("", job.policy, job.rule, ""), trace).rule)
    rule = load_rule(job.rule)
    if rule is None or rule.lossless:
        raise DraftsimError(
            f"the rule {job.rule!r} is lossless: its rounds are those of a replay, which is exact "
            "(`draftsim simulate`)"
        )
    planned = PlannedPolicy(name, policy, rule)
    learns = isinstance(rule, CSD) and rule.use_memory
    if memory is not None and learns:
        planned = replace(planned, rule=load_rule(job.rule, memory))
    if job.split is None:
        return planned, trace, None
    train, rest = split_requests(trace, job.split)
    if not rest:
        raise DraftsimError(f"--split {job.split:g} leaves no prompt to decode: lower it")
    if isinstance(rule, CSD) and learns:
        # What the policy meets decides what is counted, so every job has its own memory.
        table = calibrated(trace.select(train), policy, OnlineCorrectionMemory(rule.capacity))
        table.sizes.clear()  # from here on they are the run's own
        planned = replace(planned, rule=rule.with_memory(table))
    return planned, trace.select(rest), [trace.requests[i].id for i in train]
