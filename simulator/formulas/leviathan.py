"""Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative
Decoding": i.i.d. acceptance alpha, cost ratio c = T_draft / T_target, and a verification
that costs one target step whatever its width.
"""

from __future__ import annotations

from simulator.formulas.general import geometric_sum, require
from traces.errors import DraftsimError


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return tokens per round, bonus included, E[Y] (eq. 1): from 1 at alpha = 0 to gamma + 1."""
    require("gamma", gamma, 0)
    return geometric_sum(alpha, gamma + 1)


def acceptance_rate(tokens: float, gamma: int) -> float:
    """Return the alpha at which rounds of gamma drafts emit `tokens`: the inverse of eq. 1.

    Raises DraftsimError if no alpha does.
    """
    from scipy.optimize import brentq

    require("gamma", gamma, 1)
    if not 1 <= tokens <= gamma + 1:
        raise DraftsimError(f"no acceptance gives {tokens:g} tokens a round of {gamma}")
    return float(brentq(lambda a: expected_tokens(a, gamma) - tokens, 0.0, 1.0, xtol=1e-14))


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Return expected improvement of wall time over plain decoding (Theorem 3.8)."""
    require("c", c, 0)
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Return expected arithmetic operations over those of plain decoding (Theorem 3.11).

    ``c_hat`` is the ratio of operations per token, draft over target; the target's
    operations grow with the gamma + 1 positions it verifies.
    """
    require("c_hat", c_hat, 0)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float, max_gamma: int = 1000) -> int:
    """Return the integer draft length of highest `speedup`, 0 if none exceeds 1.

    One does exactly if alpha > c (Corollary 3.9).  The speedup has a single peak in gamma.  At
    c = 0 it only rises: the answer is then `max_gamma`, or 0 where alpha = 0.
    """
    require("max_gamma", max_gamma, 0)
    if require("c", c, 0) == 0:  # floats stop rising before the speedup does
        return max_gamma if require("alpha", alpha, 0, 1) else 0
    best, value = 0, 1.0
    for gamma in range(1, max_gamma + 1):
        if (new := speedup(alpha, gamma, c)) <= value:
            break
        best, value = gamma, new
    return best


def break_even_alpha(gamma: int, c: float, verify: float = 1.0) -> float:
    """Return the acceptance at which a draft length of gamma breaks even.

    ``verify`` is T_verify / T_target.  Solves E[Y] = gamma c + verify.

    Raises DraftsimError if even alpha = 1 gives no speedup, or alpha = 0 already does.
    """
    require("gamma", gamma, 1)
    cost = gamma * require("c", c, 0) + require("verify", verify, 0)
    if not 1 <= cost <= gamma + 1:
        raise DraftsimError(
            f"a round of gamma={gamma} costs {cost:g} target steps for 1 to {gamma + 1} tokens: "
            "no acceptance breaks even"
        )
    return acceptance_rate(cost, gamma)


def acceptance_proportion(alpha: float, gamma: int) -> float:
    """Return expected accepted over drafted tokens of a round of gamma i.i.d. drafts.

    Below alpha for gamma > 1, since drafts after the first rejection are lost:
    alpha = 0.8 gives 0.538 at gamma = 5.  GammaTune's alpha is this proportion;
    using one in the other's formula is the mistake to guard against.
    """
    require("gamma", gamma, 1)
    return alpha * geometric_sum(alpha, gamma) / gamma
