"""``draftsim capacity``: how many replicas a load takes, and how many a policy saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from commands.common import options
from commands.common.output import (
    JsonOption,
    OutOption,
    PlotsOption,
    emit,
    note,
    remark,
    say_drawn,
)
from commands.common.printed import print_table
from commands.common.progress import working
from commands.common.written import Shown, rows_file
from policies.registry import is_bound
from simulator.capacity import plan
from simulator.loads import prepared
from simulator.serving import Scenario
from simulator.serving.routers import parse_router
from simulator.targets import Targets, parse_targets
from simulator.unmeasured import said_served
from traces.aliases import Row
from traces.digits import counted
from traces.store.writing import only_writer


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
    inputs: options.BatchInputs,
    policies: options.ServedPolicies,
    engine: options.EngineLimits,
    load: options.OfferedLoad,
    router: Annotated[
        str,
        typer.Option(
            help="How a request is assigned to a replica: random, round-robin, least-requests or "
            "least-tokens."
        ),
    ] = "round-robin",
    price: Annotated[
        float | None, typer.Option(help="Price of a GPU, in dollars per hour.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs per replica. Default: those that share the model (@tpN), else 1."),
    ] = None,
    max_replicas: Annotated[int, typer.Option(help="Try at most this many replicas.")] = 1024,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests in every run. Default: the file's, or as many as are needed to judge."
        ),
    ] = None,
    replications: Annotated[int, typer.Option(help="Independent runs, for intervals.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0,
    jobs: options.JobsOption = None,
    cluster: options.ClusterOption = None,
    out: OutOption = None,
    plots: PlotsOption = None,
    json: JsonOption = None,
) -> None:
    """Plan capacity: the fewest replicas that meet the SLO, under every policy.

    With --out an interrupted plan continues where it stopped; until the end, FILE.jsonl holds the
    finished part.
    """
    recording = inputs.load(chooses="capacity", plain=policies.plain, sizes=load.drawn_sizes)
    rate, offered = load.planned(recording)
    base = Scenario(
        offered, engine.limits(recording.latency), warmup=0.2, seed=seed,
        replications=replications, router=parse_router(router), targets=parse_targets(slo),
    )  # fmt: skip
    study = prepared(
        recording, [base], policies.policy, policies.verify, policies.memory,
        graphs=engine.graphs, always_draft=inputs.always_draft, say=remark,
    )  # fmt: skip
    executor = options.chosen_executor(jobs, cluster)
    kept = rows_file(out)
    with only_writer(out) if out is not None else nullcontext():
        with working("simulating") as say:
            rows = plan(
                study.trace, study.latency, study.policies, base, rate, rule=study.rule,
                requests=requests, most=max_replicas, gpus=gpus, price=price,
                curve=plots is not None, executor=executor, say=note, path=kept, finishes=False,
                progress=lambda done, at: say(f"run {done}: {at}"),
            )  # fmt: skip
        note(f"{recording.said}: {headline(rows)}")
        emit(
            "capacity", rows, json, out=out, tables=lambda: [Shown(shown(rows), recording.said)],
            printed=lambda: print_table(shown(rows)),
        )  # fmt: skip
        if kept is not None:
            kept.unlink(missing_ok=True)
    for line in remarks(rows):
        note(line)
    if plots is not None and not any(row["curve"] for row in rows):
        note("no policy meets the SLO at any load tried: nothing to draw")
    elif plots is not None:
        from simulator.plots.look import save_all_kinds
        from simulator.plots.serving import assumption, plot_replicas

        label, figure = assumption(study.latency, study.largest), plot_replicas(rows)
        say_drawn([save_all_kinds(figure, plots / "replicas.png", label, recording.said)])


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the columns of the printed table."""
    table = []
    for row in rows:
        low, high, stops = row["replicas_lo"], row["replicas_hi"], row["stops_saving"]
        table.append({
            "policy": row["policy"], "replicas": row["replicas"],
            "replicas interval": low and _span(low, high),
            "saved": row["saved"], "in time": row["within_targets"],
            "add one above, /s": _bound(row["rate_limit"], "never"),
            "each takes, /s": _bound(row["rate_per_replica"], "any"),
            "tokens/s each GPU": row["tok_s_per_gpu"],
            "$/h": row["cost_per_hour"], "$/M tokens": row["cost_per_million_tokens"],
            "saves below, /s each": _bound(stops, "any"),
        })  # fmt: skip
    return table


