"""``draftsim serve``: batches, queues and arrivals in simulated time, and the results in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.common import options
from commands.common.output import (
    MEASURE_MORE,
    JsonOption,
    PlotsOption,
    emit,
    note,
    placed_as,
    placed_table,
    remark,
    say_drawn,
)
from commands.common.printed import print_table
from commands.common.progress import progress_bar, working
from commands.common.written import TABLES, Shown, rows_file, write_rows
from simulator.bootstrap import Interval
from simulator.executors import Executor
from simulator.loads import prepared
from simulator.recording import Recording
from simulator.serving import ClosedLoop, Router, Scenario, Timeline, break_even_load, sweep
from simulator.serving.outcome.report import joined_coverage
from simulator.serving.outcome.results import flat, read_results, restored, write_table
from simulator.serving.routers import parse_router
from simulator.serving.scenario import parse_mode
from simulator.serving.study import against_measured, limits_met, over_loads
from simulator.targets import Targets, parse_targets, parse_time
from simulator.tune.gains import (
    UNDRAFTED,
    Leader,
    best_within,
    goodputs,
    interval_over_prompts,
    is_closed,
    leaders,
)
from simulator.unmeasured import said_free
from traces.aliases import Row
from traces.digits import counted, three_digits
from traces.errors import DraftsimError
from traces.store.writing import only_writer

MEAN = "(mean end-to-end latency)"
UNFINISHED = "too few requests finish after the warm-up to compare policies"
"""Said of loads at which a run has no request after the first that do not count (`--warmup`)."""
LATENCIES = (("ttft", "mean"), ("tpot", "mean"), ("tpot", "p99"), ("e2e", "mean"))
"""Latencies in the printed table, each with its statistic."""


@dataclass(frozen=True)
class LoadOptions(options.OfferedLoad):
    """Options for the requests that arrive, or that always run."""

    batch: Annotated[
        str | None,
        typer.Option(
            metavar="B,...",
            help="Concurrency: numbers of requests that always run. Default if no load is named: "
            "powers of two, as far as the latencies were measured.",
        ),
    ] = None

    @property
    def arrive(self) -> bool:
        """True if requests arrive by the clock, and do not always run."""
        return any(given is not None for given in (self.rate, self.arrivals, self.process))

    def offered(self, recording: Recording) -> dict[str, Any]:
        """Return the load as `simulator.serving.study.over_loads` takes it."""
        batches = None if self.batch is None else options.batch_sizes("--batch", self.batch)
        return {**super().offered(recording), "concurrency": batches}


def serve(
    inputs: options.BatchInputs,
    policies: options.ServedPolicies,
    loads: LoadOptions,
    engine: options.EngineLimits,
    settings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also serve with the setting that `tune` wrote. Without --policy it is compared "
            "with no speculation and K = 1, 3, 5.",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="continuous, static, static-minimum, static-mean, pearl or dsi; "
            "pearl:interference=F if target and drafter slow each other down on one device. "
            "static: each request keeps what it had accepted; static-minimum: all keep as many "
            "tokens as the one with fewest accepted; static-mean: all draft alike, until fewer "
            "than half of their policies wish to go on."
        ),
    ] = "continuous",
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests in every run (--num-prompts), the first of --arrivals. Default: all of "
            "--arrivals, else 1000, and at least 10 for each that runs at a time."
        ),
    ] = None,
    replications: Annotated[int, typer.Option(help="Independent runs, for intervals.")] = 1,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N[:ROUTER]",
            help="Engines that share the requests, and who gets one: random, round-robin "
            "(default), least-requests or least-tokens.",
        ),
    ] = "1",
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=TIME,tpot=TIME",
            help="Targets of goodput, as in ttft=200ms,tpot=30ms (bare numbers are seconds).",
        ),
    ] = None,
    warmup: Annotated[
        float,
        typer.Option(
            help="Share of the first requests to leave out of the statistics. With --batch at "
            "least two for each that runs at a time are left out, unless this is 0."
        ),
    ] = 0.1,
    ttft: Annotated[
        str | None,
        typer.Option(hidden=True, help="The target ttft of --slo."),
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option(hidden=True, help="The target tpot of --slo."),
    ] = None,
    max_time: Annotated[
        float | None, typer.Option(help="Stop every run after this many simulated seconds.")
    ] = None,
    interference: Annotated[
        float | None, typer.Option(hidden=True, help="As --mode pearl:interference=F.")
    ] = None,
    router: Annotated[str | None, typer.Option(hidden=True, help="As --replicas N:ROUTER.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS",
            callback=placed_table,
            help="Write each finished row as a line of JSON; an interrupted run continues after "
            "the last. A name in .parquet, .csv, .tex or .json is a table, written at the end from "
            "RESULTS.jsonl.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes here. Default: one; for many requests, one per core."),
    ] = None,
    cluster: options.ClusterOption = None,
    plots: PlotsOption = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed_as(b"["),
            help="Write a Chrome trace of the first replica, under the first load and the first "
            "policy that drafts (opens in ui.perfetto.dev).",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Simulate batches and queues: latency and throughput of every policy under load.

    A request of an arrivals file keeps the file's lengths and replays a recorded sequence of
    about its output length; such rows, and those with --prompt or --output, are approximate.
    """
    recording = inputs.load(plain=settings is None and policies.plain, sizes=loads.drawn_sizes)
    batching, sharing = parse_mode(mode)
    if interference is not None and ":" in mode:
        raise DraftsimError(f"--mode {mode} names the interference: drop --interference")
    count, colon, chosen_by = replicas.partition(":")
    if colon and router is not None:
        raise DraftsimError(f"--replicas {replicas} names a router: drop --router")
    base = Scenario(
        ClosedLoop(1), engine.limits(recording.latency, batching, loads.arrive), requests,
        batching, sharing if interference is None else interference,
        targets=(targets := _targets(slo, ttft, tpot)), max_time_s=max_time, warmup=warmup,
        seed=seed, replications=replications, replicas=options.whole("--replicas", count),
        router=_router(count, chosen_by if colon else router),
    )  # fmt: skip
    scenarios = over_loads(base, recording.latency, **loads.offered(recording), say=remark)
    study = prepared(
        recording, scenarios, policies.policy, policies.verify, policies.memory,
        graphs=engine.graphs, always_draft=inputs.always_draft, settings=settings, say=remark,
    )  # fmt: skip
    meta = {
        "trace": inputs.acceptance or inputs.trace, "latency": inputs.latency or inputs.trace,
        "policies": list(study.policies),
    }  # fmt: skip
    meta |= {"source": study.trace.source} if recording.source is not None else {}
    served = sum(scenario.count * scenario.replications for scenario in scenarios)
    executor = where(jobs, cluster, served * len(study.policies), timeline)
    rows: list[dict[str, Any]] = []
    with (
        kept(rows, out, meta, recording.said),
        requests_bar(scenarios, study.policies) as (advance, progress),
        Timeline(timeline) if timeline is not None else nullcontext() as drawn,
    ):
        sweep(
            *study, path=(lines := rows_file(out)), meta=meta, finishes=lines == out,
            progress=progress, advance=advance,
            timeline=drawn, rows=rows, executor=executor, say=note,
        )  # fmt: skip
    measured = against_measured(*study)

    def interval(leader: Leader) -> Interval | None:
        return interval_over_prompts(leader, *study)

    def printed() -> None:
        with working("serving resampled prompts, for intervals", alone=True):
            said = headline(rows, interval)
        if targets.bound:
            said += within_slo(rows)
        note(f"{recording.said}: {said}")
        print_table(shown(rows))
        if measured:
            in_ms = [
                {**row, "metric": row["metric"].replace("_s", ", ms"),
                 **{side: 1e3 * row[side] for side in ("predicted", "measured")}}
                for row in measured
            ]  # fmt: skip
            print_table(in_ms, title="The requests of --arrivals, predicted and measured")

    more = {"measured": measured} if measured else None
    emit("serve", rows, json, more=more, printed=printed)
    for line in remarks(rows):
        note(line)
    for path in (p for p in (out, timeline) if p is not None):
        note(f"wrote {path}")
    if plots is not None:
        from simulator.plots.serving import draw

        say_drawn(draw(plots, rows, *study, title=recording.said, say=note))


