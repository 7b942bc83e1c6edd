"""Confidence scores of drafted tokens, which several methods use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from policies.spec import Checked
from policies.vectorised import Starts

EntropySign = Literal["intended", "literal"]
EQUAL_WEIGHTS = (1 / 3, 1 / 3, 1 / 3)
COMPONENTS = ("entropy", "logit_margin", "prob_margin")
"""Draft signals of CM-ASD's confidence, in the order of its weights."""


class CMASDConfidence(NamedTuple):
    """CM-ASD's ensemble confidence of drafted tokens, in [0, 1] (CM-ASD, eqs. 1-4).

    The attributes are its constants, taken out of the loops: see `of`.
    """

    base: float
    per_nat: float
    margin: float
    beta: float
    softmax: float
    top: float

    @classmethod
    def of(
        cls,
        vocab_size: int,
        beta: float = 1.0,
        weights: Sequence[float] = EQUAL_WEIGHTS,
        entropy_sign: EntropySign = "intended",
    ) -> CMASDConfidence:
        """Return the confidence with these parameters.

        Parameters
        ----------
        vocab_size:
            |V|, which normalises the entropy and the largest possible probability margin.
        beta:
            Slope of the sigmoid over the logit margin.  The paper gives no value: 1 is ours.
        weights:
            Weights of the entropy, margin and softmax components.  Equal weights are ours;
            (1, 0, 0), (0, 1, 0) and (0, 0, 1) are the paper's single-component ablations
            (Table III).
        entropy_sign:
            The printed equation uses H / log |V|, which is high when the drafter is UNSURE,
            as a confidence (``literal``).  The prose and the figure need
            1 - H / log |V| (``intended``).

        Notes
        -----
        The margin component, a sigmoid of a non-negative margin, spans [0.5, 1) only; the
        softmax component (p1 - p2) / (1 - 1/|V|) is clipped at 1.
        """
        entropy, margin, softmax = weights
        base, sign = (entropy, -1.0) if entropy_sign == "intended" else (0.0, 1.0)
        per_nat = sign * entropy / math.log(vocab_size)
        return cls(base, per_nat, margin, beta, softmax, 1.0 - 1.0 / vocab_size)

    def __call__(self, read: Callable[[str], Any]) -> Any:
        """Return the confidence of a token, of which ``read`` gives a draft signal by name.

        The signals may be arrays of many tokens.  A component of weight 0 is not read, so that its
        signal costs nothing.
        """
        score: Any = self.base
        if self.per_nat:
            score = score + self.per_nat * read("entropy")
        if self.margin:
            falls = -self.beta * read("logit_margin")
            exp = each(math.exp, falls) if isinstance(falls, np.ndarray) else math.exp(falls)
            score = score + self.margin / (1.0 + exp)
        if self.softmax:
            share = read("prob_margin") / self.top
            clipped = np.minimum if isinstance(share, np.ndarray) else min
            score = score + self.softmax * clipped(share, 1.0)
        return score

    def values(self, starts: Starts) -> Floats:
        """Return the confidence of every row (`policies.vectorised.Watch`)."""
        found: Floats = self(starts.signal)
        return found


def shares(name: str, weights: Sequence[float]) -> None:
    """Require the weights of the three components of a confidence."""
    if len(weights) != 3 or min(weights) < 0 or abs(sum(weights) - 1) > 1e-6:
        raise ValueError(
            f"{name} is {list(weights)}, expected three numbers >= 0 that sum to 1 "
            "(entropy, margin, softmax)"
        )


def each(function: Callable[[float], float], values: npt.NDArray[Any]) -> Floats:
    """Return a `function` of `math` of every value: numpy's own may differ in the last bit."""
    found = map(function, values.ravel().tolist())
    return np.fromiter(found, np.float64, values.size).reshape(values.shape)


class OfVocabulary:
    """A base of what normalises an entropy by log |V|: the size that it was given, or the run's."""

    vocab_size: int | None

    def begin_run(
        self, vocab_size: int | None, temperature: float = 0.0, top_p: float = 1.0
    ) -> None:
        """Take the run's vocabulary size where none was given; ValueError if neither is known."""
        self.vocab_size = vocab_size if self.vocab_size is None else self.vocab_size
        self.known_vocabulary()

    def known_vocabulary(self) -> int:
        """Return the vocabulary size; ValueError if neither the caller nor the run gave it."""
        if self.vocab_size is None:
            who = type(self).__name__
            raise ValueError(f"{who} normalises an entropy by log |V|: give it vocab_size")
        return self.vocab_size


class Confident(OfVocabulary, Checked):
    """A base of what weighs the confidence of drafted tokens, with its parameters."""

    beta: float
    weights: Sequence[float]
    entropy_sign: EntropySign

    def __post_init__(self) -> None:
        super().__post_init__()
        # A component of weight 0 is never read, so that its signal need not be there.
        named = zip(COMPONENTS, self.weights, strict=True)
        vars(self)["reads"] = tuple(name for name, weight in named if weight)

    @cached_property
    def _confidence(self) -> CMASDConfidence:
        size = self.known_vocabulary()
        return CMASDConfidence.of(size, self.beta, self.weights, self.entropy_sign)
