"""The input of a batch policy from an engine: loads, drafts, and how rounds ended."""

from __future__ import annotations

from collections.abc import Sequence

from policies import Load, Round
from tests.policy_rounds import Token


def loads(batch: int, context: int = 100) -> list[Load]:
    return [Load(batch, context)] * batch


def outcomes(drafted: int, accepted: Sequence[int]) -> list[Round]:
    return [Round(0, drafted, a, a + 1, drafted, 1) for a in accepted]


def drafts(*probs: Sequence[float]) -> list[list[Token]]:
    return [[Token(p) for p in row] for row in probs]
