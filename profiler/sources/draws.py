"""The random choices of sampled decoding with early exits, and the recorded ones in their place.

A real run draws from a generator.  With the draws of a recording instead, everything that is
not random (exits, confidences, layers run, emitted text) must come out as in the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from profiler.models.sampling import coupled, draw, probs
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.sources.base import true_tokens
from traces.sources.exits.recording import ExitRecording
from traces.sources.starts.recording import StartRecording


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


class _Recorded:
    """The output of one request of a sampled trace, whatever drafts it."""

    def __init__(self, trace: Trace, request: int, device: Any) -> None:
        self.sampling, self._device = trace.sampling, device
        starts = trace.request_starts
        self._true = true_tokens(trace, sampled=True)[
            int(starts[request]) : int(starts[request + 1])
        ]

    def first(self, logits: Tensor) -> Tensor:
        """The output's first token."""
        del logits
        return self._tensor(self._true[:1])

    def settle(
        self, drafted: Tensor, proposals: Tensor, logits: Tensor, position: int
    ) -> tuple[int, list[int]]:
        """The drafted tokens that the output has, and its next one where a position is left."""
        del proposals
        true = self._true[position : position + int(logits.shape[0])]
        accepted = 0
        for token, own in zip(drafted.tolist(), true, strict=False):
            if token != own:
                break
            accepted += 1
        return accepted, true[: accepted + 1]

    def _tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=self._device)


class RecordedDraws(_Recorded):
    """The draws along one request of a sampled trace, as a recording of early exits has them."""

    def __init__(self, recording: ExitRecording, trace: Trace, request: int, device: Any) -> None:
        super().__init__(trace, request, device)
        self._recording, self._path = recording, recording.path_starts[request]

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """Return the token that was drawn at the node of this prefix.

        Raises KeyError where the prefix was not recorded.
        """
        del logits
        node, on_path = self._path + position, True
        for i, token in enumerate(so_far):
            on_path = on_path and token.token_id == self._true[position + i]
            node = node + 1 if on_path else self._recording.children[node, token.token_id]
        return self._tensor([int(self._recording.argmax[node, at])])


class RecordedStarts(_Recorded):
    """The same of a recording by start."""

    def __init__(self, recording: StartRecording, trace: Trace, request: int, device: Any) -> None:
        super().__init__(trace, request, device)
        self._rows = recording.token[recording.request_starts[request] :]

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """Return the token that was drawn from this start at this offset."""
        del logits, at
        return self._tensor([int(self._rows[position, len(so_far)])])


class SharedDraws:
    """One coin and one noise per row, whichever exit the row takes."""

    def __init__(
        self, rows: int, vocab_size: int, generator: torch.Generator | None, device: Any
    ) -> None:
        shape = (rows, vocab_size)
        self._noise = torch.empty(shape, device=device).exponential_(generator=generator)
        self._coins = torch.rand(rows, generator=generator, device=device)

    def tokens(self, head: Tensor, truth: tuple[Tensor, Tensor] | None) -> Tensor:
        """A draw per row of `head` (rows, vocab), given `truth` where the output is known."""
        if truth is None:
            return (head / self._noise).argmax(-1)
        emitted, target = truth
        match, residual = coupled(head, target, emitted, self._coins)
        return torch.where(match, emitted, (residual / self._noise).argmax(-1))
