"""Formulas that hold without i.i.d. acceptance or a free verification, and what all share."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from traces.errors import DraftsimError


def require(name: str, value: float, low: float, high: float = math.inf) -> float:
    """Return `value` itself if it lies in [low, high]; else a `DraftsimError` that says so."""
    if not low <= value <= high:
        bound = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
        raise DraftsimError(f"{name} is {value}, expected {bound}")
    return value


def geometric_sum(alpha: float, terms: float) -> float:
    """Return (1 - alpha**terms) / (1 - alpha), accurate up to and at alpha = 1, for real terms."""
    require("alpha", alpha, 0, 1)
    require("terms", terms, 0)
    if terms == 1:
        return 1.0
    if alpha == 1:
        return float(terms)
    if alpha == 0 or terms == 0:
        return float(terms > 0)
    return -math.expm1(terms * math.log(alpha)) / (1 - alpha)


def block_efficiency(survival: npt.ArrayLike) -> float:
    """Return tokens per round from the survival function: 1 + sum over k of Pr(run >= k).

    ``survival[k - 1]`` is the probability that at least k drafts in a row match from a
    round's start, k = 1 ... gamma.  It holds for any dependence between positions; with
    survival alpha**k it is Leviathan's E[Y].
    """
    values = np.asarray(survival, dtype=np.float64)
    if values.size and (values.min() < 0 or values.max() > 1 or (np.diff(values) > 0).any()):
        raise DraftsimError("a survival function must fall from at most 1 to at least 0")
    return 1.0 + float(values.sum())


def empirical_survival(run_lengths: npt.ArrayLike, gamma: int) -> Floats:
    """Return Pr(run >= k) for k = 1 ... gamma over the given run lengths, shape (gamma,)."""
    require("gamma", gamma, 0)
    runs = np.asarray(run_lengths)
    if not runs.size:
        raise DraftsimError("no run length was given")
    return np.asarray((runs[:, None] >= np.arange(1, gamma + 1)).mean(axis=0), dtype=np.float64)


def speedup(tokens: float, gamma: float, target_s: float, draft_s: float, verify_s: float) -> float:
    """Return the speedup of rounds that emit `tokens` for gamma draft passes and one verification.

    ``tokens * target_s / (gamma * draft_s + verify_s)``: times in seconds, `verify_s` the
    target's pass over gamma + 1 positions.
    """
    require("tokens", tokens, 0)
    return tokens * target_s / (gamma * draft_s + verify_s)


def break_even_verify(tokens: float, gamma: float, c: float) -> float:
    """Return T_verify / T_target below which speculation gives a speedup: tokens - gamma c."""
    return require("tokens", tokens, 0) - gamma * c


def break_even_c(tokens: float, gamma: float, verify: float) -> float:
    """Return c = T_draft / T_target below which speculation gives a speedup.

    ``verify`` is T_verify / T_target.  Negative if verification alone takes longer than decoding
    `tokens` without speculation.
    """
    return (require("tokens", tokens, 0) - verify) / gamma
