"""A measured latency table carried over to another GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simulator.hardware.formats import WeightFormat
from simulator.hardware.interval import interval_words, note_of
from simulator.hardware.kernels import unpacking
from simulator.hardware.published import published_error
from simulator.hardware.roofline import Mode, Roofline, observations
from simulator.hardware.shapes import ModelShape
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.operators.devices import DEVICES, Device, find_device

MOST_ERROR = 0.25
"""Median relative error on the measured passes beyond which a fit describes no such table."""
PASSES = ("forward", "catch_up", "settling", "prefill", "layer")
"""Phases that run a model's layers, and so scale as its passes do."""


def table_shapes(latency: LatencyTable) -> dict[str, ModelShape]:
    """The shapes of a table's models, from its provenance.

    Raises DraftsimError if it does not say them.
    """
    meta = latency.meta
    known = meta.get("shapes") or {r: meta[r] for r in ("target", "draft") if r in meta}
    if not isinstance(known, Mapping) or not known:
        raise DraftsimError(
            "the latency table does not say its models' shapes: profile the pair again"
        )
    size = {"float32": 4.0}.get(str(meta.get("dtype")), 2.0)
    return {str(role): ModelShape.from_meta(shape, size) for role, shape in known.items()}


def home_device(latency: LatencyTable) -> Device:
    """The GPU that a table was measured on, by its provenance.

    Raises DraftsimError if the latencies were assumed, or measured on something whose peak
    rates are not known, such as a CPU: no ratio of rates leads from there to a GPU.
    """
    remedy = "give the table of one: `python -m profiler.suite latency --device cuda`"
    name = str(latency.meta.get("device", ""))
    if latency.is_constant or not name:
        raise DraftsimError(
            f"the latencies were assumed, not measured on a GPU, and cannot be carried over: "
            f"{remedy}"
        )
    try:
        return find_device(name)
    except DraftsimError:
        raise DraftsimError(
            f"the latencies were measured on {name!r}, which has no GPU data sheet here "
            f"({', '.join(DEVICES)}), and cannot be carried over: {remedy}"
        ) from None


def scaling_words(latency: LatencyTable) -> str:
    """From where to where a table was carried over, and how well; empty if it was measured."""
    note = latency.meta.get("scaled") or ""
    if not isinstance(note, Mapping):
        return str(note)
    kept = ", ".join(f"{role} in {name}" for role, name in note["weights"].items())
    to = f"{note['to']} ({kept})" if kept else note["to"]
    return f"from {note['from']} to {to}, by {scaling_error(note)}; {interval_words(latency)}"


def scaling_error(note: Mapping[str, Any]) -> str:
    """How far off the model that carried a table over is known to be; ``meta["scaled"]``."""
    where = ", ".join(note["published_devices"])
    return (
        f"a cost model that is off by {note['published_median']:.0%} in the median and "
        f"{note['published_worst']:.0%} at worst against {note['published_figures']} published "
        f"figures of {where}, and by {note['fit_error']:.1%} in the median on the passes it was "
        "fitted to"
    )


def fit_table(
    latency: LatencyTable,
    *,
    source: Device | None = None,
    shapes: Mapping[str, ModelShape] | None = None,
    mode: Mode | None = None,
) -> tuple[Roofline, float]:
    """The cost model of the device measured, and its median relative error on the passes.

    Parameters as of `carry_over`.

    Raises
    ------
    DraftsimError
        If the device or the shapes are not known, the passes ran in float32 (data sheets
        give the rates of bf16), there are too few of them, or the fit misses them by more
        than `MOST_ERROR`.
    """
    home = source or home_device(latency)
    if latency.meta.get("dtype") == "float32":
        raise DraftsimError(
            "the latencies were measured in float32, and data sheets are compared by their bf16 "
            "rates: measure in bfloat16 to carry them over"
        )
    how: Mode = mode or ("graph" if latency.meta.get("mode") in ("graph", "compiled") else "eager")
    observed = observations(latency, shapes or table_shapes(latency))
    fit = Roofline(home, how).fitted(observed)
    error = float(np.median(np.abs(fit.errors(observed))))
    if error > MOST_ERROR:
        raise DraftsimError(
            f"the cost model misses the passes measured on {home.name} by {error:.0%} in the "
            f"median, over {MOST_ERROR:.0%}: it does not describe this table and cannot carry it "
            "over"
        )
    return fit, error


