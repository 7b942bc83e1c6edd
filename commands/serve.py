"""``draftsim serve``: batches, queues and arrivals in simulated time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.inputs import (
    BUNDLED,
    LatencyOption,
    MemoryOption,
    PolicyOption,
    TraceOption,
    VerifyOption,
    batch_sizes,
    load_latency,
    load_rule,
    load_trace,
    positive_numbers,
)
from commands.output import JsonOption, emit, note, print_table
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.batch import BatchPolicy
    from policies.core import DraftPolicy
    from simulator.serving import Scenario
    from traces.latency import LatencyTable
    from traces.trace import Trace

DEFAULT = ("autoregressive", "fixed:gamma=4", "cm-asd", "gammatune")
"""Policies served where none is named (those of CM-ASD, Fig. 2)."""

ALL = (
    "autoregressive", "fixed:gamma=2", "fixed:gamma=4", "confidence", "hf-heuristic", "cm-asd",
    "gammatune", "svip", "rate-optimal", "batch-table", "disable-by-batch-size", "goodput",
    "turbospec", "confidence-freeze", "adaptive-verification", "sglang-adaptive",
)  # fmt: skip
"""What ``all`` stands for: every family that an engine could run."""

BATCHES = "1,2,4,8,16,32,64"
ONE_STREAM = ("pearl", "dsi")


def serve(
    trace: TraceOption = BUNDLED,
    latency: LatencyOption = None,
    policy: PolicyOption = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="B,...", help=f"Batch sizes, each kept full. Default where no load: {BATCHES}."
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,...", help="Offered loads, requests per second.")
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens; its first --requests rows.",
        ),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="S,...", help="Speed the arrivals file up by these.")
    ] = None,
    process: Annotated[
        str, typer.Option(help="Gaps between arrivals of --rate: poisson or deterministic.")
    ] = "poisson",
    mode: Annotated[
        str,
        typer.Option(help="continuous, static, static-minimum, static-mean, pearl or dsi."),
    ] = "continuous",
    requests: Annotated[int, typer.Option(help="Requests of every run.")] = 1000,
    replications: Annotated[int, typer.Option(help="Independent runs, for intervals.")] = 1,
    max_batch: Annotated[
        int, typer.Option(help="Requests running at a time, where --batch does not say.")
    ] = 64,
    kv_blocks: Annotated[
        int | None, typer.Option(help="Cache blocks of 16 tokens; default: no limit.")
    ] = None,
    token_budget: Annotated[int, typer.Option(help="Tokens of one iteration.")] = 8192,
    ttft: Annotated[
        float | None, typer.Option(help="Target of goodput: seconds to the first token.")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(help="Target of goodput: seconds per output token.")
    ] = None,
    max_time: Annotated[
        float | None, typer.Option(help="Stop every run after so many simulated seconds.")
    ] = None,
    interference: Annotated[
        float, typer.Option(help="pearl and dsi: slowdown from sharing one device.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and of who replays what.")] = 0,
    verify: VerifyOption = None,
    memory: MemoryOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS",
            help="Keep the rows: JSON lines, each written when finished; "
            "a Parquet table at the end if the name ends in .parquet.",
        ),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw PNG files into this folder.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Chrome trace of the first load under the first policy that drafts "
            "(opens in ui.perfetto.dev).",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Simulate batches and queues: latency and throughput of every policy under load.

    A request of an arrivals file keeps the file's lengths and replays a recorded sequence of
    about its output length; such rows are approximate.
    """
    from simulator.serving import Devices, Limits, Scenario

    recorded = load_trace(trace)
    table = load_latency(latency, trace)
    limits = Limits(max_batch=max_batch, kv_blocks=kv_blocks, token_budget=token_budget)
    base = Scenario(
        _no_arrivals(), limits, requests, mode,  # type: ignore[arg-type]
        Devices(interference), ttft_target_s=_target(ttft, "--ttft"),
        tpot_target_s=_target(tpot, "--tpot"), max_time_s=max_time, seed=seed,
        replications=replications,
    )  # fmt: skip
    scenarios = load_scenarios(base, batch, rate, arrivals, scale, process)
    policies = load_serving_policies(policy, recorded, table, mode)
    meta = {"trace": trace, "latency": latency or trace, "policies": list(policies)}
    rows: list[dict[str, Any]] = []
    with _kept(rows, out, meta), _bar(scenarios, policies) as (advance, progress):
        from simulator.serving import Timeline, sweep

        jsonl = out if out is not None and out.suffix != ".parquet" else None
        with Timeline(timeline) if timeline is not None else nullcontext() as drawn:
            sweep(
                recorded, table, policies, scenarios, rule=load_rule(verify, recorded, memory),
                path=jsonl, meta=meta, progress=progress, advance=advance, timeline=drawn,
                rows=rows,
            )  # fmt: skip
    if json is None:
        print_table([_shown(row) for row in rows])
    else:
        emit("serve", rows, json)
    for remark in remarks(rows):
        note(remark)
    for path in (p for p in (out, timeline) if p is not None):
        note(f"wrote {path}")
    if plots is not None:
        for path in draw(plots, rows, recorded, table, policies, scenarios):
            note(f"wrote {path}")