def where(
    jobs: int | None, cluster: str | None, requests: int, timeline: Path | None
) -> Executor | None:
    """Return where that many requests are simulated; None: in this process."""
    if timeline is not None and (cluster is not None or (jobs or 1) > 1):
        raise DraftsimError("--timeline needs all runs in one process: drop --jobs and --cluster")
    # With fewer requests the start of processes takes longer than it saves.
    few = not jobs and requests < 50_000
    if cluster is None and (jobs == 1 or timeline is not None or few):
        return None
    return options.chosen_executor(jobs, cluster)


def _router(count: str, name: str | None) -> Router:
    """Return the router called `name`; DraftsimError if there is nothing to be routed."""
    if name is not None and count == "1":
        raise DraftsimError("a router chooses among replicas: give --replicas 2 or more")
    return parse_router("round-robin" if name is None else name)


def _targets(slo: str | None, ttft: str | None, tpot: str | None) -> Targets:
    """Return the targets named, or those that bound nothing."""
    if slo is None:
        each = ((ttft, "--ttft"), (tpot, "--tpot"))
        ttft_s, tpot_s = (
            float("inf") if text is None else parse_time(text, option) for text, option in each
        )
        return Targets(ttft_s, tpot_s)
    if ttft is not None or tpot is not None:
        raise DraftsimError("--slo sets both targets: drop --ttft and --tpot")
    return parse_targets(slo, share=False)


