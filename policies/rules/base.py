"""Verification rules: how many of the drafted tokens are accepted.

A rule sees one round at a time: the drafted tokens and, for each, what the target says
at that position.  It is the same object whether those scores come from a recording or
from a real target.  This module holds the abstraction and the two lossless rules;
`policies.rules.threshold` and `policies.rules.context` hold the lossy ones.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from policies.guard import SCORES as SCORES  # noqa: PLC0414
from policies.spec import Checked

R = TypeVar("R", bound="VerifyRule")


class TargetScore(Protocol):
    """The target's scores at a drafted position, given the tokens drafted before it.

    Logits are raw: no temperature, no processing.
    """

    match: bool
    """The lossless verdict on the drafted token.

    Greedy: True if it is the target's argmax.  Sampling: the outcome of rejection sampling's
    coin, drawn by the provider of the score.
    """
    token: int
    """The target's argmax."""
    top1: float
    """Largest logit."""
    top2: float
    """Second largest logit."""
    logsumexp: float
    """Log-sum-exp of the logits, so that ``logit - logsumexp`` is a log-probability."""
    entropy: float
    """Entropy of the target's full distribution at T = 1, in nats."""
    draft_logit: float
    """Logit of the drafted token."""
    draft_rank: int
    """Tokens with a larger logit than the drafted one: 0 is the argmax."""


class VerifyRule(Checked, ABC):
    """Decides how many drafted tokens are accepted.  Subclass it and define `accept`.

    An instance is a prototype: a run copies it once (`fresh`) and uses the copy for all
    its requests, in order, so state such as a correction memory grows over the run and
    two runs never share it.  A stopped run goes on by calling `accept` and `end_request` again
    with what was declared in `reads` and `needs`, so state must follow from these alone.
    """

    lossless: ClassVar[bool] = False
    """True if the output is the target's own: then `accept` is the leading matches."""
    reads: tuple[str, ...] = ()
    """Draft signals the rule reads, of `policies.core.SIGNALS`.

    They are read once a round, together with the verdicts, so unlike a length policy's
    they cost no wait per drafted token.
    """
    needs: tuple[str, ...] = ("match",)
    """Target scores the rule reads, of `SCORES`."""
    look_ahead: int = 0
    """Later tokens of the draft that the verdict on a token may depend on."""

    @abstractmethod
    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        """Return the leading tokens of `draft` that are accepted.

        ``draft``: `policies.core.DraftToken`, ``scores``: `TargetScore`, equally many.
        The target's own token follows the accepted ones: a correction, or the bonus.
        """

    def begin_run(self, vocab_size: int | None, temperature: float, top_p: float = 1.0) -> None:
        """Prepare for a run, once, with what the rule may need to know about it.

        ``temperature`` is the sampling temperature, 0 for greedy; below 1, ``top_p`` is the
        share of the probability that the draft's and the target's distributions were cut to.
        Raises ValueError if the rule cannot run under these.
        """

    def end_request(self) -> None:
        """End a request of a run."""

    def fresh(self: R) -> R:
        """Return an independent copy for one run."""
        return copy.deepcopy(self)


class TokenRule(VerifyRule):
    """A rule that judges token by token; the first refusal ends the round.

    A rule without memory can define this method, which makes replay faster ::

        def accepts_each(self, tokens, scores) -> Bools | None

    It returns `accepts` for every row of a recording: the attributes of both arguments are arrays,
    one entry per row.  ``accepts_each = accepts`` does where that works elementwise.  Subclasses do
    not inherit it; None judges tokens one by one.
    """

    @abstractmethod
    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if this drafted token is kept, given that all before it were."""

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        """Return the number of leading tokens that `accepts` keeps."""
        for i, (token, score) in enumerate(zip(draft, scores, strict=True)):
            if not self.accepts(token, score):
                return i
        return len(draft)


class RejectionSampling(TokenRule):
    """Lossless speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

    The outcome is part of the score (`TargetScore.match`): a recording holds it, and a decoder
    with real models draws it, True with probability min(1, target / draft).  At temperature 0
    the rule is `ExactMatch`.
    """

    lossless = True

    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if the recorded or drawn verdict accepts the token."""
        return bool(score.match)


class ExactMatch(RejectionSampling):
    """Greedy verification: a drafted token is accepted if it is the target's argmax."""
