"""Output of ``draftsim serve``: a sentence, its table, and remarks on the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from commands.common.output import MEASURE_MORE, said_free
from commands.common.printed import print_table
from traces.digits import counted, three_digits

if TYPE_CHECKING:
    from simulator.tune.gains import Leader, Span

Row = Mapping[str, Any]
TOLD = 4
"""Loads that the sentence tells."""
NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
MEAN = "(mean end-to-end latency)"
LATENCIES = (("ttft", "mean"), ("tpot", "mean"), ("tpot", "p99"), ("e2e", "mean"))


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the columns of the printed table; latencies in milliseconds.

    Columns that would say the same of every row are left out: nothing refused or pre-empted,
    every run complete, no targets, one replication, as many requests finished everywhere.
    """
    batches = all(row["concurrency"] is not None for row in rows)
    targets = any(_asked(row) for row in rows)
    changing = any(row["length_changes"] for row in rows)
    fleets = any(row["replicas"] > 1 for row in rows)
    several = any(row["replications"] > 1 for row in rows)
    plain = {"complete", "exact", "exact up to near-ties"}
    told = [k for k in ("status", "fidelity") if not {row[k] for row in rows} <= plain]
    counted = [k for k in ("rejected", "preemptions") if any(row[k] for row in rows)]
    finished = {row["requests"] for row in rows}
    table = []
    for row in rows:
        half = row.get("throughput_tok_s_hi", math.nan) - row["throughput_tok_s"]
        table.append({
            "policy": row["policy"],
            **({"batch": row["batch"]} if batches else {"rate": row["rate"]}),
            **({"replicas": row["replicas"]} if fleets else {}),
            "tokens/s": row["throughput_tok_s"], **({"±": half} if several else {}),
            "speedup": row["speedup"],
            **({} if batches else {"latency ratio": row.get("latency_ratio", math.nan)}),
            **{f"{name} {q}, ms": 1e3 * row[f"{name}_s"][q] for name, q in LATENCIES},
            **({"in time": row["within_targets"], "goodput/s": row["goodput_req_s"]}
               if targets else {}),
            "in batch": row["mean_batch"],
            **({"imbalance": row["imbalance"]} if fleets else {}),
            "accepted": row["acceptance_rate"],
            **({"K changes": row["length_changes"]} if changing else {}),
            **({"finished": row["requests"]} if len(finished) > 1 else {}),
            **{k: row[k] for k in counted}, **{k: row[k] for k in told},
        })  # fmt: skip
    return table


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return remarks on the table: overload, refusals, guesses, break-even loads."""
    said = []
    if over := [r for r in rows if r["overloaded"]]:
        loads: dict[str, set[float]] = {}
        for row in over:
            loads.setdefault(row["policy"], set()).add(row["rate"])
        said.append(
            "overloaded, latencies grow with --requests: "
            + "; ".join(
                f"{policy} at {', '.join(f'{rate:.4g}' for rate in sorted(rates))}/s"
                for policy, rates in loads.items()
            )
        )
    if rejected := sum(r["rejected"] for r in rows):
        said.append(
            f"{counted(rejected, 'request')} too large for the KV cache or the token budget: "
            "refused"
        )
    if preempted := sum(r["preemptions"] for r in rows):
        said.append(
            f"KV blocks ran out {counted(preempted, 'time')}: a request was pre-empted and "
            "computed again"
        )
    said += guesses(rows)
    return said + said_free(what for r in rows for what in r["unpriced"]) + _break_even(rows)


def guesses(rows: Sequence[Row]) -> list[str]:
    """Return how much was read between the measured sizes, and what beyond them."""
    from simulator.serving.outcome.report import joined_coverage

    entries = joined_coverage([entry for row in rows for entry in row["coverage"]])
    outside = [e for e in entries if e["origin"] == "extrapolated"]
    said = [
        f"  {e['passes']:,} {e['model']} {e['phase'].replace('_', ' ')} passes: "
        f"batch {_span(e['batch'])}, {_each(e['new_tokens'])}, "
        f"context {_span(e['context'])}"
        for e in outside
    ]
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


def _each(ends: Sequence[float]) -> str:
    many = _span(ends)
    return f"{many} token{'s' * (many != '1')} each"


def _break_even(rows: Sequence[Row]) -> list[str]:
    from simulator.serving import break_even_load
    from simulator.tune.gains import UNDRAFTED

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


def _asked(row: Row) -> bool:
    return any(math.isfinite(row[k]) for k in ("ttft_target_s", "tpot_target_s"))


def _span(ends: Sequence[float]) -> str:
    low, high = (f"{end:,.0f}" if end >= 10 else f"{end:.3g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def headline(rows: Sequence[Row], interval: Callable[[Leader], Span | None]) -> str:
    """Return the fastest policy of each load against no speculation, in one sentence.

    ``interval`` is asked for the 95% interval of the policies that the sentence names.
    """
    from simulator.tune.gains import is_closed, leaders

    found, closed = leaders(rows), is_closed(rows)
    unit = "tokens/s" if closed else "speed end to end"

    def told(one: Leader) -> str:
        span = interval(one)
        within = "" if span is None else f" ({three_digits(span[0])} to {three_digits(span[1])})"
        return f"{one.policy} {three_digits(one.ratio)}x{within}"

    if all(one.policy is None for one in found):
        return "only no speculation was served: name a policy to compare it with."
    if all(one.ratio <= 1 for one in found):
        best = max(found, key=lambda one: one.ratio)
        if not best.ratio:
            return "no policy is faster than no speculation at any of these loads."
        return (
            "no policy is faster than no speculation at any of these loads; the closest is "
            f"{_where(best, closed)} {told(best)} in {unit}."
        )
    shown = [
        f"{_where(one, closed)} {told(one)}" if one.ratio > 1
        else f"{_where(one, closed)} no policy is faster" + (f", {told(one)}" if one.ratio else "")
        for one in found[:TOLD]
    ]  # fmt: skip
    more = "" if len(found) <= TOLD else f"; {len(found) - TOLD} more loads below"
    return f"{unit} over no speculation: {'; '.join(shown)}{more}."


def _where(one: Leader, closed: bool) -> str:
    if one.load is None:
        return "at these arrivals"
    names = "requests" if closed else "requests/s"
    return f"at {one.load:.4g} {names[:-1] if closed and one.load == 1 else names}"


def print_measured(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print predicted and measured statistics of each metric, and the error of the prediction."""
    several = len({row["policy"] for row in rows}) > 1
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        values = {
            "predicted": _seconds(row["predicted"]), "measured": _seconds(row["measured"]),
            "error": f"{row['error']:+.1%}",
        }  # fmt: skip
        for kind, text in values.items():
            key = row["policy"], row["metric"], kind
            named = {"policy": row["policy"]} if several else {}
            named["the file's requests"] = f"{NAMES[row['metric']]}, {kind}"
            lines.setdefault(key, named)[row["statistic"]] = text
    print_table(list(lines.values()))


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
