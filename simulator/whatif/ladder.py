"""The ladder: the share of the possible gain that each policy reaches, on held-out prompts.

Its rungs are no speculation, the best fixed length, each policy with its paper's settings, the
rate-optimal rule, and the oracle, which knows every outcome and wastes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive, Fixed, Oracle
from simulator.chosen import is_default, load_policies
from simulator.pricing import Priced, autoregressive, price
from simulator.summary import price_all, summarize_runs
from simulator.whatif.rate import fit_rate_optimal
from traces.acceptance.trace import Trace
from traces.aliases import Say, silent
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.vectorised import replay_many

GAMMAS = tuple(range(1, 13))
"""Draft lengths among which the best fixed one is sought."""
NO_RUNG = ("autoregressive", "fixed", "oracle", "rate-optimal")
"""Policies that other rungs hold, with what was fitted."""
PARTS = ("useful_draft", "wasted_draft", "verify", "signal", "host")
"""Parts of a round's seconds: passes of accepted drafts, of rejected ones, and the rest."""


def split_prompts(trace: Trace, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return prompt indices to train on and to hold out, half drawn within each category.

    Raises DraftsimError if either side would be empty.
    """
    if len(trace.requests) < 2:
        raise DraftsimError("one prompt cannot be split: record two or more")
    rng = np.random.default_rng(seed)
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(trace.requests):
        groups.setdefault(request.category, []).append(i)
    # Shuffled within a category, dealt across them, so that small ones land on both sides.
    order = [int(i) for group in groups.values() for i in rng.permutation(group)]
    return sorted(order[1::2]), sorted(order[::2])


def ladder(
    trace: Trace,
    latency: LatencyTable,
    *,
    policies: Mapping[str, DraftPolicy] | None = None,
    seed: int = 0,
    resamples: int = 1000,
    progress: Say = silent,
) -> pd.DataFrame:
    """Return one row per policy over the held-out prompts, by rising speedup.

    No speculation has one row, also where it is the best fixed length or among `policies`; so have
    the oracle and the rate-optimal rule, which is fitted.

    Columns: ``rung`` (``autoregressive``, ``best-fixed``, ``policy``, ``rate-optimal``,
    ``oracle``), ``policy``, ``speedup``, ``speedup_lo``, ``speedup_hi``, ``share`` of the
    oracle's gain over plain decoding that is reached (NaN for a policy that gives none),
    ``block_efficiency``,
    ``acceptance_rate``; ``time_<part>`` for each of `PARTS`, as shares of plain decoding's
    time, which add up to ``1 / speedup``; and ``lost_draft`` (useful and wasted),
    ``lost_verify``, ``lost_signal``, ``lost_host``: the same less the oracle's; ``unpriced``: what
    the table has no cells of.

    Best fixed length and rate-optimal rule are fitted on one half of the prompts
    (`split_prompts`); the other policies (default: all single-stream ones whose signals the
    trace holds) have no say in the split.  ``progress`` is told what comes next.

    Raises DraftsimError if there is one prompt, or the latency table lacks a model.
    """
    learned, tested = (trace.select(half) for half in split_prompts(trace, seed))
    progress("finding the best fixed length")
    gamma = best_fixed(learned, latency)
    progress("fitting the rate-optimal rule")
    fit = fit_rate_optimal(learned, latency)
    bound = Oracle(gamma_max=trace.max_gamma)
    rungs: dict[str, tuple[str, DraftPolicy]] = {
        f"fixed:gamma={gamma}": ("best-fixed" if gamma else "autoregressive", Fixed(gamma))
    }
    if policies is None:
        every = load_policies(None, trace, latency=latency)
        found = {name.partition(":")[0]: policy for name, policy in every}
        policies = {name: policy for name, policy in found.items() if name not in NO_RUNG}
    for name, policy in policies.items():
        again = isinstance(policy, Oracle) and vars(policy) == vars(bound)
        if not (again or (is_default(policy) and policy.gamma_max == fit.policy.gamma_max)):
            rungs.setdefault(name, ("policy", policy))
    rungs["rate-optimal"] = ("rate-optimal", fit.policy)
    rungs["oracle"] = ("oracle", bound)
    progress("replaying policies")
    logs = list(replay_many(tested, {name: policy for name, (_, policy) in rungs.items()}))
    progress("pricing policies")
    runs = price_all(logs, latency)
    table = summarize_runs(runs, resamples=resamples, seed=seed)
    table["rung"] = ["autoregressive", *(rung for rung, _ in rungs.values())]
    table["unpriced"] = [run.unpriced(latency) for run in runs]
    parts = pd.DataFrame([_parts(run, runs[0].total_s) for run in runs])
    table = pd.concat([table, parts], axis=1)
    best = table[table["rung"] == "oracle"].iloc[0]
    gain = float(best["speedup"]) - 1
    gains = np.where(table["speedup"] >= 1 - 1e-12, table["speedup"] - 1, np.nan)
    table["share"] = gains / gain if gain > 0 else np.nan
    drafts = table["time_useful_draft"] + table["time_wasted_draft"]
    table["lost_draft"] = drafts - (best["time_useful_draft"] + best["time_wasted_draft"])
    for part in ("verify", "signal", "host"):
        table[f"lost_{part}"] = table[f"time_{part}"] - best[f"time_{part}"]
    # Plain decoding comes first, and what never drafts is plain decoding again.
    resting = [
        type(p) is Autoregressive or (isinstance(p, Fixed) and not p.gamma)
        for _, p in rungs.values()
    ]
    table = table[~np.array([False, *resting])]
    columns = [
        "rung", "policy", "speedup", "speedup_lo", "speedup_hi", "share", "block_efficiency",
        "acceptance_rate", *(f"time_{p}" for p in PARTS),
        "lost_draft", "lost_verify", "lost_signal", "lost_host", "fidelity", "unpriced",
    ]  # fmt: skip
    return table[columns].sort_values("speedup", kind="stable", ignore_index=True)


def best_fixed(trace: Trace, latency: LatencyTable, gammas: Sequence[int] = GAMMAS) -> int:
    """Return the draft length of fewest seconds over `trace`, 0 where plain decoding is faster."""
    kept = [g for g in gammas if g <= (trace.max_gamma or g)]
    logs = dict(zip(kept, replay_many(trace, [("", Fixed(g)) for g in kept]), strict=True))
    if not logs:
        raise DraftsimError(f"no draft length of {list(gammas)} fits max_gamma={trace.max_gamma}")
    seconds = {g: price(log, latency).total_s for g, log in logs.items()}
    seconds[0] = price(autoregressive(next(iter(logs.values()))), latency).total_s
    return min(sorted(seconds), key=lambda g: seconds[g])


def _parts(run: Priced, whole_s: float) -> dict[str, float]:
    """Return shares of `whole_s` seconds, one per entry of `PARTS`."""
    forwards = run.log.rounds["draft_forwards"]
    kept: npt.NDArray[Any] = run.log.rounds["accepted"] / np.maximum(forwards, 1)
    seconds = {
        "useful_draft": float((run.draft_s * kept).sum()),
        "wasted_draft": float((run.draft_s * (1 - kept)).sum()),
        "verify": float(run.verify_s.sum()), "signal": float(run.signal_s.sum()),
        "host": float(run.host_s.sum()),
    }  # fmt: skip
    return {f"time_{name}": value / whole_s for name, value in seconds.items()}
