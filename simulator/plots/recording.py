"""Figures of one recording: speedups, acceptance, cost ratios, and validation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from policies.from_file import split_name
from policies.registry import PLAIN, is_bound
from simulator.bootstrap import interval, ratio, resamples
from simulator.chosen import FITTED
from simulator.palette import COLOURS, GREY, INK, PolicyPlaces
from simulator.plots import look
from simulator.pricing import autoregressive, price
from simulator.ratios import OwnRatios, carried_sums, own_ratios, speedup_at
from simulator.robustness import speedups_of
from simulator.summary import summarize
from simulator.whatif.ranking import lossless
from simulator.whatif.tilt import acceptance
from traces.acceptance.trace import Trace
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.machine import BUSY
from traces.replay.calls import is_one_pass
from traces.replay.rounds import RoundLog
from traces.sources.registry import DRAFT_MODEL


def plot_validation(rows: pd.DataFrame) -> Figure:
    """Draw predicted and measured seconds per policy, and the error; rows of `validation.compare`.

    Runs that were disturbed say so, with the share of their time without a processor.
    """
    labels = _policy_labels(rows)
    for column, text in (("batch", "batch {}"), ("forced", "forced={}")):
        if rows[column].nunique() > 1:
            own = zip(labels, rows[column], strict=True)
            labels = [f"{label}, {text.format(value)}" for label, value in own]
    machines = zip(labels, rows["machine"], rows["disturbed"], strict=True)
    labels = [
        f"{label} ({machine} {share:.0%})" if machine == BUSY else label
        for label, machine, share in machines
    ]
    figure = Figure(figsize=(8.2, 0.34 * len(rows) + 1.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
    y = np.arange(len(rows))[::-1]
    measured, predicted = rows["measured_s"].to_numpy(float), rows["predicted_s"].to_numpy(float)
    spread = rows["spread"].to_numpy(float)
    left.hlines(y, predicted, measured, color=GREY, linewidth=1)
    left.errorbar(
        measured, y, xerr=measured * spread, fmt="o", color=COLOURS[0], capsize=3,
        label="measured (± half IQR of repeats)",
    )  # fmt: skip
    left.plot(predicted, y, "D", color=COLOURS[1], markerfacecolor="white", label="predicted")
    left.set_xlabel("decode time over all prompts (s)")
    left.set_yticks(y, labels)
    left.set_xlim(left=0)
    right.errorbar(
        100 * rows["error"].to_numpy(float), y, xerr=100 * spread, fmt="D", capsize=3,
        color=COLOURS[1], markerfacecolor="white",
    )  # fmt: skip
    right.axvline(0, color=INK, linewidth=0.8)
    reach = max(1.0, 1.15 * float(100 * (rows["error"].abs() + rows["spread"].fillna(0.0)).max()))
    right.set_xlim(-reach, reach)
    right.set_xlabel("prediction error (%)")
    for axes in (left, right):
        look.style(axes, "x")
    look.legend(figure, 2, of=left)
    return figure


def plot_speedup(summary: pd.DataFrame) -> Figure:
    """Draw the speedup of every policy with its interval; rows of `summary.summarize`.

    The fastest is first; lower bounds are not ranked.  The oracle, which no policy reaches, is
    above the others in grey.  Approximate rows are below them, hollow.
    """
    rows = summary[summary["policy"] != PLAIN]
    if "lower bound" not in set(rows["fidelity"]):
        rows = rows.sort_values("speedup", ascending=False, kind="stable")
    rows = _by_kind(rows)
    figure, axes = look.canvas(6.8, 0.32 * len(rows) + 1.3)
    y = np.arange(len(rows))[::-1]
    _draw_rows(axes, rows, y, rows["kind"])
    for value, high, at in zip(rows["speedup"], rows["speedup_hi"], y, strict=True):
        if np.isfinite(value):
            axes.annotate(
                f"{value:.2f}", (np.nanmax([value, high]), at), (5, 0), color=INK, fontsize=7,
                textcoords="offset points", va="center",
            )  # fmt: skip
    axes.set_yticks(y, _policy_labels(rows))
    axes.margins(x=0.09)
    axes.set_xlabel("speedup over no speculation (×, 95% interval over prompts)")
    if rows["kind"].nunique() > 1:
        look.legend(figure, 3)
    return figure


KINDS = (
    ("bound: knows every outcome", GREY, "D", GREY),
    ("policies", COLOURS[0], "o", COLOURS[0]),
    ("approximate", COLOURS[1], "s", "white"),
)
"""Kinds of row in the order that they are drawn in: label, colour, marker and its filling."""


def _by_kind(rows: pd.DataFrame) -> pd.DataFrame:
    """Add each row's index into `KINDS` as ``kind``, and sort by it."""
    oracle = rows["policy"].map(is_bound).to_numpy(dtype=bool)
    about = rows["fidelity"] == "approximate"
    kinds = np.where(oracle, 0, np.where(about, 2, 1))
    return rows.assign(kind=kinds).sort_values("kind", kind="stable")


