"""How often a drafter foresees the target, by offset, along a recorded trace's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiler.features import FeatureDrafter, target_features, unroll
from traces.acceptance.trace import MATCH, Request, Trace

Shares = dict[str, list[float]]
"""By category, and over all: the share of starts from which at least k tokens are accepted."""


def recorded_outputs(trace: Trace) -> Iterator[tuple[Request, Tensor, Tensor]]:
    """(request, its tokens with the prompt, the draft model's matches) of every request."""
    tokens = trace.columns["token"][trace.on_path]
    matches = trace.columns["match"][trace.on_path] == MATCH
    starts = trace.request_starts
    for request, begin, end in zip(trace.requests, starts, starts[1:], strict=False):
        ids = [*(request.prompt_ids or ()), *tokens[begin:end].tolist()]
        yield request, torch.tensor(ids), torch.from_numpy(matches[begin:end])


def chains(matches: Tensor, offsets: int) -> Tensor:
    """Return True where all tokens up to an offset match, (starts, offsets), along one path.

    A draft model's proposal at a position depends on the path alone, so a draft from a start goes
    on matching as long as the positions do. Starts that have `offsets` positions ahead count.
    """
    return matches.unfold(0, offsets, 1).long().cumprod(1).bool()


@torch.inference_mode()
def drafted(drafter: FeatureDrafter, target: Any, ids: Tensor, prompt: int, offsets: int) -> Tensor:
    """Return a feature drafter's drafts from every output token but the last: (starts, offsets).

    `ids`: prompt and output. The drafts of row i follow the output's token i, its i + 1 first
    tokens known; starts that have `offsets` tokens ahead count.
    """
    features = target_features(target, ids[None], drafter.feature_layers)
    picked: list[Tensor] = []

    def pick(states: Tensor) -> Tensor:
        picked.append(drafter.target_ids(drafter.logits(states).argmax(-1)))
        return picked[-1]

    outputs = unroll(drafter, ids[None], features, offsets, pick=pick)
    pick(outputs[-1])
    return torch.cat(picked).T[prompt - 1 : len(ids) - 1 - offsets]


def measure(
    trace: Trace, target: Any, drafter: FeatureDrafter | None = None, offsets: int = 5
) -> Shares:
    """Shares by category and for ``all``; of the trace's own draft model where there is no drafter.

    Every request weighs the same, whatever its length; one too short to count is left out.
    """
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    for request, ids, matches in recorded_outputs(trace):
        if request.tokens <= offsets + 1:
            continue
        if drafter is None:
            accepted = chains(matches[1:], offsets)
        else:
            drafts = drafted(drafter, target, ids, request.prompt_length, offsets)
            emitted = ids[request.prompt_length + 1 :].unfold(0, offsets, 1)
            accepted = (drafts == emitted).long().cumprod(1)
        share = accepted.float().mean(0).numpy()
        found.setdefault(request.category, []).append(share)
        found.setdefault("all", []).append(share)
    return {name: np.mean(shares, 0).round(4).tolist() for name, shares in found.items()}
