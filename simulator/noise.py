"""The errors that an engine's repeats alone would show: how large they are without a mistake."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BOUND = 0.02
"""Error of a speedup that is worth telling: repeats are named whose scatter is half of it."""


def with_noise(rows: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """The rows with the relative standard errors that their own repeats give what was measured.

    ``noise`` is of tokens/s, ``speedup_noise`` of the speedup over the policy `first` at the same
    load; both are None if each arm ran once.  Arms of a load are taken to scatter alike: with a
    few repeats each, one arm's own scatter says little.
    """
    for load in dict.fromkeys(row["load"] for row in rows):
        own = [row for row in rows if row["load"] == load]
        rates = np.log([row["throughputs"] for row in own])
        repeats = rates.shape[1]
        single = scatter(rates)
        beside = scatter(rates, shared=True)
        for row in own:
            row["noise"] = None if single is None else single / math.sqrt(repeats)
            row["speedup_noise"] = None if beside is None else (
                0.0 if row["policy"] == first else beside * math.sqrt(2 / repeats)
            )  # fmt: skip
    return rows


def scatter(logs: npt.NDArray[np.float64], shared: bool = False) -> float | None:
    """Standard deviation of one repeat about its arm, from (arms, repeats) logarithms.

    With `shared`, less what all arms of a repeat share, which no ratio of two of them sees.  None
    where too few ran to tell.
    """
    arms, repeats = logs.shape
    rest = logs - logs.mean(1, keepdims=True)
    degrees = arms * (repeats - 1)
    if shared:
        rest = rest - rest.mean(0, keepdims=True)
        degrees -= repeats - 1
    return math.sqrt(float((rest**2).sum()) / degrees) if degrees else None


def expected_median(noises: Sequence[float]) -> float:
    """Median of the errors' sizes that a model without error would show, its noises being these.

    The median over a mixture of normal errors; 0 where none has any.
    """
    from scipy.optimize import brentq
    from scipy.stats import halfnorm

    scales = np.array([n for n in noises if n])
    if not scales.size:
        return 0.0
    none = len(noises) - scales.size

    def above(size: float) -> float:
        return float(none + np.sum(halfnorm.cdf(size, scale=scales))) / len(noises) - 0.5

    return 0.0 if above(0.0) >= 0 else float(brentq(above, 0.0, 2 * scales.max()))


def noise_said(rows: Sequence[Mapping[str, Any]], first: str) -> str | None:
    """Return how far the speedups are off, and how far the repeats alone would have them off."""
    arms = [row for row in rows if row["policy"] != first and row["speedup_noise"] is not None]
    if not arms:
        return None
    errors = np.abs([row["speedup_error"] for row in arms])
    floor, repeats = expected_median([row["speedup_noise"] for row in arms]), arms[0]["repeats"]
    needed = math.ceil(repeats * (2 * floor / BOUND) ** 2)
    return (
        f"speedups are off by {np.median(errors):.1%} (median; worst {errors.max():.1%}); a model "
        f"without error would show {floor:.1%} with {repeats} repeats that scatter as these do"
        + (f" ({needed} repeats: {BOUND / 2:.0%})" if needed > repeats else "")
        + _paced(arms)
    )


def _paced(arms: Sequence[Mapping[str, Any]]) -> str:
    paced = [row["paced_speedup_error"] for row in arms]
    errors = [abs(error) for error in paced if error is not None]
    if not errors:
        return ""
    return f"; for a machine as the control load found it they are off by {np.median(errors):.1%}"
