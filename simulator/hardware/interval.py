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
from traces.store.operators import operators_alone

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
    """A table with everything dearer, and with everything cheaper, than it is."""

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
    show.  A wide pass is never cheaper than a narrow one.  A table that was composed and corrected
    by whole steps is dear as it is; in the cheap one, passes that no step covers are the sums of
    their operators.  None for a table that was measured, or composed without whole steps.
    """
    found = _bounds.get(latency)
    if found is not None:
        return found
    how = reach_of(latency)
    if how is None:
        alone = operators_alone(latency)
        if alone is None:
            return None
        found = _bounds[latency] = Bounds(latency, _uncovered(latency, alone))
    else:
        dear, cheap = Reach(*how), Reach(1 / how.draft, 1 / how.verify)
        found = _bounds[latency] = Bounds(_shaded(latency, *dear), _shaded(latency, *cheap))
    return found


_bounds: WeakKeyDictionary[LatencyTable, Bounds] = WeakKeyDictionary()


def _uncovered(latency: LatencyTable, alone: LatencyTable) -> LatencyTable:
    """`latency` with the seconds of `alone` in cells that no whole step covers."""
    keys = ["model", "phase", "batch", "new_tokens", "context"]
    cells = latency.cells.merge(alone.cells[[*keys, "median_s"]], on=keys, suffixes=("", "_alone"))
    summed = cells.pop("median_s_alone")
    cells["median_s"] = cells["median_s"].where(cells["repeats"] > 0, summed)
    return LatencyTable(cells, latency.meta)


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


def bounds_words(latency: LatencyTable) -> str:
    """Return when a prediction lies at the bounds of `bounds_of`."""
    if reach_of(latency) is None:
        return "between whole steps and the sums of operators"
    return "were the carrying model off as it was before"
