"""vLLM's own drafter, a draft model or an EAGLE head, told by a policy of ours how far to draft.

The policy decides before the drafter runs, so it may read no signal of a drafted token but its
place (`reads` is empty): of the drafter's probabilities vLLM hands nothing on.  What the engine
still pays: a first pass of the drafter over all that was verified in every iteration, drafts or
not; passes over the whole batch until the longest draft of any request ends; and on a GPU a wait
for the sampled tokens, by which the policy decides.

Written against vLLM 0.32: ``num_spec_tokens_to_schedule`` of the scheduler's output is how many
tokens a drafter is asked for, in v1/worker/gpu_model_runner.py without asynchronous scheduling.
"""

from __future__ import annotations

from typing import Any

from profiler.engines.drafts import UNKNOWN
from profiler.engines.server import record
from profiler.engines.session import Governed
from profiler.engines.setup import asks_for_engine
from traces.errors import DraftsimError


class OwnDrafter(Governed):
    """A replacement of a runner's `propose_draft_token_ids`, used like a `Proposer`.

    Drafts that a source dictates (`profiler.engines.drafts.Forced`) are handed on instead of the
    drafter's, whose passes run all the same.

    Parameters
    ----------
    runner:
        vLLM's model runner.
    longest, vocabulary:
        Tokens a draft may have; token ids of the engine's model.
    """

    own_passes = True
    booked = False

    def __init__(self, runner: Any, longest: int, vocabulary: int) -> None:
        super().__init__(longest, vocabulary)
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
    """DraftsimError unless vLLM's ``speculative_config`` lets a policy say how far to draft."""
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
    """vLLM's plugin: puts on runners and engines what the environment asks for.

    An `OwnDrafter` where `profiler.engines.setup.VARIABLE` names the engine as the source of
    drafts, a recorder where `profiler.engines.server.lines.VARIABLE` names a
    folder.
    """
    record.install()
    if not asks_for_engine():
        return
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
