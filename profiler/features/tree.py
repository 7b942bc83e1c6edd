"""Draft trees grown by a drafter, some side by side: EAGLE-2's (arXiv:2406.16858, sec. 4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from profiler.features.runner import DrafterRunner
from profiler.models.signals import signals
from traces.errors import DraftsimError


class Layer(NamedTuple):
    """Candidates of one layer of every tree; after the first layer, `topk` per parent."""

    scores: Tensor
    """(trees, nodes) sums of log-probabilities along the path."""
    tokens: Tensor
    """(trees, nodes) target ids."""
    parent: Tensor
    """(trees, nodes) index in the layer above; 0 in the first."""
    chosen: Tensor
    """(trees, topk) nodes that are expanded, best first."""
    logits: Tensor
    """(trees, draft vocabulary) that the best node's token was taken from."""


class Cut(NamedTuple):
    """The verified part of a tree: the root, then its nodes, layer by layer."""

    tokens: Tensor
    """(nodes,) target ids, the root's left out."""
    parent: Tensor
    """(nodes,) place of each node's parent; 0 is the root."""
    depth: Tensor
    """(1 + nodes,): 0 for the root."""
    sees: Tensor
    """(1 + nodes, 1 + nodes): ancestors and itself."""


class Trees:
    """Trees that continue some entries of one sequence, which the runner's first slots hold.

    Their nodes take the slots after it.  Of equal scores the upper layer's comes first, then the
    node that was reached first.

    Parameters
    ----------
    runner:
        With room for ``trees x topk`` entries a layer.
    logits:
        (trees, draft vocabulary) after the last entry of each.
    feature:
        (trees, hidden): the replacement of the next feature there.
    at:
        (trees,) the last entry of each.
    sees:
        (trees, path) entries that each follows.

    Raises
    ------
    DraftsimError
        If the drafter knows fewer tokens than `topk`, or has modules that run in turn.
    """

    def __init__(
        self, runner: DrafterRunner, topk: int, logits: Tensor, feature: Tensor, at: Tensor,
        sees: Tensor,
    ) -> None:  # fmt: skip
        if topk > logits.shape[-1]:
            raise DraftsimError(f"topk is {topk}, and the drafter knows {logits.shape[-1]} tokens")
        check_tree(runner.drafter.modules_in_turn)
        self.topk = topk
        self._runner, self._at, self._sees = runner, at, sees
        self._root = feature
        self._own = torch.eye(topk, dtype=torch.bool, device=at.device)
        scores, own = _best(logits, topk)
        tokens, place = runner.drafter.target_ids(own), torch.arange(topk, device=at.device)
        chosen = place.expand_as(tokens)
        self.layers = [Layer(scores, tokens, torch.zeros_like(tokens), chosen, logits)]
        self._ancestors = self._own[None, :, :0]
        self._features = feature[:, None]

    @torch.inference_mode()
    def grow(self) -> Layer:
        """Expand the best nodes of the last layer: one pass of the drafter."""
        last, k, depth = self.layers[-1], self.topk, len(self.layers)
        count = len(self._at)
        tokens, score = (v.gather(1, last.chosen) for v in (last.tokens, last.scores))
        # The place of its parent among the nodes expanded before.
        above = last.chosen // k if depth > 1 else torch.zeros_like(last.chosen)
        rows = torch.arange(count, device=above.device)[:, None]
        features = self._features[rows, above].flatten(0, 1)
        own = self._own.expand(count, k, k)
        if depth > 1:
            own = torch.cat([self._ancestors[rows, above], own], 2)
        self._ancestors = own
        nodes = own.new_zeros(count, k, depth, count, k)
        nodes[rows[:, 0], :, :, rows[:, 0]] = own.view(count, k, depth, k)
        path = self._sees.shape[1]
        mask = torch.cat([self._sees[:, None].expand(-1, k, -1), nodes.flatten(2)], 2)
        states, out = self._runner.run(
            tokens.flatten(), features, path + (depth - 1) * count * k, mask=mask.flatten(0, 1),
            positions=(self._at + depth).repeat_interleave(k),
        )  # fmt: skip
        self._features = out.view(count, k, -1)
        logits = self._runner.drafter.logits(states).view(count, k, -1)
        grown, ids = _best(logits, k)
        scores = (score[..., None] + grown).flatten(1)
        chosen = _in_order(scores)[:, :k]
        parent = last.chosen.repeat_interleave(k, 1)
        made = Layer(
            scores, self._runner.drafter.target_ids(ids).flatten(1), parent, chosen,
            logits[rows[:, 0], chosen[:, 0] // k],
        )  # fmt: skip
        self.layers.append(made)
        return made

    @torch.inference_mode()
    def cut(self, budget: int, layers: int) -> Cut:
        """The best `budget` nodes of the first `layers` layers of the first tree."""
        kept = self.layers[:layers]
        device = self._at.device
        if not kept:
            none = torch.zeros(0, dtype=torch.long, device=device)
            return Cut(none, none, none.new_zeros(1), torch.ones_like(self._own[:1, :1]))
        sizes = [layer.scores.shape[1] for layer in kept]
        # Place 0 is the root; those of a layer begin after all of the layers above.
        begins = [1 + sum(sizes[:d]) for d in range(len(sizes))]
        parent = torch.cat([
            layer.parent[0] + (begins[d - 1] if d else 0) for d, layer in enumerate(kept)
        ])  # fmt: skip
        depth = torch.repeat_interleave(
            torch.arange(1, len(sizes) + 1, device=device), torch.tensor(sizes, device=device)
        )
        best = _in_order(torch.cat([layer.scores for layer in kept], 1))[0, :budget].sort().values
        place = parent.new_zeros(1 + sum(sizes))
        place[best + 1] = torch.arange(1, len(best) + 1, device=device)
        above = place[parent[best]]
        sees = torch.eye(1 + len(best), dtype=torch.bool, device=device)
        upwards = torch.cat([above.new_zeros(1), above])
        for _ in kept:
            sees = sees | sees[upwards]
        tokens = torch.cat([layer.tokens[0] for layer in kept])[best]
        return Cut(tokens, above, torch.cat([above.new_zeros(1), depth[best]]), sees)


def check_tree(modules_in_turn: int) -> None:
    """Raise DraftsimError for a drafter that grows no trees."""
    if modules_in_turn > 1:
        raise DraftsimError(
            f"a drafter of {modules_in_turn} modules that run in turn drafts a chain alone: name "
            "one of a single module for eagle2"
        )


def layer_signals(layer: Layer) -> Tensor:
    """(trees, 4): `traces.sources.starts.trees.TREE_SIGNALS` of a layer's best node."""
    of = signals(layer.logits)
    score = layer.scores.gather(1, layer.chosen[:, :1])[:, 0]
    return torch.stack([score, of.top1 - of.logsumexp, of.top2 - of.logsumexp, of.entropy], -1)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the likeliest tokens, (..., count) each; none above 0."""
    top = logits.float().topk(count, dim=-1)
    return top.values - logits.float().logsumexp(-1, keepdim=True), top.indices


def _in_order(scores: Tensor) -> Tensor:
    """Indices of (trees, nodes) scores, the largest first, of equal ones the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices
