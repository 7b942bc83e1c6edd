"""Extrapolation of a measured latency table to another GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from simulator.hardware.record import published_error, ratio_errors, reach, unpacking, width_errors
from simulator.hardware.roofline import LaunchMode, ModelShape, Roofline, WeightFormat, observations
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.operators.devices import DEVICES, Device, find_device
from traces.store.operators import operators_alone

MOST_ERROR = 0.25
"""Median relative error on the measured passes beyond which a fit describes no such table."""
PASSES = (
    "forward", "with_prompts", "pass", "catch_up", "along", "settling", "tree", "prefill", "layer",
)  # fmt: skip
"""Phases that run a model's layers, and so scale as its passes do."""


def table_shapes(latency: LatencyTable) -> dict[str, ModelShape]:
    """Return the shapes of a table's models, from its provenance.

    Raises DraftsimError if the table does not hold them.
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
    """Return the GPU that a table was measured on, by its provenance.

    Raises DraftsimError if the latencies were assumed, or measured on a device without known peak
    rates, such as a CPU.
    """
    remedy = "give the table of one: `python -m profiler.suite latency --device cuda`"
    name = str(latency.meta.get("device", ""))
    if latency.is_constant or not name:
        raise DraftsimError(
            f"the latencies were assumed, not measured on a GPU, and cannot be extrapolated: "
            f"{remedy}"
        )
    try:
        return find_device(name)
    except DraftsimError:
        raise DraftsimError(
            f"the latencies were measured on {name!r}, which has no GPU data sheet here "
            f"({', '.join(DEVICES)}), and cannot be extrapolated: {remedy}"
        ) from None


def scaling_words(latency: LatencyTable) -> str:
    """Return in words both devices of an extrapolated table, and its error; empty if measured."""
    note = latency.meta.get("scaled") or ""
    if not isinstance(note, Mapping):
        return str(note)
    kept = ", ".join(f"{role} in {name}" for role, name in note["weights"].items())
    to = f"{note['to']} ({kept})" if kept else note["to"]
    return f"from {note['from']} to {to}, by {scaling_error(note)}; {interval_words(latency)}"


def scaling_error(note: Mapping[str, Any]) -> str:
    """Return the known error of the model that extrapolated a table (``meta["scaled"]``)."""
    where = ", ".join(note["published_devices"])
    return (
        f"a cost model with a median error of {note['published_median']:.0%} (worst "
        f"{note['published_worst']:.0%}) for {note['published_figures']} published figures of "
        f"{where}, and of {note['fit_error']:.1%} for the passes that it was fitted to"
    )


def fit_table(latency: LatencyTable, shapes: Mapping[str, ModelShape]) -> tuple[Roofline, float]:
    """Return the cost model of the device measured, and its median relative error on the passes.

    Raises DraftsimError if the device or the shapes are not known, several GPUs share a model, the
    passes ran in float32 (data sheets give the rates of bf16), there are too few of them, or the
    fit misses them by more than `MOST_ERROR`.
    """
    home = home_device(latency)
    if latency.gpus > 1:
        raise DraftsimError(
            f"{latency.gpus} GPUs share a model of these latencies, and what they send each other "
            "cannot be carried over: name latencies of one GPU, or composed for the GPU asked about"
        )
    if latency.meta.get("dtype") == "float32":
        raise DraftsimError(
            "the latencies were measured in float32, and data sheets are compared by their bf16 "
            "rates: measure in bfloat16 to carry them over"
        )
    how: LaunchMode = "graph" if latency.meta.get("mode") in ("graph", "compiled") else "eager"
    observed = observations(latency, shapes)
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
    latency: LatencyTable, to: Device, *, weights: Mapping[str, WeightFormat] | None = None
) -> LatencyTable:
    """Return `latency` as it would be on `to`: every cell times the fitted model's ratio there.

    Only the ratio comes from the model, so a cell keeps what the model does not explain.  Host
    phases do not change.  The result is marked ``scaled``, with the fit, its error for the measured
    cells, and its error for published figures of other devices, which is the one to expect.

    Raises DraftsimError if the table cannot be fitted (see `fit_table`), it knows no model of that
    role, or the models' weights are larger than the memory of `to`.

    Parameters
    ----------
    weights:
        Format of the weights on `to`, by role; by default as measured.
    """
    known = table_shapes(latency)
    fit, error = fit_table(latency, known)
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
    draft_within, verify_within = reaches(fit.mode, quantised)
    note = {
        "from": home.name, "to": to.name, "mode": fit.mode, "fixed_s": fit.fixed_s,
        "layer_s": fit.layer_s, "memory_share": fit.memory_share,
        "compute_share": fit.compute_share, "fit_error": error,
        "published_median": against.median, "published_worst": against.worst,
        "published_figures": against.figures, "published_devices": list(against.devices),
        "weights": {role: form.name for role, form in asked.items()},
        "draft_within": draft_within, "verify_within": verify_within, "within_level": LEVEL,
    }  # fmt: skip
    return LatencyTable(cells, {**latency.meta, "device": to.name, "scaled": note})


LEVEL = 0.8
"""Share of further errors that should lie within: four of five."""
CALIBRATE = (
    "above batch 1 this model is optimistic: `draftsim calibrate` fits a server to a few of its "
    "own runs"
)
DRAFTING = ("forward", "catch_up", "settling", "head")


class TableBounds(NamedTuple):
    """A latency table with every cost at its upper, and at its lower bound."""

    dear: LatencyTable
    cheap: LatencyTable


def reaches(mode: LaunchMode, quantised: bool) -> tuple[float, float]:
    """Return the factors that drafts, and wide passes, over the target's step may be off by."""
    return reach(ratio_errors(mode, quantised), LEVEL), reach(width_errors(quantised), LEVEL)