def load_scenarios(
    base: Scenario,
    batch: str | None,
    rate: str | None,
    arrivals: Path | None,
    scale: str | None,
    process: str,
) -> list[Scenario]:
    """The loads that the options name, one scenario each.

    Raises DraftsimError if they contradict each other or hold an impossible value.
    """
    from simulator.serving import ArrivalFile, Deterministic, Poisson, over_batches, over_rates

    if batch is not None and (rate is not None or arrivals is not None):
        raise DraftsimError("--batch keeps the engine full: drop --rate and --arrivals, or --batch")
    if scale is not None and (arrivals is None or rate is not None):
        raise DraftsimError("--scale speeds up --arrivals: give a file, and no --rate beside it")
    if arrivals is not None:
        file = ArrivalFile(arrivals)
        if rate is not None:
            return over_rates(replace(base, arrivals=file), positive_numbers("--rate", rate))
        scales = positive_numbers("--scale", scale or "1")
        return [replace(base, arrivals=file.scaled(s)) for s in scales]
    if rate is not None:
        kinds: Mapping[str, Any] = {"poisson": Poisson, "deterministic": Deterministic}
        if process not in kinds:
            raise DraftsimError(f"--process is {process!r}, expected poisson or deterministic")
        return over_rates(
            replace(base, arrivals=kinds[process](1.0)), positive_numbers("--rate", rate)
        )
    one_stream = base.mode in ONE_STREAM
    sizes = batch_sizes("--batch", batch or ("1" if one_stream else BATCHES))
    if one_stream and sizes != [1]:
        raise DraftsimError(
            f"mode {base.mode!r} serves one stream at a time: use --batch 1, --rate or --arrivals"
        )
    return over_batches(base, sizes)


def load_serving_policies(
    texts: Sequence[str] | None, trace: Trace, latency: LatencyTable, mode: str = "continuous"
) -> dict[str, DraftPolicy | BatchPolicy]:
    """The named policies, by the names given; none: `DEFAULT`, ``all``: `ALL`.

    Policies that weigh cost get the table's; those that estimate acceptance, and the rate
    that ``rate-optimal`` works for, are fitted to the trace.  Those that came with ``all``
    or by default are left out where the trace lacks their signals or the mode does not fit.
    Raises DraftsimError naming what is wrong with a text.
    """
    from policies.batch import BatchPolicy
    from policies.registry import POLICIES, parse_serving_policy
    from policies.spec import parameters
    from simulator.serving import TableCost
    from simulator.whatif.rate import fit_estimates, fit_rate_optimal

    asked = [t for t in texts or () if t != "all"]
    implied = DEFAULT if not texts else ALL if "all" in texts else ()
    batched = mode in ("continuous", "static")
    vocab = (trace.meta.get("target") or {}).get("vocab_size")
    chosen: dict[str, DraftPolicy | BatchPolicy] = {}
    for text in [*asked, *implied]:
        name = text.partition(":")[0].strip()
        resources: dict[str, Any] = {"vocab_size": vocab}
        wants = parameters(POLICIES[name]) if name in POLICIES else {}
        if "cost" in wants:
            resources["cost"] = TableCost(latency)
        if "estimator" in wants:
            resources["estimator"] = fit_estimates(trace, "isotonic", trace.max_gamma or 8)[0]
        try:
            made: DraftPolicy | BatchPolicy
            if text == "rate-optimal":
                made = fit_rate_optimal(trace, latency, batches=(1, 4, 16, 64)).policy
            else:
                made = parse_serving_policy(text, max_gamma=trace.max_gamma, **resources)
        except ValueError as error:
            raise DraftsimError(str(error)) from None
        fits = set(made.reads) <= trace.signals and (batched or not isinstance(made, BatchPolicy))
        if text in asked or fits:
            chosen.setdefault(text, made)
    return chosen


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader of the table should know: overload, refusals, guesses, break-even loads."""
    from simulator.serving import break_even_load

    said = []
    if over := [r for r in rows if r["overloaded"]]:
        loads = sorted({(r["policy"], f"{r['rate']:.3g}/s") for r in over})
        said.append(
            "overloaded, latencies grow with --requests: "
            + ", ".join(f"{policy} at {load}" for policy, load in loads)
        )
    if rejected := sum(r["rejected"] for r in rows):
        said.append(
            f"{rejected} request(s) could never fit the cache blocks or the token budget "
            "and were refused"
        )
    if far := sum(r["extrapolated"] for r in rows):
        between = sum(r["interpolated"] for r in rows)
        said.append(
            f"{far} passes were priced outside the measured sizes by a fitted roofline, "
            f"{between} between them"
        )
    if free := sorted({what for r in rows for what in r["unpriced"]}):
        said.append(f"not in the latency table, hence free: {', '.join(free)}")
    plain = [r for r in rows if r["policy"] == "autoregressive" and r["rate"] is not None]
    for name in dict.fromkeys(r["policy"] for r in rows if r["policy"] != "autoregressive"):
        own = [r for r in rows if r["policy"] == name]
        if len(plain) < 2 or len(own) != len(plain):
            continue
        at = sorted(range(len(plain)), key=lambda i: plain[i]["rate"])
        load = break_even_load(
            [plain[i]["rate"] for i in at],
            [own[i]["e2e_s"]["mean"] for i in at],
            [plain[i]["e2e_s"]["mean"] for i in at],
        )
        if load == float("inf"):
            said.append(f"{name} pays up to the highest load")
        elif load > 0:
            said.append(f"{name} pays up to {load:.3g} requests/s")
        else:
            said.append(f"{name} does not pay from the lowest load on")
    return said


def draw(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    trace: Trace,
    latency: LatencyTable,
    policies: Mapping[str, DraftPolicy | BatchPolicy],
    scenarios: Sequence[Scenario],
) -> list[Path]:
    """Draw what the rows show; the paths written.

    Over batch sizes that is latency against throughput, and per policy the speedup over
    batch and context; over loads, latency against load.
    """
    from policies import Autoregressive
    from simulator.plots import save
    from simulator.serving import plots, speedup_grid

    finished = [row for row in rows if row["requests"]]
    if not finished:
        note("no request finished: there is nothing to draw")
        return []
    base = scenarios[0]
    if base.arrivals.rate is not None:
        names = {row["policy"] for row in finished}
        baseline = "autoregressive" if "autoregressive" in names else None
        return [
            save(plots.plot_latency_load(finished, metric, baseline), folder / f"load_{name}.png")
            for metric, name in (("e2e_s", "e2e"), ("tpot_s", "tpot"))
        ]
    written = [save(plots.plot_latency_throughput(finished), folder / "latency_throughput.png")]
    if base.mode in ONE_STREAM:
        return written
    batches = [s.limits.max_batch for s in scenarios]
    contexts = _contexts(trace, latency)
    small = replace(base, requests=max(64, 2 * max(batches)), replications=1)
    for i, (name, policy) in enumerate(policies.items()):
        if isinstance(policy, Autoregressive):
            continue
        grid = speedup_grid(trace, latency, policy, Autoregressive(), batches, contexts, small)
        figure = plots.plot_speedup_grid(grid, batches, contexts, name)
        written.append(save(figure, folder / f"speedup_{i}_{_file_name(name)}.png"))
    return written


def _contexts(trace: Trace, latency: LatencyTable) -> list[int]:
    """Prompt lengths for the grid: the measured contexts, or the recording's own around."""
    cells = latency.cells
    own = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]["context"]
    measured = sorted({int(c) for c in own if c > 0})
    return measured or [64, 256, 1024, 4096]


