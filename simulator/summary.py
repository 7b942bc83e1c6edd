"""Summaries of runs: from round logs and latencies to one row per policy.

Speedup is plain decoding's seconds per token over the policy's, as a ratio of sums over
the prompts.  By default it counts decoding alone, the time speculation can change; with
``prefill=True`` both sides include the prompts.  Intervals are bootstrap
intervals over prompts, the unit that is independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from simulator.bootstrap import Interval, gain, rate_ratio
from simulator.bootstrap import resamples as draws
from simulator.executors import results_of
from simulator.pricing import Priced, autoregressive, price
from traces.aliases import Count, Row, silent
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.store.text import plain

SUMMARY_COLUMNS = (
    "policy", "verify", "source", "tokens", "rounds", "drafted", "accepted", "draft_forwards",
    "target_forwards", "block_efficiency", "acceptance_rate", "wall_s", "speedup", "speedup_lo",
    "speedup_hi", "fidelity",
)  # fmt: skip
"""Columns of `summarize`: counts over all requests, `wall_s` in seconds."""


def summarize(
    logs: Sequence[RoundLog],
    latency: LatencyTable,
    *,
    resamples: int = 2000,
    prefill: bool = False,
    seed: int = 0,
    by_category: bool = False,
) -> pd.DataFrame:
    """Return one row per log (columns `SUMMARY_COLUMNS`), plain decoding first.

    Parameters
    ----------
    logs:
        Runs over the same requests in the same order.
    latency:
        Latency table that prices all logs.
    resamples, seed:
        Bootstrap resamples over prompts, and their seed.  With one prompt the interval is NaN.
    prefill:
        True if `wall_s` and the speedups include prefill.
    by_category:
        True to return rows for each prompt category, with a leading ``category``.

    Notes
    -----
    ``tokens`` counts what the rounds emitted, so ``block_efficiency`` is
    ``tokens / target_forwards``; a first token that prefill emits belongs to neither.
    A lossy rule changes the length of outputs, hence seconds *per token*.

    Raises
    ------
    DraftsimError
        If there is no log, a log has no rounds, or the logs' requests differ.
    """
    runs = price_all(logs, latency)
    return summarize_runs(
        runs, resamples=resamples, prefill=prefill, seed=seed, by_category=by_category
    )


def summarize_runs(
    runs: Sequence[Priced], *, resamples: int = 2000, prefill: bool = False, seed: int = 0,
    by_category: bool = False,
) -> pd.DataFrame:  # fmt: skip
    """Return the rows of `summarize` for runs that were priced (`price_all`)."""
    names = [r.category for r in runs[0].log.requests]
    parts = []
    for category in dict.fromkeys(names) if by_category else [None]:
        keep = np.array([category in (None, name) for name in names], dtype=bool)
        part = _rows(runs, keep, draws(int(keep.sum()), resamples, seed), prefill)
        if by_category:
            part.insert(0, "category", category)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def prompt_speedups(log: RoundLog, latency: LatencyTable) -> Floats:
    """Return the speedup of each prompt, shape (requests,); NaN if a request has no rounds.

    SpecBound, Table 5 shows this distribution: a mean above 1x hides the prompts that
    speculation slows down.  ``np.nanmean(prompt_speedups(...) < 1)`` is their share.
    """
    plain, run = price_all([log], latency)
    return speedups_over(plain, run)


def speedups_over(plain: Priced, run: Priced) -> Floats:
    """Return the speedups of `prompt_speedups` for runs that were priced."""
    return rate_ratio(_sums(run), _sums(plain))


def gains_over(
    rival: Priced, runs: Sequence[Priced], *, resamples: int = 2000, prefill: bool = False
) -> list[Interval]:
    """Return seconds per token of `rival` over those of each run, with the interval of that ratio.

    Every resample has the same prompts for both, so what makes a prompt fast for both cancels: two
    policies can differ significantly although their own intervals overlap.
    The interval is NaN with one prompt.
    """
    theirs = _sums(rival, prefill)
    weights = draws(theirs.shape[1], resamples)
    return [gain(_sums(run, prefill), theirs, weights) for run in runs]


def speedup_distribution(speedups: npt.ArrayLike, edges: npt.ArrayLike) -> pd.DataFrame:
    """Return prompts per speedup range, fastest first: columns low, high, prompts, share.

    ``edges`` are the increasing bounds of the ranges; the lowest range also takes what is
    below it and the highest what is above, so that the shares add up to 1.
    """
    values = np.asarray(speedups, dtype=np.float64)
    values = values[np.isfinite(values)]
    bounds = np.asarray(edges, dtype=np.float64)
    if len(bounds) < 2 or (np.diff(bounds) <= 0).any():
        raise DraftsimError(f"the edges {bounds.tolist()} are not two or more increasing numbers")
    if not len(values):
        raise DraftsimError("no prompt has a speedup: every request ended with its first token")
    counts, _ = np.histogram(np.clip(values, bounds[0], bounds[-1]), bounds)
    frame = pd.DataFrame(
        {"low": bounds[:-1], "high": bounds[1:], "prompts": counts, "share": counts / len(values)}
    )
    return frame.iloc[::-1].reset_index(drop=True)


def to_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the frame as JSON-ready rows; NaN, which JSON lacks, becomes None."""
    return [plain(row) for row in frame.to_dict("records")]


