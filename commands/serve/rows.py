"""The printed table of ``draftsim serve``, and remarks on its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from commands.common.output import said_free

Row = Mapping[str, Any]
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
            f"{_counted(rejected, 'request')} could never fit the cache blocks or the token "
            "budget: refused"
        )
    if preempted := sum(r["preemptions"] for r in rows):
        said.append(
            f"the cache blocks ran out {_counted(preempted, 'time')}: a request was pre-empted, "
            "and what it held was computed again"
        )
    said += guesses(rows)
    return said + said_free(what for r in rows for what in r["unpriced"]) + _break_even(rows)


def guesses(rows: Sequence[Row]) -> list[str]:
    """How much was read between the measured sizes, and what beyond them."""
    from simulator.serving.outcome.merge import joined_coverage

    entries = joined_coverage([entry for row in rows for entry in row["coverage"]])
    outside = [e for e in entries if e["origin"] == "extrapolated"]
    said = [
        f"  {e['passes']:,} {e['model']} {e['phase'].replace('_', ' ')} passes: "
        f"batch {_span(e['batch'])}, {_span(e['new_tokens'])} tokens each, "
        f"context {_span(e['context'])}"
        for e in outside
    ]
    if outside:
        said.insert(0, "outside the measured sizes, priced by a fitted roofline:")
    if beside := sum(e["passes"] for e in entries if e["origin"] == "composed"):
        said.append(
            f"steps with prompts and decoding, estimated as both passes less a launch: {beside:,} "
            "(`draftsim profile --engine` measures them)"
        )
    if between := sum(e["passes"] for e in entries if e["origin"] == "interpolated"):
        total = sum(e["passes"] for e in entries)
        said.append(
            f"between measured sizes, priced by interpolation: {between:,} of {total:,} passes "
            "(--json lists them under coverage)"
        )
    return said


def _break_even(rows: Sequence[Row]) -> list[str]:
    from simulator.serving import break_even_load

    said = []
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
            said.append(f"{name} is faster than no speculation at every load tried {MEAN}")
        elif load > 0:
            said.append(f"{name} is faster than no speculation up to {load:.3g} requests/s {MEAN}")
        else:
            said.append(f"{name} is slower than no speculation from the lowest load on {MEAN}")
    return said


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"


def _asked(row: Row) -> bool:
    return any(math.isfinite(row[k]) for k in ("ttft_target_s", "tpot_target_s"))


def _span(ends: Sequence[float]) -> str:
    low, high = (f"{end:.0f}" if end >= 10 else f"{end:.3g}" for end in ends)
    return low if low == high else f"{low} to {high}"
