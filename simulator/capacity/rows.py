"""Rows of a capacity plan, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from policies.lengths.basic import Autoregressive
from simulator.capacity.points import Bench
from simulator.capacity.stages import Answer, Start
from simulator.serving.sweep import break_even_load
from traces.errors import DraftsimError

SECONDS_PER_HOUR = 3600
TOLD_APART = 0.01
"""Shares of requests in time that differ by less are taken to be equal."""


def plan_rows(
    bench: Bench,
    rate: float,
    starts: Mapping[str, Start],
    answers: Mapping[str, Answer],
    compared: tuple[Sequence[float], Mapping[str, Sequence[float]]],
    curves: Mapping[str, Sequence[tuple[int, float]]],
) -> list[dict[str, Any]]:
    """Return a row per policy; latencies and throughput are those at ``replicas``.

    * ``replicas``: fewest that meet the SLO.  None if no number that was tried does, or if a
      request alone is too slow.
    * ``replicas_lo``, ``replicas_hi``: its 95% interval over replications.
    * ``within_alone``: share of requests within the SLO if every request is alone.
    * ``rate_limit``: largest load at which ``replicas`` meet the SLO; infinite if no rate was too
      much.  ``rate_per_replica`` is that load per replica.
    * ``saved``: replicas fewer than without speculation.
    * ``stops_saving``: load per replica above which no speculation meets the SLO for more requests;
      infinite if at no rate tried, NaN if already at the lowest.
    * ``too_short``: why the simulated requests are too few to judge.
    * ``curve``: pairs of replicas and the largest rate at which they meet the SLO.
    """
    plain = next((n for n, p in bench.policies.items() if isinstance(p, Autoregressive)), None)
    rows = []
    for name in bench.policies:
        found = answers.get(name)
        verdict = found.verdict if found is not None else starts[name].alone
        count = found.replicas if found is not None else None
        outcomes = verdict.outcomes
        rows.append({
            "policy": name, "verify": outcomes[0]["verify"], "source": outcomes[0]["source"],
            "router": bench.router, "rate": rate,
            "ttft_target_s": bench.targets.ttft_s, "tpot_target_s": bench.targets.tpot_s,
            "share": bench.targets.share, "replicas": count,
            "replicas_lo": found.low if found is not None else None,
            "replicas_hi": found.high if found is not None else None,
            "within_targets": verdict.within, "within_targets_lo": verdict.low,
            "within_targets_hi": verdict.high, "within_alone": starts[name].alone.within,
            "rate_limit": found.limit if found is not None else math.nan,
            "rate_per_replica": found.limit / count if found is not None and count else math.nan,
            "saved": _saved(answers, plain, count),
            "stops_saving": _stops(compared, plain, name),
            "throughput_tok_s": verdict.mean("throughput_tok_s") if count else math.nan,
            **{
                metric: {q: verdict.mean(metric, q) for q in outcomes[0][metric]}
                for metric in ("ttft_s", "tpot_s", "e2e_s")
            },
            "utilisation": verdict.mean("utilisation"), "mean_batch": verdict.mean("mean_batch"),
            "requests": outcomes[0]["requests"], "replications": len(outcomes),
            "too_short": verdict.too_short if found is not None else "",
            "curve": [list(pair) for pair in curves.get(name, ())],
            "rejected": sum(o["rejected"] for o in outcomes),
            "extrapolated": sum(o["extrapolated"] for o in outcomes),
            "unpriced": list(outcomes[0]["unpriced"]), "fidelity": outcomes[0]["fidelity"],
        })  # fmt: skip
    return rows


def with_cost(
    rows: Sequence[Mapping[str, Any]], gpus: int = 1, price: float | None = None
) -> list[dict[str, Any]]:
    """Return the rows with tokens per second and GPU, and what they cost.

    Parameters
    ----------
    gpus:
        Of a replica.
    price:
        Of a GPU, in dollars an hour; without one ``cost_per_hour``, of the fleet, and
        ``cost_per_million_tokens``, of output, are NaN.

    Raises
    ------
    DraftsimError
        For an impossible number of GPUs or price.
    """
    if gpus < 1:
        raise DraftsimError(f"gpus is {gpus}, expected at least 1 a replica")
    if price is not None and not 0 <= price < math.inf:
        raise DraftsimError(f"price is {price}, expected dollars an hour, 0 or more")
    priced = []
    for row in rows:
        used = row["replicas"] * gpus if row["replicas"] is not None else math.nan
        hourly = math.nan if price is None else used * price
        tokens_s = row["throughput_tok_s"]
        priced.append({
            **row, "gpus": None if row["replicas"] is None else used,
            "tok_s_per_gpu": tokens_s / used, "cost_per_hour": hourly,
            "cost_per_million_tokens": hourly / (tokens_s * SECONDS_PER_HOUR) * 1e6,
        })  # fmt: skip
    return priced


def _saved(answers: Mapping[str, Answer], plain: str | None, count: int | None) -> int | None:
    found = answers.get(plain) if plain is not None else None
    if found is None or found.replicas is None or count is None:
        return None
    return found.replicas - count


def _stops(
    compared: tuple[Sequence[float], Mapping[str, Sequence[float]]], plain: str | None, name: str
) -> float | None:
    rates, shares = compared
    if plain is None or name == plain or name not in shares:
        return None
    if plain not in shares:
        return math.inf  # plain decoding keeps the targets at no rate
    gaps = [other - own for own, other in zip(shares[name], shares[plain], strict=True)]
    late = [gap if abs(gap) > TOLD_APART else 0.0 for gap in gaps]
    return break_even_load(rates, late, [0.0] * len(late))
