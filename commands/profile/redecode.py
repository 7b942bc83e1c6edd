"""Decoding the prompts of a run again, for real, under lossy verify rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from commands.common.inputs import load_policies, load_rule, say_memory
from commands.common.output import note
from traces.errors import DraftsimError, FileError

if TYPE_CHECKING:
    from profiler.checks.spot_check import Arm
    from profiler.recording.run import RunInfo
    from traces.acceptance.trace import Trace


class Job(NamedTuple):
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
) -> list[Job]:
    """What the options of `profile` ask for."""
    from traces.sources.methods import method
    from traces.sources.registry import DRAFT_MODEL

    wanted = [Job(policy, verify, split) for policy in policies or ["fixed"] if verify]
    for name in methods:
        chosen = method(name)
        if chosen.source != DRAFT_MODEL or chosen.rule == "exact":
            raise DraftsimError(
                f"method {name!r} is lossless: its rounds are those of a replay, which is exact "
                "(`draftsim simulate`)"
            )
        wanted.append(Job(chosen.policy, chosen.rule, split))
    if papers:
        from simulator.papers.real_runs import REAL_RUNS

        wanted += [Job(*run) for run in REAL_RUNS]
    return wanted


def decode_again(
    info: RunInfo,
    out: Path,
    wanted: Sequence[Job],
    memory: Path | None = None,
    sampled: bool = False,
) -> None:
    """Decode the prompts of the run folder `out` under every job; keep rounds and outputs.

    What the folder holds of that is kept, so that a stopped run goes on where it stopped; under
    a `memory`, which may have changed since, everything is decoded.
    """
    from profiler.checks.outputs import real_run
    from profiler.checks.spot_check import run_arms
    from profiler.profile import progress_bar
    from traces.store.files import read_trace
    from traces.store.outputs import write_run

    greedy = read_trace(out / "trace.parquet")
    everything = read_trace(out / "sampled.parquet") if sampled else greedy
    planned = [_arm(job, everything, memory) for job in wanted]
    if memory is None:
        planned = [job for job in planned if not _is_kept(out, *job[:2])]
    if not planned:
        return
    pair = info.load()
    with progress_bar() as progress:
        for arm, trace, calibrated_on in planned:
            task = progress.add_task(f"decoding {arm.label}", total=len(trace.requests))
            advance = partial(progress.advance, task)
            measured = run_arms(pair, trace, [arm], repeats=1, advance=advance)
            provenance = {
                "run": out.name, "memory_file": memory.name if memory else None,
                "calibrated_on": calibrated_on, "sampling": trace.sampling.meta,
            }  # fmt: skip
            run = real_run(pair, greedy, arm, measured, provenance)
            note(f"wrote {write_run(run, out)}")
            say_memory([run.log])


def _is_kept(out: Path, arm: Arm, trace: Trace) -> bool:
    """Whether the run folder holds what `arm` decodes of `trace`."""
    from traces.store.outputs import find_run, find_runs, read_run

    assert arm.rule is not None
    for file in find_runs(out):
        try:
            run = read_run(file)
        except FileError:
            continue  # damaged: decoded again
        if find_run([run], arm.policy, arm.rule, trace) is not None:
            note(f"{file} is finished and kept as it is: delete it to decode again")
            return True
    return False


def _arm(job: Job, trace: Trace, memory: Path | None) -> tuple[Arm, Trace, list[str] | None]:
    """The arm of a job, the requests it decodes, and those its memory was calibrated on."""
    from policies.rules.context import CSD
    from policies.rules.memory import OnlineCorrectionMemory
    from profiler.checks.spot_check import Arm
    from traces.replay.corrections import calibrated, split_requests
    from traces.sources.methods import Method, resolved

    [(name, policy)] = load_policies([job.policy], trace)
    job = job._replace(rule=resolved(Method("", job.policy, job.rule, ""), trace).rule)
    rule = load_rule(job.rule, trace)
    if rule is None or rule.lossless:
        raise DraftsimError(
            f"the rule {job.rule!r} is lossless: its rounds are those of a replay, which is exact "
            "(`draftsim simulate`)"
        )
    arm = Arm(name, policy, rule)
    learns = isinstance(rule, CSD) and rule.use_memory
    if memory is not None and learns:
        arm = replace(arm, rule=load_rule(job.rule, trace, memory))
    if job.split is None:
        return arm, trace, None
    train, rest = split_requests(trace, job.split)
    if not rest:
        raise DraftsimError(f"--split {job.split:g} leaves no prompt to decode: lower it")
    if isinstance(rule, CSD) and learns:
        # What the policy meets decides what is counted, so every job has its own memory.
        table = calibrated(trace.select(train), policy, OnlineCorrectionMemory(rule.capacity))
        table.sizes.clear()  # from here on they are the run's own
        arm = replace(arm, rule=rule.with_memory(table))
    return arm, trace.select(rest), [trace.requests[i].id for i in train]
