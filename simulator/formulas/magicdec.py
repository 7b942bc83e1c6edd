"""MagicDec (arXiv:2408.11049), eq. 3-4: speculation in long-context batches."""

from __future__ import annotations

from simulator.formulas.bounds import require


def time_ratio(
    tokens: float, gamma: float, target_s: float, draft_s: float, verify_s: float,
    selection_s: float = 0.0,
) -> float:  # fmt: skip
    """Return T_SD / T_T per token (eq. 4).

    ``tokens`` is Omega(gamma, alpha), the tokens per round; the times, in seconds, are
    those of one batch at its context: a target step, a draft step (over a sparse cache),
    selecting that cache, and the verification of gamma drafts.  With verify_s = target_s
    and no selection it is the inverse of Leviathan's Theorem 3.8.
    """
    require("tokens", tokens, 1)
    require("target_s", target_s, 1e-12)
    return (gamma * (draft_s + selection_s) / target_s + verify_s / target_s) / tokens
