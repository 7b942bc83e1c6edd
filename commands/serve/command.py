"""``draftsim serve``: batches, queues and arrivals in simulated time."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

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
from commands.common.output import (
    JsonOption,
    emit,
    note,
    placed_as,
    placed_folder,
    placed_table,
    say_drawn,
)
from commands.common.printed import print_table
from commands.common.progress import working
from commands.common.workers import ClusterOption
from commands.serve.fastest import Leader, Span, headline, interval_over_prompts
from commands.serve.fleet import RouterOption, chosen_router, where
from commands.serve.loads import (
    ONE_STREAM,
    AsyncOption,
    BudgetOption,
    MaxBatchOption,
    OutputOption,
    PromptOption,
    load_scenarios,
    requests_of,
    sizes_of,
)
from commands.serve.measured import against_measured, print_measured
from commands.serve.plots import draw
from commands.serve.progress import kept, requests_bar, rows_file
from commands.serve.rows import remarks, shown
from traces.errors import DraftsimError
from traces.store.recordings import DEFAULT_TRACE


def serve(
    trace: TraceOption = DEFAULT_TRACE,
    acceptance: AcceptanceOption = None,
    latency: LatencyOption = None,
    assume_batch_free: AssumeOption = False,
    policy: PolicyOption = None,
    source: DraftedOption = None,
    always_draft: AlwaysOption = None,
    one_pass: OnePassOption = False,
    settings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also under what tune wrote; without --policy, next to no speculation and "
            "K = 1, 3, 5.",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="B,...",
            help="Batch sizes, each kept full. Default where no load is named: powers of two, as "
            "far as the latencies were measured.",
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,...", help="Offered loads, requests per second.")
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens, the result of `vllm bench "
            "serve --save-detailed`, or requests.jsonl of LLMServingSim's bench; the first "
            "--requests of it. What was measured is shown next to the prediction.",
        ),
    ] = None,
    prompt: PromptOption = None,
    output: OutputOption = None,
    scale: Annotated[
        str | None, typer.Option(metavar="S,...", help="Speed the arrivals file up by these.")
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(help="Gaps between arrivals of --rate: poisson (default) or deterministic."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(help="continuous, static, static-minimum, static-mean, pearl or dsi."),
    ] = "continuous",
    requests: Annotated[int, typer.Option(help="Requests of every run.")] = 1000,
    replications: Annotated[int, typer.Option(help="Independent runs, for intervals.")] = 1,
    max_batch: MaxBatchOption = None,
    replicas: Annotated[int, typer.Option(help="Engines like that, which share the requests.")] = 1,
    router: RouterOption = None,
    kv_blocks: BlocksOption = None,
    token_budget: BudgetOption = None,
    async_scheduling: AsyncOption = False,
    cudagraph_capture_sizes: CaptureOption = None,
    cudagraph_mode: GraphModeOption = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=TIME,tpot=TIME",
            help="Targets of goodput, as in ttft=200ms,tpot=30ms (bare numbers are seconds).",
        ),
    ] = None,
    warmup: Annotated[
        float, typer.Option(help="Share of the requests, first to arrive, that are not counted.")
    ] = 0.1,
    ttft: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The target ttft of --slo: time to the first token."),
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The target tpot of --slo: time per output token."),
    ] = None,
    max_time: Annotated[
        float | None, typer.Option(help="Stop every run after this many simulated seconds.")
    ] = None,
    interference: Annotated[
        float | None, typer.Option(help="pearl and dsi: slowdown from sharing one device.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and of who replays what.")] = 0,
    verify: VerifyOption = None,
    memory: MemoryOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS",
            callback=placed_table,
            help="Keep the rows: JSON lines, each written when finished, after which an "
            "interrupted run goes on; if the name ends in .parquet, .csv, .tex or .json a table "
            "at the end, until then the lines in RESULTS.jsonl.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes here. Default: one; for many requests, one per core."),
    ] = None,
    cluster: ClusterOption = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            callback=placed_folder, help="Draw the results into this folder: PNG, SVG and PDF."
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed_as(b"["),
            help="Chrome trace of the first load under the first policy that drafts, of the "
            "first replica (opens in ui.perfetto.dev).",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Simulate batches and queues: latency and throughput of every policy under load.

    A request of an arrivals file keeps the file's lengths and replays a recorded sequence of
    about its output length; such rows are approximate.
    """
    from simulator.chosen import PLAIN, load_serving_policies
    from simulator.serving import Devices, Limits, Scenario
    from traces.replay.always import drafting_always

    recording = load_recording(
        trace,
        latency,
        source,
        acceptance=acceptance,
        assume_batch_free=assume_batch_free,
        one_pass=one_pass,
        plain=settings is None and set(policy or ()) == {PLAIN},
        sizes=sizes_of(prompt, output, arrivals),
    )
    recorded, table = recording.trace, recording.latency
    policy, verify = one_rule(policy, verify)
    rule = load_rule(verify, recorded, memory)
    recording.check_rule(rule)
    if recording.source is not None and mode in ONE_STREAM:
        raise DraftsimError(
            f"--mode {mode} drafts on while the target verifies, and {recorded.source} drafts from "
            "what it has verified: take a recording of a draft model, or another --mode"
        )
    if interference is not None and mode not in ONE_STREAM:
        raise DraftsimError(f"--interference is of --mode pearl or dsi, not of {mode}")
    ttft_s, tpot_s = _targets(slo, ttft, tpot)
    blocks = blocks_of(kv_blocks, table)
    limits = Limits.of_engine(table, max_batch, token_budget, blocks, async_scheduling)
    base = Scenario(
        _no_arrivals(), limits, requests, mode,  # type: ignore[arg-type]
        Devices(interference or 0.0), ttft_target_s=ttft_s, tpot_target_s=tpot_s,
        max_time_s=max_time, warmup=warmup, seed=seed, replications=replications,
        replicas=replicas, router=chosen_router(router, replicas),
    )  # fmt: skip
    scenarios = load_scenarios(base, batch, rate, arrivals, scale, process, table)
    largest = 1 if mode in ONE_STREAM else max(s.limits.max_batch for s in scenarios)
    table.check_sizes("target", "forward", largest, 1)  # refused before anything is served
    recording = in_graphs(recording, cudagraph_capture_sizes, cudagraph_mode, largest)
    table = recording.priced(largest)
    if always_draft is not None and mode in ONE_STREAM:
        raise DraftsimError(f"--mode {mode} drafts without rounds to wait for: drop --always-draft")
    table = drafting_always(table, always_draft)
    policies = load_serving_policies(policy, recorded, table, mode, settings, largest, note)
    meta = {"trace": acceptance or trace, "latency": latency or trace, "policies": list(policies)}
    meta |= {"source": recorded.source} if recording.source is not None else {}
    executor = where(jobs, cluster, requests_of(scenarios) * len(policies), timeline)
    rows: list[dict[str, Any]] = []
    with (
        kept(rows, out, meta, recording.said),
        requests_bar(scenarios, policies) as (advance, progress),
    ):
        from simulator.serving import Timeline, sweep

        with Timeline(timeline) if timeline is not None else nullcontext() as drawn:
            sweep(
                recorded, table, policies, scenarios, rule=rule,
                path=rows_file(out), meta=meta, progress=progress, advance=advance, timeline=drawn,
                rows=rows, executor=executor, say=note,
            )  # fmt: skip
    measured = against_measured(recorded, table, policies, scenarios, rule)
    if json is None:

        def interval(leader: Leader) -> Span | None:
            return interval_over_prompts(leader, recorded, table, policies, scenarios, rule)

        with working("serving resampled prompts, for intervals", alone=True):
            said = headline(rows, interval)
        note(f"{recording.said}: {said}")
        print_table(shown(rows))
        if measured:
            print_measured(measured)
    else:
        emit("serve", rows, json, more={"measured": measured} if measured else None)
    for remark in remarks(rows):
        note(remark)
    for path in (p for p in (out, timeline) if p is not None):
        note(f"wrote {path}")
    if plots is not None:
        say_drawn(draw(plots, rows, recorded, table, policies, scenarios, recording.said))


def _targets(slo: str | None, ttft: str | None, tpot: str | None) -> tuple[float, float]:
    """Seconds of the two targets, infinite where none is named."""
    from simulator.targets import parse_targets, parse_time

    if slo is None:
        each = ((ttft, "--ttft"), (tpot, "--tpot"))
        ttft_s, tpot_s = (
            float("inf") if text is None else parse_time(text, option) for text, option in each
        )
        return ttft_s, tpot_s
    if ttft is not None or tpot is not None:
        raise DraftsimError("--slo holds both targets: drop --ttft and --tpot")
    if any(part.strip().startswith("p=") for part in slo.split(",")):
        raise DraftsimError(
            f"--slo {slo}: serve shows the share of requests within the targets, whatever p is: "
            "drop p, or ask capacity or tune"
        )
    targets = parse_targets(slo)
    return targets.ttft_s, targets.tpot_s


def _no_arrivals() -> Any:
    from simulator.serving import ClosedLoop

    return ClosedLoop(1)