def carry_over(
    latency: LatencyTable,
    to: Device,
    *,
    source: Device | None = None,
    shapes: Mapping[str, ModelShape] | None = None,
    mode: Mode | None = None,
    weights: Mapping[str, WeightFormat] | None = None,
) -> LatencyTable:
    """`latency` as it would be on `to`: every cell times the ratio of the fitted model there.

    Only the ratio is the model's; what it does not explain of a cell is kept.  Host phases
    stay as they are, since the host does.  The result is marked ``scaled``, with the fit, its
    error on the measured cells and that against published figures of other devices, which is
    the one to expect.

    Parameters
    ----------
    source:
        The device measured; by default what the table's provenance says.
    shapes, mode:
        Models' shapes and launch mode; by default as well.
    weights:
        By role, the format that a model's weights are kept in there; those measured by default.

    Raises
    ------
    DraftsimError
        If the table cannot be fitted (see `fit_table`), it knows no model of that role, or the
        models' weights are larger than the memory of `to`.
    """
    known = dict(shapes or table_shapes(latency))
    fit, error = fit_table(latency, source=source, shapes=known, mode=mode)
    asked = dict(weights or {})
    if odd := [role for role in asked if role not in known]:
        raise DraftsimError(f"no model {odd[0]!r} in these latencies, expected {', '.join(known)}")
    there = {
        role: shape.kept_as(asked[role], unpacking(asked[role], fit.mode))
        if role in asked else shape
        for role, shape in known.items()
    }  # fmt: skip
    held = sum(shape.held_bytes for shape in there.values())
    if held > to.memory:
        raise DraftsimError(
            f"{to.name} has {to.memory / 1e9:.0f} GB of memory and the models' weights take "
            f"{held / 1e9:.0f} GB: leave it out, or choose a smaller pair"
        )
    home, away = fit.device, fit.on(to)
    cells = latency.cells.copy()
    for role, shape in known.items():
        rows = (cells["model"] == role) & cells["phase"].isin(PASSES)
        if not rows.any():
            continue
        sizes = [cells.loc[rows, c].to_numpy(float) for c in ("batch", "new_tokens", "context")]
        sizes[1][cells.loc[rows, "phase"] == "settling"] = 1.0  # there a place, not a width
        ratio = away.seconds(there[role], *sizes) / fit.seconds(shape, *sizes)
        for column in ("median_s", "spread_s"):
            cells.loc[rows, column] = cells.loc[rows, column].to_numpy(float) * ratio
    # A head is its projection's weights: memory or arithmetic, and no layers' launches.
    for role, shape in known.items():
        heads = cells["phase"].eq("head") & cells["model"].eq(role)
        bits = (there[role].head_bytes or shape.weight_bytes) / shape.weight_bytes
        cells.loc[heads, ["median_s", "spread_s"]] *= bits * home.bandwidth / to.bandwidth
    quantised = any(form.quantised for form in asked.values())
    against = published_error(fit, quantised)
    note = {
        "from": home.name, "to": to.name, "mode": fit.mode, "fixed_s": fit.fixed_s,
        "layer_s": fit.layer_s, "memory_share": fit.memory_share,
        "compute_share": fit.compute_share, "fit_error": error,
        "published_median": against.median, "published_worst": against.worst,
        "published_figures": against.figures, "published_devices": list(against.devices),
        "weights": {role: form.name for role, form in asked.items()},
        **note_of(fit.mode, quantised),
    }  # fmt: skip
    return LatencyTable(cells, {**latency.meta, "device": to.name, "scaled": note})
