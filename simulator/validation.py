"""Comparison of predicted with measured seconds, run by run, and its verdict.

Measured input, one row per request and repeat (`traces.store.engine_runs.MEASURED_COLUMNS`):

==========  ====================================================================
policy      name of the policy, as in its round log
verify      name of the verification rule
batch       sequences decoded together
forced      whether acceptance came from the recording instead of the models
repeat      number of the repeat, all runs interleaved within one
request     request id
wall_s      decode seconds of this request in this repeat, prefill excluded
rounds      draft-verify rounds it took
off_s       seconds of ``wall_s`` without a processor (if it was watched)
repeated    times the run was repeated because of that (if it was watched)
==========  ====================================================================

Predicted input: the `Priced` run of each policy, or a frame with columns policy, verify,
request, predicted_s, rounds, and batch or forced where the prediction depends on them.
Seconds are summed over the requests that were measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import half_iqr
from policies.registry import PLAIN, parse_policy
from simulator.pricing import Priced, price
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.machine import DISTURBED, machine_label
from traces.replay.vectorised import replay_many
from traces.sources.found import find_drafted
from traces.store.engine_runs import MEASURED_COLUMNS, OFF_COLUMNS, read_measured
from traces.store.files import read_latency
from traces.store.header import MOST, is_number, is_whole
from traces.store.text import read_object

VALIDATE_COLUMNS = (
    "policy", "verify", "batch", "forced", "predicted_s", "measured_s", "error", "spread",
    "rounds_differ", "machine", "disturbed", "left_out", "speedup_error",
)  # fmt: skip
"""Columns of `compare`: seconds; `error` and `spread` relative to `measured_s`."""

RUN = ["policy", "verify", "batch", "forced"]


def predictions(runs: Sequence[Priced]) -> pd.DataFrame:
    """Return per policy, verification rule and request: predicted decode seconds and rounds."""
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
    """Return one row per measured run (columns `VALIDATE_COLUMNS`).

    * ``measured_s``: sum over requests of the mean over their undisturbed repeats.  (A median would
      hide passes that are slow now and then, which a sum contains.)  A request that was disturbed
      in every repeat counts with the seconds in which it had a processor.
    * ``error``: ``predicted_s / measured_s - 1``; positive if the prediction is too slow.
    * ``spread``: half the interquartile range of the repeats, relative to ``measured_s`` (NaN with
      one repeat).
    * ``rounds_differ``: requests whose number of rounds is not the predicted one.
    * ``speedup_error``: signed error of the speedup over no speculation in the same session (NaN if
      that did not run).  It does not change if the whole machine is slower or faster than when it
      was profiled.
    * ``disturbed``: share of the counted runs' seconds without a processor (NaN if not watched);
      ``machine`` judges it (`traces.machine.machine_label`); ``left_out`` counts repeated and
      uncounted runs.

    Raises
    ------
    DraftsimError
        If a column is missing, a measured run or request has no prediction, a repeat
        lacks a request that another has, or a measured sum is not positive.
    """
    if missing := [c for c in MEASURED_COLUMNS if c not in measured.columns]:
        raise DraftsimError(f"measured times lack the column(s) {', '.join(missing)}")
    if measured.empty:
        raise DraftsimError("no measured times: run at least one policy")
    table = predicted if isinstance(predicted, pd.DataFrame) else predictions(predicted)
    keys = [c for c in (*RUN, "request") if c in table.columns]
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
    for run, part in joined.groupby(RUN, sort=False):
        sums = part.pivot_table(index="repeat", columns="request", values="seconds", dropna=False)
        if bool(sums.isna().to_numpy().any()):
            raise DraftsimError(
                f"the run {run} lacks a request in one of its repeats: run it again"
            )
        seconds = sums.sum(axis=1).to_numpy(float)
        alone = ~part["disturbed_run"]
        counted = part[alone | ~alone.groupby(part["request"]).transform("any")]
        middle = float(counted.groupby("request")["seconds"].mean().sum())
        if not 0 < middle < math.inf:
            raise DraftsimError(f"the run {run} took {middle} seconds, expected more than 0")
        first = part.drop_duplicates("request")
        expected = float(first["predicted_s"].sum())
        differ = part.loc[part["rounds"] != part["predicted_rounds"], "request"].nunique()
        spread = float(half_iqr(seconds)) / middle if len(seconds) > 1 else math.nan
        off = float(counted["off_s"].sum(skipna=False) / counted["wall_s"].sum())
        left_out = len(part) - len(counted) + int(part["repeated"].sum())
        machine = machine_label({} if math.isnan(off) else {"off": off})
        rows.append(
            (*run, expected, middle, expected / middle - 1, spread, int(differ), machine, off,
             left_out)
        )  # fmt: skip
    frame = pd.DataFrame(rows, columns=list(VALIDATE_COLUMNS[:-1]))
    plain = frame[frame["policy"] == PLAIN].set_index(["batch", "forced"])["error"]
    control = frame.join(plain.rename("control"), on=["batch", "forced"])["control"]
    # (plain / policy), predicted over measured: the policy's own times are the divisor.
    frame["speedup_error"] = (1 + control) / (1 + frame["error"]) - 1
    return frame


MEDIAN_BOUND = 0.02
"""Largest median |error| of predictions made from latencies measured on the same device."""
WORST_BOUND = 0.05
"""Largest |error| of any policy."""


class Verdict(NamedTuple):
    """The verdict of the rows of `compare` together."""

    median_error: float
    """Median of |error| over the runs."""
    worst_error: float
    """Signed error of the run with the largest |error|."""
    worst_policy: str
    ranked_pairs: int
    """Pairs of runs whose measured times differ by more than twice their spread."""
    misranked: tuple[tuple[str, str], ...]
    """Pairs that the prediction orders the other way, faster measured one first."""
    sign_arms: int
    """Runs measured clearly faster or slower than plain decoding."""
    wrong_sign: tuple[str, ...]
    """Rows whose prediction lies on the other side of 1x."""
    undrifted_error: float
    """Median |error| had passes been as fast as in the latency table (`anchor_drift`)."""
    rows: int
    """Runs compared: policies at batches."""

    @property
    def met(self) -> dict[str, bool]:
        """The bounds of a recording, and for each whether it is kept."""
        return {
            "median": self.median_error <= MEDIAN_BOUND,
            "worst": abs(self.worst_error) <= WORST_BOUND,
            "ranking": not self.misranked,
            "sign": not self.wrong_sign,
        }


def verdict(*recordings: pd.DataFrame) -> Verdict:
    """Judge the rows of `compare`, of one recording or of several: errors, ranking, side of 1x.

    Policies are compared within one (batch, forced) group of a recording.  A difference counts if
    it exceeds twice the larger of the two spreads, in seconds.  A column ``drift`` (`anchor_drift`)
    enters ``undrifted_error``, where it is known.

    Raises
    ------
    DraftsimError
        If there are no rows.
    """
    rows = pd.concat(recordings, ignore_index=True) if recordings else pd.DataFrame()
    if rows.empty:
        raise DraftsimError("no compared runs: make at least one")
    drift = rows["drift"].fillna(0.0) if "drift" in rows else 0.0
    magnitude = rows["error"].abs()
    worst = rows.iloc[int(magnitude.argmax())]
    pairs, signs = 0, 0
    misranked: list[tuple[str, str]] = []
    wrong: list[str] = []
    groups = (part.groupby(["batch", "forced"], sort=False) for part in recordings)
    for _, group in itertools.chain.from_iterable(groups):
        records = [
            (str(p), float(s), float(m), 2 * float(m * w))
            for p, s, m, w in zip(
                group["policy"], group["predicted_s"], group["measured_s"], group["spread"],
                strict=True,
            )
        ]  # fmt: skip
        for a, b in itertools.combinations(records, 2):
            fast, slow = (a, b) if a[2] < b[2] else (b, a)
            # A spread nobody measured (NaN) makes no difference a clear one.
            if not slow[2] - fast[2] > max(fast[3], slow[3]):
                continue
            pairs += 1
            other_way = fast[1] >= slow[1]
            if other_way:
                misranked.append((fast[0], slow[0]))
            if (fast[0] == PLAIN) != (slow[0] == PLAIN):
                signs += 1
                if other_way:
                    wrong.append(slow[0] if fast[0] == PLAIN else fast[0])
    return Verdict(
        float(magnitude.median()), float(worst["error"]), str(worst["policy"]), pairs,
        tuple(misranked), signs, tuple(wrong),
        float(((1 + rows["error"]) * (1 + drift) - 1).abs().median()), len(rows),
    )  # fmt: skip


APART = 0.03
"""Difference of errors from which the error of no speculation is said to be in every speedup."""


def common_error(rows: pd.DataFrame) -> str:
    """Say that the error of no speculation is unlike the policies', and so in every speedup; or "".

    No speculation is one run among many: a minute of another speed of the machine shows there.
    """
    plain = rows["policy"] == PLAIN
    alone, others = rows.loc[plain, "error"], rows.loc[~plain, "error"]
    if len(alone) != 1 or len(others) < 3:
        return ""
    off, usual = float(alone.iloc[0]), float(others.median())
    scatter = float((others - usual).abs().median())
    if abs(off - usual) <= max(APART, 2 * scatter):
        return ""
    return (
        f"the seconds of no speculation are {off:+.1%} off, those of the policies {usual:+.1%}: "
        "every speedup errs by the difference, so repeat the check before you rely on it"
    )


def check_recording(folder: Path) -> pd.DataFrame:
    """Return predicted against measured seconds of a recording, one row per policy and batch.

    ``folder`` holds ``latency.parquet``, ``measured.parquet`` and a trace, or the name of the
    folder that does, as ``python -m profiler.suite unpack`` sorts them.  Columns as in
    `simulator.validation.compare`.  Batches that cannot be predicted are left out; ``attrs`` says
    why, by batch, under ``left_out``.

    Raises
    ------
    DraftsimError
        If a file is missing or damaged, or no batch can be predicted.
    """
    trace, latency = find_drafted(str(folder))
    runs = read_measured(folder / "measured.parquet").times
    parts: list[pd.DataFrame] = []
    left_out: dict[int, str] = {}
    for batch in sorted(set(runs["batch"].tolist())):
        try:
            parts.append(_check_batch(trace, latency, runs[runs["batch"] == batch], batch))
        except DraftsimError as error:
            left_out[batch] = str(error)
    if not parts:
        raise DraftsimError("; ".join(left_out.values()))
    rows = pd.concat(parts, ignore_index=True)
    rows.attrs["left_out"] = left_out
    return rows


def _check_batch(
    trace: Trace, latency: LatencyTable, runs: pd.DataFrame, batch: int
) -> pd.DataFrame:
    policies = {n: parse_policy(n, max_gamma=trace.max_gamma) for n in runs["policy"].unique()}
    used = trace.select(_decoded(trace, runs, batch))
    if batch == 1:
        return compare([price(log, latency) for log in replay_many(used, policies)], runs)
    # Brings all of serving, which a data sheet alone does not need.
    from simulator.serving.study import predict_groups

    groups, _ = predict_groups(used, latency, policies, [batch])
    return compare(groups, runs)


def anchor_drift(folder: Path) -> dict[int, float]:
    """Return, by batch, how much slower passes were during the full runs than in the latency table.

    It is the median, over the passes that stage ``forced`` times again (its anchors), of measured
    over tabled seconds, minus one.  Batches without anchors, or without passes in the table, are
    left out.

    Raises DraftsimError if ``provenance.json`` is there and damaged.
    """
    path = folder / "provenance.json"
    if not path.is_file():
        return {}
    latency = read_latency(folder / "latency.parquet")
    tabled_batches = set(latency.cells["batch"].tolist())
    found: dict[int, list[float]] = {}
    document = read_object(path, "unpack the recording again")
    try:
        units = document.get("forced", {}).get("units", {})
        for unit in units.values():
            anchors = unit.get("anchors", [])
            if not isinstance(anchors, list):
                raise TypeError("anchors are no list")
            for at in anchors:
                sizes = all(is_whole(at[name]) for name in ("batch", "width", "context"))
                if not (sizes and is_number(at["median_s"]) and 0 < at["median_s"] <= MOST):
                    raise ValueError(f"an anchor is {at}")
                if at["batch"] not in tabled_batches:
                    continue
                tabled = latency.seconds(
                    at["model"], "forward", batch=at["batch"], new_tokens=at["width"],
                    context=at["context"],
                )  # fmt: skip
                found.setdefault(at["batch"], []).append(at["median_s"] / float(tabled) - 1)
    except (ValueError, KeyError, TypeError, AttributeError, DraftsimError) as error:
        raise DraftsimError(f"{path}: damaged ({error}): unpack the recording again") from None
    return {batch: float(np.median(ratios)) for batch, ratios in found.items()}


def _decoded(trace: Trace, measured: pd.DataFrame, batch: int) -> list[int]:
    """Return indices of the requests that were decoded: each group from its first request on."""
    place = {r.id: i for i, r in enumerate(trace.requests)}
    if unknown := set(measured["request"]) - set(place):
        raise DraftsimError(
            f"request {sorted(unknown)[0]!r} was measured but is not in the trace of this folder: "
            "unpack both from the same run"
        )
    first = sorted(place[request] for request in set(measured["request"]))
    return [i for start in first for i in range(start, min(start + batch, len(trace.requests)))]


BOUND = 0.02
"""Error of a speedup that is worth telling: repeats are named whose scatter is half of it."""


def with_noise(rows: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """Return the rows with the relative standard errors that their own repeats give what was
    measured.

    ``noise`` is of tokens/s, ``speedup_noise`` of the speedup over the policy `first` at the same
    load; both are None if each ran once.  Policies of a load are taken to scatter alike: with a
    few repeats each, the scatter of one says little.
    """
    for load in dict.fromkeys(row["load"] for row in rows):
        own = [row for row in rows if row["load"] == load]
        rates = np.log([row["throughputs"] for row in own])
        repeats = rates.shape[1]
        single = scatter(rates)
        in_turn = scatter(rates, shared=True)
        for row in own:
            row["noise"] = None if single is None else single / math.sqrt(repeats)
            row["speedup_noise"] = None if in_turn is None else (
                0.0 if row["policy"] == first else in_turn * math.sqrt(2 / repeats)
            )  # fmt: skip
    return rows


def scatter(logs: npt.NDArray[np.float64], shared: bool = False) -> float | None:
    """Return the standard deviation of one repeat about its run, from (runs, repeats) logarithms.

    With `shared`, less what all runs of a repeat share, which no ratio of two of them sees.  None
    where too few ran to tell.
    """
    runs, repeats = logs.shape
    rest = logs - logs.mean(1, keepdims=True)
    degrees = runs * (repeats - 1)
    if shared:
        rest = rest - rest.mean(0, keepdims=True)
        degrees -= repeats - 1
    return math.sqrt(float((rest**2).sum()) / degrees) if degrees else None


def expected_median(noises: Sequence[float]) -> float:
    """Return the median of the errors' sizes that a model without error would show, its noises
    being these.

    The median over a mixture of normal errors; 0 where none has any.
    """
    from scipy.optimize import brentq
    from scipy.stats import halfnorm

    scales = np.array([n for n in noises if n])
    if not scales.size:
        return 0.0
    none = len(noises) - scales.size

    def above(size: float) -> float:
        return float(none + np.sum(halfnorm.cdf(size, scale=scales))) / len(noises) - 0.5

    return 0.0 if above(0.0) >= 0 else float(brentq(above, 0.0, 2 * scales.max()))


SURE = 2
"""Standard errors from 1 beyond which the repeats are sure on which side of 1 a speedup is."""


def noise_said(rows: Sequence[Mapping[str, Any]], first: str) -> str | None:
    """Say the error of the speedups, and the part that the noise of the repeats explains."""
    runs = [row for row in rows if row["policy"] != first and row["speedup_noise"] is not None]
    if not runs:
        return None
    errors = np.abs([row["speedup_error"] for row in runs])
    floor, repeats = expected_median([row["speedup_noise"] for row in runs]), runs[0]["repeats"]
    needed = math.ceil(repeats * (2 * floor / BOUND) ** 2)
    paced = [abs(e) for row in runs if (e := row["paced_speedup_error"]) is not None]
    wrong = [row for row in runs if (row["speedup"] - 1) * (row["speedup_predicted"] - 1) < 0]
    sure = sum(abs(math.log(row["speedup"])) > SURE * row["speedup_noise"] for row in wrong)
    return (
        f"the median error of speedups is {np.median(errors):.1%} (worst {errors.max():.1%}); a "
        f"perfect model would show {floor:.1%} with the noise of these {repeats} repeats"
        + (f" ({BOUND / 2:.0%} with {needed} repeats)" if needed > repeats else "")
        + (
            f"; it is {np.median(paced):.1%} after correcting for the speed of the machine"
            if paced else ""
        )
        + f"; {len(wrong)} of {len(runs)} are on the wrong side of 1x"
        + (f", {sure} of them by more than {SURE} standard errors" if wrong else "")
    )  # fmt: skip
