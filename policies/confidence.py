"""Confidence scores of drafted tokens, which several methods use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

EntropySign = Literal["intended", "literal"]
EQUAL_WEIGHTS = (1 / 3, 1 / 3, 1 / 3)


def cmasd_confidence(
    entropy: Any,
    logit_margin: Any,
    prob_margin: Any,
    vocab_size: int,
    beta: float = 1.0,
    weights: Sequence[float] = EQUAL_WEIGHTS,
    entropy_sign: EntropySign = "intended",
) -> Any:
    """Return CM-ASD's ensemble confidence of a drafted token, in [0, 1] (CM-ASD, eqs. 1-4).

    Parameters
    ----------
    entropy, logit_margin, prob_margin:
        The token's draft signals (nats; raw logits; probabilities at T = 1): scalars, or
        arrays of one shape, which is then the shape of the result.
    vocab_size:
        |V|, which normalises the entropy and the largest possible probability margin.
    beta:
        Slope of the sigmoid over the logit margin.  The paper gives no value: 1 is ours.
    weights:
        Weights of the entropy, margin and softmax components.  Equal weights are ours; (1, 0, 0),
        (0, 1, 0) and (0, 0, 1) are the paper's single-component ablations (Table III).
    entropy_sign:
        The printed equation uses H / log |V|, which is high when the drafter is UNSURE,
        as a confidence (``literal``).  The prose and the figure need
        1 - H / log |V| (``intended``).

    Notes
    -----
    The margin component, a sigmoid of a non-negative margin, spans [0.5, 1) only; the
    softmax component (p1 - p2) / (1 - 1/|V|) is clipped at 1.
    """
    w_entropy, w_margin, w_softmax = weights
    scalar = isinstance(entropy, float | int)
    score: Any = 0.0
    if w_entropy:
        spread = entropy / math.log(vocab_size)
        score = score + w_entropy * (1.0 - spread if entropy_sign == "intended" else spread)
    if w_margin:
        exp: Any = math.exp if scalar else partial(each, math.exp)
        score = score + w_margin / (1.0 + exp(-beta * logit_margin))
    if w_softmax:
        top: Any = prob_margin / (1.0 - 1.0 / vocab_size)
        score = score + w_softmax * (min(top, 1.0) if scalar else np.minimum(top, 1.0))
    return score


def each(function: Callable[[float], float], values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return a `function` of `math` of every value: numpy's own may differ in the last bit."""
    found = map(function, values.ravel().tolist())
    return np.fromiter(found, np.float64, values.size).reshape(values.shape)


def known_vocabulary(own: int | None, run: int | None, who: str) -> int:
    """Return the vocabulary size it was given, or else the run's; ValueError if neither is."""
    if own is not None:
        return own
    if run is not None:
        return run
    raise ValueError(f"{who} normalises an entropy by log |V|: give it vocab_size")
