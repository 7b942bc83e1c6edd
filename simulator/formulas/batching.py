"""Speculation in batches: truncated acceptance, goodput, an affine step time, and MagicDec
(arXiv:2408.11049)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.formulas.general import geometric_sum, require


def truncated_tokens(alphas: Sequence[float], gamma: int) -> float:
    """Return tokens per sequence and round if a batch keeps only what all sequences accepted.

    1 + sum over k of the product over b of alpha_b**k: the shortest of B independent runs.
    One sequence gives Leviathan's E[Y]; ragged batches keep that value for each sequence.
    """
    require("gamma", gamma, 0)
    together = math.prod(require("alpha", a, 0, 1) for a in alphas)
    return geometric_sum(together, gamma + 1)


def llama_8b_h100_s(cached_tokens: float, tokens: float) -> float:
    """Return seconds of a step of Llama-3.1-8B on one H100, affine in its tokens.

    It is the regression of SpecDecode-Bench's simulator (commit 2fdccbd), in TurboSpec's form
    (arXiv:2406.14066).
    """
    return 3.926e-8 * cached_tokens + 2.101e-5 * tokens + 5.886e-3


def goodput(alpha: float, gamma: int, batch: int, proposing: int, step_s: float) -> float:
    """Return tokens per second of a batch step (TurboSpec): `proposing` of `batch` speculate.

    Each speculating sequence emits Leviathan's E[Y] tokens, each other one token.
    """
    require("proposing", proposing, 0, batch)
    require("step_s", step_s, 1e-12)
    emitted = proposing * geometric_sum(alpha, require("gamma", gamma, 0) + 1)
    return (emitted + batch - proposing) / step_s


def time_ratio(
    tokens: float, gamma: float, target_s: float, draft_s: float, verify_s: float,
    selection_s: float = 0.0,
) -> float:  # fmt: skip
    """Return T_SD / T_T per token at long contexts (MagicDec, eq. 3-4).

    ``tokens`` is Omega(gamma, alpha), the tokens per round; the times, in seconds, are
    those of one batch at its context: a target step, a draft step (over a sparse cache),
    selecting that cache, and the verification of gamma drafts.  With verify_s = target_s
    and no selection it is the inverse of Leviathan's Theorem 3.8.
    """
    require("tokens", tokens, 1)
    require("target_s", target_s, 1e-12)
    return (gamma * (draft_s + selection_s) / target_s + verify_s / target_s) / tokens
