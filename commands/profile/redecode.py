"""Decoding the prompts of a run again, for real, under lossy verification rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from commands.common.output import note, say_memory
from commands.common.progress import progress_bar
from traces.digits import counted
from traces.errors import DraftsimError, FileError

if TYPE_CHECKING:
    from commands.profile.recording import RecordingJob
    from profiler.checks.spot_check import PlannedPolicy
    from profiler.prompts import CodeTask
    from traces.acceptance.trace import Trace
    from traces.store.outputs import Output


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
    from traces.sources.methods import method
    from traces.sources.registry import DRAFT_MODEL

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
        from simulator.papers.compare import REAL_RUNS

        wanted += [RunToRecord(*run) for run in REAL_RUNS]
    return wanted


def decode_again(
    recording: RecordingJob,
    wanted: Sequence[RunToRecord],
    memory: Path | None = None,
    sampled: bool = False,
) -> None:
    """Decode the recorded prompts under every job; keep rounds and outputs.

    Decoded are those that the recording's limit and categories leave.  What the folder holds
    of that is kept, and a stopped run goes on with the prompt where it stopped; under a `memory`,
    which may have changed since, finished runs are decoded again.

    Outputs are scored where a prompt asks for a number: in the prompts file, which need not be
    there any more, or when the run was recorded.
    """
    from policies.from_file import file_of
    from profiler.checks.differences import answers_to
    from profiler.checks.interleaved import check_options, rule_conditions, unfinished
    from profiler.checks.spot_check import real_run, run_requests
    from profiler.prompts import read_prompts
    from traces.store.files import read_trace
    from traces.store.outputs import write_run

    out, file = recording.out, recording.prompts
    greedy = read_trace(out / "trace.parquet")
    everything = read_trace(out / "sampled.parquet") if sampled else greedy
    chosen, part = part_of(everything, recording.limit, recording.categories)
    answers = answers_to(greedy, read_prompts(file) if file.is_file() else ())
    planned = [_planned_run(job, chosen, memory) for job in wanted]
    if memory is None:
        planned = [job for job in planned if not _is_kept(out, *job[:2])]
    if not planned:
        return
    for one, trace, _ in planned:
        note(f"decoding {counted(len(trace.requests), 'prompt')} with {one.label}")
    pair = recording.load()
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
    from traces.store.outputs import find_runs

    if not decodes and not (out.is_dir() and find_runs(out)):
        raise DraftsimError(
            f"--run-code: {out} has no outputs decoded under a rule: add --verify RULE"
        )
    if prompts is None or not _tasks(prompts):
        raise DraftsimError(
            f"--run-code: no prompt of {prompts} has tests: give unit_tests, or solution and "
            "mutant, to some (docs/profile.md)"
        )


def score_code(out: Path, prompts: Path) -> None:
    """Run the code of every output kept in the folder whose prompt has tests; keep which pass."""
    from profiler.checks.sandbox import judge
    from traces.store.outputs import find_runs, quality_of_code, read_run, write_outputs

    tasks = _tasks(prompts)

    @cache  # a rule seldom changes every text
    def passes(id: str, text: str) -> bool:
        return judge(tasks[id][1], text).passed

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


def _tasks(file: Path) -> dict[str, tuple[str, CodeTask]]:
    """Return category and tests of the prompts of a file that have tests, by id."""
    from profiler.prompts import read_prompts

    return {p.id: (p.category, p.code) for p in read_prompts(file) if p.code is not None}


def part_of(
    trace: Trace, limit: int | None, categories: Collection[str]
) -> tuple[Trace, str | None]:
    """Return the requests that are chosen, in the trace's order, and what they are; None if all
    are.
    """
    from profiler.prompts import chosen_of

    chosen = {r.id for r in chosen_of(trace.requests, "the recording", limit, categories)}
    keep = [i for i, request in enumerate(trace.requests) if request.id in chosen]
    if len(keep) == len(trace.requests):
        return trace, None
    limited = [] if limit is None else [f"{len(keep)}-prompts"]
    return trace.select(keep), "+".join([*categories, *limited])


def _is_kept(out: Path, planned: PlannedPolicy, trace: Trace) -> bool:
    """Return True if the run folder holds what `planned` decodes of `trace`."""
    from traces.store.outputs import find_run, find_runs, read_run

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
    from policies.rules.context import CSD
    from policies.rules.memory import OnlineCorrectionMemory
    from profiler.checks.spot_check import PlannedPolicy
    from simulator.chosen import load_policies, load_rule
    from traces.replay.corrections import calibrated, split_requests
    from traces.sources.methods import Method, resolved

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
