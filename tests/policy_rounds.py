"""Rounds of a single-stream policy over given tokens, without a decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from policies import DraftPolicy, Load, Round


@dataclass
class Token:
    prob: float = 0.9
    entropy: float = 0.1
    logit_margin: float = 3.0
    prob_margin: float = 0.8
    token_id: int = 0
    ends: bool = False
    top_prob: float = -1.0
    raw_prob: float = -1.0
    top10_prob: float = -1.0

    def __post_init__(self) -> None:
        """Unless said otherwise the token is the likeliest, drawn at T = 1."""
        self.top_prob = self.prob if self.top_prob < 0 else self.top_prob
        self.raw_prob = self.prob if self.raw_prob < 0 else self.raw_prob
        self.top10_prob = self.prob if self.top10_prob < 0 else self.top10_prob


def one_round(
    policy: DraftPolicy, run: int, tokens: Iterable[Token] = (), limit: int = 200, context: int = 9
) -> tuple[int, int, int]:
    """(draft passes, sent, accepted) of a round whose first `run` tokens match."""
    supply = iter(tokens)
    policy.begin_round(Load(1, context, run))
    draft: list[Any] = []
    while len(draft) < limit and policy.keep_drafting(draft):
        draft.append(next(supply, Token()))
    passes = len(draft)
    del draft[policy.submit(draft) :]
    accepted = min(run, len(draft))
    policy.observe(Round(0, len(draft), accepted, accepted + 1, passes, 1), draft)
    return passes, len(draft), accepted


def sent(policy: DraftPolicy, runs: Sequence[int], **kwargs: Any) -> list[int]:
    return [one_round(policy, run, **kwargs)[1] for run in runs]
