"""SpecBound (arXiv:2604.12247), eq. 3-5: early exit within a bounded depth.

A round computes gamma positions through the first d_max of L layers one after another
and the rest of the layers for all of them at once; ``depth`` is d_max / L.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.formulas.general import geometric_sum, require
from traces.errors import DraftsimError

Reading = Literal["physical", "literal"]
"""Eq. 4 with the exponent gamma (gamma counts every position of the draft phase, so that
gamma = 1 is plain decoding) or gamma + 1 (Leviathan's, a bonus on top)."""


def round_cost(gamma: float, depth: float) -> float:
    """Return the time of a round in plain decoding steps (eq. 3): gamma depth + (1 - depth)."""
    require("gamma", gamma, 1)
    return gamma * require("depth", depth, 0, 1) + (1 - depth)


def expected_tokens(alpha: float, gamma: float, reading: Reading = "physical") -> float:
    """Return tokens per round (eq. 4)."""
    require("gamma", gamma, 1)
    return geometric_sum(alpha, gamma + (reading == "literal"))


def speedup(alpha: float, gamma: float, depth: float, reading: Reading = "physical") -> float:
    """Return the speedup over plain decoding (eq. 5).

    alpha = 0 gives `worst_case`; alpha = 1 gives gamma / (1 + (gamma - 1) depth), towards
    1 / depth; depth = 1 never exceeds 1 in the physical reading.
    """
    return expected_tokens(alpha, gamma, reading) / round_cost(gamma, depth)


def worst_case(width: float, depth: float) -> float:
    """Return the speedup if every full draft is rejected (App. E): 1 / (1 + (w - 1) d)."""
    return 1 / round_cost(width, depth)


def break_even_alpha(gamma: float, depth: float, reading: Reading = "physical") -> float:
    """Return acceptance at which eq. 5 gives 1; at gamma = 2 (physical) it is the depth itself."""
    from scipy.optimize import brentq

    if require("gamma", gamma, 1) == 1:
        raise DraftsimError("gamma is 1, which is plain decoding: any acceptance breaks even")
    cost = round_cost(gamma, depth)
    return float(brentq(lambda a: expected_tokens(a, gamma, reading) - cost, 0.0, 1.0, xtol=1e-14))


def speedup_from_compression(
    compression: npt.ArrayLike, gamma: npt.ArrayLike, depth: float
) -> npt.NDArray[np.float64]:
    """Evaluate eq. 5 with a measured compression rate (tokens per round) in place of eq. 4."""
    require("depth", depth, 0, 1)
    return np.asarray(
        np.asarray(compression, dtype=float) / (1 + (np.asarray(gamma, dtype=float) - 1) * depth)
    )


class DepthFit(NamedTuple):
    """Least-squares fit of eq. 5 to published (compression, speedup) pairs."""

    depth: float
    """Fitted depth fraction d_max / L."""
    predicted: npt.NDArray[np.float64]
    rmse: float
    mape: float
    """Mean |error| relative to the published speedup."""
    r_squared: float


def fit_depth(compression: npt.ArrayLike, speedups: npt.ArrayLike, wasted: float = 0.0) -> DepthFit:
    """Fit the depth fraction with gamma = compression + `wasted` positions per round.

    The compression rate enters eq. 5 through the numerator alone, so only the product
    (gamma - 1) depth can be identified; tying gamma to the compression rate identifies
    the depth.  ``wasted`` is how many positions a round computes for nothing.
    """
    from scipy.optimize import minimize_scalar

    rate = np.asarray(compression, dtype=float)
    published = np.asarray(speedups, dtype=float)
    if rate.shape != published.shape or rate.size < 2:
        raise DraftsimError(
            f"{rate.size} compression rates and {published.size} speedups: "
            "expected two or more of each, in pairs"
        )

    def predict(depth: float) -> npt.NDArray[np.float64]:
        return speedup_from_compression(rate, rate + wasted, depth)

    found = minimize_scalar(
        lambda d: float(((predict(d) - published) ** 2).sum()),
        bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-10},
    )  # fmt: skip
    depth = float(found.x)
    residual = predict(depth) - published
    total = float(((published - published.mean()) ** 2).sum())
    return DepthFit(
        depth,
        predict(depth),
        float(np.sqrt((residual**2).mean())),
        float((np.abs(residual) / published).mean()),
        1 - float((residual**2).sum()) / total if total else float("nan"),
    )
