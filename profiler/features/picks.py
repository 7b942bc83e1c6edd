"""Which token every start of a recording drafts: the likeliest, or one drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profiler.features.base import FeatureDrafter
from profiler.models.sampling import coupled, draw, probs
from traces.acceptance.sampling import Sampling


class Likeliest:
    """Greedy drafts."""

    def __init__(self, drafter: FeatureDrafter) -> None:
        self._drafter = drafter

    def __call__(self, logits: Tensor, starts: Tensor, step: int) -> Tensor:
        """Target ids (starts,) of each start's token `step`, from logits (starts, vocab)."""
        del starts, step
        return self._drafter.target_ids(logits.argmax(-1))


class Drawn:
    """Drafts of lossless rejection sampling, given the output that was drawn.

    As long as a start's tokens are those of the output, each is it with the probability that
    it was, given that it was emitted (`profiler.models.sampling.coupled`); where it was not, and
    from then on, the tokens are the drafter's own draws.  Every start has its own coins, as a
    round begins at each at most once.

    Parameters
    ----------
    output:
        The sampled tokens.
    target:
        (tokens, vocab) distributions that they were drawn from.
    """

    def __init__(
        self, drafter: FeatureDrafter, output: Sequence[int], target: Tensor, sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:  # fmt: skip
        self._drafter, self._sampling, self._generator = drafter, sampling, generator
        self._output = torch.tensor(output, device=target.device)
        self._target = target
        self._on_path = torch.ones(len(output), dtype=torch.bool, device=target.device)

    def __call__(self, logits: Tensor, starts: Tensor, step: int) -> Tensor:
        """As `Likeliest`; steps in turn, ``starts`` in positions of the output."""
        head = probs(self._drafter.over_target(logits), self._sampling)
        place = starts + step
        known = place < len(self._output)
        place = place.clamp(max=len(self._output) - 1)
        emitted = self._output[place]
        coins = torch.rand(len(starts), generator=self._generator, device=logits.device)
        match, residual = coupled(head, self._target[place], emitted, coins)
        follows = self._on_path[starts] & known
        own = draw(torch.where(follows[:, None], residual, head), self._generator)
        match &= follows
        self._on_path[starts] = match
        return torch.where(match, emitted, own)
