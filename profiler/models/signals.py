"""The numbers a trace keeps of a next-token distribution, computed one way everywhere.

The recorder and the real decoder must agree to the last bit of a float32, or a policy
near its threshold would decide differently in replay; so both call these functions and
both derive probabilities and margins as `traces.acceptance.trace.Trace.signal` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from profiler.models.sampling import log_probs_at
from traces.acceptance.sampling import Sampling
from traces.errors import DraftsimError


class Signals(NamedTuple):
    """Per row of logits: float32 columns, shape (rows,)."""

    top1: Tensor
    top2: Tensor
    logsumexp: Tensor
    entropy: Tensor

    def stack(self) -> Tensor:
        """(rows, 4)."""
        return torch.stack(tuple(self), dim=-1)


def signals(logits: Tensor, best: Tensor | None = None) -> Signals:
    """Raw top-2 logits, log-sum-exp and entropy (nats) at T = 1.

    ``logits``: (rows, vocab), any float dtype; computed in float32.  ``best``: (rows,) their
    argmax, where the caller has it: seeking it is the largest part of the work.
    """
    logits = logits.float()
    if best is None:
        top1, top2 = logits.topk(2, dim=-1).values.unbind(-1)
    else:
        index = best[:, None]
        top1 = logits.gather(1, index)[:, 0]
        top2 = logits.scatter(1, index, -torch.inf).amax(-1)
    # exp(-inf) * -inf is NaN: a masked-out token carries no entropy.  In place: over a large
    # vocabulary fresh memory costs more than the arithmetic; and one exp serves both sums.
    below = (logits - top1[:, None]).clamp_(min=-1e30)
    weights = below.exp()
    total = weights.sum(-1)
    log_total = total.log()
    entropy = log_total - weights.mul_(below).sum(-1) / total
    return Signals(top1, top2, top1 + log_total, entropy)


LIKELIEST = 10
"""Tokens that llama.cpp's server keeps of a draft model's."""


def top10_log_prob(logits: Tensor) -> Tensor:
    """Log-probability of the likeliest token among the ten likeliest at T = 1; float32 (rows,).

    Apart from `signals`, since only who asks pays for seeking them.

    ``logits``: (rows, vocab) raw, any float dtype.
    """
    likeliest = logits.float().topk(min(LIKELIEST, logits.shape[-1]), dim=-1).values
    return -(likeliest - likeliest[:, :1]).logsumexp(-1)


class Drafted(NamedTuple):
    """Per drafted token, float32 columns of shape (rows,): `Signals`, and log-probabilities."""

    top1: Tensor
    top2: Tensor
    logsumexp: Tensor
    entropy: Tensor
    log_prob: Tensor
    """That it was drawn with."""
    top_log_prob: Tensor
    """Log probability of the likeliest token at T = 1."""
    raw_log_prob: Tensor
    """Its own at T = 1 without top-p."""

    def stack(self) -> Tensor:
        """(rows, 7)."""
        return torch.stack(tuple(self), dim=-1)


def drafted(
    logits: Tensor,
    tokens: Tensor,
    sampling: Sampling,
    *,
    best: Tensor | None = None,
    log_prob: Tensor | None = None,
) -> Drafted:
    """The numbers about one drafted token per row.

    ``logits``: (rows, vocab) raw, any float dtype; ``tokens``: (rows,) drawn from them under
    `sampling`; ``best`` as for `signals`; ``log_prob``: (rows,) that of drawing them, where the
    caller has it.
    """
    of = signals(logits, best)
    raw = logits.gather(1, tokens[:, None])[:, 0].float() - of.logsumexp
    if sampling.plain:
        log_prob = raw
    elif log_prob is None:
        log_prob = log_probs_at(logits, tokens, sampling)
    return Drafted(*of, log_prob, of.top1 - of.logsumexp, raw)


def check_finite(values: Tensor, model: str, where: str) -> None:
    """Raise if a log-sum-exp is NaN: the model's logits are then not usable."""
    if bool(values.isnan().any()):
        raise DraftsimError(
            f"the {model} produced NaN logits {where}: check its weights and dtype "
            "(bfloat16 or float32 instead of float16 often helps)"
        )
