"""How far a prediction for another GPU may be off, by what the model was off before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.hardware.record import ratio_errors, reach, width_errors
from simulator.hardware.roofline import Mode
from traces.latency.table import LatencyTable

LEVEL = 0.8
"""Share of further errors that should lie within: four of five."""
CALIBRATE = (
    "at batches above one the model is optimistic: `draftsim calibrate` fits a server to a handful "
    "of its own runs"
)
DRAFTING = ("forward", "catch_up", "settling", "head")


class Reach(NamedTuple):
    """Factors that a cost beside the target's own step may be off by."""

    draft: float
    """A draft model's passes."""
    verify: float
    """A pass over several tokens."""


class Bounds(NamedTuple):
    """A carried table with everything dearer, and with everything cheaper, than carried."""

    dear: LatencyTable
    cheap: LatencyTable


def reaches(mode: Mode, quantised: bool) -> Reach:
    """The factors by the model's own record; see `simulator.hardware.record`."""
    return Reach(reach(ratio_errors(mode, quantised), LEVEL), reach(width_errors(quantised), LEVEL))


def reach_of(latency: LatencyTable) -> Reach | None:
    """The factors of a table that was carried over; None for one that was measured."""
    note = latency.meta.get("scaled")
    if not isinstance(note, Mapping) or "draft_within" not in note:
        return None
    return Reach(float(note["draft_within"]), float(note["verify_within"]))


def bounds_of(latency: LatencyTable) -> Bounds | None:
    """`latency` with drafting and wide passes dearer and cheaper by their factors.

    The target's passes over one token stay as they are: what they are off by, a speedup does not
    show.  A wide pass is never cheaper than a narrow one.  None for a table that was measured.
    """
    how = reach_of(latency)
    if how is None:
        return None
    found = _bounds.get(latency)
    if found is None:
        dear, cheap = Reach(*how), Reach(1 / how.draft, 1 / how.verify)
        found = _bounds[latency] = Bounds(_shaded(latency, *dear), _shaded(latency, *cheap))
    return found


_bounds: WeakKeyDictionary[LatencyTable, Bounds] = WeakKeyDictionary()


def _shaded(latency: LatencyTable, draft: float, verify: float) -> LatencyTable:
    cells = latency.cells.copy()
    seconds = cells["median_s"].to_numpy(float).copy()
    drafting = (cells["model"] != "target") & cells["phase"].isin(DRAFTING)
    seconds[drafting.to_numpy()] *= draft
    passes = ((cells["model"] == "target") & (cells["phase"] == "forward")).to_numpy()
    seconds[passes] = _wide(cells[passes], seconds[passes], verify)
    cells["median_s"] = seconds
    return LatencyTable(cells, latency.meta)


def _wide(
    cells: pd.DataFrame, seconds: npt.NDArray[np.float64], factor: float
) -> npt.NDArray[np.float64]:
    frame = cells[["batch", "context", "new_tokens"]].assign(seconds=seconds)
    narrow = frame.loc[frame["new_tokens"] == 1, ["batch", "context", "seconds"]]
    at = frame.merge(narrow, how="left", on=["batch", "context"], suffixes=("", "_of_one"))
    width, own, least = (
        at[name].to_numpy(float) for name in ("new_tokens", "seconds", "seconds_of_one")
    )
    wide = np.where(width > 1, np.fmax(own * factor, least), own)
    return np.asarray(wide, dtype=np.float64)


def note_of(mode: Mode, quantised: bool) -> dict[str, Any]:
    """What a carried table's provenance keeps of them."""
    found = reaches(mode, quantised)
    return {"draft_within": found.draft, "verify_within": found.verify, "within_level": LEVEL}


def interval_words(latency: LatencyTable) -> str:
    """The factors in words; empty for a table that was measured."""
    how = reach_of(latency)
    if how is None:
        return ""
    return (
        f"by its record, {LEVEL:.0%} of the time a draft pass is within a factor {how.draft:.2f} "
        f"and a verification within {how.verify:.2f}, beside the target's step"
    )
