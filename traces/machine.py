"""How quiet a machine was during a measurement: figures, and their meaning.

A state is a table with these keys, stored in the metadata of the measurement (``machine``):

==================  ======================================================================
runs                timed runs (or blocks of passes)
disturbed           runs that were disturbed at their first attempt
repeated            runs repeated because of that, within a budget
off                 share of the kept runs' seconds that they had no processor
steal               share of the processors' time that the hypervisor gave to others
others              processors kept busy by other work, on average
reference_s         median seconds of a fixed amount of work, repeated at intervals
reference_spread_s  half its interquartile range
==================  ======================================================================

A figure that the platform does not provide is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

State = Mapping[str, Any]

DISTURBED = 0.03
"""Share of a run without a processor from which the run counts as disturbed."""
UNSTEADY = 0.05
"""Spread of the reference work, relative to its median, from which the machine was unsteady.

At 9 to 11%, its processors idle, predictions of runs a minute after the profile were 8% off.
"""
ALIKE = 0.05
"""Difference of the reference work below which two machines are alike, whatever its spread."""

QUIET, BUSY = "quiet", "disturbed"


def machine_label(state: State | None) -> str | None:
    """Return `QUIET` or `BUSY`; None if nothing is known.

    >>> machine_label({"off": 0.2})
    'disturbed'
    >>> machine_label({"off": 0.0, "reference_s": 1.0, "reference_spread_s": 0.02})
    'quiet'
    """
    off, spread = _number(state, "off"), _spread(state)
    if off is None and spread is None:
        return None
    return BUSY if (off or 0) > DISTURBED or (spread or 0) > UNSTEADY else QUIET


def slowdown(before: State | None, after: State | None) -> float | None:
    """Return how much longer the reference work took `after` than `before`, relative.

    >>> slowdown({"reference_s": 2.0}, {"reference_s": 3.0})
    0.5
    """
    old, new = _number(before, "reference_s"), _number(after, "reference_s")
    return None if not old or new is None else new / old - 1


def differ(before: State | None, after: State | None) -> bool:
    """Return True if the time of the reference work changed by more than its spread."""
    change = slowdown(before, after)
    if change is None:
        return False
    ratio = max(1 + change, 1 / max(1 + change, 1e-9)) - 1
    return ratio > max(ALIKE, (_spread(before) or 0) + (_spread(after) or 0))


def describe_machine(state: State | None) -> str:
    """Return the figures that are known, in words."""
    words = []
    if (off := _number(state, "off")) is not None:
        words.append(f"{off:.1%} of the time without a processor")
    if runs := _number(state, "runs"):
        disturbed, repeated = (int(_number(state, k) or 0) for k in ("disturbed", "repeated"))
        words.append(f"{disturbed} of {runs:.0f} runs disturbed, {repeated} repeated")
    if (others := _number(state, "others")) is not None:
        words.append(f"other work on {others:.1f} processors")
    if steal := _number(state, "steal"):
        words.append(f"{steal:.1%} taken by the hypervisor")
    if (spread := _spread(state)) is not None:
        words.append(f"reference work ± {spread:.0%}")
    return ", ".join(words)


def _spread(state: State | None) -> float | None:
    middle, spread = _number(state, "reference_s"), _number(state, "reference_spread_s")
    return None if not middle or spread is None else spread / middle


def _number(state: State | None, key: str) -> float | None:
    value = None if state is None else state.get(key)
    return float(value) if isinstance(value, (int, float)) else None