def headline(rows: Sequence[Row]) -> str:
    """Return the fewest replicas, and those without speculation, in one sentence."""
    found = [row for row in rows if row["replicas"] is not None and not is_bound(row["policy"])]
    load = f"{rows[0]['rate']:.4g} requests/s"
    if not found:
        return f"no number of replicas tried serves {load} within the SLO."
    best = min(found, key=lambda row: (row["replicas"], row["policy"] != "autoregressive"))
    low, high = best["replicas_lo"], best["replicas_hi"]
    span = "" if low is None else f" ({_span(low, high)})"
    name = "no speculation" if best["policy"] == "autoregressive" else best["policy"]
    words = f"{load} take {_replicas(best['replicas'])}{span} with {name}"
    if all(row["policy"] == "autoregressive" or is_bound(row["policy"]) for row in rows):
        return f"{words}; name a policy to compare it with."
    if best["policy"] == "autoregressive":
        return f"{words}; no policy takes fewer."
    plain = next((row for row in rows if row["policy"] == "autoregressive"), None)
    if plain is None:
        return f"{words}."
    if plain["replicas"] is None:
        return f"{words}; no number tried is enough without speculation."
    return f"{words}, {plain['replicas']} without speculation."


def _span(low: int, high: int | None) -> str:
    """Return an interval of replicas, whose upper end may be unknown."""
    return f"{low} or more" if high is None else f"{low} to {high}"


def _bound(rate: float | None, unbounded: str) -> float | str | None:
    """Return a rate; `unbounded` if none of those tried was too much."""
    return unbounded if rate is not None and math.isinf(rate) else rate


def _replicas(count: int, one: str = "", more: str = "") -> str:
    """Return a number of replicas, followed by its verb (`one` or `more`)."""
    return f"1 replica {one}".strip() if count == 1 else f"{count:,} replicas {more}".strip()


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return the comparison in words, and what a reader of the table should know."""
    first = rows[0]
    targets = Targets(first["ttft_target_s"], first["tpot_target_s"])
    plain = next((r for r in rows if r["policy"] == "autoregressive"), None)
    against = [] if plain is None else [r for r in rows if r is not plain]
    said = [
        f"{first['rate']:.4g} requests/s, {first['share']:.0%} of them within {targets}, "
        f"router {first['router']}, at most {counted(first['max_batch'], 'request')} at a time in "
        f"each (--max-batch){':' if against else ''}"
    ]
    said += [f"  {_compared(row, plain)}" for row in against if plain is not None]
    said += [f"{row['policy']}: {_why_none(row)}" for row in rows if row["replicas"] is None]
    said += [
        f"{row['policy']}: too few requests to judge ({row['too_short']}): raise --requests"
        for row in rows if row["too_short"]
    ]  # fmt: skip
    said += [
        f"{row['policy']}: {_replicas(row['replicas'], 'meets', 'meet')} the SLO at every rate of "
        "these requests" + (
            " of the file" if row["requests"] is None else ": raise --requests to find the limit"
        )
        for row in rows if math.isinf(row["rate_limit"])
    ]  # fmt: skip
    if rejected := sum(row["rejected"] for row in rows):
        said.append(
            f"{counted(rejected, 'request')} too large for a replica's KV cache, counted as late"
        )
    return said + said_served(rows, ": `draftsim serve --replicas` lists them")


def _compared(row: Row, plain: Row) -> str:
    count, other = row["replicas"], plain["replicas"]
    name = row["policy"]
    if count is None:
        return f"{name} cannot meet the SLO with any number of replicas tried"
    if other is None:
        return f"{name} takes {count}; no speculation cannot meet the SLO with any number tried"
    words = f"{name} takes {_replicas(count)}, no speculation {other}"
    stops = row["stops_saving"]
    if stops is None:
        return words
    if count >= other and not math.isnan(stops):
        # Replicas are whole: at this rate there are none to save.
        upto = "" if math.isinf(stops) else f" up to {stops:.3g} requests/s per replica"
        return f"{words}; it saves none here, though more requests{upto} meet the SLO with it"
    if math.isnan(stops):
        return f"{words}; it saves no replica at any rate tried"
    if math.isinf(stops):
        return f"{words}; it saves replicas at every rate tried"
    return f"{words}; above {stops:.3g} requests/s per replica it saves none"


def _why_none(row: Row) -> str:
    if row["within_alone"] < row["share"]:
        slowest_s = {name: row[f"{name}_s"]["p95"] for name in ("ttft", "tpot")}
        if math.isnan(slowest_s["ttft"]):
            return (
                "every request that counts is refused, because a replica's KV cache is too small "
                "for it: no number of replicas is enough (--kv-blocks sets its size)"
            )
        # Outputs of one token have no time per output token.
        told = [f"{name} {s * 1e3:,.0f} ms" for name, s in slowest_s.items() if not math.isnan(s)]
        return (
            f"alone on a replica {row['within_alone']:.1%} of the requests meet the SLO "
            f"(95th percentiles: {', '.join(told)}): no number of replicas is enough"
        )
    return f"{row['within_targets']:.1%} meet the SLO with the most replicas tried"
