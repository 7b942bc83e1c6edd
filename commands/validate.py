"""``draftsim validate``: predictions held against real runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer

from commands.engine_options import (
    AcceptanceOption,
    CheckedEngineOption,
    LoadOption,
    RateOption,
    RequestsOption,
    SeedOption,
)
from commands.inputs import (
    DEFAULT_TRACE,
    MemoryOption,
    PolicyOption,
    TrustOption,
    VerifyOption,
    load_policies,
    replay_all,
    say_left_out,
)
from commands.output import JsonOption, OutOption, emit, note, say_unjudged
from commands.quiet import QUIETLY, say_machine, with_machine
from commands.ranking import is_unfitted, named
from commands.sources import SourceOption, split_systems
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.loading import Pair
    from traces.rounds import RoundLog
    from traces.trace import Trace

ARMS = (
    "autoregressive", "fixed:gamma=2", "fixed:gamma=4", "fixed:gamma=8", "confidence",
    "confidence:roc_update=in_call", "hf-heuristic", "hf-heuristic:full_accept_means=budget",
    "gammatune", "gammatune-plus", "svip", "adaedl", "draft-and-verify", "oracle",
)  # fmt: skip
"""Arms of a spot check where none is named: every policy family, fixed lengths as control."""

ENGINE_ARMS = ("fixed:gamma=2", "fixed:gamma=4", "gammatune")
"""Arms in a real engine where none is named, beside no speculation."""

ASSISTED = {
    "constant": (
        "confidence:roc_update=in_call",
        {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
         "assistant_confidence_threshold": 0.4},
    ),
    "heuristic": (
        "hf-heuristic:gamma=5,gamma_max=none",
        {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic_transient",
         "assistant_confidence_threshold": 0.0},
    ),
}  # fmt: skip
"""transformers' schedules: the policy that replays each, and its generation settings."""


REMEDY = "predict from latencies measured between the runs, with --remeasure"


