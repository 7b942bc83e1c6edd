"""Figures of served rows, of runs over time, and of a capacity plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from policies.arrays import Floats
from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive
from policies.registry import PLAIN, is_bound
from policies.rules.base import VerifyRule
from simulator.capacity import FINE
from simulator.palette import GREY, INK, PolicyPlaces
from simulator.plots import look
from simulator.serving import Scenario, over_batches, sweep
from simulator.serving.study import break_even_load
from traces.acceptance.trace import Trace
from traces.aliases import Say, silent
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

Rows = Sequence[Mapping[str, Any]]
SLOWER_FASTER = LinearSegmentedColormap.from_list("diverging", ["#8C4A00", "#FFFFFF", "#004978"])
"""Brown below a speedup of 1, blue above it."""


def plot_latency_throughput(rows: Rows, places: PolicyPlaces | None = None) -> Figure:
    """Plot mean TPOT against throughput, a curve a policy, a point a batch size (CM-ASD, Fig. 2).

    Replications are drawn with their 95% intervals.  ``places`` are those of figures drawn before,
    whose colours are kept.
    """
    frame = _frame(rows)
    figure, axes = look.canvas(6.0, 3.8)
    looks = _looks(frame["policy"], places)
    for i, (policy, part) in enumerate(_by_policy(frame)):
        line = part.sort_values("batch")
        x, y = line["throughput_tok_s"], 1e3 * line["tpot_s_mean"]
        line_of = looks[policy]
        axes.plot(x, y, **line_of, label=_label(policy))
        if _replicated(line, "tpot_s"):
            bar = {"color": line_of["color"], "linewidth": 1}
            axes.hlines(y, line["throughput_tok_s_lo"], line["throughput_tok_s_hi"], **bar)
            low, high = (1e3 * line[f"tpot_s_{end}"] for end in ("lo", "hi"))
            axes.vlines(x, low, high, **bar)
        # The first curve carries the labels: batch sizes line up along the others.
        for batch, at_x, at_y in zip(line["batch"], x, y, strict=True) if i == 0 else ():
            axes.annotate(
                str(int(batch)), (at_x, at_y), xytext=(0, 6), textcoords="offset points",
                fontsize=7, color=INK, ha="center",
            )  # fmt: skip
    first, sizes = frame["policy"].iloc[0], sorted(set(frame["batch"].astype(int)))
    axes.set_xlabel(
        f"throughput (tokens/s; points: batch {', '.join(map(str, sizes))}, named along {first})"
        if len(sizes) > 1 else f"throughput (tokens/s) at batch {sizes[0]}"
    )  # fmt: skip
    axes.set_ylabel(f"{_NAMES['tpot_s']} (ms{_INTERVAL if _replicated(frame, 'tpot_s') else ''})")
    axes.set_xscale("log")
    _plain_logarithm(axes.xaxis)
    axes.set_ylim(bottom=0)
    _finish(figure, axes)
    return figure


def plot_latency_load(
    rows: Rows,
    latency: str = "e2e_s",
    baseline: str | None = None,
    places: PolicyPlaces | None = None,
) -> Figure:
    """Plot the mean latency against offered load, and the load at which each policy breaks even.

    `latency` is ``ttft_s``, ``tpot_s`` or ``e2e_s``.  `baseline` is the policy to break even with;
    by default the first.  ``places`` are those of figures drawn before, whose colours are kept.
    """
    frame = _frame(rows)
    if frame["rate"].isna().any():
        raise DraftsimError("latency against load needs rows with a rate: sweep over rates")
    baseline = baseline or str(frame["policy"].iloc[0])
    plain = frame[frame["policy"] == baseline].sort_values("rate")
    if plain.empty:
        raise DraftsimError(f"no row of the baseline {baseline!r}")
    figure, axes = look.canvas(6.0, 3.8)
    metric = f"{latency}_mean"
    unit, per_s = ("s", 1) if latency == "e2e_s" else ("ms", 1e3)
    crossed = 0
    looks = _looks(frame["policy"], places)
    for policy, part in _by_policy(frame):
        line = part.sort_values("rate")
        line_of = looks[policy]
        axes.plot(line["rate"], per_s * line[metric], **line_of, label=_label(policy))
        if _replicated(line, latency):
            low, high = (per_s * line[f"{latency}_{end}"] for end in ("lo", "hi"))
            axes.vlines(line["rate"], low, high, color=line_of["color"], linewidth=1)
        if policy == baseline:
            continue
        shared = line.merge(plain, on="rate", suffixes=("", "_plain"))
        load = break_even_load(shared["rate"], shared[metric], shared[f"{metric}_plain"])
        if np.isfinite(load):
            axes.axvline(load, color=line_of["color"], linestyle=(0, (1, 2)), linewidth=1)
            axes.annotate(
                f"{policy}: {load:.2g}/s", (load, 1), xycoords=("data", "axes fraction"),
                xytext=(2, -9 - 10 * crossed), textcoords="offset points", fontsize=7,
                color=line_of["color"],
            )  # fmt: skip
            crossed += 1
    axes.set_xlabel(
        f"offered load (requests/s; vertical: break-even with {baseline})"
        if crossed else "offered load (requests/s)"
    )  # fmt: skip
    axes.set_ylabel(
        f"mean {_NAMES[latency]} ({unit}{_INTERVAL if _replicated(frame, latency) else ''})"
    )
    axes.set_yscale("log")
    _plain_logarithm(axes.yaxis)
    axes.set_xlim(left=0)
    _finish(figure, axes)
    return figure


def plot_pareto(rows: Rows, places: PolicyPlaces | None = None) -> Figure:
    """Draw output tokens/s of one user against those of all, one curve a policy.

    A point is a batch size or a load; a user's tokens/s are 1 / TPOT.  The grey line joins the
    points that no other point exceeds in both (as vLLM's ``bench sweep plot_pareto``), without
    the oracle's.  ``places`` are those of figures drawn before, whose colours are kept.
    """
    frame = _frame(rows).assign(user=lambda all_rows: 1 / all_rows["tpot_s_mean"])
    loads = bool(frame["concurrency"].isna().any())
    figure, axes = look.canvas(6.4, 4.0)
    real = frame[~frame["policy"].map(is_bound)]
    best = real.sort_values(["user", "throughput_tok_s"], ascending=False, kind="stable")
    best = best[best["throughput_tok_s"] > best["throughput_tok_s"].cummax().shift(fill_value=-1)]
    axes.plot(
        best["user"], best["throughput_tok_s"], color=GREY, linewidth=6, alpha=0.35, zorder=0,
        label="best of all" if len({*real["policy"]}) > 1 else "_",
    )  # fmt: skip
    looks = _looks(frame["policy"], places)
    for policy, part in _by_policy(frame):
        line = part.sort_values("rate" if loads else "concurrency")
        axes.plot(line["user"], line["throughput_tok_s"], **looks[policy], label=_label(policy))
    width, height = (float(frame[name].max()) for name in ("user", "throughput_tok_s"))
    named: list[tuple[str, float, float]] = []
    for _, row in best.iterrows():
        text = f"{row['rate']:.3g}/s" if loads else f"{int(row['concurrency'])}"
        x, y = row["user"] / width, row["throughput_tok_s"] / height
        # Two policies at one load may lie next to each other: one label says both.
        if any(text == t and abs(x - a) < 0.04 and abs(y - b) < 0.04 for t, a, b in named):
            continue
        named.append((text, x, y))
        axes.annotate(
            text, (row["user"], row["throughput_tok_s"]), xytext=(5, 5),
            textcoords="offset points", fontsize=7, color=INK,
        )  # fmt: skip
    what = "request rate" if loads else "requests at a time"
    axes.set_xlabel(f"output tokens/s of one user (1 / TPOT; numbers: {what})")
    axes.set_ylabel("output tokens/s in all")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _finish(figure, axes)
    return figure


def plot_over_time(rows: Rows, places: PolicyPlaces | None = None) -> Figure:
    """Draw requests running and KV blocks in use over simulated time, one curve a policy.

    Rows of one load or batch size; of replications, the first is drawn.  ``places`` are those of
    figures drawn before, whose colours are kept.
    """
    if not rows:
        raise DraftsimError("there are no rows to draw: sweep first")
    blocks = any(any(row["over_time"]["kv_blocks"]) for row in rows)
    figure = Figure(figsize=(6.0, 5.2 if blocks else 3.2), layout="constrained")
    panels = figure.subplots(1 + blocks, 1, sharex=True, squeeze=False)[:, 0]
    each = "\nper replica" if rows[0]["replicas"] > 1 else ""
    shown = [("batch", f"requests running{each}"), ("kv_blocks", f"KV blocks in use{each}")]
    looks = _looks([row["policy"] for row in rows], places)
    for axes, (name, label) in zip(panels, shown, strict=False):
        for row in rows:
            line_of = {**looks[row["policy"]], "marker": ""}
            times, values = row["over_time"]["time_s"], row["over_time"][name]
            axes.step(times, values, where="post", **line_of, label=_label(row["policy"]))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        look.style(axes)
    rate, batch = rows[0]["rate"], rows[0]["batch"]
    where = f"at {rate:.3g} requests/s" if rows[0]["concurrency"] is None and rate else ""
    panels[-1].set_xlabel(f"simulated time (s) {where or f'at batch {batch}'}")
    look.legend(figure, 4, of=panels[0])
    return figure


def plot_speedups(
    speedups: Mapping[str, npt.ArrayLike], batches: Sequence[int], columns: Sequence[str]
) -> Figure:
    """Draw the speedup over no speculation by batch size and prompt length, a panel per policy.

    ``speedups`` are arrays of shape (batches, columns), NaN where nothing was served; ``columns``
    are labels.  Raises DraftsimError if there is no policy, or an array has another shape.
    """
    grids = {name: np.asarray(values, dtype=float) for name, values in speedups.items()}
    shape = len(batches), len(columns)
    if not grids or any(grid.shape != shape for grid in grids.values()):
        shapes = ", ".join(str(grid.shape) for grid in grids.values()) or "none"
        raise DraftsimError(f"speedups have shapes {shapes}, expected {shape}")
    across = 2 if len(grids) == 4 else min(len(grids), 3)
    down = -(-len(grids) // across)
    width, height = 0.9 + 0.62 * len(columns), 0.9 + 0.36 * len(batches)
    figure = Figure(
        figsize=(max(4.5, across * width + 0.9), down * height + 0.5), layout="constrained"
    )
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    every = np.concatenate([grid.ravel() for grid in grids.values()])
    # As far to either side of 1, so that equal shades are equal factors.
    reach = max(
        1 + look.LEAST_REACH,
        np.nanmax(every, initial=1.0),
        1 / np.nanmin(every[every > 0], initial=1.0),
    )
    scale = LogNorm(1 / reach, reach)
    for axes, (name, grid) in zip(panels.ravel(), grids.items(), strict=False):
        image = axes.imshow(grid, cmap=SLOWER_FASTER, norm=scale, aspect="auto", origin="lower")
        for i, j in np.ndindex(*shape):
            value = grid[i, j]
            far = np.isfinite(value) and abs(scale(value) - 0.5) > 0.3
            axes.text(
                j, i, f"{value:.2f}" if np.isfinite(value) else "–", ha="center", va="center",
                fontsize=8, color="white" if far else INK,
            )  # fmt: skip
        axes.set_title(_label(name), fontsize=9)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(batches)), [str(b) for b in batches])
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_visible(False)
    for axes in panels.ravel()[len(grids) :]:
        axes.set_visible(False)
    figure.supxlabel("prompt tokens", fontsize=9)
    figure.supylabel("batch size", fontsize=9)
    bar = figure.colorbar(image, ax=panels.ravel().tolist(), fraction=0.06, pad=0.02)
    bar.set_label("speedup over\nno speculation", fontsize=8)
    bar.ax.yaxis.set_major_locator(FixedLocator([1 / reach, reach**-0.5, 1, reach**0.5, reach]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    look.mark_bar(bar)
    return figure


_NAMES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "e2e_s": "end-to-end latency",
}


_INTERVAL = "; bars: 95%"


def _replicated(line: pd.DataFrame, latency: str) -> bool:
    """Return True if the rows of a curve have intervals, as replications do."""
    return f"{latency}_lo" in line and bool(line[f"{latency}_lo"].notna().any())


def _frame(rows: Rows) -> pd.DataFrame:
    if not rows:
        raise DraftsimError("there are no rows to draw: sweep first")
    return pd.json_normalize([dict(row) for row in rows], sep="_")


def _by_policy(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(name), part) for name, part in frame.groupby("policy", sort=False)]


def _looks(policies: Iterable[str], places: PolicyPlaces | None) -> dict[str, dict[str, Any]]:
    """Return the line and marker of each policy, at its place among those drawn before."""
    names = list(dict.fromkeys(map(str, policies)))
    at = (places or PolicyPlaces()).of(names)
    return {name: look.series(at.get(name, 0), 1, name) for name in names}


def _label(policy: str) -> str:
    return f"{policy} (bound)" if is_bound(policy) else policy


def _plain_logarithm(axis: Axis) -> None:
    """Put ticks at round numbers, written as numbers instead of powers."""
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _finish(figure: Figure, axes: Axes) -> None:
    look.style(axes)
    look.legend(figure, 4)


MOST_CONTEXTS = 5
"""Prompt lengths of a map: as many columns as can be read."""
APART = 1.3
"""Prompt lengths nearer to each other than this factor share a column."""


def draw(
    folder: Path, rows: Sequence[Mapping[str, Any]], trace: Trace, latency: LatencyTable,
    policies: Mapping[str, DraftPolicy | BatchPolicy], scenarios: Sequence[Scenario],
    rule: VerifyRule | None = None, title: str = "", say: Say = silent,
) -> list[Path]:  # fmt: skip
    """Draw the rows, with `title` below each figure, and return the PNG files.

    Over batch sizes these are latency against throughput, and the speedup of every policy by batch
    and prompt length; over loads, latency against load; with either, tokens/s of a user against
    tokens/s in all, and the batch and the cache blocks in use over time at the largest size or
    load.  `say` is called with what cannot be drawn.
    """
    said = assumption(latency, max(s.limits.max_batch for s in scenarios))
    places = PolicyPlaces()
    places.of(row["policy"] for row in rows)

    def save(figure: Figure, name: str) -> Path:
        return look.save_all_kinds(figure, folder / f"{name}.png", said, title)

    def pareto() -> list[Path]:
        """Draw tokens/s of a user against those of all; nothing if no output has two tokens."""
        spoken = [row for row in finished if row["tpot_s"]["mean"] > 0]
        return [save(plot_pareto(spoken, places), "pareto")] if spoken else []

    finished = [row for row in rows if row["requests"]]
    if not finished:
        say("no request finished: there is nothing to draw")
        return []
    base = scenarios[0]
    most = max(row["rate"] or 0 for row in finished)
    last = [row for row in finished if (row["rate"] or 0) == most]
    if base.arrivals.concurrency is None:
        written = [save(plot_over_time(last, places), "over_time")]
        loads = {row["rate"] for row in finished}
        if loads == {None}:
            say("all arrivals have the same time: there is no load to draw latency against")
            return written
        written += pareto()
        names = {row["policy"] for row in finished}
        baseline = "autoregressive" if "autoregressive" in names else None
        for metric, name in (("e2e_s", "e2e"), ("tpot_s", "tpot"), ("ttft_s", "ttft")):
            drawn = [row for row in finished if row[metric]["mean"] == row[metric]["mean"]]
            if drawn:
                figure = plot_latency_load(drawn, metric, baseline, places)
                written.append(save(figure, f"load_{name}"))
        return written
    largest = max(row["batch"] for row in finished)
    last = [row for row in finished if row["batch"] == largest]
    written = [
        *pareto(),
        save(plot_latency_throughput(finished, places), "latency_throughput"),
        save(plot_over_time(last, places), "over_time"),
    ]
    if base.one_stream:
        return written
    grids = _speedups(finished, trace, latency, policies, scenarios, rule)
    if grids:
        columns = ["as\nrecorded", *map(str, _contexts(trace, latency))]
        figure = plot_speedups(grids, [s.limits.max_batch for s in scenarios], columns)
        written.append(save(figure, "speedup"))
    return written


def _speedups(
    rows: Sequence[Mapping[str, Any]], trace: Trace, latency: LatencyTable,
    policies: Mapping[str, DraftPolicy | BatchPolicy], scenarios: Sequence[Scenario],
    rule: VerifyRule | None,
) -> dict[str, npt.NDArray[np.float64]]:  # fmt: skip
    """Return the speedup of every policy that drafts, by batch and prompt length.

    The first column is that of the rows.  In the others every prompt has one length, the recorded
    acceptance is taken to hold there, and the same scenario is served with fewer requests.
    """
    batches = [s.limits.max_batch for s in scenarios]
    fewer = max(64, 4 * max(batches))
    small = over_batches(replace(scenarios[0], requests=fewer, replications=1, replicas=1), batches)
    found = [rows]
    for context in _contexts(trace, latency):
        requests = [replace(r, prompt_length=context, prompt_ids=None) for r in trace.requests]
        found.append(sweep(replace(trace, requests=requests), latency, policies, small, rule=rule))
    drafting = [n for n, p in policies.items() if type(p) is not Autoregressive]
    grids = {name: np.full((len(batches), len(found)), np.nan) for name in drafting}
    for j, column in enumerate(found):
        for row in column:
            if row["policy"] in grids:
                grids[row["policy"]][batches.index(row["batch"]), j] = row["speedup"]
    return grids


def _contexts(trace: Trace, latency: LatencyTable) -> list[int]:
    """Return up to `MOST_CONTEXTS` measured prompt lengths, spread evenly on a log scale."""
    cells = latency.cells
    own = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]["context"]
    measured = sorted({int(c) for c in own if c > 0}) or [64, 256, 1024, 4096]
    chosen: list[int] = []
    for wanted in np.geomspace(measured[0], measured[-1], MOST_CONTEXTS):
        nearest = min(measured, key=lambda c: abs(np.log(c / wanted)))
        if not chosen or nearest >= APART * chosen[-1]:
            chosen.append(nearest)
    return chosen


def assumption(latency: LatencyTable, batch: int) -> str:
    """Return the label of a plot of figures at `batch`; empty if nothing was assumed."""
    said = latency.said_batch_free(batch)
    return f"assumed to cost nothing: {said}" if said else ""


Pairs = Sequence[Sequence[float]]


def limits(pairs: Pairs) -> Floats:
    """Return the rates (most,) up to which 1, 2, ... replicas meet the SLO.

    Numbers of replicas that were not simulated are interpolated: the rate per replica is linear in
    the logarithm of their number.
    """
    counts, rates = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    every = np.arange(1, int(counts[-1]) + 1)
    each = np.interp(np.log(every), np.log(counts), rates / counts)
    return np.asarray(np.maximum.accumulate(every * each))


def needed(row: Mapping[str, Any]) -> Floats:
    """Return `limits` of a row's curve, which give the row's own replicas at the rate asked for.

    Interpolated limits are cut to agree with the simulated ones.  A limit is known to `FINE`: one
    at the rate asked for is drawn beyond it, so that the line meets the marker.
    """
    steps, rate, count = limits(row["curve"]), row["rate"], row["replicas"]
    if count is not None:
        steps[: count - 1] = np.minimum(steps[: count - 1], np.nextafter(rate, 0.0))
        steps[count - 1 :] = np.maximum(steps[count - 1 :], rate * (1 + FINE / 2))
    return steps


def crossings(one: Pairs, other: Pairs) -> list[tuple[float, float]]:
    """Return (rate, replicas) where the lines of two policies cross by more than `FINE`."""
    a, b = limits(one), limits(other)
    most = min(len(a), len(b))
    with np.errstate(divide="ignore", invalid="ignore"):  # no rate at few replicas
        gaps = np.nan_to_num(a[:most] / b[:most] - 1, posinf=1e9)
    told = np.flatnonzero(np.abs(gaps) > FINE)
    found = []
    for left, right in pairwise(told.tolist()):
        if gaps[left] * gaps[right] < 0:
            share = gaps[left] / (gaps[left] - gaps[right])
            count = left + 1 + share * (right - left)
            found.append((float(np.interp(count, np.arange(1, most + 1), a)), float(count)))
    return found


def plot_replicas(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot replicas needed over request rates; rows of `simulator.capacity.plan` with curves.

    Markers stand at the rate asked for, with the interval over replications; rings where the
    line of a policy crosses that of no speculation.
    """
    drawn = [(i, row) for i, row in enumerate(rows) if row["curve"]]
    if not drawn:
        raise DraftsimError("no row has a curve: plan with curve=True, or relax the targets")
    rate = rows[0]["rate"]
    end = 1.25 * rate
    figure, axes = look.canvas(6.4, 4.0)
    tops = [1.0]
    # Lines that coincide would hide each other: each is drawn a little off its own number.
    spread: Floats = np.linspace(-0.06, 0.06, len(drawn)) * (len(drawn) - 1)
    for (i, row), shift in zip(drawn, spread, strict=True):
        steps = needed(row)
        line_of = look.series(i, 1)
        x = np.concatenate(([0.0], steps[steps < end]))
        y = np.arange(1, len(x) + 1)
        if len(x) <= len(steps):  # this many meet the SLO beyond the figure
            x, y = np.append(x, end), np.append(y, y[-1])
        else:
            y = np.append(y[:-1], y[-2])
        axes.step(x, y + shift, where="post", **{**line_of, "marker": ""}, label=row["policy"])
        tops += [float(y[-1]), float(row["replicas_hi"] or 0)]
        if row["replicas"] is not None:
            count, low, high = (row[f"replicas{which}"] for which in ("", "_lo", "_hi"))
            bar = [[count - (low or count)], [(high or count) - count]]
            axes.errorbar(
                [rate * (1 + 0.06 * shift)], [count + shift], bar, color=line_of["color"],
                marker=line_of["marker"], markersize=5, capsize=2, linewidth=1,
            )  # fmt: skip
    for row in rows:
        if not row["curve"]:
            axes.plot([], [], " ", label=f"{row['policy']}: meets the SLO nowhere")
    said = _mark_crossings(axes, drawn, spread, end)
    axes.axvline(rate, color=GREY, linewidth=0.8, zorder=0)
    axes.set_xlim(0, end)
    axes.set_ylim(0, max(tops) + 0.8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    apart = "\n(lines are drawn a little apart)" if len(drawn) > 1 else ""
    axes.set_ylabel(f"replicas that meet the SLO{apart}")
    bars = any(row["replicas_lo"] is not None for _, row in drawn)
    axes.set_xlabel(
        f"requests per second (markers: at {rate:.4g}/s{', bars: 95%' if bars else ''})\n{said}"
    )
    look.style(axes)
    look.legend(figure, 3)
    return figure


def _mark_crossings(
    axes: Any, drawn: Sequence[tuple[int, Mapping[str, Any]]], shifts: Floats, end: float
) -> str:
    plain = next((row["curve"] for _, row in drawn if row["policy"] == PLAIN), None)
    if plain is None:
        return f"{PLAIN} meets the SLO at no rate"
    marked = 0
    for (i, row), shift in zip(drawn, shifts, strict=True):
        line_of = {"color": look.series(i, 1)["color"]}
        for rate, _ in crossings(row["curve"], plain) if row["policy"] != PLAIN else ():
            if rate < end:
                # On the policy's own step, where the eye looks for it.
                step = float(needed(row).searchsorted(rate)) + 1 + shift
                axes.plot(rate, step, marker="o", markersize=9, fillstyle="none", **line_of)
                axes.annotate(
                    f"{rate:.3g}/s", (rate, step), xytext=(4, 8), fontsize=7,
                    textcoords="offset points", **line_of,
                )  # fmt: skip
                marked += 1
    return f"rings: crosses {PLAIN}" if marked else f"no line crosses that of {PLAIN}"
