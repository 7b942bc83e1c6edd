"""The random choices of sampled decoding with early exits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from profiler.models.sampling import coupled, draw, probs
from traces.acceptance.sampling import Sampling


class Draws(Protocol):
    """The random draws of a sampled decoder."""

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn; not greedily."""
        ...

    def first(self, logits: Tensor) -> Tensor:
        """The token that the prefill emits, from logits (1, vocab); (1,)."""
        ...

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """The token that exit `at` drafts at an output position after `so_far`; (1,)."""
        ...

    def settle(
        self, drafted: Tensor, proposals: Tensor, logits: Tensor, position: int
    ) -> tuple[int, list[int]]:
        """Verify a round that began at an output position.

        ``drafted`` (count,) tokens from the raw logits ``proposals`` (count, vocab); ``logits``
        (positions, vocab) of the target, as many positions or one more.  Returns the number
        of accepted tokens and the tokens emitted.
        """
        ...


class RandomDraws:
    """Lossless rejection sampling (Leviathan et al., 2211.17192, Alg. 1) from a generator.

    ``sampling`` is not greedy; `generator` None is torch's global one.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator | None = None) -> None:
        if sampling.greedy:
            raise ValueError(f"temperature is {sampling.temperature:g}, expected above 0")
        self.sampling, self.generator = sampling, generator

    def first(self, logits: Tensor) -> Tensor:
        """A draw from the target."""
        return draw(probs(logits, self.sampling), self.generator)

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """A draw from the exit head."""
        del at, position, so_far
        return draw(probs(logits, self.sampling), self.generator)

    def settle(
        self, drafted: Tensor, proposals: Tensor, logits: Tensor, position: int
    ) -> tuple[int, list[int]]:
        """Toss a coin per drafted token, and draw from the residual after the first that fails."""
        del position
        count = drafted.shape[0]
        target, proposal = (probs(rows, self.sampling) for rows in (logits, proposals))
        index = drafted[:, None]
        ratio = target[:count].gather(1, index) / proposal.gather(1, index)
        coins = torch.rand(count, generator=self.generator, device=ratio.device)
        accepted = int((coins < ratio[:, 0]).long().cumprod(0).sum())
        tokens = drafted[:accepted]
        if accepted < target.shape[0]:
            left = target[accepted : accepted + 1]
            if accepted < count:
                left = (left - proposal[accepted]).clamp(min=0)
            tokens = torch.cat([tokens, draw(left, self.generator)])
        return accepted, tokens.tolist()


class SharedDraws:
    """One coin and one noise per row, whichever exit the row takes."""

    def __init__(
        self, rows: int, vocab_size: int, generator: torch.Generator | None, device: Any
    ) -> None:
        shape = (rows, vocab_size)
        self._noise = torch.empty(shape, device=device).exponential_(generator=generator)
        self._coins = torch.rand(rows, generator=generator, device=device)

    def tokens(self, head: Tensor, truth: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return one sampled token per row of `head` (rows, vocab), or `truth` if it is known."""
        if truth is None:
            return (head / self._noise).argmax(-1)
        emitted, target = truth
        match, residual = coupled(head, target, emitted, self._coins)
        return torch.where(match, emitted, (residual / self._noise).argmax(-1))
