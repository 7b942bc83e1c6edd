"""The numbers a trace keeps of a next-token distribution, computed one way everywhere.

The recorder and the real decoder must agree to the last bit of a float32, or a policy
near its threshold would decide differently in replay; so both call these functions and
both derive `prob` and the margins as `traces.trace.Trace.signal` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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


def check_finite(values: Tensor, model: str, where: str) -> None:
    """Raise if a log-sum-exp is NaN: the model's logits are then not usable."""
    if bool(values.isnan().any()):
        raise DraftsimError(
            f"the {model} produced NaN logits {where}: check its weights and dtype "
            "(bfloat16 or float32 instead of float16 often helps)"
        )
