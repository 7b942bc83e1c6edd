"""Tokens drafted by a real model: those of one pass, and each by itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property

from torch import Tensor

from profiler.models.sampling import drafted, top10_log_prob
from traces.acceptance.sampling import GREEDY, Sampling


class DraftStep:
    """The tokens of one draft pass, copied to the host as a whole when first read.

    ``logits`` (rows, vocab) raw; ``picks`` (rows,) the target ids drafted under `sampling`; ``own``
    (rows,) the same tokens in the vocabulary of the logits, if that is another.
    """

    def __init__(
        self, logits: Tensor, picks: Tensor, sampling: Sampling = GREEDY, own: Tensor | None = None
    ) -> None:
        self.logits, self.picks, self.sampling = logits, picks, sampling
        self._own = picks if own is None else own

    @cached_property
    def ids(self) -> list[int]:
        """Proposed token of each row."""
        ids: list[int] = self.picks.tolist()
        return ids

    @cached_property
    def values(self) -> list[Sequence[float]]:
        """`profiler.models.sampling.Drafted` of each row."""
        # One transfer for all signals: the wait costs more than the numbers.
        numbers = drafted(self.logits, self._own, self.sampling).stack()  # (rows, 7)
        values: list[Sequence[float]] = numbers.tolist()
        return values

    @cached_property
    def top10(self) -> list[float]:
        """`profiler.models.sampling.top10_log_prob` of each row."""
        top10: list[float] = top10_log_prob(self.logits).tolist()
        return top10


class ModelToken:
    """A token just drafted for one row; reading a signal fetches those of the whole pass.

    ``eos``: ids that end a draft; none if EOS is not watched for.
    """

    __slots__ = ("_eos", "_row", "_step")

    def __init__(self, step: DraftStep, row: int = 0, eos: Collection[int] = ()) -> None:
        self._step, self._row, self._eos = step, row, eos

    def fill(self, token_id: int, values: Sequence[float]) -> None:
        """Take the id that a shared transfer brought, and the signals unless empty.

        The token is the only one of its pass.
        """
        self._step.ids = [token_id]
        if values:
            vars(self._step).setdefault("values", [values])

    @property
    def device_id(self) -> Tensor:
        """The token for the next pass, (1,)."""
        return self._step.picks[self._row : self._row + 1]

    @property
    def logits(self) -> Tensor:
        """Raw draft logits, (1, vocab)."""
        return self._step.logits[self._row : self._row + 1]

    def _fetch(self) -> Sequence[float]:
        return self._step.values[self._row]

    @property
    def token_id(self) -> int:
        """Vocabulary id."""
        return self._step.ids[self._row]

    @property
    def ends(self) -> bool:
        """Return True if the draft proposed EOS (never, if EOS is not watched for)."""
        return bool(self._eos) and self.token_id in self._eos

    # Derived in float64 from float32, exactly as Trace.signal does.

    @property
    def prob(self) -> float:
        """Probability the draft drew the token with (T = 1 if greedy)."""
        return math.exp(self._fetch()[4])

    @property
    def entropy(self) -> float:
        """Entropy at T = 1, nats."""
        return self._fetch()[3]

    @property
    def logit_margin(self) -> float:
        """Top-1 minus top-2 raw logit."""
        top1, top2, *_ = self._fetch()
        return top1 - top2

    @property
    def prob_margin(self) -> float:
        """Top-1 minus top-2 probability at T = 1."""
        top1, top2, lse, *_ = self._fetch()
        return math.exp(top1 - lse) - math.exp(top2 - lse)

    @property
    def top_prob(self) -> float:
        """Largest probability at T = 1."""
        return math.exp(self._fetch()[5])

    @property
    def raw_prob(self) -> float:
        """Probability of the token at T = 1 without top-p."""
        return math.exp(self._fetch()[6])

    @property
    def top10_prob(self) -> float:
        """Largest probability at T = 1 over the ten likeliest tokens alone."""
        return math.exp(self._step.top10[self._row])
