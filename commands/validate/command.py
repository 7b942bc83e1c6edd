"""``draftsim validate``: predictions held against real runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from commands.common.options import (
    MemoryOption,
    PolicyOption,
    SourceOption,
    TrustOption,
    VerifyOption,
    one_rule,
)
from commands.common.output import JsonOption, OutOption, emit, placed
from commands.common.quiet import columns_shown
from commands.engine.options import CheckedEngine
from commands.validate.flow import Given, RealRuns
from commands.validate.spot_check import SpotCheck, say_verdict
from traces.errors import DraftsimError

COPY = "the measured times are kept there, so copy it and name the copy"


def validate(
    served: CheckedEngine,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder of `draftsim profile`.")
    ] = None,
    policy: PolicyOption = None,
    forced: Annotated[
        bool,
        typer.Option("--forced", help="Take drafts and verdicts from the trace: tests cost alone."),
    ] = False,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Use the sampled trace of the run.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Real runs of every policy and prompt.")] = 3,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None,
    assisted: Annotated[
        bool, typer.Option(help="Also run transformers' own assisted generation.")
    ] = True,
    remeasure: Annotated[
        bool,
        typer.Option(
            "--remeasure",
            help="Predict from latencies measured again, between the real runs: leaves out "
            "how the machine has changed since the profile.",
        ),
    ] = False,
    source: SourceOption = None,
    verify: VerifyOption = None,
    memory: MemoryOption = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="B,...", help="Decode static batches of these sizes instead."),
    ] = None,
    recorded: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Instead, run nothing: a recording with measured runs (bundled, or a folder of "
            "one or more that the GPU suite unpacked), and the bounds it keeps; repeatable.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=placed, help="With --recorded: the tables, as Markdown."
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Run policies for real, interleaved, and compare with what was predicted.

    A stopped check goes on where it stopped when the command is repeated, but for --verify;
    one with --engine that is done goes on for more --repeats.

    With a lossy --verify rule the predicted seconds price the rounds really decoded; what
    replay along the recorded text would have said instead, and the quality of the output,
    stand in further columns.

    With --batch the prompts are decoded in groups, each until its slowest has ended, and
    compared with the simulator's static batches; profile with the same --batch first.

    With --source the source drafts in place of the draft model; --policy also takes named
    systems with a source of their own.  Profile with --exit-layers first.

    `texts_diverged` counts requests that wrote another text than the recorded one (with --engine:
    than by plain decoding), as low precision can decide a near-tie of two tokens otherwise.
    From that token on their rounds are not compared, and their seconds are left out.

    With --recorded nothing is run: the measurements of a GPU are compared with what its latencies
    predict, pair by pair, mode, batch and policy.  `drift` is how much slower single passes were
    during those runs than when the latencies were measured.

    With --engine rounds and, in closed loops, iterations are to be equal; seconds are compared
    by load and by kind of iteration.  --source says whose recorded drafts decide what is accepted;
    `machine` is how much slower a control load ran than when the engine was measured, and
    --remeasure measures it again between the arms.  With --http the clients are those of a server:
    `request_s` and `iteration_s` are what it adds around requests and iterations, `share` of the
    requests' time; they predict from loops of plain decoding that are no row, which also tell how
    much slower the engine is than its latencies (`slowdown`).
    """
    served.check(policy, remeasure)
    if recorded is not None:
        from commands.validate.recorded import recorded_check

        if run is not None:
            raise DraftsimError("--recorded runs nothing: drop --run")
        recorded_check(recorded, markdown, json, out)
        return
    if run is None:
        raise DraftsimError("name a run folder with --run, or a recording with --recorded")
    from profiler.recording.run import only_writer, read_run

    if served.engine is not None:
        from commands.engine.check import columns_of, engine_check, say_checked

        with only_writer(run, COPY) if run.is_dir() else nullcontext():
            found = engine_check(served, run, source, policy, repeats, limit, remeasure)
        emit("validate", found, json, show=columns_of(served, remeasure), out=out)
        if json is None:
            say_checked(served, found)
        return
    if markdown is not None:
        raise DraftsimError("--markdown is for --recorded: drop it, or use --json")
    policy, verify = one_rule(policy, verify)
    if remeasure and (batch or verify):
        raise DraftsimError("--remeasure is for lossless runs, one at a time")
    kind = _kind(policy, source, verify, memory, batch, sampled, forced, assisted)
    # Refused now where it is no run or may only be read, and not once torch is loaded or after
    # minutes of decoding.
    read_run(run, trust_remote_code)
    with only_writer(run, COPY):
        rows = kind(Given(run, policy, repeats, limit, remeasure, trust_remote_code)).rows()
    emit("validate", rows, json, show=columns_shown(rows), out=out)
    if json is None:
        say_verdict(rows)


def _kind(
    policy: list[str] | None, source: str | None, verify: str | None, memory: Path | None,
    batch: str | None, sampled: bool, forced: bool, assisted: bool,
) -> Callable[[Given], RealRuns]:  # fmt: skip
    """Return the kind of real runs that the options ask for.

    Raises DraftsimError if they ask for several kinds at once.
    """
    from simulator.predict import split_systems

    if source is not None or split_systems(policy)[1]:
        from commands.validate.sources import SourceRuns

        if batch is not None or verify is not None or memory is not None or sampled or forced:
            raise DraftsimError(
                "other draft sources are run greedily, one request at a time: drop --batch, "
                "--verify, --memory, --sampled and --forced"
            )
        return lambda given: SourceRuns(given, source)
    if batch is not None:
        from commands.validate.batched import BatchRuns

        if verify is not None or memory is not None or sampled:
            raise DraftsimError("--batch runs greedily: drop --verify, --memory and --sampled")
        return lambda given: BatchRuns(given, batch, forced)
    if verify is not None:
        from commands.validate.lossy import LossyRuns

        if forced:
            raise DraftsimError("a forced run takes its verdicts from the trace: drop --verify")
        return lambda given: LossyRuns(given, verify, memory, sampled)
    if memory is not None:
        raise DraftsimError("--memory belongs to a rule that has one: add --verify csd")
    return lambda given: SpotCheck(given, forced, sampled, assisted)
