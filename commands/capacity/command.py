"""``draftsim capacity``: how many replicas a load takes, and how many a policy saves."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.capacity.said import headline, remarks, shown
from commands.common.devices import (
    AlwaysOption,
    BlocksOption,
    CaptureOption,
    GraphModeOption,
    OnePassOption,
    blocks_of,
    in_graphs,
)
from commands.common.drafted import DraftedOption, load_recording
from commands.common.inputs import (
    SERVED_TRACE,
    AcceptanceOption,
    AssumeOption,
    LatencyOption,
    MemoryOption,
    PolicyOption,
    TraceOption,
    VerifyOption,
    load_rule,
    one_rule,
)
from commands.common.latex import Shown
from commands.common.output import JsonOption, OutOption, emit, note, placed_folder, say_drawn
from commands.common.printed import print_table
from commands.common.progress import working
from commands.common.workers import ClusterOption, JobsOption, chosen_executor
from commands.serve.fleet import DEFAULT_ROUTER, RouterOption, chosen_router
from commands.serve.loads import BudgetOption, MaxBatchOption, arrivals_of
from commands.serve.plots import assumption
from commands.serve.policies import load_serving_policies
from traces.errors import DraftsimError
from traces.store.lock import only_writer

if TYPE_CHECKING:
    from simulator.serving import Scenario


def capacity(
    slo: Annotated[
        str,
        typer.Option(
            metavar="ttft=TIME,tpot=TIME,p=SHARE",
            help="Targets, as in ttft=200ms,tpot=30ms (bare numbers are seconds): time to the "
            "first token, time per token after it, and the share of requests that must meet both "
            "(default 0.95).",
        ),
    ],
    rate: Annotated[float | None, typer.Option(help="Offered load, requests per second.")] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens, at its own rate or --rate.",
        ),
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(help="Gaps between arrivals of --rate: poisson (default) or deterministic."),
    ] = None,
    policy: PolicyOption = None,
    router: RouterOption = None,
    price: Annotated[float | None, typer.Option(help="Dollars an hour of a GPU.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of a replica.")] = 1,
    trace: TraceOption = SERVED_TRACE,
    acceptance: AcceptanceOption = None,
    latency: LatencyOption = None,
    assume_batch_free: AssumeOption = False,
    source: DraftedOption = None,
    always_draft: AlwaysOption = None,
    one_pass: OnePassOption = False,
    max_batch: MaxBatchOption = None,
    kv_blocks: BlocksOption = None,
    token_budget: BudgetOption = None,
    cudagraph_capture_sizes: CaptureOption = None,
    cudagraph_mode: GraphModeOption = None,
    max_replicas: Annotated[int, typer.Option(help="Replicas to try at most.")] = 1024,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of every run. Default: the file's, or as many as a judgement needs."
        ),
    ] = None,
    replications: Annotated[int, typer.Option(help="Independent runs, for intervals.")] = 5,
    seed: Annotated[int, typer.Option(help="Of arrivals and of who replays what.")] = 0,
    verify: VerifyOption = None,
    memory: MemoryOption = None,
    jobs: JobsOption = None,
    cluster: ClusterOption = None,
    out: OutOption = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=placed_folder,
            help="Also draw replicas over request rates into this folder: PNG, SVG and PDF.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Plan capacity: the fewest replicas that keep the targets, under every policy.

    With --out an interrupted plan goes on where it was: until the end FILE.jsonl holds what is
    finished.
    """
    from simulator.capacity import parse_targets
    from simulator.capacity.rows import with_cost
    from simulator.serving import Limits, Scenario
    from traces.replay.always import drafting_always

    targets = parse_targets(slo)
    with_cost([], gpus, price)  # refused before anything is simulated
    recording = load_recording(
        trace,
        latency,
        source,
        acceptance=acceptance,
        chooses="capacity",
        assume_batch_free=assume_batch_free,
        one_pass=one_pass,
    )
    recorded, table = recording.trace, recording.latency
    policy, verify = one_rule(policy, verify)
    rule = load_rule(verify, recorded, memory)
    recording.check_rule(rule)
    limits = Limits.of_engine(table, max_batch, token_budget, blocks_of(kv_blocks, table))
    max_batch = limits.max_batch
    table.check_sizes("target", "forward", max_batch, 1)
    recording = in_graphs(recording, cudagraph_capture_sizes, cudagraph_mode, max_batch)
    table = drafting_always(recording.priced(max_batch), always_draft)
    base = Scenario(
        arrivals_of(rate, arrivals, process), limits, warmup=0.2, seed=seed,
        replications=replications, router=chosen_router(router or DEFAULT_ROUTER, 2),
    )  # fmt: skip
    asked = _rate(rate, base)
    policies = load_serving_policies(policy, recorded, table, largest=max_batch)
    executor = chosen_executor(jobs, cluster)
    kept = None if out is None else out.with_name(out.name + ".jsonl")
    with only_writer(out) if out is not None else nullcontext():
        planned = _planned(
            kept, recorded, table, policies, base, asked, targets, rule=rule, requests=requests,
            most=max_replicas, curve=plots is not None, executor=executor, say=note,
        )  # fmt: skip
        rows = with_cost(planned, gpus, price)
        note(f"{recording.said}: {headline(rows)}")
        emit(
            "capacity", rows, json, out=out, printed=lambda: print_table(shown(rows)),
            tables=lambda: [Shown(shown(rows), recording.said)],
        )  # fmt: skip
        if kept is not None:
            kept.unlink(missing_ok=True)
    for remark in remarks(rows):
        note(remark)
    if plots is not None:
        _draw(plots, rows, assumption(table, max_batch), recording.said)


def _rate(rate: float | None, base: Scenario) -> float:
    if rate is not None:
        return rate
    own: float | None = base.arrivals.rate
    if own is None:
        raise DraftsimError("the arrivals file spans no time: give the load, --rate")
    return own


def _planned(kept: Path | None, *question: Any, **options: Any) -> list[dict[str, Any]]:
    """The plan, with a word on what is being simulated; the file `kept` holds what is finished."""
    from simulator.capacity import plan

    with working("simulating") as say:
        return plan(
            *question, **options, path=kept, progress=lambda done, at: say(f"run {done}: {at}")
        )


def _draw(folder: Path, rows: list[dict[str, Any]], label: str, title: str) -> None:
    from simulator.capacity.plots import plot_replicas
    from simulator.plots import save_all_kinds

    if not any(row["curve"] for row in rows):
        note("no load was found up to which a policy meets the SLO: nothing to draw")
        return
    say_drawn([save_all_kinds(plot_replicas(rows), folder / "replicas.png", label, title)])