def _draw_rows(axes: Axes, rows: pd.DataFrame, y: npt.NDArray[Any], kinds: Iterable[int]) -> None:
    """Draw each row's speedup and interval at its height, and lines at 1 and between kinds.

    ``kinds`` are those of all heights, from above.
    """
    for kind, (label, colour, marker, face) in enumerate(KINDS):
        mine = (rows["kind"] == kind).to_numpy()
        if mine.any():
            own = rows[mine]
            value, low, high = (own[f"speedup{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
            axes.errorbar(
                value, y[mine], xerr=np.nan_to_num([value - low, high - value]).clip(0),
                fmt=marker, color=colour, capsize=2.5, markersize=5, markerfacecolor=face,
                label=label,
            )  # fmt: skip
    of_places = list(kinds)
    for i in np.flatnonzero(np.diff(of_places)):
        axes.axhline(len(of_places) - i - 1.5, color=GREY, linewidth=0.6)
    axes.axvline(1, color=INK, linewidth=0.8)
    look.style(axes, "x")


def plot_categories(by_category: pd.DataFrame) -> Figure:
    """Draw the speedup by prompt category, one panel each; rows of `summarize` by category.

    As in `plot_speedup`, bounds are above and approximate rows below.
    """
    rows = _by_kind(by_category[by_category["policy"] != PLAIN])
    rows = rows.assign(label=_policy_labels(rows))
    kinds = dict(zip(rows["label"], rows["kind"], strict=True))
    places = dict(zip(kinds, range(len(kinds))[::-1], strict=True))
    panels = list(rows.groupby("category", sort=False))
    across = min(len(panels), 5)
    down = -(-len(panels) // across)
    figure = Figure(
        figsize=(1.9 + 1.75 * across, (0.3 * len(kinds) + 0.6) * down + 0.6), layout="constrained"
    )
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[max(len(panels) - across, 0) : len(panels)]:
        axes.tick_params(labelbottom=True)
    for axes, (category, own) in zip(grid, panels, strict=False):
        _draw_rows(axes, own, own["label"].map(places).to_numpy(), kinds.values())
        axes.set_title(str(category), fontsize=9)
        axes.set_yticks([*places.values()], [*places])
    figure.supxlabel("speedup over no speculation (×, 95% interval over prompts)", fontsize=9)
    if rows["kind"].nunique() > 1:
        look.legend(figure, 3, of=grid[0])
    return figure


def _policy_labels(rows: pd.DataFrame) -> list[str]:
    """Return policy names, with the rule where several rules share the table."""
    several = rows["verify"].nunique() > 1
    pairs = zip(rows["policy"], rows["verify"], strict=True)
    return [f"{p} ({v})" if several else str(p) for p, v in pairs]


def plot_cost_ratio(
    logs: Sequence[RoundLog],
    latency: LatencyTable,
    own: OwnRatios,
    places: PolicyPlaces | None = None,
) -> Figure:
    """Draw the speedup against c = T_draft / T_target for each log.

    Rounds are priced by the pair's `latency`, with drafting scaled from its `own` ratio to c
    (`simulator.ratios.carried_sums`).  So the curves meet the table's speedups at the pair's c,
    which is marked; a logarithmic axis has no place for c = 0.  ``places`` are those of figures
    drawn before, whose colours are kept.
    """
    shown = own.ratio or 1.0
    c = np.unique([*np.geomspace(min(0.005, shown), max(1.0, shown), 200), shown])
    figure, axes = look.canvas(7.2, 3.8)
    plain = price(autoregressive(logs[0]), latency)
    sums = [carried_sums(price(log, latency), plain, own) for log in logs]
    rules = len({log.verify for log in logs})
    here = [float(speedup_at(s, own.ratio, own.verify)[0]) for s in sums]
    order = np.argsort([-speedup for speedup in here])
    names = [log.policy + (f" ({log.verify})" if rules > 1 else "") for log in logs]
    at = (places or PolicyPlaces()).of(names)
    # Bounds come last in the legend: no engine can run them.
    for i in sorted(order, key=lambda i: is_bound(logs[i].policy)):
        label = names[i]
        label += " (bound)" if is_bound(logs[i].policy) else ""
        # Its settings are those for the pair's own c, so that others may pass it elsewhere.
        label += " (not refitted)" if split_name(logs[i].policy)[0] == FITTED else ""
        label += " ~" if logs[i].fidelity == "approximate" else ""
        label += f"  {three_digits(here[i])}"
        line_of = look.series(at.get(names[i], 0), len(c), logs[i].policy)
        if logs[i].fidelity == "approximate" and not is_bound(logs[i].policy):
            line_of["linewidth"] = 0.9
        axes.plot(c, speedup_at(sums[i], c, own.verify), label=label, **line_of)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axhline(1, color=INK, linewidth=0.8)
    if own.ratio > 0:
        axes.axvline(own.ratio, color=GREY, linewidth=1, linestyle="--")
    axes.annotate(
        f"this pair: c = {own.ratio:.2g}" + ", left of the axis" * (own.ratio == 0),
        (own.ratio or c[0], 1), (4, -4), color=INK, fontsize=8,
        xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost ratio c = T_draft / T_target")
    axes.set_ylabel("speedup over no speculation (×)")
    look.style(axes, "both")
    look.legend(figure, title="speedup at this pair's c")
    if any(log.fidelity == "approximate" for log in logs):
        axes.set_xlabel(f"{axes.get_xlabel()}   (~ approximate)")
    return figure


def plot_survival(trace: Trace, gamma: int = 16) -> Figure:
    """Plot the chance that k drafts in a row are accepted: recorded (with interval) and i.i.d.

    The i.i.d. curve alpha**k has the recording's mean alpha: what lies between the curves
    is what a formula with a single alpha misses.  The share of each k is of all positions with k
    further tokens, so that the curves meet at 1.  Drafts go up to `gamma` tokens, at most one less
    than the longest output has, and as long as they were recorded by draft position.
    """
    gamma = min(gamma, max(request.tokens for request in trace.requests) - 1)
    if trace.by_start and trace.max_gamma is not None:
        gamma = min(gamma, trace.max_gamma)
    if gamma < 1:
        raise DraftsimError("no output is longer than one token: nothing was drafted")
    k = np.arange(1, gamma + 1)
    bounds = zip(trace.request_starts[:-1], trace.request_starts[1:], strict=True)
    accepted = np.array(
        [(trace.run_lengths[start:stop, None] >= k).sum(axis=0) for start, stop in bounds]
    )
    positions = np.maximum(np.diff(trace.request_starts)[:, None] - k + 1, 0)
    drawn = resamples(len(accepted), 500, 0)
    shares = ratio(drawn @ accepted, drawn @ positions).T
    low, high = np.array([interval(share, prompts=len(accepted)) for share in shares]).T
    alpha = acceptance(trace)
    figure, axes = look.canvas(5.6, 3.6)
    axes.fill_between(k, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(k, accepted.sum(axis=0) / positions.sum(axis=0), "o-", color=COLOURS[0], markersize=4,
              label="recorded (95% interval over prompts)")  # fmt: skip
    axes.plot(k, alpha**k, "s--", color=COLOURS[1], markersize=4, markerfacecolor="white",
              label=f"i.i.d. with the same α = {alpha:.2f}")  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_xlim(0.5, gamma + 0.5)
    axes.set_xlabel("draft length k (tokens)")
    axes.set_ylabel("share of positions whose next k\ndrafts are all accepted")
    axes.legend(frameon=False, fontsize=8)
    look.style(axes, "both")
    return figure


def plot_robustness(speedups: pd.DataFrame, places: PolicyPlaces | None = None) -> Figure:
    """Draw the speedup against initial gamma, relative to the mean of fixed lengths.

    ``speedups`` is what `robustness.speedup_by_gamma` returns, ``fixed`` among its policies.
    ``places`` are those of figures drawn before, whose colours are kept.
    """
    mean = float(speedups.loc[speedups["policy"] == "fixed", "speedup"].mean())
    if not mean > 0:
        raise DraftsimError("the policy fixed, to which speedups are relative, is not in the table")
    figure, axes = look.canvas(6.4, 3.6)
    at = (places or PolicyPlaces()).of(speedups["policy"].astype(str))
    for name, part in speedups.groupby("policy", sort=False):
        value = part["speedup"].to_numpy(float) / mean
        label = f"{name}  {value.mean():.2f} ± {value.std(ddof=1):.2g}"
        line_of = look.series(at.get(str(name), 0), 1, str(name))
        axes.plot(part["gamma"], value, label=label, **line_of)
    axes.axhline(1, color=INK, linewidth=0.8)
    ticks = sorted({int(g) for g in speedups["gamma"]})
    look.powers_of_two(axes, [g for g in ticks if g in (1, 2, 3, 4, 6, 8, 12, 16, 24)])
    axes.set_xlabel("initial draft length γ (tokens)")
    axes.set_ylabel("speedup relative to\nthe mean of fixed (×)")
    look.style(axes, "both")
    look.legend(figure, title="mean ± sd over γ")
    return figure


COMPARED = (
    "fixed", "hf-heuristic", "confidence", "gammatune", "svip", "oracle", "eagle", "eagle3",
)  # fmt: skip
"""Policies and systems drawn where a plot holds only a few and all were asked for."""
COUNTED = "prefill counted"
"""Label of a plot of decoding with prefill."""
FEW = 6
"""Names that a line on what is left out still lists."""


def save_all(
    trace: Trace, latency: LatencyTable, logs: Sequence[RoundLog], folder: Path,
    validation: pd.DataFrame | None = None, systems: Sequence[RoundLog] = (),
    texts: Sequence[str] | None = None, title: str = "", resamples: int = 2000,
    prefill: bool = False,
) -> tuple[list[Path], list[str]]:  # fmt: skip
    """Draw everything a recording shows into `folder`; return the files, and what they leave out.

    ``logs`` are of the draft model; ``systems``, with their own drafts or rules, are added to plots
    of speedups.  Every plot shows the policies named in ``texts`` if it can, and the fastest; plots
    with few curves show `COMPARED` of all.  ``title`` names pair and device below every plot.
    ``resamples`` and ``prefill`` are those of `summarize`; with prefill, plots of decoding alone
    are left out.
    """
    every = [*logs, *systems]
    label = "lower bounds: the log does not hold its draft lengths" if trace.is_lower_bound else ""
    counted = dict.fromkeys(("speedup", "categories"), COUNTED) if prefill else {}
    overall = summarize(every, latency, resamples=resamples, prefill=prefill)
    speed = dict(zip(overall["policy"], overall["speedup"], strict=True))
    if texts and "all" not in texts:
        some = list(every)
    else:
        wanted = {*COMPARED, *(split_name(text.rpartition("/")[2])[0] for text in texts or ())}
        real = [] if trace.is_lower_bound else [
            log for log in every if log.mismatched is None and not is_bound(log.policy)
        ]  # fmt: skip
        best = max(real, key=lambda log: speed[log.policy], default=None)
        some = [log for log in every if split_name(log.policy)[0] in wanted or log is best]
        some = some or list(logs)
    if not trace.is_lower_bound:
        some.sort(key=lambda log: -speed[log.policy])
    figures = {
        "speedup": plot_speedup(overall),
        "categories": plot_categories(
            summarize(some, latency, resamples=resamples, prefill=prefill, by_category=True)
        ),
    }
    said = []
    exact = all(lossless(log.verify) for log in logs)
    if exact:
        figures["survival"] = plot_survival(trace)
    else:
        said.append("survival.png and robustness.png are of lossless verification: drop --verify")
    if others := [log.policy for log in every if log not in some]:
        names = ", ".join(dict.fromkeys(others)) if len(others) <= FEW else f"{len(others)} others"
        shown = "categories.png shows" if prefill else "categories.png and cost_ratio.png show"
        said.append(
            f"{shown} the fastest policy and {len(some) - 1} others, without {names}: name "
            "policies with --policy to draw them"
        )
    if prefill:
        alone = "cost_ratio.png and robustness.png are" if exact else "cost_ratio.png is"
        said.append(f"{alone} of decoding alone: drop --prefill")
    else:
        drawn, left_out = _of_decoding(trace, latency, some, texts, exact)
        figures |= drawn
        said += left_out
    if validation is not None:
        figures["validation"] = plot_validation(validation.dropna(subset=["predicted_s"]))
    paths = [
        look.save_all_kinds(
            figure, folder / f"{name}.png", "; ".join(filter(None, (label, counted.get(name)))),
            title,
        )
        for name, figure in figures.items()
    ]  # fmt: skip
    return paths, said


def _of_decoding(
    trace: Trace, latency: LatencyTable, logs: Sequence[RoundLog], texts: Sequence[str] | None,
    robustness: bool,
) -> tuple[dict[str, Figure], list[str]]:  # fmt: skip
    """Return the plots of decoding alone, without prefill, and a line on what each leaves out."""
    figures: dict[str, Figure] = {}
    said = []
    places = PolicyPlaces()
    drafted = [log for log in logs if log.source == DRAFT_MODEL]
    if is_one_pass(latency):
        said.append(
            "cost_ratio.png is not drawn: c is the cost of one drafted token, and --one-pass "
            "drafts all in one pass"
        )
    elif drafted:
        own = own_ratios(trace, latency)
        figures["cost_ratio"] = plot_cost_ratio(drafted, latency, own, places)
    elsewhere = [log.policy for log in logs if log.source != DRAFT_MODEL]
    if elsewhere and "cost_ratio" in figures:
        said.append(
            "cost_ratio.png shows policies with the draft model, without "
            f"{', '.join(dict.fromkeys(elsewhere))}"
        )
    if not robustness:
        return figures, said
    try:
        speedups, left_out = speedups_of(trace, latency, texts)
    except DraftsimError as error:
        said.append(f"robustness.png is not drawn: {error}")
    else:
        figures["robustness"] = plot_robustness(speedups, places)
        said += left_out
    return figures, said
