"""Latencies as a roofline has them, which are carried over to other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simulator.hardware.roofline import ModelShape, Roofline
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.latency.table import LatencyTable, as_cells
from traces.operators.devices import DEVICES
from traces.store.files import write_latency, write_trace

SHAPES: dict[str, dict[str, Any]] = {
    "target": {"layers": 32, "hidden_size": 4096, "vocab_size": 32000, "parameters": 6.74e9},
    "draft": {"layers": 12, "hidden_size": 768, "vocab_size": 32000, "parameters": 162e6},
}
TRUTH = Roofline(DEVICES["h200"], "graph", 5e-5, 5e-6, 0.7, 0.5)


def cells(model: Roofline, prefix: str = "", wrinkle: float = 0.0) -> pd.DataFrame:
    """Passes as `model` has them, apart from noise; phases of the host that it knows nothing of."""
    rng = np.random.default_rng(1)
    rows: list[tuple[Any, ...]] = []
    for role, meta in SHAPES.items():
        shape = ModelShape.from_meta(meta)
        phases = ("forward",) if role == "target" else ("forward", "catch_up")
        rows += [
            (prefix + role, phase, b, n, c,
             float(model.seconds(shape, b, n, c)) * np.exp(wrinkle * rng.normal()), 1e-6, 5)
            for phase in phases
            for b in (1, 16) for n in (1, 2, 9, 25) for c in (16, 2048)
        ]  # fmt: skip
    rows.append((prefix + "target", "host_round", 1, 1, 0, 3e-4, 0.0, 5))
    return as_cells(rows)


def measured(**meta: Any) -> LatencyTable:
    """The table of `cells`, with `meta` besides."""
    about = {"kind": "measured", "device": "NVIDIA H200", "dtype": "bfloat16", "mode": "graph"}
    return LatencyTable(cells(TRUTH), {**about, "shapes": SHAPES, **meta})


def write_carried(folder: Path) -> Path:
    """A trace and latencies of three kinds into `folder`, which is returned."""
    write_trace(
        synthetic_trace(Bursty(), requests=8, tokens=60, concentration=8.0, seed=2),
        folder / "trace.parquet",
    )
    write_latency(measured(), folder / "latency.parquet")
    write_latency(measured(device="Intel(R) Xeon(R)"), folder / "cpu.parquet")
    both = [cells(TRUTH, f"vicuna-7b+160m/{mode}/") for mode in ("eager", "graph")]
    shapes = {"vicuna-7b+160m": SHAPES}
    meta = {**measured().meta, "shapes": shapes}
    write_latency(LatencyTable(pd.concat(both), meta), folder / "suite.parquet")
    return folder
