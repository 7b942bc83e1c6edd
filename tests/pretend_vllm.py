"""vLLM's model runner around a proposer, without a model: texts are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from profiler.engines.vllm.proposer import Proposer


def config(longest: int, vocabulary: int = 97) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=longest),
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary),
    )


class PretendRunner:
    """Decodes `texts` greedily, `batch` requests at a time, with the proposer's drafts.

    Requests are called SEQUENCE/0 followed by a number of the engine's own; prompts are processed
    in an iteration of their own kind, `chunks` of them for every prompt.
    """

    def __init__(
        self, proposer: Proposer, texts: Mapping[int, Sequence[int]], prompts: Mapping[int, Any],
        batch: int = 3, chunks: int = 1,
    ) -> None:  # fmt: skip
        self.proposer, self.texts, self.prompts, self.batch = proposer, texts, prompts, batch
        self.chunks = dict.fromkeys(texts, chunks)
        self.waiting = list(texts)
        self.requests: dict[str, Any] = {}
        self.drafts: dict[str, list[int]] = {}
        self.iterations: list[dict[str, int]] = []
        self.sampled_too_many = False
        self.input_batch = SimpleNamespace(req_ids=[], token_ids_cpu=np.zeros((batch, 1)))

    def run(self) -> dict[str, list[int]]:
        """Every request's output."""
        outputs: dict[str, list[int]] = {}
        while self.waiting or self.requests:
            while self.waiting and len(self.requests) < self.batch:
                self._admit(self.waiting.pop(0))
            outputs |= self._iterate()
        return outputs

    def _admit(self, sequence: int) -> None:
        self.requests[f"{sequence}/0-{sequence:08x}"] = SimpleNamespace(
            sequence=sequence, prompt_token_ids=self.prompts[sequence], output_token_ids=[],
            sampling_params=SimpleNamespace(max_tokens=len(self.texts[sequence])),
        )  # fmt: skip

    def _iterate(self) -> dict[str, list[int]]:
        # vLLM's rows change places as requests come and go.
        names = sorted(self.requests, reverse=len(self.iterations) % 2 == 1)
        verified = {n: self.drafts[n] for n in names if self.drafts.get(n)}
        sampled = [self._sample(n, verified.get(n, [])) for n in names]
        self.iterations.append({n: len(verified.get(n, [])) for n in names})
        self.input_batch.req_ids = names
        output = SimpleNamespace(scheduled_spec_decode_tokens=verified)
        self.drafts = dict(zip(names, self.propose(output, sampled), strict=True))
        ended = {}
        for name in names:
            request = self.requests[name]
            if len(request.output_token_ids) >= len(self.texts[request.sequence]):
                del self.requests[name], self.drafts[name]
                ended[name] = request.output_token_ids[: len(self.texts[request.sequence])]
        return ended

    def _sample(self, name: str, draft: Sequence[int]) -> list[int]:
        request = self.requests[name]
        if self.chunks[request.sequence] > 1:
            self.chunks[request.sequence] -= 1
            return []
        done, text = len(request.output_token_ids), [*self.texts[request.sequence], 0, 0]
        accepted = 0
        while (
            accepted < len(draft) and text[min(done + accepted, len(text) - 1)] == draft[accepted]
        ):
            accepted += 1
        tokens = text[done : done + accepted + 1]
        request.output_token_ids += tokens
        limit = request.sampling_params.max_tokens
        self.sampled_too_many |= len(request.output_token_ids) > limit
        return tokens

    def propose(self, scheduler_output: Any, sampled: list[list[int]]) -> list[list[int]]:
        """As `GPUModelRunner.propose_draft_token_ids` of vLLM 0.32 calls a custom class."""
        ids = self.input_batch.token_ids_cpu
        drafts = self.proposer.propose(sampled, None, ids)
        # The proposer looked for this method's argument: it must still be there.
        assert scheduler_output is not None
        return drafts