def _file_name(policy: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "_" for c in policy)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the printed table; latencies in milliseconds."""
    where = "batch" if row["rate"] is None else "rate"
    return {
        "policy": row["policy"], where: row[where], "tokens/s": row["throughput_tok_s"],
        **{
            f"{name} {q}, ms": 1e3 * row[f"{name}_s"][q]
            for name, q in (("ttft", "mean"), ("tpot", "mean"), ("tpot", "p99"), ("e2e", "mean"))
        },
        "in batch": row["mean_batch"], "accepted": row["acceptance_rate"],
        "wasted": row["wasted_drafts"], "finished": row["requests"], "status": row["status"],
        "fidelity": row["fidelity"],
    }  # fmt: skip


@contextmanager
def _kept(rows: list[dict[str, Any]], out: Path | None, meta: Mapping[str, Any]) -> Iterator[None]:
    """Write a Parquet `out` at the end, and leave readable results behind an interruption."""
    from simulator.serving.results import write_table

    table = out if out is not None and out.suffix == ".parquet" else None
    try:
        yield
    except KeyboardInterrupt:
        if table is not None and rows:
            write_table(rows, table, meta, complete=False)
        kept = f" are in {out}, marked incomplete" if out is not None else " were finished"
        note(f"stopped: {len(rows)} row(s){kept}")
        raise typer.Exit(130) from None
    if table is not None:
        write_table(rows, table, meta)


@contextmanager
def _bar(scenarios: Sequence[Scenario], policies: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """A progress bar over every request of every run, on standard error: (advance, progress)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )  # fmt: skip
    first = scenarios[0]
    each = first.requests or 0
    if (lengths := getattr(first.arrivals, "rows", None)) is not None:
        each = min(each, len(lengths[0])) or len(lengths[0])
    each *= first.replications
    runs = len(scenarios) * len(policies)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"run 1 of {runs}", total=each * runs)

        def progress(done: int, total: int, name: str) -> None:
            label = f"run {min(done + 1, total)} of {total}"
            bar.update(task, completed=each * done, description=label)

        yield lambda: bar.advance(task), progress


def _target(seconds: float | None, option: str) -> float:
    if seconds is None:
        return float("inf")
    if not seconds > 0:
        raise DraftsimError(f"{option} is {seconds}, expected > 0 seconds")
    return seconds


def _no_arrivals() -> Any:
    from simulator.serving import ClosedLoop

    return ClosedLoop(1)
