"""A token drafted by a real model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from profiler.models.sampling import drafted, top10_log_prob
from traces.acceptance.sampling import Sampling


class Fetched(ABC):
    """The signals of a drafted token, `profiler.models.sampling.Drafted` fetched to the host."""

    __slots__ = ()

    @abstractmethod
    def _fetch(self) -> Sequence[float]:
        """Return the token's numbers, (7,)."""

    @abstractmethod
    def _fetch_top10(self) -> float:
        """Return `profiler.models.sampling.top10_log_prob`, apart: few ask, and it costs as
        much.
        """

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
        return math.exp(self._fetch_top10())


class ModelToken(Fetched):
    """A token just drafted; its signals come to the host only when somebody reads one."""

    __slots__ = ("_eos", "_id", "_logits", "_sampling", "_top10", "_values", "device_id")

    def __init__(
        self, device_id: Tensor, logits: Tensor, sampling: Sampling, eos: frozenset[int] | None
    ) -> None:
        self.device_id = device_id  # (1,)
        self._logits = logits  # (1, vocab)
        self._sampling = sampling
        self._eos = eos
        self._values: tuple[float, ...] | None = None
        self._top10: float | None = None
        self._id: int | None = None

    def fill(self, token_id: int, values: tuple[float, ...]) -> None:
        """Take what a shared transfer brought: the id, and the signals unless empty."""
        self._id = token_id
        self._values = self._values or values or None

    @property
    def logits(self) -> Tensor:
        """Raw draft logits, (1, vocab)."""
        return self._logits

    def _fetch(self) -> tuple[float, ...]:
        # One transfer for all signals: the wait costs more than the numbers.
        if self._values is None:
            numbers = drafted(self._logits, self.device_id, self._sampling)
            self._values = tuple(numbers.stack()[0].tolist())
        return self._values

    def _fetch_top10(self) -> float:
        if self._top10 is None:
            self._top10 = float(top10_log_prob(self._logits))
        return self._top10

    @property
    def token_id(self) -> int:
        """Vocabulary id."""
        if self._id is None:
            self._id = int(self.device_id)
        return self._id

    @property
    def ends(self) -> bool:
        """Return True if the draft proposed EOS (never, if EOS is not watched for)."""
        return self._eos is not None and self.token_id in self._eos
