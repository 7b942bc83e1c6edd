"""A verification pass as a verify rule sees it: drafted tokens and the target's scores.

The numbers are those the recorder keeps (`profiler.models.signals`), so that a rule decides in a
real round as it does in a replay of that round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policies.guard import Guarded, UndeclaredSignal, guarded_scores
from policies.rules.base import VerifyRule
from profiler.models.signals import drafted as numbers_of
from profiler.models.signals import signals
from traces.acceptance.sampling import Sampling
from traces.replay.scores import RecordedScore


class Judged(NamedTuple):
    """The result of a rule for one verification pass."""

    accepted: int
    """Leading drafted tokens that stand."""
    mismatched: list[bool]
    """Per drafted token, whether the target would have emitted another one."""
    log_probs: list[float]
    """The target's log-probability of every drafted token at T = 1, nats."""
    picks: list[int]
    """The target's argmax at every position, one more than drafted."""
    pick_log_probs: list[float]
    """And its log-probability."""


def judge(
    rule: VerifyRule,
    draft: Sequence[Any],
    drafted: Tensor,
    logits: Tensor,
    sampling: Sampling,
    coins: Tensor | None = None,
) -> Judged:
    """Let `rule` decide on a round, with one transfer to the host.

    Parameters
    ----------
    draft, drafted:
        The drafted tokens, and their ids on the device, (count,).
    logits:
        The target's raw logits, (count + 1, vocab).
    sampling:
        Of the draft's probabilities.
    coins:
        (count,) outcomes of rejection sampling, which are then the lossless verdicts;
        None for greedy decoding, where they are whether the token is the argmax.
    """
    count = drafted.shape[0]
    numbers = target_numbers(logits, torch.cat([drafted, drafted.new_zeros(1)]))
    verdicts = drafted == numbers[:count, 0] if coins is None else coins
    # float64 holds every token id and every float32 as it is.
    pad = numbers.new_zeros(1)
    parts = [numbers, torch.cat([drafted, pad])[:, None], torch.cat([verdicts, pad])[:, None]]
    reads_signals = bool(set(rule.reads) - {"token_id"})
    own = [t for t in draft if hasattr(t, "fill")] if reads_signals else []
    if own and len(own) == count:
        proposal = torch.cat([t.logits for t in own])  # (count, vocab)
        side = numbers_of(proposal, drafted, sampling).stack()  # (count, 7)
        parts.append(torch.cat([side, torch.zeros_like(side[:1])]))
    rows = torch.cat([part.double() for part in parts], dim=1).tolist()
    score = guarded_scores(RecordedScore, rule.needs)
    scores = []
    for token, row in zip(draft, rows, strict=False):
        pick, top1, top2, lse, entropy, logit, rank, drafted_id, match = row[:9]
        scores.append(score((match == 1, int(pick), top1, top2, lse, entropy, logit, int(rank))))
        if hasattr(token, "fill"):
            token.fill(int(drafted_id), tuple(row[9:]))
    return Judged(
        _accepted(rule, draft, scores),
        [row[8] != 1 for row in rows[:count]],
        [row[5] - row[3] for row in rows[:count]],
        [int(row[0]) for row in rows],
        [row[1] - row[3] for row in rows],
    )


def _accepted(rule: VerifyRule, draft: Sequence[Any], scores: Sequence[Any]) -> int:
    try:
        return rule.accept([Guarded(token, rule.reads) for token in draft], scores)
    except UndeclaredSignal as error:
        raise error.by(rule) from None


def target_numbers(logits: Tensor, drafted: Tensor) -> Tensor:
    """The target's numbers about one drafted token per row, float64 (rows, 7).

    Columns: argmax, top-1 and top-2 logit, log-sum-exp, entropy, and the drafted token's
    logit and rank; each as in the columns ``target_*`` of a trace.
    """
    raw = logits.float()
    of_draft = raw.gather(1, drafted[:, None])
    columns = (
        raw.argmax(-1), *signals(logits), of_draft[:, 0], (raw > of_draft).sum(-1)
    )  # fmt: skip
    return torch.stack([column.double() for column in columns], dim=1)