@contextmanager
def kept(
    rows: list[dict[str, Any]], out: Path | None, meta: Mapping[str, Any], caption: str = ""
) -> Iterator[None]:
    """Write the table `out` at the end, and leave readable results after an interruption.

    Lines of the rows that are finished stay then: the same command goes on with them.  ``caption``
    is that of a LaTeX table.
    """
    table = out if out is not None and out.suffix in TABLES else None
    lines = rows_file(out)
    with only_writer(table) if table is not None else nullcontext():
        try:
            yield
        except KeyboardInterrupt:
            if rows and lines is not None and lines.is_file():
                # The file may be one row ahead.
                rows = [restored(row) for row in read_results(lines).rows]
            if table is not None and rows:
                write_as(rows, table, meta, caption, complete=False)
            note(_stopped(len(rows), out))
            raise
        if table is not None:
            write_as(rows, table, meta, caption)
            if lines is not None:
                lines.unlink(missing_ok=True)


def _stopped(count: int, out: Path | None) -> str:
    """Return how many rows a stopped run had finished, and where they are."""
    if not count:
        return "stopped: no row was finished"
    rows = f"stopped: {counted(count, 'finished row')}"
    if out is None:
        return rows
    marked = out.suffix not in TABLES or out.suffix == ".parquet"
    return f"{rows} in {out}" + (", marked incomplete" if marked else "")


def write_as(
    rows: Sequence[Row], path: Path, meta: Mapping[str, Any], caption: str,
    complete: bool = True,
) -> None:  # fmt: skip
    """Write rows as the table that the suffix names; only Parquet says if they are complete."""
    if path.suffix == ".parquet":
        write_table(rows, path, meta, complete)
    else:
        records = flat(rows).to_dict("records") if path.suffix == ".csv" else rows
        write_rows(path, records, "serve", tables=lambda: [Shown(shown(rows), caption)])


