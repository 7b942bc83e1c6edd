"""GammaTune (arXiv:2504.00030), eq. 1-6.

Its alpha is the accepted share of the drafted tokens, not a per-token probability, and
its c the inverse of Leviathan's: T_target / T_draft.  Both are kept here under names that
say so.
"""

from __future__ import annotations

from simulator.formulas.general import require


def cost_ratio(target_s: float, draft_s: float) -> float:
    """Return GammaTune's c, T_target / T_draft: how many draft steps one target step lasts."""
    return require("target_s", target_s, 0) / require("draft_s", draft_s, 1e-12)


def steps(tokens: int, proportion: float, gamma: float) -> float:
    """Return the rounds for `tokens`: each emits proportion * gamma drafts and one more."""
    require("proportion", proportion, 0, 1)
    return tokens / (proportion * require("gamma", gamma, 0) + 1)


def cost(tokens: int, proportion: float, gamma: float, c_gt: float, draft_s: float) -> float:
    """Return seconds for `tokens`: steps, each of a target step and gamma draft steps."""
    return steps(tokens, proportion, gamma) * (require("c_gt", c_gt, 0) + gamma) * draft_s


def speedup(proportion: float, gamma: float, c_gt: float) -> float:
    """Return plain decoding's time over speculation's (eq. 6): c (1 + alpha gamma) / (c + gamma).

    With `leviathan.acceptance_proportion` it equals Leviathan's Theorem 3.8.  Held
    constant, the proportion makes it monotone in gamma: an optimum exists only because
    the proportion falls with gamma.
    """
    require("proportion", proportion, 0, 1)
    require("gamma", gamma, 0)
    return require("c_gt", c_gt, 0) * (1 + proportion * gamma) / (c_gt + gamma)


def break_even_proportion(c_gt: float) -> float:
    """Return the accepted share above which any gamma gives a speedup: 1 / c."""
    require("c_gt", c_gt, 1)
    return 1 / c_gt
