"""The cost model against published latencies, its error printed and not hidden."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from simulator.hardware.formats import FORMATS, SHAPES
from simulator.hardware.record import outside_launches, passes
from simulator.hardware.roofline import Mode, Observation, Roofline
from simulator.published import (
    CONTEXT,
    GAMMATUNE,
    GAMMATUNE_MS,
    QUANTISED,
    SPECBOUND_3,
    SPECBOUND_4,
)
from traces.operators.devices import DEVICES

COLUMNS = ("table", "row", "device", "published", "ours", "error", "kind")


def check_published(
    fitted: Roofline | None = None, *, depth: float = 0.3, width: int = 4
) -> pd.DataFrame:
    """Return published latencies and speedups with the model's; ``error`` is ours / published - 1.

    Parameters
    ----------
    fitted:
        An eager model fitted to a measured table, carried over to each paper's device
        (kind ``scaled``).  Without one the launches are fitted to GammaTune's other
        unquantised models (kind ``left out``: the row itself never enters its own fit) and
        all of them serve the SpecBound rows (kind ``fitted elsewhere``).
    depth, width:
        SpecBound's draft phase as a share of the layers, and positions a round: the two
        devices' speedups differ by what a pass of that width costs on each.

    Notes
    -----
    Times are milliseconds (GammaTune 1, SpecBound 3); SpecBound 4 gives the speedup on the
    RTX 3090 over that on the H800.
    """
    rows: list[tuple[object, ...]] = []
    h100 = DEVICES["h100"]
    plain = [name for name in GAMMATUNE_MS if name not in QUANTISED]
    for name, published in GAMMATUNE_MS.items():
        others = [n for n in plain if n != name]
        model = fitted.on(h100) if fitted else _launches(others)
        shape = SHAPES[name].kept_as(FORMATS[QUANTISED.get(name, "bf16")])
        ours = 1e3 * float(model.seconds(shape, context=CONTEXT))
        kind = "scaled" if fitted else "left out"
        if name in QUANTISED:
            kind += ", quantised"
        rows.append(_row("GammaTune 1, ms", name, "h100", published, ours, kind))
    everyone = fitted or _launches(plain)
    kind = "scaled" if fitted else "fitted elsewhere"
    vicuna = SHAPES["lmsys/vicuna-7b-v1.5"]
    h800, rtx = everyone.on(DEVICES["h800"]), everyone.on(DEVICES["rtx-3090"])
    ours = 1e3 * float(h800.seconds(vicuna, context=CONTEXT))
    published = SPECBOUND_3.number("Per-token latency (ms)", "AR_base")
    rows.append(_row("SpecBound 3, ms", "AR", "h800", published, ours, kind))

    def round_cost(model: Roofline) -> float:
        """Return a round over a plain step (SpecBound, eq. 3, at the width's measured cost)."""
        one, wide = (
            float(model.seconds(vicuna, new_tokens=n, context=CONTEXT)) for n in (1, width)
        )
        return width * depth + (1 - depth) * wide / one

    ratio = round_cost(h800) / round_cost(rtx)
    rows += [
        _row(
            "SpecBound 4, 3090/H800", task, "rtx-3090",
            SPECBOUND_4.number("RTX 3090", task) / SPECBOUND_4.number("H800", task), ratio, kind,
        )
        for task in SPECBOUND_4.columns
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


class PublishedError(NamedTuple):
    """Absolute relative errors of the cost model against published figures."""

    median: float
    worst: float
    figures: int
    devices: tuple[str, ...]


def published_error(fitted: Roofline | None = None, quantised: bool = False) -> PublishedError:
    """Return the error of the model against published passes of its kind.

    Of the launch mode of `fitted` (eager without one) and of weights that are `quantised` or are
    not: `simulator.hardware.record.passes`, and eagerly `check_published` as well, in which an
    eager model is carried over to each paper's device.
    """
    eager = fitted is None or fitted.mode == "eager"
    return _published_error(fitted if eager else None, "eager" if eager else "graph", quantised)


@cache
def _published_error(fitted: Roofline | None, mode: Mode, quantised: bool) -> PublishedError:
    rows = [
        (abs(row.error), row.run.device) for row in passes(mode, quantised)
        if row.study is not GAMMATUNE  # below
    ]  # fmt: skip
    if mode == "eager" and not quantised:
        papers = check_published(fitted)
        papers = papers[~papers["kind"].str.contains("quantised")]
        rows += list(zip(papers["error"].abs(), papers["device"], strict=True))
    found, devices = zip(*rows, strict=True)
    return PublishedError(
        float(np.median(found)), max(found), len(found), tuple(sorted(set(devices)))
    )


def _launches(names: Sequence[str]) -> Roofline:
    """Launch times of eager decoding, from published single-token latencies."""
    observed = [Observation(SHAPES[n], 1, 1, CONTEXT, GAMMATUNE_MS[n] / 1e3) for n in names]
    start = Roofline(DEVICES["h100"], "eager", 0.0, outside=outside_launches(GAMMATUNE.name))
    return start.fitted(observed, ("layer_s",))


def _row(
    table: str, row: str, device: str, published: float, ours: float, kind: str
) -> tuple[object, ...]:
    return table, row, device, published, ours, ours / published - 1, kind