@contextmanager
def requests_bar(
    scenarios: Sequence[Scenario], policies: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Show a progress bar over every request of every run, and yield (advance, progress)."""
    each = scenarios[0].count * scenarios[0].replications
    runs = len(scenarios) * len(policies)
    with progress_bar() as bar:
        task = bar.add_task(f"requests, run 1 of {runs}", total=each * runs)

        def progress(done: int, total: int, name: str) -> None:
            label = f"requests, run {min(done + 1, total)} of {total}"
            bar.update(task, completed=each * done, description=label)

        waiting = 0

        def advance(count: int) -> None:
            # A bar takes as long to move as a request to serve: not for every one of many.
            nonlocal waiting
            waiting += count
            if waiting * 200 >= each:
                bar.advance(task, waiting)
                waiting = 0

        yield advance, progress


def headline(rows: Sequence[Row], interval: Callable[[Leader], Interval | None]) -> str:
    """Return the fastest policy of each load against no speculation, in one sentence.

    ``interval`` is asked for the 95% interval of the policies that the sentence names.
    """
    found, closed = leaders(rows), is_closed(rows)
    unit = "tokens/s" if closed else "speed end to end"

    def told(one: Leader) -> str:
        span = interval(one)
        within = "" if span is None else f" ({three_digits(span.low)} to {three_digits(span.high)})"
        return f"{one.policy} {three_digits(one.ratio)}x{within}"

    if not any(one.served for one in found):
        return "nothing was served at any of these loads."
    if all(one.policy is None for one in found):
        return "only no speculation was served: name a policy to compare it with."
    if all(one.served and one.ratio <= 1 for one in found):
        best = max(found, key=lambda one: one.ratio)
        if not best.ratio:
            return f"{UNFINISHED} at any of these loads."
        return (
            "no policy is faster than no speculation at any of these loads; the closest is "
            f"{_at(best.load, closed)} {told(best)} in {unit}."
        )
    shown = [
        f"{at} {told(one)}" if one.ratio > 1
        else f"{at} no policy is faster, {told(one)}" if one.ratio
        else f"{at} {UNFINISHED}" if one.served else f"{at} nothing was served"
        for one in found[:4] for at in [_at(one.load, closed)]
    ]  # fmt: skip
    more = "" if len(found) <= 4 else f"; {len(found) - 4} more loads below"
    return f"{unit} over no speculation: {'; '.join(shown)}{more}."


def within_slo(rows: Sequence[Row]) -> str:
    """Return which serves more within the SLO at each load, in one sentence after a space.

    Empty if there is nothing to compare.
    """
    found, closed = goodputs(rows), is_closed(rows)
    said = []
    for load, pair in [*found.items()][:4]:
        (_, plain), (name, own) = pair.items()
        answer = f"{name if best_within(pair) == name else 'no policy'} serves more"
        said.append(
            f"{_at(load, closed)} {answer} ({name} {three_digits(own)}, no speculation "
            f"{three_digits(plain)} requests/s)"
        )
    more_loads = "" if len(found) <= 4 else f"; {len(found) - 4} more loads below"
    return f" Within the SLO {'; '.join(said)}{more_loads}." if said else ""


def _at(load: float | None, closed: bool) -> str:
    if load is None:
        return "at these arrivals"
    names = "requests" if closed else "requests/s"
    return f"at {load:.4g} {names[:-1] if closed and load == 1 else names}"


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the columns of the printed table; latencies in milliseconds.

    Columns that would say the same of every row are left out, or have no value: nothing refused or
    pre-empted, every run complete, no targets, one replication, as many requests finished
    everywhere.
    """
    usual = {0, "complete", "exact", "exact up to near-ties"}
    told = [
        name for name in ("rejected", "preemptions", "status", "fidelity")
        if not {row[name] for row in rows} <= usual
    ]  # fmt: skip
    differ = len({row["requests"] for row in rows}) > 1
    changing = any(row["length_changes"] for row in rows)
    table = []
    for row in rows:
        closed, fleet = row["concurrency"] is not None, row["replicas"] > 1
        targets = math.isfinite(min(row["ttft_target_s"], row["tpot_target_s"]))
        half = row.get("throughput_tok_s_hi", math.nan) - row["throughput_tok_s"]
        table.append({
            "policy": row["policy"], "batch": row["batch"] if closed else None,
            "rate": row["rate"], "replicas": row["replicas"] if fleet else None,
            "tokens/s": row["throughput_tok_s"], "±": half if row["replications"] > 1 else None,
            "speedup": row["speedup"],
            "latency ratio": None if closed else row.get("latency_ratio"),
            **{f"{name} {q}, ms": 1e3 * row[f"{name}_s"][q] for name, q in LATENCIES},
            "in time": row["within_targets"] if targets else None,
            "goodput/s": row["goodput_req_s"] if targets else None, "in batch": row["mean_batch"],
            "imbalance": row["imbalance"] if fleet else None, "accepted": row["acceptance_rate"],
            "K changes": row["length_changes"] if changing else None,
            "finished": row["requests"] if differ else None, **{name: row[name] for name in told},
        })  # fmt: skip
    return table


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return remarks on the table: overload, refusals, guesses, break-even loads."""
    said = [*limits_met(rows), *guesses(rows)]
    return said + said_free(what for r in rows for what in r["unpriced"]) + _break_even(rows)


def guesses(rows: Sequence[Row]) -> list[str]:
    """Return how much was read between the measured sizes, and what beyond them."""
    entries = joined_coverage([entry for row in rows for entry in row["coverage"]])
    outside = [e for e in entries if e["origin"] == "extrapolated"]
    said = [
        f"  {e['passes']:,} {e['model']} {e['phase'].replace('_', ' ')} passes: "
        + (
            # A step that also reads prompts has no batch of its own in the table.
            f"{_span(e['batch'])} decoded and {many} prompt tokens" if e["phase"] == "mixed"
            else f"batch {_span(e['batch'])}, {many} token{'s' * (many != '1')} each, "
            f"context {_span(e['context'])}"
        )
        for e in outside for many in [_span(e["new_tokens"])]
    ]  # fmt: skip
    if outside:
        said.insert(0, "outside the measured sizes, priced by a fitted roofline:")
        said.append(f"  {MEASURE_MORE}")
    if composed := sum(e["passes"] for e in entries if e["origin"] == "composed"):
        said.append(
            "mixed prefill and decode steps, estimated as prefill + decode - one launch: "
            f"{composed:,} (`draftsim profile engine` measures them)"
        )
    if between := sum(e["passes"] for e in entries if e["origin"] == "interpolated"):
        total = sum(e["passes"] for e in entries)
        said.append(
            f"between measured sizes, priced by interpolation: {between:,} of {total:,} passes "
            "(--json lists them under coverage)"
        )
    return said


def _span(ends: Sequence[float]) -> str:
    low, high = (f"{end:,.0f}" if end >= 10 else f"{end:.3g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _break_even(rows: Sequence[Row]) -> list[str]:
    said: list[str] = []
    plain: dict[float, float] = {}
    drafting: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["rate"] is not None:
            own = plain if row["policy"] in UNDRAFTED else drafting.setdefault(row["policy"], {})
            own[row["rate"]] = row["e2e_s"]["mean"]
    rates = sorted(plain)
    for name, own in drafting.items():
        if len(rates) < 2 or own.keys() != plain.keys():
            continue
        own_s, plain_s = ([side[rate] for rate in rates] for side in (own, plain))
        if any(map(math.isnan, [*own_s, *plain_s])) or own_s == plain_s:
            continue
        load = break_even_load(rates, own_s, plain_s)
        faster = [r for r, own, other in zip(rates, own_s, plain_s, strict=True) if own < other]
        if load == float("inf"):
            said.append(f"{name} is faster than no speculation at every load tried {MEAN}")
        elif load > 0:
            said.append(f"{name} is faster than no speculation up to {load:.3g} requests/s {MEAN}")
        elif faster:
            loads = ", ".join(f"{rate:.3g}" for rate in faster)
            said.append(f"{name} is faster than no speculation only at {loads} requests/s {MEAN}")
        else:
            said.append(f"{name} is slower than no speculation at every load tried {MEAN}")
    return said
