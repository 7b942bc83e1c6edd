"""What ``draftsim capacity`` says of its rows: the printed table, and remarks to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from commands.common.output import said_free

Row = Mapping[str, Any]


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The columns of the printed table."""
    priced = any(not math.isnan(row["cost_per_hour"]) for row in rows)
    table = []
    for row in rows:
        low, high = row["replicas_lo"], row["replicas_hi"]
        table.append({
            "policy": row["policy"], "replicas": row["replicas"],
            "of 95 %": None if low is None else f"{low} to {high if high is not None else '?'}",
            "saved": row["saved"], "in time": row["within_targets"],
            "add one above, /s": row["rate_limit"], "each takes, /s": row["rate_per_replica"],
            "tokens/s each GPU": row["tok_s_per_gpu"],
            **({"$/h": row["cost_per_hour"], "$/M tokens": row["cost_per_million_tokens"]}
               if priced else {}),
            "saves below, /s each": row["stops_saving"],
        })  # fmt: skip
    return table


def headline(rows: Sequence[Row]) -> str:
    """Return the fewest replicas, and those without speculation, in one sentence."""
    found = [row for row in rows if row["replicas"] is not None]
    load = f"{rows[0]['rate']:.4g} requests/s"
    if not found:
        return f"no number of replicas that was tried serves {load} within the SLO."
    best = min(found, key=lambda row: (row["replicas"], row["policy"] != "autoregressive"))
    low, high = best["replicas_lo"], best["replicas_hi"]
    span = "" if low is None else f" ({low} to {high if high is not None else '?'})"
    name = "no speculation" if best["policy"] == "autoregressive" else best["policy"]
    words = f"{load} take {best['replicas']} replica(s){span} with {name}"
    if best["policy"] == "autoregressive":
        return f"{words}; no policy takes fewer."
    plain = next((row for row in rows if row["policy"] == "autoregressive"), None)
    if plain is None:
        return f"{words}."
    return f"{words}, {plain['replicas'] or 'more than were tried'} without speculation."


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return the comparison in words, and what a reader of the table should know."""
    first = rows[0]
    targets = " and ".join(
        f"{name} {seconds:g} s"
        for name, seconds in (("ttft", first["ttft_target_s"]), ("tpot", first["tpot_target_s"]))
        if math.isfinite(seconds)
    )
    said = [
        f"{first['rate']:.4g} requests/s, {first['share']:.0%} of them within {targets}, "
        f"routed {first['router']}:"
    ]
    plain = next((r for r in rows if r["policy"] == "autoregressive"), None)
    if plain is not None:
        said += [f"  {_compared(row, plain)}" for row in rows if row is not plain]
    said += [
        f"{row['policy']}: {_why_none(row)}" for row in rows if row["replicas"] is None
    ]  # fmt: skip
    said += [
        f"{row['policy']}: the horizon is too short to judge ({row['too_short']}): "
        "raise --requests"
        for row in rows if row["too_short"]
    ]  # fmt: skip
    said += [
        f"{row['policy']}: {row['replicas']} replica(s) serve all {row['requests']} requests at "
        "whatever rate they come: raise --requests to find one that is too much"
        for row in rows if math.isinf(row["rate_limit"])
    ]  # fmt: skip
    if rejected := sum(row["rejected"] for row in rows):
        said.append(f"{rejected} request(s) could never fit a replica and count as late")
    if outside := [row["policy"] for row in rows if row["extrapolated"]]:
        said.append(
            "passes outside the measured sizes were priced by a fitted roofline under "
            f"{', '.join(outside)}: `draftsim serve --replicas` tells which"
        )
    return said + said_free(what for row in rows for what in row["unpriced"])


def _compared(row: Row, plain: Row) -> str:
    count, other = row["replicas"], plain["replicas"]
    name = row["policy"]
    if count is None:
        return f"{name} cannot meet the SLO with any number of replicas that was tried"
    if other is None:
        return f"{name} takes {count}; no speculation cannot meet the SLO with any that was tried"
    words = f"{name} takes {count} replica{'s' if count > 1 else ''}, no speculation {other}"
    stops = row["stops_saving"]
    if stops is None:
        return words
    if math.isnan(stops):
        return f"{words}; it saves none at any rate that was tried"
    if math.isinf(stops):
        return f"{words}; it saves at every rate that was tried"
    return f"{words}; above {stops:.3g} requests/s a replica it saves none"


def _why_none(row: Row) -> str:
    if row["within_alone"] < row["share"]:
        return (
            f"alone in a replica {row['within_alone']:.1%} of the requests keep the targets "
            f"(ttft {row['ttft_s']['p95']:.3g} s, tpot {row['tpot_s']['p95']:.3g} s for the "
            "slowest twentieth): no number of replicas will do"
        )
    return f"{row['within_targets']:.1%} meet the SLO at the most replicas that were tried"
