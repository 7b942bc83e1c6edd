"""Timed whole steps of an engine, and by how much they exceed the sum of their operators.

    step = host + (1 + dense) x (operators but attention) + (1 + attended) x attention

The three are never negative, and fitted to relative errors.  On the RTX PRO 6000, factors fitted
to steps of 1 and 64 tokens predict the other steps, and factors from 1k of context predict 8k.  The
median error is below 3%.  Where a GPU has whole steps, passes take what they say, unless the sum
of the operators is asked for (``rtx-pro-6000:operators/...``).

The excess may be the way in which the steps were timed: on an RTX 4090, whose operators were timed
in the same way, a server's 300 requests took what the operators add up to, and LLMServingSim has
withdrawn its table of steps.  So a pass of a kind that no step covers (`covered`) has an interval
from the sum of its operators to the corrected time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from traces.latency.interpolate import non_negative
from traces.operators.shapes import Placed, find_architecture


class Parts(NamedTuple):
    """Seconds of passes."""

    dense_s: Floats
    """Seconds of all operators except attention."""
    attended_s: Floats


class StepFactors(NamedTuple):
    """Factors and seconds that steps take beyond their operators."""

    host_s: float = 0.0
    dense: float = 0.0
    attended: float = 0.0

    def of(self, parts: Parts) -> Floats:
        """Return seconds of steps whose operators are `parts`."""
        more = self.host_s + self.dense * parts.dense_s + self.attended * parts.attended_s
        return np.asarray(parts.dense_s + parts.attended_s + more)


NOTHING = StepFactors()


def covered(
    steps: pd.DataFrame, placed: Placed, batch: Floats, width: Floats, context: Floats
) -> npt.NDArray[np.bool_]:
    """Return which passes lie among the `steps`: the same model, no larger sizes.

    Steps were timed of sequences that decode one token, and of a prompt's chunk in an empty cache.
    """
    found = np.zeros(len(batch), dtype=bool)
    if steps.empty or model_of_steps(steps) != placed:
        return found
    chunk, sequences, cached = (
        steps[name].to_numpy(float) for name in ("tokens", "batch", "batch_context")
    )
    for size in np.unique(sequences[chunk == 0]).tolist():
        longest = cached[(chunk == 0) & (sequences >= size)].max()
        found |= (width == 1) & (batch <= size) & (context + 1 <= longest)
    prompts = chunk[sequences == 0].max(initial=0)
    return np.asarray(found | ((batch == 1) & (context == 0) & (width <= prompts)))


def fit_steps(parts: Parts, seconds: Floats) -> StepFactors:
    """Return the factors of steps that took these seconds and whose operators are `parts`."""
    features = np.stack([np.ones(len(seconds)), parts.dense_s, parts.attended_s], axis=1)
    beyond = 1 - (parts.dense_s + parts.attended_s) / seconds
    return StepFactors(*non_negative(features / seconds[:, None], beyond).tolist())


def model_of_steps(steps: pd.DataFrame) -> Placed:
    """Return the model that whole steps were timed of, and the GPUs that share it."""
    name, shared = steps[["model", "tensor_parallel"]].iloc[0]
    return Placed(find_architecture(str(name)), int(shared))
