"""The class that vLLM loads by name, so that a policy of ours drafts inside it.

    DRAFTSIM_PROPOSER='{"policy": "gammatune", "source": "pld"}' vllm serve MODEL \\
        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                               "model": "profiler.engines.proposer.Proposer"}'

Written against vLLM 0.32 (v1/worker/gpu_model_runner.py, `propose_draft_token_ids`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from profiler.engines.drafts import Asked
from profiler.engines.rounds import Rounds, Stream, rounds_of
from profiler.engines.setup import Setup, setup_from
from traces.errors import DraftsimError


class Proposer:
    """Drafts for every request of a vLLM engine as a policy decides.

    The policy's prototype is copied for each request, told the load before every round, and
    told what came of it.  What it sees as the batch are the requests that decode in the next
    iteration; prompts that join them are not known when drafts are asked for, only those
    that are being processed in chunks.

    Without `use`, the setup is that of the environment (`profiler.engines.setup`).
    """

    def __init__(self, vllm_config: Any) -> None:
        self.longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self.vocabulary = int(vllm_config.model_config.get_vocab_size())
        self.setup: Setup | None = None
        self.finished: dict[str, Stream] = {}
        """Streams that have ended, by the request's own name; kept only after `use`."""
        self._keep = False
        self._streams: dict[str, tuple[Stream, Asked, list[int]]] = {}
        self._rounds: Rounds | None = None

    def load_model(self, *args: Any) -> None:
        """Nothing to load."""

    def use(self, setup: Setup) -> None:
        """Draft so from now on, forgetting every request; keep the rounds of those that end."""
        self.setup, self._keep = setup, True
        self._streams.clear()
        self.finished = {}
        self._rounds = self._rounds_of(setup)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of each row of the engine's batch; none where a prompt is not finished."""
        del num_tokens_no_spec, slot_mappings
        caller = sys._getframe(1).f_locals
        runner, names, verified = _engine_state(caller, token_ids_cpu)
        rounds = self._started()
        for name in [n for n in self._streams if n not in runner.requests]:
            self._leave(name)
        settled: list[tuple[Stream, Sequence[int], int]] = []
        for name, tokens in zip(names, sampled_token_ids, strict=False):
            if tokens and name in self._streams:
                stream, _, output = self._streams[name]
                output.extend(tokens)
                settled.append((stream, tokens, len(verified.get(name, ()))))
            elif tokens:
                self._join(name, runner.requests[name])
        if settled:
            streams, emitted, seen = zip(*settled, strict=True)
            rounds.settle(streams, emitted, seen)
        going_on: list[str] = []
        for name, tokens in zip(names, sampled_token_ids, strict=False):
            if tokens and self._streams[name][0].drafts.remaining > 0:
                going_on.append(name)
            elif tokens:
                self._leave(name)
        waiting = sum(not tokens for tokens in sampled_token_ids)
        drafts = rounds.draft([self._streams[n][0] for n in going_on], waiting) if going_on else []
        by_name = dict(zip(going_on, drafts, strict=True))
        return [by_name.get(name, []) for name in names[: len(sampled_token_ids)]]

    def _started(self) -> Rounds:
        if self._rounds is None:
            self.setup = self.setup or setup_from(longest=self.longest)
            self._rounds = self._rounds_of(self.setup)
        return self._rounds

    def _rounds_of(self, setup: Setup) -> Rounds:
        size = setup.source.vocab_size or self.vocabulary
        return rounds_of(setup.policy, self.longest, size)

    def _join(self, name: str, state: Any) -> None:
        assert self.setup is not None
        # vLLM appends a number of its own to the name that the caller gave.
        limit = state.sampling_params.max_tokens
        asked = Asked(name.rpartition("-")[0], state.prompt_token_ids, limit)
        output = list(state.output_token_ids)
        stream = Stream(asked.id, self.setup.source.open(asked, output))
        self._streams[name] = stream, asked, output
        self._started().join(stream)

    def _leave(self, name: str) -> None:
        assert self.setup is not None
        stream, asked, output = self._streams.pop(name)
        self._started().leave(stream)
        self.setup.source.close(asked, output)
        if self._keep:
            self.finished.setdefault(asked.id, stream)


def _engine_state(
    caller: dict[str, Any], token_ids: Any
) -> tuple[Any, list[str], dict[str, list[int]]]:
    """The model runner, its rows' request names, and the drafts that it just verified.

    vLLM hands a proposer token arrays alone; who the rows are, how long they may become and
    what was verified stands in the method that calls it.
    """
    runner, output = caller.get("self"), caller.get("scheduler_output")
    batch = getattr(runner, "input_batch", None)
    if output is None or batch is None or batch.token_ids_cpu is not token_ids:
        raise DraftsimError(
            "this version of vLLM calls proposers otherwise than 0.32 does: install vllm==0.32.0"
        )
    return runner, batch.req_ids, output.scheduled_spec_decode_tokens
