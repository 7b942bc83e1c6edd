"""draftsim's policies inside vLLM, with their own drafts or with those of vLLM's drafter.

    DRAFTSIM_PROPOSER='{"policy": "gammatune", "source": "pld"}' vllm serve MODEL \\
        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                               "model": "profiler.engines.vllm.proposer.Proposer"}'

vLLM loads `Proposer` by that name.  `OwnDrafter` tells a draft model or an EAGLE head how far to
draft.  The policy decides before the drafter runs, and vLLM does not expose the drafter's
probabilities.  So it may read nothing of a drafted token but its place (`reads` is empty).  The
engine still runs a drafter pass over all verified tokens in every iteration, with or without
drafts, and passes over the whole batch up to the longest draft of any request.  On a GPU it also
waits for the sampled tokens, which the policy needs.

Written against vLLM 0.32 (v1/worker/gpu_model_runner.py): ``propose_draft_token_ids``, and
``num_spec_tokens_to_schedule`` of the scheduler's output, which is how many tokens a drafter is
asked for without asynchronous scheduling.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from profiler.engines.drafts import UNKNOWN
from profiler.engines.session import VARIABLE, Governed, asks_for_engine
from profiler.engines.vllm import watch
from traces.errors import DraftsimError


class Proposer(Governed):
    """Drafts for every request of a vLLM engine as a policy decides (`Session`)."""

    def __init__(self, vllm_config: Any) -> None:
        longest = int(vllm_config.speculative_config.num_speculative_tokens)
        vocabulary = int(vllm_config.model_config.get_vocab_size())
        super().__init__(longest, vocabulary, watch.caller_name)

    def load_model(self, *args: Any) -> None:
        """Load nothing: it drafts without a model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts of each row of the engine's batch; none where a prompt is not finished.

        vLLM hands a proposer token arrays alone; who the rows are, how long they may become and
        what was verified is in the method that calls it.
        """
        del num_tokens_no_spec, slot_mappings
        caller = sys._getframe(1).f_locals
        runner: Any = caller.get("self")
        output = caller.get("scheduler_output")
        batch: Any = getattr(runner, "input_batch", None)
        if output is None or batch is None or batch.token_ids_cpu is not token_ids_cpu:
            raise DraftsimError(
                "this version of vLLM calls proposers otherwise than 0.32 does: "
                "install vllm==0.32.0"
            )
        verified = output.scheduled_spec_decode_tokens
        return self.session.advance(batch.req_ids, sampled_token_ids, verified, runner.requests)


class OwnDrafter(Governed):
    """A replacement of a runner's `propose_draft_token_ids`, used like a `Proposer`.

    Drafts that a source dictates (`profiler.engines.drafts.Forced`) are handed on instead of the
    drafter's, whose passes run all the same.

    ``runner``: vLLM's model runner.  ``longest``, ``vocabulary``: tokens a draft may have; token
    ids of the engine's model.
    """

    own_passes = True
    booked = False

    def __init__(self, runner: Any, longest: int, vocabulary: int) -> None:
        super().__init__(longest, vocabulary, watch.caller_name)
        self._runner, self._propose = runner, runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self.propose

    def propose(self, output: Any, sampled: Any, *rest: Any) -> list[list[int]]:
        """Return the drafter's tokens of each row, as far as the policy goes."""
        runner = self._runner
        unfinished = runner.discard_request_mask.np
        emitted = [
            [] if unfinished[i] else [token for token in row if token >= 0]
            for i, row in enumerate(sampled.tolist())
        ]
        drafts = self.session.advance(
            runner.input_batch.req_ids, emitted,
            output.scheduled_spec_decode_tokens, runner.requests,
        )  # fmt: skip
        output.num_spec_tokens_to_schedule = max(map(len, drafts), default=0)
        found = self._propose(output, sampled, *rest).tolist()
        return [
            [own if token == UNKNOWN else token for token, own in zip(draft, row, strict=False)]
            for draft, row in zip(drafts, found, strict=True)
        ]


def check_speculative(config: Any, asynchronous: bool) -> None:
    """Raise DraftsimError unless vLLM's ``speculative_config`` lets a policy cut drafts."""
    if not (config.use_eagle() or config.uses_draft_model()):
        raise DraftsimError(
            f"vLLM drafts by {config.method!r}: a policy cuts drafts of a draft model or an EAGLE "
            "head; give another method, or this project's Proposer (method custom_class)"
        )
    if config.disable_padded_drafter_batch:
        raise DraftsimError(
            'drop "disable_padded_drafter_batch" from --speculative-config: drafts are cut after '
            "a padded batch"
        )
    if asynchronous:
        raise DraftsimError(
            "vLLM plans an iteration before the last one's drafts are known: start it with "
            "--no-async-scheduling, so that a policy may say how many there are"
        )


def register() -> None:
    """Register vLLM's plugin: put on runners and engines what the environment asks for.

    An `OwnDrafter` where `profiler.engines.session.VARIABLE` names the engine as the source of
    drafts, a recorder where `profiler.engines.notes.VARIABLE` names a folder.
    """
    watch.install()
    if not asks_for_engine(os.environ.get(VARIABLE, "")):
        return
    os.environ[watch.SECOND_RUNNER] = "0"
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    own: Any = GPUModelRunner.__init__

    def init(runner: Any, *args: Any, **kwargs: Any) -> None:
        own(runner, *args, **kwargs)
        config = runner.vllm_config.speculative_config
        if config is not None:
            check_speculative(config, runner.use_async_scheduling)
            vocabulary = int(runner.model_config.get_vocab_size())
            OwnDrafter(runner, int(config.num_speculative_tokens), vocabulary)

    GPUModelRunner.__init__ = init
