"""The columns of recorded drafts that policies read, for all of a recording at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DRAWN = ("log_prob", "raw_log_prob")
"""Further columns of recordings along sampled outputs."""


def read_columns(
    signals: Mapping[str, npt.NDArray[np.float32]],
    log_prob: npt.NDArray[Any] | None = None,
    raw_log_prob: npt.NDArray[Any] | None = None,
) -> Floats:
    """(..., 6): prob, entropy, logit_margin, prob_margin, top_prob, raw_prob of every draft.

    ``signals`` are ``top1``, ``top2``, ``logsumexp`` and ``entropy`` of a drafter's logits at
    T = 1.  Without `log_prob` every draft is the likeliest token; without `raw_log_prob` it has the
    probability that it was drawn with.  Differences are taken in float32 where the real decoder
    takes them so, that no policy decides otherwise.
    """
    top1, top2, lse, entropy = (signals[n] for n in ("top1", "top2", "logsumexp", "entropy"))
    wide1, wide2 = top1.astype(np.float64), top2.astype(np.float64)
    top = np.exp((top1 - lse).astype(np.float64))
    prob = top if log_prob is None else np.exp(log_prob.astype(np.float64))
    raw = prob if raw_log_prob is None else np.exp(raw_log_prob.astype(np.float64))
    margin = np.exp(wide1 - lse) - np.exp(wide2 - lse)
    wide = entropy.astype(np.float64)
    return np.stack([prob, wide, wide1 - wide2, margin, top, raw], axis=-1)
