"""A measured latency table carried over to another GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simulator.hardware.devices import Device, find_device
from simulator.hardware.roofline import Mode, Roofline, observations
from simulator.hardware.shapes import ModelShape
from traces.errors import DraftsimError
from traces.latency import LatencyTable


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


def carry_over(
    latency: LatencyTable,
    to: Device,
    *,
    source: Device | None = None,
    shapes: Mapping[str, ModelShape] | None = None,
    mode: Mode | None = None,
) -> LatencyTable:
    """`latency` as it would be on `to`: every cell times the ratio of the fitted model there.

    Only the ratio is the model's; what it does not explain of a cell is kept.  Host phases
    stay as they are, since the host does.  The result is marked ``scaled``, with the fit and
    its error on the measured cells.

    Parameters
    ----------
    source:
        The device measured; by default what the table's provenance says.
    shapes, mode:
        Models' shapes and launch mode; by default as well.

    Raises
    ------
    DraftsimError
        If the device or the shapes are not known, or there are too few cells to fit.
    """
    home = source or find_device(str(latency.meta.get("device", "")))
    known = dict(shapes or table_shapes(latency))
    how: Mode = mode or ("graph" if latency.meta.get("mode") == "graph" else "eager")
    observed = observations(latency, known)
    fit = Roofline(home, how).fitted(observed)
    away = fit.on(to)
    cells = latency.cells.copy()
    for role, shape in known.items():
        rows = (cells["model"] == role) & cells["phase"].isin(["forward", "prefill", "layer"])
        if not rows.any():
            continue
        sizes = [cells.loc[rows, c].to_numpy(float) for c in ("batch", "new_tokens", "context")]
        ratio = away.seconds(shape, *sizes) / fit.seconds(shape, *sizes)
        for column in ("median_s", "spread_s"):
            cells.loc[rows, column] = cells.loc[rows, column].to_numpy(float) * ratio
    # A head is its projection's weights: memory or arithmetic, and no layers' launches.
    heads = cells["phase"].eq("head")
    cells.loc[heads, ["median_s", "spread_s"]] *= home.bandwidth / to.bandwidth
    note = {
        "from": home.name, "to": to.name, "mode": how, "fixed_s": fit.fixed_s,
        "layer_s": fit.layer_s, "memory_share": fit.memory_share,
        "compute_share": fit.compute_share,
        "median_error": float(np.median(np.abs(fit.errors(observed)))),
    }  # fmt: skip
    return LatencyTable(cells, {**latency.meta, "device": to.name, "scaled": note})
