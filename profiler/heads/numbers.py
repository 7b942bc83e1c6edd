"""The numbers kept of an exit head's logits, computed alike for recording and decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.models.sampling import log_probs_at
from profiler.models.signals import signals
from traces.acceptance.sampling import Sampling


def log_confidence(logits: Tensor, temperature: float) -> Tensor:
    """Log of the largest softmax(z / T) per row (SpecBound, eq. 2): (rows, vocab) -> (rows,)."""
    scaled = logits.float() / temperature
    return scaled.amax(-1) - scaled.logsumexp(-1)


def exit_columns(logits: Tensor, temperatures: list[float]) -> dict[str, Tensor]:
    """Argmax, log confidence at each temperature and the signals; (rows, ...) each."""
    of = signals(logits)
    return {
        "argmax": logits.argmax(-1),
        "log_confidence": torch.stack([log_confidence(logits, t) for t in temperatures], -1),
        "top1": of.top1,
        "top2": of.top2,
        "logsumexp": of.logsumexp,
        "entropy": of.entropy,
    }


def drawn_columns(
    logits: Tensor, drawn: Tensor, logsumexp: Tensor, sampling: Sampling
) -> dict[str, Tensor]:
    """Log-probabilities of tokens drawn from `logits`, as in `profiler.models.signals.drafted`.

    ``logits``: (rows, vocab) raw; ``drawn``, ``logsumexp``: (rows,).
    """
    raw = logits.gather(1, drawn[:, None])[:, 0].float() - logsumexp
    if sampling.plain:
        return {"log_prob": raw}
    return {"log_prob": log_probs_at(logits, drawn, sampling), "raw_log_prob": raw}