def validate(
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
    repeats: Annotated[int, typer.Option(min=1, help="Real runs of every arm and prompt.")] = 3,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many prompts.")] = None,
    assisted: Annotated[
        bool, typer.Option(help="Also run transformers' own assisted generation.")
    ] = True,
    remeasure: Annotated[
        bool,
        typer.Option(
            "--remeasure",
            help="Predict from latencies measured again, in turn with the real runs: leaves out "
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
        Path | None, typer.Option(metavar="FILE", help="Of --recorded: the tables, as Markdown.")
    ] = None,
    trust_remote_code: TrustOption = False,
    engine: CheckedEngineOption = None,
    trace: AcceptanceOption = DEFAULT_TRACE,
    load: LoadOption = None,
    rate: RateOption = None,
    requests: RequestsOption = 40,
    seed: SeedOption = 0,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Run policies for real, interleaved, and compare with what was predicted.

    With a lossy --verify rule the predicted seconds price the rounds really decoded; what
    replay along the recorded text would have said instead, and the quality of the output,
    stand in further columns.

    With --batch the prompts are decoded in groups, each until its slowest has ended, and
    compared with the simulator's static batches; profile with the same --batch first.

    With --source the source drafts in place of the draft model; --policy also takes named
    systems with a source of their own.  Profile with --exit-layers first.

    With --recorded nothing is run: what a GPU measured is held against what its latencies
    predict, pair by pair, mode, batch and policy.  `drift` is how much slower single passes were
    beside those runs than when the latencies were measured.

    With --engine rounds and, in closed loops, iterations are to be equal; seconds are compared
    by load and by kind of iteration.  `machine` is how much slower a control load ran than when
    the engine was measured.
    """
    if recorded is not None:
        from commands.recorded import recorded_check

        if run is not None:
            raise DraftsimError("--recorded runs nothing: drop --run")
        recorded_check(recorded, markdown, json, out)
        return
    if run is None:
        raise DraftsimError("name a run folder with --run, or a recording with --recorded")
    if engine is not None:
        from commands.engine_check import SHOWN, engine_check, load_names, say_kinds

        found = engine_check(
            engine, run, trace, policy or ENGINE_ARMS, load_names(load, rate), requests, repeats,
            limit, seed,
        )  # fmt: skip
        emit("validate", found, json, show=SHOWN, out=out)
        if json is None:
            say_kinds(found)
        return
    if markdown is not None:
        raise DraftsimError("--markdown is for --recorded: drop it, or use --json")
    if remeasure and (batch or verify):
        raise DraftsimError("--remeasure is for lossless runs, one at a time")
    if source is not None or split_systems(policy)[1]:
        from commands.source_check import source_check

        if batch is not None or verify is not None or memory is not None or sampled or forced:
            raise DraftsimError(
                "other draft sources are run greedily, one request at a time: drop --batch, "
                "--verify, --memory, --sampled and --forced"
            )
        rows = source_check(run, policy, source, repeats, limit, remeasure, trust_remote_code)
    elif batch is not None:
        from commands.batched import batch_check

        if verify is not None or memory is not None or sampled:
            raise DraftsimError("--batch runs greedily: drop --verify, --memory and --sampled")
        rows = batch_check(run, policy, batch, forced, repeats, limit, trust_remote_code)
    elif verify is not None:
        from commands.lossy import lossy_check
        from traces.files import read_latency

        if forced:
            raise DraftsimError("a forced run takes its verdicts from the trace: drop --verify")
        rows = lossy_check(run, policy, verify, memory, sampled, repeats, limit, trust_remote_code)
        say_unjudged(read_latency(run / "latency.parquet"))
    elif memory is not None:
        raise DraftsimError("--memory belongs to a rule that has one: add --verify csd")
    else:
        rows = spot_check(
            run, policy, forced, sampled, repeats, limit, assisted, remeasure, trust_remote_code
        )
    emit("validate", rows, json, show=[c for c in rows.columns if c not in QUIETLY], out=out)
    if json is None:
        say_verdict(rows)


def spot_check(
    run: Path,
    policy: list[str] | None = None,
    forced: bool = False,
    sampled: bool = False,
    repeats: int = 3,
    limit: int | None = None,
    assisted: bool = True,
    remeasure: bool = False,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """The rows of `validate`; the measured times are kept in the run folder.

    With `remeasure` the sweeps over the latencies are spread over the real runs, the rows are
    predicted from them, and the column `profile_error` is the error of the run's own table.
    That second table is kept in the run folder (`commands.remeasure.CHECKED`).
    """
    from commands.remeasure import Remeasured
    from profiler.profile import progress_bar
    from profiler.run import read_run
    from profiler.seq2seq_start import is_seq2seq
    from profiler.spotcheck import Arm, rounds_differ, run_arms
    from simulator.pricing import price
    from simulator.validation import compare
    from traces.files import read_latency, read_trace
    from traces.measured import MeasuredRuns, write_measured

    info = read_run(run, trust_remote_code)
    trace = read_trace(run / ("sampled.parquet" if sampled else "trace.parquet"))
    latency = read_latency(run / "latency.parquet")
    if limit is not None:
        trace = trace.select(spread_over_categories(trace, limit))
    chosen = named(load_policies(policy or list(ARMS), trace))
    if not policy:
        lacking = {n: p for n, p in chosen if not trace.signals.issuperset(p.reads)}
        say_left_out(lacking, trace.signals)
        chosen = [(n, p) for n, p in chosen if n not in lacking]
    for name in (n for n, p in chosen if is_unfitted(p)):
        note(f"{name} runs unfitted: with the estimates and the rate it comes with")
    if "autoregressive" not in dict(chosen):
        chosen = load_policies(["autoregressive"], trace) + chosen
    replayed = {log.policy: log for log in replay_all(trace, chosen)}
    pair = info.load()
    total = repeats * len(trace.requests) * len(chosen)
    again = Remeasured(pair, total) if remeasure else None
    with progress_bar() as progress:
        task = progress.add_task("decoding for real", total=total)

        def advance() -> None:
            progress.advance(task)
            if again is not None:
                again.advance()

        measured = run_arms(
            pair, trace, [Arm(name, p) for name, p in chosen], forced=forced, repeats=repeats,
            advance=advance,
        )  # fmt: skip
        logs = list(replayed.values())
        if again is not None:
            rows = again.compare(logs, measured.times, latency, run)
        else:
            rows = compare([price(log, latency) for log in logs], measured.times)
        rows = with_machine(rows, latency, measured.machine)
        # Sampled runs draw other numbers than the recording did: only greedy rounds can agree.
        if trace.temperature == 0:
            rows["rounds_differ"] = [
                rounds_differ(measured.logs[name], replayed[name]) for name in rows["policy"]
            ]
            # With encoder-decoders transformers 5.23 drafts otherwise than the draft model would.
            if assisted and not forced and not is_seq2seq(pair.target):
                rows = pd.concat([rows, _assisted_rows(pair, trace, progress)], ignore_index=True)
    say_machine(latency, measured.machine, None if remeasure else REMEDY)
    meta = {**pair.meta, "machine": measured.machine}
    write_measured(MeasuredRuns(measured.times, meta), run / "measured.parquet")
    return rows


def _assisted_rows(pair: Pair, trace: Trace, progress: Any) -> pd.DataFrame:
    """transformers' assisted generation: its target passes against the replayed rounds."""
    import torch

    from profiler.spotcheck import assisted_generation

    rows = []
    for schedule, (text, settings) in ASSISTED.items():
        log: RoundLog = replay_all(trace, load_policies([text], trace), first=0)[0]
        expected = log.per_request([1] * len(log))
        task = progress.add_task(f"transformers, {schedule}", total=len(trace.requests))
        seconds, differ = 0.0, 0
        for i, request in enumerate(trace.requests):
            prompt = torch.tensor(request.prompt_ids, device=pair.device)
            _, passes, wall = assisted_generation(pair, prompt, request.max_new_tokens, **settings)
            differ += abs(passes - int(expected[i]))
            seconds += wall
            progress.advance(task)
        rows.append(
            {
                "policy": f"transformers {schedule}", "verify": "exact", "batch": 1,
                "forced": False, "predicted_s": None, "measured_s": seconds, "error": None,
                "spread": None, "rounds_differ": differ, "speedup_error": None,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def say_verdict(rows: pd.DataFrame) -> None:
    """What the comparison amounts to, in words."""
    from simulator.validation import verdict

    priced = rows.dropna(subset=["predicted_s"])
    said = verdict(priced)
    note(
        f"{int(rows['rounds_differ'].sum())} differing rounds; "
        f"median |error| {said.median_error:.1%}, worst {said.worst_error:+.1%} "
        f"({said.worst_policy}), of the speedups {priced['speedup_error'].abs().median():.1%}; "
        f"{len(said.misranked)} of {said.ranked_pairs} clearly different pairs misranked, "
        f"{len(said.wrong_sign)} of {said.sign_arms} on the wrong side of 1x"
    )
    if "profile_error" in priced:
        note(
            "predicted from latencies measured between the real runs; from those of the profile "
            f"before them the median |error| is {priced['profile_error'].abs().median():.1%}"
        )


def spread_over_categories(trace: Trace, limit: int) -> list[int]:
    """`limit` request indices, in turn from each category."""
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(trace.requests):
        groups.setdefault(request.category, []).append(i)
    order = sorted(
        range(len(trace.requests)), key=lambda i: groups[trace.requests[i].category].index(i)
    )
    return sorted(order[:limit])
