"""Speculation in batches: truncated acceptance, goodput, and an affine step time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.formulas.bounds import geometric_sum, require


def truncated_tokens(alphas: Sequence[float], gamma: int) -> float:
    """Return tokens per sequence and round if a batch keeps only what all sequences accepted.

    1 + sum over k of the product over b of alpha_b**k: the shortest of B independent runs.
    One sequence gives Leviathan's E[Y]; ragged batches keep that value for each sequence.
    """
    require("gamma", gamma, 0)
    together = math.prod(require("alpha", a, 0, 1) for a in alphas)
    return geometric_sum(together, gamma + 1)


@dataclass(frozen=True)
class AffineLatency:
    """Step time c_kv N_kv + c_token N_batched + c_batch B + c_0, in seconds.

    The regression of TurboSpec (arXiv:2406.14066) and of SpecDecode-Bench's simulator.
    """

    per_cached_token: float = 0.0
    per_token: float = 0.0
    per_sequence: float = 0.0
    constant: float = 0.0

    def seconds(self, cached_tokens: float, tokens: float, batch: float) -> float:
        """Return seconds of a step over a batch with that much cache and that many new tokens."""
        return (
            self.per_cached_token * cached_tokens
            + self.per_token * tokens
            + self.per_sequence * batch
            + self.constant
        )


LLAMA_8B_H100 = AffineLatency(per_cached_token=3.926e-8, per_token=2.101e-5, constant=5.886e-3)
"""Llama-3.1-8B on one H100 (SpecDecode-Bench/simulator, commit 2fdccbd)."""


def goodput(alpha: float, gamma: int, batch: int, proposing: int, step_s: float) -> float:
    """Return tokens per second of a batch step (TurboSpec): `proposing` of `batch` speculate.

    Each speculating sequence emits Leviathan's E[Y] tokens, each other one token.
    """
    require("proposing", proposing, 0, batch)
    if step_s <= 0:
        require("step_s", step_s, 1e-12)
    emitted = proposing * geometric_sum(alpha, require("gamma", gamma, 0) + 1)
    return (emitted + batch - proposing) / step_s
