"""The part of real decoding that all sources share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policies.core import DraftToken, Load
from traces.replay.calls import CallCounter


class SourceDecoder(ABC):
    """A sequence that is being decoded greedily, and the calls it took.

    ``prompt_tokens``: length of the prompt; the output is limited to `max_new_tokens`.
    """

    def __init__(self, prompt_tokens: int, max_new_tokens: int, eos: frozenset[int]) -> None:
        self.output: list[int] = []
        self.calls = CallCounter()
        self.eos = eos
        self._prompt, self._limit = prompt_tokens, max_new_tokens

    @property
    def position(self) -> int:
        """Output tokens emitted so far."""
        return len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens to the limit, 0 after EOS."""
        if self.output and self.output[-1] in self.eos:
            return 0
        return self._limit - len(self.output)

    @property
    def load(self) -> Load:
        """A single stream."""
        return Load(1, self._prompt + len(self.output), None)

    @abstractmethod
    def draft(self, so_far: Sequence[Any]) -> DraftToken | None:
        """The proposal after the output so far and `so_far`; None where there is none."""

    @abstractmethod
    def verify(self, draft: Sequence[Any]) -> int:
        """Check `draft`, extend the output, and return how many tokens were accepted."""

    def _emit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.output.append(token)
            if token in self.eos:
                break

    @staticmethod
    def _compare(drafted: Sequence[Tensor], picks: Tensor) -> tuple[int, list[int]]:
        """Leading drafted tokens that are the target's, and the tokens to emit.

        ``picks`` (positions,): the target's own tokens; with no position after the last drafted
        token, a full match emits the draft alone.
        """
        count = sum(part.shape[0] for part in drafted)
        both = torch.cat([*drafted, picks]).tolist()
        tokens: list[int] = both[count:]
        accepted = 0
        while accepted < min(count, len(tokens)) and both[accepted] == tokens[accepted]:
            accepted += 1
        return accepted, tokens[: accepted + 1]
