"""Records what of a draft tree the target follows, from every start of an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import DrafterRunner, Trees, check_tree, layer_signals
from profiler.models.stack import LayerRunner
from profiler.sources.start_record import Rows
from traces.acceptance.trace import Trace
from traces.sources.base import prompt_tokens, true_tokens
from traces.sources.starts.trees import TREE_SIGNALS, TreeRecording

TREE_CHUNK = 16
"""Trees grown side by side: bounds the mask and the logits' memory."""
TOPK = 10
"""Nodes expanded in a layer, and children of each, where nothing else is asked for: EAGLE-2's."""
LAYERS = 8
"""Depth of recorded trees, likewise: that of EAGLE-3's released code."""

BUDGET = 59
"""Nodes verified of a tree: with its root, the 60 of the authors' `total_token`."""


@dataclass(frozen=True)
class GrownTrees:
    """A drafter, and the shape of its trees."""

    drafter: FeatureDrafter
    topk: int = TOPK
    layers: int = LAYERS
    budget: int = BUDGET


class TreeRecorder:
    """Trees from every start, as the real decoder grows them.

    ``longest``: tokens of the longest path; ``topk`` and ``layers`` as for `Trees`.
    """

    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, longest: int, topk: int = TOPK,
        layers: int = LAYERS,
    ) -> None:  # fmt: skip
        check_tree(drafter.modules_in_turn)
        self.target, self.drafter, self.topk, self.layers = target, drafter, topk, layers
        self._runner = DrafterRunner(drafter, longest + TREE_CHUNK * topk * (layers - 1))

    def meta(self) -> dict[str, Any]:
        """Return the settings that the replay needs to know."""
        return {"kind": self.drafter.kind, "topk": self.topk}

    @torch.inference_mode()
    def record(self, prompt: Tensor, output: list[int]) -> Rows:
        """Rows of one request; that of start 0, before the first token, is empty."""
        count, layers = len(output), self.layers
        rows: Rows = {name: np.zeros((count, layers), np.float32) for name in TREE_SIGNALS}
        rows["rank"] = np.full((count, layers, layers), -1, np.int32)
        if count < 2:
            return rows
        path = torch.cat([prompt, prompt.new_tensor(output[:-1])])
        fused = self.drafter.fuse(self.target.states(path[:-1], 0, self.drafter.feature_layers))
        entries, first = int(fused.shape[0]), int(prompt.shape[0]) - 1
        heads, out = self._runner.run(path[1:], fused, 0)
        padded = prompt.new_tensor(output + [-1] * layers)
        for begin in range(first, entries, TREE_CHUNK):
            at = torch.arange(begin, min(begin + TREE_CHUNK, entries), device=path.device)
            sees = torch.arange(entries, device=at.device)[None] <= at[:, None]
            logits = self.drafter.logits(heads[at])
            trees = Trees(self._runner, self.topk, logits, out[at], at, sees)
            found = [layer_signals(trees.layers[0])]
            found += [layer_signals(trees.grow()) for _ in range(layers - 1)]
            start = at - first + 1
            mine = slice(int(start[0]), int(start[-1]) + 1)
            for name, values in zip(TREE_SIGNALS, torch.stack(found, 1).unbind(-1), strict=True):
                rows[name][mine] = values.cpu().numpy()
            true = padded[start[:, None] + torch.arange(layers, device=at.device)]
            rows["rank"][mine] = ranks(trees, true).cpu().numpy()
        return rows


def ranks(trees: Trees, true: Tensor) -> Tensor:
    """(trees, layers, layers): places of the tokens `true` (trees, layers), -1 for none.

    As `TreeRecording.rank`.
    """
    count, layers = true.shape
    rank = torch.full((count, layers, layers), -1, dtype=torch.long, device=true.device)
    rows, k = torch.arange(count, device=true.device), trees.topk
    place = torch.zeros_like(rows)  # of the node above among those expanded
    there = torch.ones_like(rows, dtype=torch.bool)
    for j, layer in enumerate(trees.layers):
        children = place[:, None] * k + torch.arange(k, device=true.device)
        same = layer.tokens.gather(1, children) == true[:, j, None]
        there = there & same.any(1)
        node = children[rows, same.int().argmax(1)]
        score = layer.scores[rows, node][:, None]
        before = torch.zeros_like(rows)
        for d, other in enumerate(trees.layers):
            ahead = other.scores > score
            if d < j:
                ahead |= other.scores == score
            elif d == j:
                earlier = torch.arange(other.scores.shape[1], device=true.device) < node[:, None]
                ahead |= (other.scores == score) & earlier
            before = before + ahead.sum(1)
            if d >= j:
                rank[:, j, d] = torch.where(there, before, -1)
        expanded = layer.chosen == node[:, None]
        there = there & expanded.any(1)
        place = expanded.int().argmax(1)
    return rank


def record_trees(
    target: Any, trace: Trace, drafter: FeatureDrafter, topk: int = TOPK, layers: int = LAYERS,
    advance: Callable[[], None] = lambda: None,
) -> TreeRecording:  # fmt: skip
    """The trees of every start of the requests of `trace`; `advance` after each request.

    Raises DraftsimError if the trace was sampled or holds no prompts, or of what `Trees` refuses.
    """
    output, starts = true_tokens(trace), trace.request_starts
    longest = max(r.prompt_length + r.tokens for r in trace.requests)
    recorder = TreeRecorder(LayerRunner(target, longest), drafter, longest, topk, layers)
    parts = []
    for i in range(len(trace.requests)):
        prompt = torch.tensor(prompt_tokens(trace, i), device=recorder.target.device)
        parts.append(recorder.record(prompt, output[int(starts[i]) : int(starts[i + 1])]))
        advance()
    merged = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    return TreeRecording(
        merged["rank"], {name: merged[name] for name in TREE_SIGNALS},
        tuple(int(s) for s in starts), {**recorder.meta(), "sampling": trace.sampling.meta},
    )  # fmt: skip
