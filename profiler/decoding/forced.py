"""Forced decoding: real passes with dictated verdicts, for one sequence or a batch.

It gives the cost of a run that accepts as the trace did, so it tests the cost model alone.  It
needs no trained weights, because random weights have the same latency.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policies.core import Load
from profiler.decoding.batch import Stream
from profiler.decoding.single import ModelDecoder, ModelToken
from profiler.models.runner import Runner
from profiler.models.sampling import TokenVerdict
from traces.acceptance.trace import Trace
from traces.replay.decoder import ReplayDecoder


class ForcedToken:
    """A real draft token's work with a recorded token's values."""

    __slots__ = ("_real", "_recorded")

    def __init__(self, real: ModelToken, recorded: Any) -> None:
        self._real, self._recorded = real, recorded

    @property
    def device_id(self) -> Tensor:
        """The real token, for the next pass."""
        return self._real.device_id

    @property
    def logits(self) -> Tensor:
        """The real logits, (1, vocab)."""
        return self._real.logits

    @property
    def ends(self) -> bool:
        """As recorded: no transfer, so nothing waits."""
        return bool(self._recorded.ends)

    def __getattr__(self, name: str) -> Any:
        # A policy that reads a signal pays for fetching it, and acts on the recorded one.
        getattr(self._real, name)
        return getattr(self._recorded, name)


def random_prompt(tokens: int, vocab_size: int, device: torch.device, seed: int = 0) -> Tensor:
    """Return a prompt of random ids, the same for each seed."""
    seeded = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (tokens,), generator=seeded).to(device)


class ForcedDecoder(ModelDecoder):
    """`ModelDecoder` whose drafts, verdicts and end come from request `request` of `trace`.

    The prompt is random ids of the recorded length.
    """

    def __init__(self, target: Runner, draft: Runner, trace: Trace, request: int) -> None:
        self._script: ReplayDecoder | None = None
        info = trace.requests[request]
        prompt = random_prompt(info.prompt_length, target.vocab_size, target.device)
        super().__init__(
            target, draft, prompt, info.max_new_tokens, first=trace.first, watch_eos=False,
            sampling=trace.sampling,
        )  # fmt: skip
        self._script = ReplayDecoder(trace, request)

    @property
    def remaining(self) -> int:
        return self._script.remaining if self._script else self.limit

    @property
    def load(self) -> Load:
        assert self._script is not None
        return self._script.load

    def draft(self, so_far: Sequence[Any]) -> Any:
        assert self._script is not None
        return ForcedToken(super().draft(so_far), self._script.draft(so_far))

    def _verdict(self, draft: Sequence[Any], drafted: Tensor, logits: Tensor) -> TokenVerdict:
        # The real comparison runs for its cost; the verdict is the recording's.
        super()._verdict(draft, drafted, logits)
        if self._script is None:  # the prefill, before the recording begins
            return 0, logits[:1].argmax(-1), [0]
        before = self._script.position
        accepted = self._script.verify(draft)
        emitted = self._script.position - before  # without a bonus after an accepted EOS
        return accepted, logits[: accepted + 1].argmax(-1), [0] * emitted


class ForcedStream(Stream):
    """Request `request` of `trace`, its prompt random ids of the recorded length.

    For a `BatchedDecoder` that does not watch for EOS.
    """

    def __init__(self, trace: Trace, request: int, vocab_size: int, device: torch.device) -> None:
        info = trace.requests[request]
        prompt = random_prompt(info.prompt_length, vocab_size, device, seed=request)
        super().__init__(request, prompt, info.max_new_tokens)
        self._script = ReplayDecoder(trace, request, first=1)
        self._begun = False

    @property
    def position(self) -> int:
        return self._script.position

    @property
    def remaining(self) -> int:
        return self._script.remaining

    def load_in(self, batch: int) -> Load:
        return self._script.load._replace(batch=batch)

    def proposed(self, token: ModelToken) -> ForcedToken:
        """Return the recorded token in place of the real one."""
        return ForcedToken(token, self._script.draft(self.draft))

    def judge(self, accepted: int) -> int:
        """Return the recording's verdict, whatever the models' is."""
        return copy.copy(self._script).verify(self.draft)

    def ends_after(self, accepted: int, tokens: Sequence[int]) -> bool:
        after = copy.copy(self._script)
        after.verify(self.draft[:accepted])
        return after.remaining == 0

    def emit(self, accepted: int, tokens: Sequence[int]) -> None:
        """Advance the recording; the output itself has no meaning."""
        if self._begun:  # the recording's replay begins after the prefill's token
            self._script.verify(self.draft[:accepted])
        self._begun = True
