"""Drafted positions with both full distributions, and rules asked about them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

V = 12
seeds = st.integers(0, 2**32 - 1)
relaxed = settings(max_examples=60, deadline=None)


def acceptance_probability(target_prob: float, draft_prob: float) -> float:
    """min(1, target / draft) of the drafted token (Leviathan et al., 2211.17192, Alg. 1)."""
    return min(1.0, target_prob / draft_prob)


def residual(
    target_probs: npt.NDArray[np.floating[Any]], draft_probs: npt.NDArray[np.floating[Any]]
) -> npt.NDArray[np.float64]:
    """The distribution a rejected token is replaced from: (target - draft)+, normalised.

    Shapes (..., vocab), all alike.  Where the two agree nothing is ever rejected, and
    the target's own distribution is returned.
    """
    target = np.asarray(target_probs, np.float64)
    excess = np.maximum(target - draft_probs, 0.0)
    mass = excess.sum(-1, keepdims=True)
    return np.where(mass > 0, excess / np.where(mass > 0, mass, 1.0), target)


class Position:
    """One drafted position with both full distributions, and the records made of them."""

    def __init__(self, rng: np.random.Generator, greedy: bool = True) -> None:
        self.target_logits = rng.normal(0, rng.uniform(0.2, 4), V)
        self.draft_logits = self.target_logits + rng.normal(0, rng.uniform(0.1, 3), V)
        self.p, self.q = (
            np.exp(z) / np.exp(z).sum() for z in (self.target_logits, self.draft_logits)
        )
        self.d = int(self.q.argmax()) if greedy else int(rng.choice(V, p=self.q))
        self.best = int(self.p.argmax())
        ratio = self.p[self.d] / self.q[self.d]
        self.match = self.d == self.best if greedy else bool(rng.random() < ratio)

    @property
    def token(self) -> SimpleNamespace:
        logits, probs = np.sort(self.draft_logits)[::-1], np.sort(self.q)[::-1]
        return SimpleNamespace(
            token_id=self.d,
            prob=self.q[self.d],
            entropy=-(self.q * np.log(self.q)).sum(),
            logit_margin=logits[0] - logits[1],
            prob_margin=probs[0] - probs[1],
        )

    @property
    def score(self) -> SimpleNamespace:
        z = self.target_logits
        top = np.sort(z)[::-1]
        return SimpleNamespace(
            match=self.match, token=self.best, top1=top[0], top2=top[1],
            logsumexp=np.log(np.exp(z).sum()), entropy=-(self.p * np.log(self.p)).sum(),
            draft_logit=z[self.d], draft_rank=int((z > z[self.d]).sum()),
        )  # fmt: skip


def positions(seed: int, count: int = 8, greedy: bool = True) -> list[Position]:
    rng = np.random.default_rng(seed)
    return [Position(rng, greedy) for _ in range(count)]


def accept(rule: Any, drafted: list[Position]) -> int:
    return int(rule.accept([x.token for x in drafted], [x.score for x in drafted]))


def leading(verdicts: list[bool]) -> int:
    return verdicts.index(False) if False in verdicts else len(verdicts)
