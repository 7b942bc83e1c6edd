"""What a ranking of policies needs to be fair: the best fixed length, a fitted stopping rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from policies.lengths.basic import Fixed
from simulator.pricing import price
from simulator.whatif.ladder import GAMMAS, split_prompts
from simulator.whatif.rate import Estimates, RateFit, fit_rate_optimal
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.lanes import replay_many
from traces.replay.rounds import RoundLog

LOWER_BOUND = "lower bound"
"""Of a row from a log that does not tell its draft lengths."""
BEST_FIXED = "best fixed"
"""Said of the fastest fixed draft length, chosen in hindsight on the prompts it is shown for."""
FITTED = "fitted on other prompts"
UNFITTED = "unfitted"
"""Said of a rate-optimal rule with the estimates and the rate it comes with."""
FEWEST_PROMPTS = 4
"""Prompts from which a rule is fitted to one half and judged on the other."""
LOSSLESS = ("exact", "rejection-sampling")
"""Verification under which the output is the target's own."""
NOT_RUN = ("oracle", "autoregressive")
"""Rows of a ranking that are no policy to recommend: the bound, and no speculation."""


def winner(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the fastest row that one could run; None where there is none.

    Every table and page recommends this one.  ``rows`` have the keys ``policy``, ``verify``,
    ``speedup`` and ``fidelity`` (`simulator.summary.SUMMARY_COLUMNS`).  Rules that change the
    text are left out, and so are lower bounds, among which the largest need not be the best.
    """
    able = [
        i for i, row in enumerate(rows)
        if row["verify"] in LOSSLESS and row["policy"].partition(":")[0] not in NOT_RUN
        and row["speedup"] is not None and row["fidelity"] != LOWER_BOUND
    ]  # fmt: skip
    return max(able, key=lambda i: rows[i]["speedup"]) if able else None


def fixed_lengths(trace: Trace, gammas: Sequence[int] = GAMMAS) -> list[RoundLog]:
    """The trace under each fixed draft length that it can be replayed at, named after it."""
    kept = [g for g in gammas if g <= (trace.max_gamma or g)]
    return list(replay_many(trace, {f"fixed:gamma={g}": Fixed(g) for g in kept}))


def fastest(logs: Sequence[RoundLog], latency: LatencyTable) -> RoundLog:
    """The log of fewest seconds per emitted token, the first of equals.

    Raises
    ------
    DraftsimError
        If there is no log, or as of `simulator.pricing.price`.
    """
    if not logs:
        raise DraftsimError("no round log was given: name at least one policy")
    return min(
        logs,
        key=lambda log: price(log, latency).total_s / max(int(log.rounds["emitted"].sum()), 1),
    )


def cross_fitted_rule(
    trace: Trace, latency: LatencyTable, *, gamma_max: int | None = None, seed: int = 0,
    name: str = "rate-optimal",
) -> RoundLog:  # fmt: skip
    """The trace under the rate-optimal rule, every prompt under one fitted to other prompts.

    Each half of the prompts (`simulator.whatif.ladder.split_prompts`) is replayed under the
    rule that `simulator.whatif.rate.fit_rate_optimal` finds on the other half.  Where the
    halves would read other estimates, both take the kind that all prompts choose, so that one
    log has one price of reading.

    Raises
    ------
    DraftsimError
        With fewer than `FEWEST_PROMPTS` prompts, or where the rule cannot be fitted.
    """
    if len(trace.requests) < FEWEST_PROMPTS:
        raise DraftsimError(
            f"{len(trace.requests)} prompts are too few to fit a rule on one half and judge it on "
            f"the other: record {FEWEST_PROMPTS} or more"
        )
    halves = split_prompts(trace, seed)

    def fit(prompts: Sequence[int] | None, estimates: Estimates = "auto") -> RateFit:
        return fit_rate_optimal(trace, latency, prompts, estimates=estimates, gamma_max=gamma_max)

    fits = [fit(half) for half in halves]
    if fits[0].estimates != fits[1].estimates:
        kind = cast(Estimates, fit(None).estimates)
        fits = [fit(half, kind) for half in halves]
    parts, logs = [], []
    for found, held_out in zip(fits, reversed(halves), strict=True):
        [log] = replay_many(trace.select(held_out), {name: found.policy})
        rounds = log.rounds.copy()
        rounds["request"] = np.array(held_out)[rounds["request"]]
        parts.append(rounds)
        logs.append(log)
    joined = np.concatenate(parts)
    order = np.argsort(joined["request"], kind="stable")
    return replace(logs[0], rounds=joined[order], requests=trace.requests)
