"""The class that vLLM loads by name, so that a policy of ours drafts inside it.

    DRAFTSIM_PROPOSER='{"policy": "gammatune", "source": "pld"}' vllm serve MODEL \\
        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                               "model": "profiler.engines.proposer.Proposer"}'

Written against vLLM 0.32 (v1/worker/gpu_model_runner.py, `propose_draft_token_ids`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from profiler.engines.rounds import Stream
from profiler.engines.session import Session
from profiler.engines.setup import Setup, setup_from
from traces.errors import DraftsimError


class Proposer:
    """Drafts for every request of a vLLM engine as a policy decides (`Session`).

    Without `use`, the setup is that of the environment (`profiler.engines.setup`).
    """

    own_passes = False
    """Whether a drafter of the engine's own runs passes."""

    def __init__(self, vllm_config: Any) -> None:
        self.longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self.vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._session: Session | None = None

    def load_model(self, *args: Any) -> None:
        """Nothing to load."""

    def use(self, setup: Setup) -> None:
        """Draft so from now on, forgetting every request; keep the rounds of those that end."""
        self._session = Session(setup, self.longest, self.vocabulary, keep=True)

    @property
    def finished(self) -> Mapping[str, Stream]:
        """Streams that have ended since `use`, by the request's own name."""
        return {} if self._session is None else self._session.finished

    @property
    def session(self) -> Session:
        """What `use` began, or the environment says; DraftsimError if it says nothing."""
        if self._session is None:
            self._session = Session(setup_from(longest=self.longest), self.longest, self.vocabulary)
        return self._session

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
