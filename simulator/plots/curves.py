"""Figures of curves: over the cost ratio, the draft length and the initial one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from policies.registry import is_bound
from simulator.bootstrap import intervals
from simulator.bootstrap import resamples as draws
from simulator.formulas.general import empirical_survival
from simulator.palette import COLOURS, GREY, INK
from simulator.plots.look import BOUND, series, style
from simulator.pricing import autoregressive, price
from simulator.ratios import OwnRatios, carried_sums, ratio_sums, speedup_at
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog


def plot_cost_ratio(
    logs: Sequence[RoundLog], ratios: npt.ArrayLike | None = None, verify: float = 1.0, *,
    latency: LatencyTable | None = None, own: OwnRatios | None = None,
) -> Figure:  # fmt: skip
    """Draw the speedup against c = T_draft / T_target for each log.

    With the pair's `latency` and its `own` ratios, rounds cost what they cost there with
    drafting scaled to c (`simulator.ratios.carried_sums`), so that the curves go through the
    table's speedups at the pair's c, which is marked.  Without, a round costs c per draft pass
    and one target pass, or `verify` of them where it verifies drafts.
    """
    if (latency is None) != (own is None):
        raise DraftsimError("latency and own ratios belong together: give both, or neither")
    c = np.geomspace(0.005, 1, 200) if ratios is None else np.asarray(ratios, dtype=float)
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    sums = []
    if latency is not None and own is not None:
        plain = price(autoregressive(logs[0]), latency)
        sums = [carried_sums(price(log, latency), plain, own) for log in logs]
        if ratios is None and own.ratio > 0:
            c = np.unique([*c, own.ratio])
    else:
        sums = [ratio_sums(log) for log in logs]
    at, rules = verify if own is None else own.verify, len({log.verify for log in logs})
    order = np.argsort([-float(speedup_at(s, c[0] if own is None else own.ratio, at)[0])
                        for s in sums])  # fmt: skip
    # Bounds come last in the legend: no engine can run them.
    for i in sorted(order, key=lambda i: is_bound(logs[i].policy)):
        label = logs[i].policy + (f" ({logs[i].verify})" if rules > 1 else "")
        label += " (bound)" if is_bound(logs[i].policy) else ""
        label += " ~" if logs[i].fidelity == "approximate" else ""
        if own is not None:
            label += f"  {three_digits(float(speedup_at(sums[i], own.ratio, at)[0]))}"
        axes.plot(c, speedup_at(sums[i], c, at), label=label, **look_of(logs[i], int(i), len(c)))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axhline(1, color=INK, linewidth=0.8)
    if own is not None:
        axes.axvline(own.ratio, color=GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"this pair: c = {own.ratio:.2g}", (own.ratio, 1), (4, -4), color=INK, fontsize=8,
            xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost ratio c = T_draft / T_target")
    axes.set_ylabel("speedup over no speculation (×)")
    style(axes, "both")
    figure.legend(
        loc="outside right upper", frameon=False, fontsize=8,
        title=None if own is None else "speedup at this pair's c", title_fontsize=8,
    )  # fmt: skip
    if any(log.fidelity == "approximate" for log in logs):
        axes.set_xlabel(f"{axes.get_xlabel()}   (~ approximate)")
    return figure


def look_of(log: RoundLog, i: int, points: int) -> dict[str, Any]:
    """Return the look of the i-th curve: grey and dotted for a bound, thin if approximate."""
    if is_bound(log.policy):
        return {**BOUND}
    own = series(i, points)
    return {**own, "linewidth": 0.9} if log.fidelity == "approximate" else own


def plot_survival(trace: Trace, gamma: int = 16, resamples: int = 500, seed: int = 0) -> Figure:
    """Chance that k drafts in a row are accepted: recorded (with interval) and i.i.d.

    The i.i.d. curve alpha**k has the recording's mean alpha: what lies between the curves
    is what a formula with a single alpha misses.  Drafts go up to `gamma` tokens, or one less than
    the longest output has.
    """
    gamma = min(gamma, max(request.tokens for request in trace.requests) - 1)
    if gamma < 1:
        raise DraftsimError("no output is longer than one token: nothing was drafted")
    curves, weights = [], []
    for start, stop in zip(trace.request_starts[:-1], trace.request_starts[1:], strict=True):
        if stop - start > gamma:
            curves.append(empirical_survival(trace.run_lengths[start : stop - gamma], gamma))
            weights.append(float(stop - start - gamma))
    table, weight = np.array(curves), np.array(weights)
    drawn = draws(len(weight), resamples, seed) * weight
    low, high = intervals(drawn @ table / drawn.sum(axis=1, keepdims=True))
    match = trace.columns["match"][trace.on_path]
    alpha = float((match[match != UNKNOWN] == MATCH).mean())
    k = np.arange(1, gamma + 1)
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(k, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(k, weight @ table / weight.sum(), "o-", color=COLOURS[0], markersize=4,
              label="recorded (95% interval over prompts)")  # fmt: skip
    axes.plot(k, alpha**k, "s--", color=COLOURS[1], markersize=4, markerfacecolor="white",
              label=f"i.i.d. with the same α = {alpha:.2f}")  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_xlim(0.5, gamma + 0.5)
    axes.set_xlabel("draft length k (tokens)")
    axes.set_ylabel("share of positions whose next k\ndrafts are all accepted")
    axes.legend(frameon=False, fontsize=8)
    style(axes, "both")
    return figure


def plot_robustness(speedups: pd.DataFrame, reference: str = "fixed") -> Figure:
    """Draw the speedup against initial gamma, relative to `reference`'s mean.

    ``speedups`` is what `robustness.speedup_by_gamma` returns.
    """
    mean = float(speedups.loc[speedups["policy"] == reference, "speedup"].mean())
    if not mean > 0:
        raise DraftsimError(f"the reference policy {reference!r} is not in the table")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, part) in enumerate(speedups.groupby("policy", sort=False)):
        value = part["speedup"].to_numpy(float) / mean
        label = f"{name}  {value.mean():.2f} ± {value.std(ddof=1):.2f}"
        axes.plot(part["gamma"], value, label=label, **{**series(i, 1), "markevery": 1})
    axes.axhline(1, color=INK, linewidth=0.8)
    ticks = sorted({int(g) for g in speedups["gamma"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks([g for g in ticks if g in (1, 2, 3, 4, 6, 8, 12, 16, 24)])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("initial draft length γ (tokens)")
    axes.set_ylabel(f"speedup relative to\nthe mean of {reference} (×)")
    style(axes, "both")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, title="mean ± sd over γ",
                  title_fontsize=8)  # fmt: skip
    return figure