def reach_of(latency: LatencyTable) -> tuple[float, float] | None:
    """Return the `reaches` of an extrapolated table; None for a measured one."""
    note = latency.meta.get("scaled")
    if not isinstance(note, Mapping) or "draft_within" not in note:
        return None
    return float(note["draft_within"]), float(note["verify_within"])


def bounds_of(latency: LatencyTable) -> TableBounds | None:
    """Return `latency` with drafting and wide passes slower, and faster, by their factors.

    The target's passes over one token do not change, because their error cancels in a speedup.  A
    wide pass is never faster than a narrow one.  A table that was composed and corrected by whole
    steps is the upper bound itself; in its lower bound, passes that no step covers are the sums of
    their operators.  None for a table that was measured, or composed without whole steps.
    """
    if (found := _bounds.get(latency)) is not None:
        return found
    if (how := reach_of(latency)) is not None:
        cheap = _shaded(latency, 1 / how[0], 1 / how[1])
        found = TableBounds(_shaded(latency, *how), cheap)
    elif (alone := operators_alone(latency)) is not None:
        found = TableBounds(latency, _uncovered(latency, alone))
    else:
        return None
    _bounds[latency] = found
    return found


_bounds: WeakKeyDictionary[LatencyTable, TableBounds] = WeakKeyDictionary()


def _uncovered(latency: LatencyTable, alone: LatencyTable) -> LatencyTable:
    """Return `latency` with the seconds of `alone` in cells that no whole step covers."""
    keys = ["model", "phase", "batch", "new_tokens", "context"]
    summed = alone.cells[[*keys, "median_s"]]
    cells = latency.cells.merge(summed, how="left", on=keys, suffixes=("", "_alone"))
    own, other = cells["median_s"], cells.pop("median_s_alone")
    # Passes that the source of drafts added or made free are its own, not the composed model's.
    cells["median_s"] = own.where((cells["repeats"] > 0) | other.isna() | (own == 0), other)
    return LatencyTable(cells, latency.meta)


def _shaded(latency: LatencyTable, draft: float, verify: float) -> LatencyTable:
    cells = latency.cells.copy()
    target = cells["model"] == "target"
    cells.loc[~target & cells["phase"].isin(DRAFTING), "median_s"] *= draft
    passes = cells[target & cells["phase"].isin(["forward", "with_prompts"])]
    seconds, narrow = passes["median_s"], passes["new_tokens"] == 1
    alike = [passes[size] for size in ("phase", "batch", "context")]
    least = seconds.where(narrow).groupby(alike).transform("max")
    wide = (seconds * verify).clip(lower=least)
    cells.loc[passes.index, "median_s"] = wide.where(passes["new_tokens"] > 1, seconds)
    return LatencyTable(cells, latency.meta)


def interval_words(latency: LatencyTable) -> str:
    """Return the factors in words; empty for a table that was measured."""
    how = reach_of(latency)
    if how is None:
        return ""
    return (
        f"by its record, {LEVEL:.0%} of the time a draft pass is within a factor {how[0]:.2f} "
        f"and a verification within {how[1]:.2f}, relative to the target's step"
    )


def bounds_words(latency: LatencyTable) -> str:
    """Return when a prediction lies at the bounds of `bounds_of`."""
    if reach_of(latency) is None:
        return "between whole steps and the sums of operators"
    return "if the extrapolation has its past errors"


def said_calibrate(tables: Iterable[LatencyTable], largest: int) -> list[str]:
    """Return, if extrapolated latencies price batches above one, a line on what does better."""
    return [CALIBRATE] if largest > 1 and any(t.meta.get("scaled") for t in tables) else []
