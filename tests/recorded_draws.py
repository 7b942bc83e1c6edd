"""The draws of a recording in place of random ones: sampled decoding must replay exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiler.models.sampling import TokenVerdict, count_matches
from traces.acceptance.trace import Trace
from traces.sources.base import true_tokens
from traces.sources.exit_recording import ExitRecording
from traces.sources.starts.sources import StartRecording


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
    ) -> TokenVerdict:
        """The drafted tokens that the output has, and its next one where a position is left."""
        del proposals
        true = self._true[position : position + int(logits.shape[0])]
        accepted = count_matches(drafted.tolist(), true)
        tokens = true[: accepted + 1]
        return accepted, self._tensor(tokens), tokens

    def _tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=self._device)


class RecordedDraws(_Recorded):
    """The draws along one request of a sampled trace, as a recording of early exits has them."""

    def __init__(self, recording: ExitRecording, trace: Trace, request: int, device: Any) -> None:
        super().__init__(trace, request, device)
        self._recording, self._path = recording, recording.request_starts[request]

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """Return the token that was drawn at the node of this prefix.

        The prefix must have been recorded.
        """
        del logits
        node, on_path = self._path + position, True
        for i, token in enumerate(so_far):
            on_path = on_path and token.token_id == self._true[position + i]
            if on_path:
                node += 1
            else:
                fed = np.array([node]), np.array([token.token_id])
                node = int(self._recording.after(*fed)[0])
                assert node >= 0
        return self._tensor([int(self._recording["argmax"][node, at])])


class RecordedStarts(_Recorded):
    """The draws along one request of a sampled trace, as a recording by start has them."""

    def __init__(self, recording: StartRecording, trace: Trace, request: int, device: Any) -> None:
        super().__init__(trace, request, device)
        self._rows = recording["token"][recording.request_starts[request] :]

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """Return the token that was drawn from this start at this offset."""
        del logits, at
        return self._tensor([int(self._rows[position, len(so_far)])])
