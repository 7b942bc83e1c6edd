"""What the engine says on its own: prompts for recorded sequences, and its greedy outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from policies.basic import Autoregressive
from profiler.engines.drafts import Forced
from profiler.engines.setup import Setup
from traces.trace import Trace

FIRST_ID = 3
"""Ids below this one are left out of made-up prompts: usually padding, begin and end."""


class Served(Protocol):
    """What `profiler.engines.engine.Engine` offers to this module."""

    proposer: Any
    vocabulary: int

    def run(self, name: str, prompt: list[int], tokens: int) -> list[int]:
        """The output of one request by itself."""
        ...


def prompts_of(trace: Trace, vocabulary: int, seed: int = 0) -> dict[int, list[int]]:
    """Prompt ids of every sequence: the recorded ones, or made-up ones of the same length.

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


def own_texts(
    engine: Served,
    trace: Trace,
    prompts: dict[int, list[int]],
    advance: Callable[[], None] = lambda: None,
) -> dict[int, list[int]]:
    """The engine's greedy output of every sequence, as long as the recorded one, undrafted."""
    nothing = {i: [0] for i in prompts}
    engine.proposer.use(Setup(Autoregressive(), Forced(trace, nothing, engine.vocabulary)))
    texts = {}
    for i, prompt in prompts.items():
        texts[i] = engine.run(f"{i}/alone", prompt, trace.requests[i].tokens)
        advance()
    return texts
