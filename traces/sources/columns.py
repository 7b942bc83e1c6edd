"""The arrays of recorded drafts: the columns that policies read, and checks of their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.errors import DraftsimError

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


def check_shapes(
    recording: str, arrays: Mapping[str, tuple[npt.NDArray[Any] | None, tuple[int, ...]]]
) -> None:
    """Raise DraftsimError unless each array that exists has the shape given with it.

    ``recording`` names the recording in the message.
    """
    for name, (values, expected) in arrays.items():
        if values is not None and values.shape != expected:
            raise DraftsimError(
                f"{recording}: {name} has shape {values.shape}, expected {expected}: record it "
                "again"
            )
