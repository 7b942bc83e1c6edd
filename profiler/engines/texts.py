"""The engine's own texts: prompts for recorded sequences, and its greedy outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from policies.lengths.basic import Autoregressive
from profiler.engines.drafts import Forced
from profiler.engines.setup import Setup
from traces.acceptance.trace import Trace

FIRST_ID = 3
"""Ids below this one are left out of made-up prompts: usually padding, begin and end."""
TEXTS = "texts"
"""Name under which the outputs are kept by a check that goes on where it was stopped."""


class Served(Protocol):
    """The part of `profiler.engines.engine.Engine` that this module uses."""

    proposer: Any
    vocabulary: int

    def run(self, requests: Mapping[str, tuple[Sequence[int], int]]) -> dict[str, list[int]]:
        """Outputs by name of requests, each a prompt and how many tokens to emit."""
        ...


def prompts_of(trace: Trace, vocabulary: int, seed: int = 0) -> dict[int, list[int]]:
    """Return prompt ids of every sequence: the recorded ones, or made-up ones of the same length.

    Recorded ids that the engine's model does not have are made up, too: another model's.
    """
    rng = np.random.default_rng(seed)
    prompts = {}
    for i, request in enumerate(trace.requests):
        made_up = rng.integers(FIRST_ID, vocabulary, max(request.prompt_length, 1)).tolist()
        known = request.prompt_ids
        fits = known and max(known) < vocabulary
        prompts[i] = list(known) if known and fits else made_up
    return prompts


def own_texts(engine: Served, trace: Trace, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """The engine's greedy output of every sequence, as long as the recorded one, undrafted."""
    nothing = {i: [0] for i in prompts}
    engine.proposer.use(Setup(Autoregressive(), Forced(trace, nothing, engine.vocabulary)))
    asked = {f"{i}/alone": (prompt, trace.requests[i].tokens) for i, prompt in prompts.items()}
    outputs = engine.run(asked)
    return {i: outputs[f"{i}/alone"] for i in prompts}