def price_all(
    logs: Sequence[RoundLog], latency: LatencyTable,
    progress: Count = silent,
) -> list[Priced]:  # fmt: skip
    """Return plain decoding of the first log's requests and each log, priced.

    `progress` is told of the logs that are priced, and of all, as `results_of` counts them.

    Raises DraftsimError as in `summarize`.
    """
    if not logs:
        raise DraftsimError("no round log was given: name at least one policy")
    plain = autoregressive(logs[0])
    ids = [r.id for r in plain.requests]
    for log in (plain, *logs):
        if [r.id for r in log.requests] != ids:
            raise DraftsimError(f"the runs of {plain.policy} and {log.policy} have other requests")
        if not len(log):
            raise DraftsimError(f"the run of {log.policy} has no rounds: the outputs are too short")
    parts = [partial(price, log, latency) for log in (plain, *logs)]
    shared = [latency, plain, *logs]
    return results_of(parts, len(plain) * len(parts), shared, progress)


def row_key(row: Row) -> tuple[str, str, str]:
    """Return what tells a row from the others: its policy, rule and source."""
    return row["policy"], row["verify"], row["source"]


def speedup(log: RoundLog, latency: LatencyTable) -> float:
    """Return seconds per token of plain decoding over those of `log`."""
    return float(price(autoregressive(log), latency).total_s / price(log, latency).total_s)


def _sums(run: Priced, prefill: bool = False) -> Floats:
    """Return tokens and seconds of each request, shape (2, requests)."""
    seconds = run.wall_s if prefill else run.decode_s
    return np.stack([run.log.per_request(run.log.rounds["emitted"]), seconds])


def totals(rounds: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the counts that rounds add up to, and their ratios; NaN for a ratio to nothing."""
    emitted, drafted, accepted, forwards = (
        int(rounds[name].sum(dtype=np.int64))
        for name in ("emitted", "drafted", "accepted", "draft_forwards")
    )
    return {
        "tokens": emitted, "rounds": len(rounds), "drafted": drafted, "accepted": accepted,
        "draft_forwards": forwards,
        "block_efficiency": emitted / len(rounds) if len(rounds) else math.nan,
        "acceptance_rate": accepted / drafted if drafted else math.nan,
    }  # fmt: skip


def _rows(
    runs: Sequence[Priced], keep: npt.NDArray[np.bool_], weights: Floats, prefill: bool
) -> pd.DataFrame:
    plain = _sums(runs[0], prefill)[:, keep]
    rows = []
    for i, run in enumerate(runs):
        own = _sums(run, prefill)[:, keep]
        # The same resamples for every policy, so that their intervals can be compared.
        speedup, lo, hi = gain(own, plain, weights)
        counts = totals(run.log.rounds[keep[run.log.rounds["request"]]])
        rows.append(
            {
                **counts, "policy": run.log.policy, "verify": run.log.verify,
                "source": run.log.source, "target_forwards": counts["rounds"],
                "wall_s": float(own[1].sum()), "speedup": speedup, "speedup_lo": lo if i else 1.0,
                "speedup_hi": hi if i else 1.0, "fidelity": run.log.fidelity,
            }
        )  # fmt: skip
    return pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS))


HARDLY_VERIFIES = 0.95
"""Share of the judged mismatches from which on a rule is said to accept nearly everything."""
HARDLY_SAID = "hardly verifies"
"""Said in the note of a row with such a rule."""


def accepted_mismatches(log: RoundLog) -> float | None:
    """Return the share of judged mismatches that a lossy rule accepted; None if it judged none.

    A rejection ends the round, and its token is one that the target would not have chosen.
    """
    if log.mismatched is None:
        return None
    stood = int(log.mismatched.sum())
    refused = int((log.rounds["accepted"] < log.rounds["drafted"]).sum())
    return stood / (stood + refused) if stood + refused else None


def degenerate(logs: Sequence[RoundLog]) -> list[str]:
    """Return for each run what makes it degenerate, in words; empty for the others.

    A rule that accepts over `HARDLY_VERIFIES` of the mismatches it judges, one that accepts
    none, and runs whose rounds are identical to an earlier one's: their settings differ in name
    alone.
    """
    seen: dict[tuple[bytes, bytes], RoundLog] = {}
    found = []
    for log in logs:
        said = []
        share = accepted_mismatches(log)
        if share is not None and share > HARDLY_VERIFIES:
            said.append(f"accepts {share:.0%} of mismatches: {HARDLY_SAID}")
        calls = b"" if log.recorded_calls is None else log.recorded_calls.tobytes()
        first = seen.setdefault((log.rounds.tobytes(), calls), log)
        if first is not log:
            said.append(f"identical to {_told_apart(first, log)}")
        elif share == 0:
            said.append("accepts no mismatch: never fires")
        found.append("; ".join(said))
    return found


def _told_apart(log: RoundLog, other: RoundLog) -> str:
    """Return the shortest name that tells `log` from `other`."""
    if log.policy != other.policy:
        return log.policy
    return log.verify if log.verify != other.verify else log.source
