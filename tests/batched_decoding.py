"""Batched decoding of whole lists of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from policies.batch.base import Policy
from policies.core import Round
from policies.together import Synchronise, together_of
from profiler.decoding.batch import BatchedDecoder, Stream, speculate_batch
from profiler.models.runner import Runner


@dataclass(frozen=True)
class Decoded:
    """Outputs and rounds of every sequence, in the order given, and iterations run."""

    outputs: list[list[int]]
    rounds: list[list[Round]]
    iterations: int


def decode_batch(
    target: Runner,
    draft: Runner,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    eos: frozenset[int],
    policy: Policy,
    *,
    synchronise: Synchronise = "ragged",
    continuous: bool = False,
    run_lengths: Sequence[Sequence[int]] | None = None,
) -> Decoded:
    """Decode `prompts`, as many at a time as the runners have room for.

    Parameters
    ----------
    target, draft:
        Runners over a shared vocabulary; their caches are overwritten.
    prompts:
        (prompt_tokens,) token ids each, on the models' device.
    policy:
        One policy copied per request, or one for the whole batch; a prototype.
    synchronise:
        ``ragged``: each sequence keeps what it had accepted; ``minimum``: all keep as many
        as the worst; ``mean``: all draft alike, until most would stop
        (see `policies.together`).
    continuous:
        True if the next prompt replaces the first sequence to end; otherwise a
        batch runs until its slowest has ended.
    run_lengths:
        For the oracle: known matches ahead of every output position of every prompt.

    Raises
    ------
    DraftsimError
        If a prompt is empty or does not fit, a model gives NaN, or the policy cannot be
        synchronised so.
    """
    decoder = BatchedDecoder(target, draft)
    together = together_of(policy, synchronise, target.vocab_size)
    streams = [
        Stream(i, prompt, max_new_tokens, eos, run_lengths[i] if run_lengths else None)
        for i, prompt in enumerate(prompts)
    ]
    step = len(streams) if continuous else decoder.size
    groups = [streams[i : i + step] for i in range(0, len(streams), step or 1)]
    rounds: list[list[Round]] = [[] for _ in prompts]
    iterations = 0
    for group in groups:
        for iteration in speculate_batch(decoder, together, group):
            iterations += 1
            for stream, outcome in iteration:
                rounds[stream.request].append(outcome)
    return Decoded([s.output for s in streams], rounds, iterations)
