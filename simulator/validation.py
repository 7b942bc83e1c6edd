"""Predicted against measured seconds, per arm, and what the comparison amounts to.

Measured input, one row per request and repeat (`traces.store.measured.MEASURED_COLUMNS`):

==========  ====================================================================
policy      name of the policy, as in its round log
verify      name of the verify rule
batch       sequences decoded together
forced      whether acceptance came from the recording instead of the models
repeat      number of the repeat, all arms interleaved within one
request     request id
wall_s      decode seconds of this request in this repeat, prefill excluded
rounds      draft-verify rounds it took
off_s       of ``wall_s``, seconds without a processor (where it was watched)
repeated    times the run was made again because of that (likewise)
==========  ====================================================================

Predicted input: the `Priced` run of each policy, or a frame with columns policy, verify,
request, predicted_s, rounds, and batch or forced where the prediction depends on them.
Seconds are summed over the requests that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd

from simulator.pricing import Priced
from traces.errors import DraftsimError
from traces.machine import DISTURBED, label
from traces.store.measured import MEASURED_COLUMNS, OFF_COLUMNS

VALIDATE_COLUMNS = (
    "policy", "verify", "batch", "forced", "predicted_s", "measured_s", "error", "spread",
    "rounds_differ", "machine", "disturbed", "left_out", "speedup_error",
)  # fmt: skip
"""Columns of `compare`: seconds; `error` and `spread` relative to `measured_s`."""

CONTROL = "autoregressive"
"""The arm that speedups are relative to."""

ARM = ["policy", "verify", "batch", "forced"]


def predictions(runs: Sequence[Priced]) -> pd.DataFrame:
    """Per policy, verify rule and request: predicted decode seconds and rounds."""
    parts = [
        pd.DataFrame(
            {
                "policy": run.log.policy,
                "verify": run.log.verify,
                "request": [r.id for r in run.log.requests],
                "predicted_s": run.decode_s,
                "rounds": run.log.per_request(np.ones(len(run.log))).astype(int),
            }
        )
        for run in runs
    ]
    if not parts:
        raise DraftsimError("no predicted run was given: name at least one policy")
    return pd.concat(parts, ignore_index=True)


def compare(predicted: pd.DataFrame | Sequence[Priced], measured: pd.DataFrame) -> pd.DataFrame:
    """One row per measured arm (columns `VALIDATE_COLUMNS`).

    ``measured_s`` is the sum over requests of the mean over their undisturbed repeats (a mean, as
    latencies are: a median hides what is slow now and then, and a sum pays for it); a request
    that was disturbed in every repeat counts with the seconds in which it had a processor.
    ``error`` is ``predicted_s / measured_s - 1`` (positive: predicted too slow), ``spread`` half
    the interquartile range of the repeats relative to ``measured_s`` (NaN from one repeat),
    ``rounds_differ`` the number of requests whose round count was not the predicted one,
    ``speedup_error`` the signed error of the speedup over plain decoding run in the same
    session (NaN without that arm): what is left of ``error`` when the whole machine was
    slower or faster than when it was profiled.  ``disturbed`` is the share of the counted runs'
    seconds that they had no processor (NaN if nobody watched), ``machine`` says whether that
    is little (`traces.machine.label`), ``left_out`` counts the runs made again or not counted.

    Raises
    ------
    DraftsimError
        If a column is missing, a measured arm or request has no prediction, a repeat
        lacks a request that another has, or a measured sum is not positive.
    """
    if missing := [c for c in MEASURED_COLUMNS if c not in measured.columns]:
        raise DraftsimError(f"measured times lack the column(s) {', '.join(missing)}")
    if measured.empty:
        raise DraftsimError("no measured times: run at least one policy")
    table = predicted if isinstance(predicted, pd.DataFrame) else predictions(predicted)
    keys = [c for c in (*ARM, "request") if c in table.columns]
    joined = measured.merge(
        table.rename(columns={"rounds": "predicted_rounds"}),
        on=keys, how="left", validate="many_to_one",
    )  # fmt: skip
    if (unknown := joined[joined["predicted_s"].isna()]).shape[0]:
        row = unknown.iloc[0]
        raise DraftsimError(
            f"request {row['request']!r} was measured under {row['policy']}/{row['verify']} "
            "but not predicted: replay the same requests and policies"
        )
    joined = joined.assign(**{c: math.nan for c in OFF_COLUMNS if c not in joined})
    joined["disturbed_run"] = joined["off_s"] > DISTURBED * joined["wall_s"]
    joined["seconds"] = joined["wall_s"] - joined["off_s"].where(joined["disturbed_run"], 0.0)
    rows = []
    for arm, part in joined.groupby(ARM, sort=False):
        sums = part.pivot_table(index="repeat", columns="request", values="seconds", dropna=False)
        if bool(sums.isna().to_numpy().any()):
            raise DraftsimError(
                f"the run {arm} lacks a request in one of its repeats: run it again"
            )
        seconds = sums.sum(axis=1).to_numpy(float)
        alone = ~part["disturbed_run"]
        counted = part[alone | ~alone.groupby(part["request"]).transform("any")]
        middle = float(counted.groupby("request")["seconds"].mean().sum())
        if not 0 < middle < math.inf:
            raise DraftsimError(f"the run {arm} took {middle} seconds, expected more than 0")
        first = part.drop_duplicates("request")
        expected = float(first["predicted_s"].sum())
        low, high = np.percentile(seconds, [25, 75])
        differ = part.loc[part["rounds"] != part["predicted_rounds"], "request"].nunique()
        spread = float(high - low) / 2 / middle if len(seconds) > 1 else math.nan
        off = float(counted["off_s"].sum(skipna=False) / counted["wall_s"].sum())
        left_out = len(part) - len(counted) + int(part["repeated"].sum())
        machine = label({} if math.isnan(off) else {"off": off})
        rows.append(
            (*arm, expected, middle, expected / middle - 1, spread, int(differ), machine, off,
             left_out)
        )  # fmt: skip
    frame = pd.DataFrame(rows, columns=list(VALIDATE_COLUMNS[:-1]))
    frame["speedup_error"] = _speedup_error(frame)
    return frame


def _speedup_error(rows: pd.DataFrame) -> pd.Series[float]:
    plain = rows[rows["policy"] == CONTROL].set_index(["batch", "forced"])["error"]
    control = [
        float(plain.get((batch, forced), math.nan))
        for batch, forced in zip(rows["batch"], rows["forced"], strict=True)
    ]
    # (plain / policy), predicted over measured: the policy's own times are the divisor.
    return (1 + pd.Series(control, index=rows.index)) / (1 + rows["error"]) - 1


class Verdict(NamedTuple):
    """The verdict of the rows of `compare` together."""

    median_error: float
    """Median of |error| over the arms."""
    worst_error: float
    """Signed error of the arm with the largest |error|."""
    worst_policy: str
    ranked_pairs: int
    """Pairs of arms whose measured times differ by more than twice their spread."""
    misranked: tuple[tuple[str, str], ...]
    """Pairs that the prediction orders the other way, faster measured one first."""
    sign_arms: int
    """Arms measured clearly faster or slower than plain decoding."""
    wrong_sign: tuple[str, ...]
    """Rows whose prediction lies on the other side of 1x."""


def verdict(rows: pd.DataFrame, baseline: str = CONTROL) -> Verdict:
    """Judge the rows of `compare`: errors, ranking, and side of 1x.

    Arms are compared within one (batch, forced) group.  A difference counts where it
    exceeds twice the larger of the two spreads, in seconds.

    Raises
    ------
    DraftsimError
        If there are no rows.
    """
    if rows.empty:
        raise DraftsimError("no compared runs: make at least one")
    magnitude = rows["error"].abs()
    worst = rows.iloc[int(magnitude.argmax())]
    pairs, signs = 0, 0
    misranked: list[tuple[str, str]] = []
    wrong: list[str] = []
    for _, group in rows.groupby(["batch", "forced"], sort=False):
        records = [
            (str(p), float(s), float(m), 2 * float(m * w))
            for p, s, m, w in zip(
                group["policy"], group["predicted_s"], group["measured_s"], group["spread"],
                strict=True,
            )
        ]  # fmt: skip
        for a, b in combinations(records, 2):
            fast, slow = (a, b) if a[2] < b[2] else (b, a)
            # A spread nobody measured (NaN) makes no difference a clear one.
            if not slow[2] - fast[2] > max(fast[3], slow[3]):
                continue
            pairs += 1
            other_way = fast[1] >= slow[1]
            if other_way:
                misranked.append((fast[0], slow[0]))
            if (fast[0] == baseline) != (slow[0] == baseline):
                signs += 1
                if other_way:
                    wrong.append(slow[0] if fast[0] == baseline else fast[0])
    return Verdict(
        float(magnitude.median()), float(worst["error"]), str(worst["policy"]), pairs,
        tuple(misranked), signs, tuple(wrong),
    )  # fmt: skip
