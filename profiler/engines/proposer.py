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

from profiler.engines.session import Governed
from traces.errors import DraftsimError


class Proposer(Governed):
    """Drafts for every request of a vLLM engine as a policy decides (`Session`)."""

    def __init__(self, vllm_config: Any) -> None:
        longest = int(vllm_config.speculative_config.num_speculative_tokens)
        super().__init__(longest, int(vllm_config.model_config.get_vocab_size()))

    def load_model(self, *args: Any) -> None:
        """Load nothing: it drafts without a model."""

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
        return self.session.advance(names, sampled_token_ids, verified, runner.requests)


def _engine_state(
    caller: dict[str, Any], token_ids: Any
) -> tuple[Any, list[str], dict[str, list[int]]]:
    """Return the model runner, its rows' request names, and the drafts that it just verified.

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
