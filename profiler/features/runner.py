"""Runs of a drafter: one sequence's chain or tree, and whole sequences that are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from profiler.features.drafters import FeatureDrafter
from profiler.models.runner import SlotCache
from profiler.models.sampling import coupled, draw, probs, signals
from profiler.models.stack import LayerRunner
from traces.acceptance.sampling import Sampling
from traces.errors import DraftsimError


class DrafterRunner:
    """Runs entries of a sequence, any slots rewritten at will; an entry's slot is its position.

    ``slots``: entries that its cache has room for, branches of trees included; ``batch``:
    sequences of as many entries.
    """

    def __init__(self, drafter: FeatureDrafter, slots: int, batch: int = 1) -> None:
        self.drafter = drafter
        self.cache = SlotCache(drafter.modules_in_turn, slots, batch)
        positions = torch.arange(slots, device=drafter.device)
        self._causal = torch.ones(slots, slots, dtype=torch.bool, device=drafter.device).tril_()
        self._cos, self._sin = drafter.rotary(positions[None])

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, fused: Tensor, start: int, *, module: int = 0,
        mask: Tensor | None = None, positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run entries in the slots ``start ...``; slots before are attended to.

        Several sequences run at once, causally, if tokens and states have a further first axis.

        Parameters
        ----------
        tokens: (entries,) target ids, each the token after its feature.
        fused: (entries, hidden): `FeatureDrafter.fuse` of features, or what an earlier call
            returned for the next.
        module: which of the drafter's modules in turn.
        mask: (entries, start + entries) for trees; causal if None.
        positions: (entries,) for trees; slots if None.

        Returns the head's input, and what replaces the next feature; (entries, hidden) each.
        """
        stop = start + tokens.shape[-1]
        self.cache.place(start, stop)
        if mask is None:
            mask = self._causal[start:stop, :stop]
        at = slice(start, stop) if positions is None else positions
        alone = tokens.dim() == 1
        if alone:
            tokens, fused = tokens[None], fused[None]
        states, feature = self.drafter.step(
            self.drafter.embed(tokens), fused, (self._cos[:, at], self._sin[:, at]),
            mask[None, None], self.cache, module,
        )  # fmt: skip
        return (states[0], feature[0]) if alone else (states, feature)


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


class CutTree(NamedTuple):
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
    runner: With room for ``trees x topk`` entries a layer.
    logits: (trees, draft vocabulary) after the last entry of each.
    feature: (trees, hidden): the replacement of the next feature there.
    at: (trees,) the last entry of each.
    sees: (trees, path) entries that each follows.

    Raises DraftsimError if the drafter knows fewer tokens than `topk`, or has modules that run in
    turn.
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
    def cut(self, budget: int, layers: int) -> CutTree:
        """Return the best `budget` nodes of the first `layers` layers of the first tree."""
        kept = self.layers[:layers]
        device = self._at.device
        if not kept:
            none = torch.zeros(0, dtype=torch.long, device=device)
            return CutTree(none, none, none.new_zeros(1), torch.ones_like(self._own[:1, :1]))
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
        return CutTree(tokens, above, torch.cat([above.new_zeros(1), depth[best]]), sees)


def check_tree(modules_in_turn: int) -> None:
    """Raise DraftsimError for a drafter that grows no trees."""
    if modules_in_turn > 1:
        raise DraftsimError(
            f"a drafter of {modules_in_turn} modules that run in turn drafts a chain alone: name "
            "one of a single module for eagle2"
        )


def layer_signals(layer: Layer) -> Tensor:
    """Return (trees, 4): `traces.sources.starts.trees.TREE_SIGNALS` of a layer's best node."""
    of = signals(layer.logits)
    score = layer.scores.gather(1, layer.chosen[:, :1])[:, 0]
    return torch.stack([score, of.top1 - of.logsumexp, of.top2 - of.logsumexp, of.entropy], -1)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids of the likeliest tokens, (..., count) each; none above 0."""
    top = logits.float().topk(count, dim=-1)
    return top.values - logits.float().logsumexp(-1, keepdim=True), top.indices


def _in_order(scores: Tensor) -> Tensor:
    """Return indices of (trees, nodes) scores, the largest first, of equal ones the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices


class DrafterChain:
    """A drafter that follows one sequence.

    ``slots``: tokens it has room for, drafts and branches of trees included.
    """

    def __init__(self, drafter: FeatureDrafter, slots: int) -> None:
        self.drafter = drafter
        self._runner = DrafterRunner(drafter, slots)
        count, hidden = drafter.modules_in_turn, int(drafter.config.hidden_size)
        self._tokens = torch.zeros(slots, dtype=torch.long, device=drafter.device)
        # What module k reads of every entry: the target's, and module k - 1's output.
        self._inputs = torch.zeros(count, slots, hidden, dtype=drafter.dtype, device=drafter.device)
        self._known = 0  # true tokens
        self._seen = 0  # features: the last token's comes with the pass that processes it
        self._done = [0] * count  # entries that each module has seen with true tokens
        self._fed_back = self._inputs[0, :1]

    @torch.inference_mode()
    def prefill(self, prompt: Tensor, features: Tensor) -> None:
        """Take in a prompt (tokens,) and its (tokens, width) features."""
        self.learn(prompt, features)
        for module in range(self.drafter.modules_in_turn):
            self._run(module, self._known - 1 - module)

    @torch.inference_mode()
    def draft(self, offset: int, last: Tensor | None) -> tuple[Tensor, int]:
        """Return logits (1, draft vocabulary) of this round's token `offset`, and the pass's width.

        ``last`` (1,): the token drafted before it, None at the first.
        """
        entries = self._known - 1
        if last is not None:
            self._tokens[self._known + offset - 1] = last[0]
        if self.drafter.modules_in_turn == 1 and last is not None:
            states, self._fed_back = self._runner.run(last, self._fed_back, entries + offset - 1)
            return self.drafter.logits(states), 1
        begin = self._done[offset]
        states = self._run(offset, entries)
        self._done[offset] = max(0, entries - offset)
        return self.drafter.logits(states[-1:]), entries - begin

    @torch.inference_mode()
    def draft_all(self, count: int) -> tuple[Tensor, int]:
        """Return logits (count, draft vocabulary) of all this round's tokens, and the pass's width.

        The drafter is one of `FeatureDrafter.one_pass`.
        """
        begin, entries = self._done[0], self._known - 1
        tokens, inputs = self._tokens[begin + 1 : entries + 1], self._inputs[0, begin:entries]
        masks = self.drafter.following(
            self._tokens.new_zeros(count - 1), self._inputs[0].new_zeros(count - 1, inputs.shape[1])
        )
        states, _ = self._runner.run(
            torch.cat([tokens, masks[0]]), torch.cat([inputs, masks[1]]), begin
        )
        self._done[0] = entries
        return self.drafter.logits(states[-count:]), entries - begin + count - 1

    @torch.inference_mode()
    def tree(self, topk: int) -> tuple[Trees, int]:
        """Return a tree after the known tokens, one layer deep, and the width of its pass."""
        logits, width = self.draft(0, None)
        entries = self._known - 1
        sees = torch.ones(1, entries, dtype=torch.bool, device=logits.device)
        at = self._tokens.new_full((1,), entries - 1)
        return Trees(self._runner, topk, logits, self._fed_back, at, sees), width

    @torch.inference_mode()
    def learn(self, tokens: Tensor, features: Tensor | None = None) -> None:
        """Take in true tokens (n,), and the (m, width) features that have become known."""
        if features is not None:
            at = self._seen
            self._inputs[0, at : at + features.shape[0]] = self.drafter.fuse(features)
            self._seen = at + features.shape[0]
        self._tokens[self._known : self._known + tokens.shape[0]] = tokens
        self._known += tokens.shape[0]

    def _run(self, module: int, stop: int) -> Tensor:
        """Run a module over the entries it lacks up to `stop`; what the head reads of them."""
        begin = self._done[module]
        if stop <= begin:
            return self._inputs[0, :0]
        tokens = self._tokens[begin + 1 + module : stop + 1 + module]
        states, out = self._runner.run(
            tokens, self._inputs[module, begin:stop], begin, module=module
        )
        if module + 1 < self.drafter.modules_in_turn:
            self._inputs[module + 1, begin:stop] = out
        self._fed_back = out[-1:]
        self._done[module] = stop
        return states


class DrawnDrafts:
    """Drafts of lossless rejection sampling, given the output that was drawn.

    While the tokens of a start equal the output, each next one equals it with the probability that
    it was drafted, given that it was emitted (`profiler.models.sampling.coupled`).  From the first
    that differs on, tokens are the drafter's own draws.  Every start has its own random numbers,
    because at most one round begins there.

    ``output``: the sampled tokens.  ``target``: (tokens, vocab) distributions that they were drawn
    from.
    """

    def __init__(
        self, drafter: FeatureDrafter, output: Sequence[int], target: Tensor, sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:  # fmt: skip
        self._drafter, self._sampling, self._generator = drafter, sampling, generator
        self._output = torch.tensor(output, device=target.device)
        self._target = target
        self._on_path = torch.ones(len(output), dtype=torch.bool, device=target.device)

    def __call__(self, logits: Tensor, starts: Tensor, step: int) -> Tensor:
        """Return target ids (starts,) of each start's token `step`, from logits (starts, vocab).

        Steps come in turn; ``starts`` (starts,) are positions of the output.
        """
        head = probs(self._drafter.over_target(logits), self._sampling)
        place = starts + step
        known = place < len(self._output)
        place = place.clamp(max=len(self._output) - 1)
        emitted = self._output[place]
        coins = torch.rand(len(starts), generator=self._generator, device=logits.device)
        match, residual = coupled(head, self._target[place], emitted, coins)
        follows = self._on_path[starts] & known
        own = draw(torch.where(follows[:, None], residual, head), self._generator)
        match &= follows
        self._on_path[starts] = match
        return torch.where(match, emitted, own)


def verify_tree(
    target: LayerRunner, last: Tensor, cut: CutTree | None, slot: int, depths: Sequence[int],
    eos: frozenset[int],
) -> tuple[Tensor, Tensor, list[int]]:  # fmt: skip
    """Run one pass over the last true token (1,), in `slot`, and the nodes of `cut` after it.

    The target's cache is compacted to the accepted path.

    Returns the target's tokens after each token of the path, (path,), their states, (path, width),
    and the path's places in the tree, the root's 0 first: its last token is the target's own,
    unless the path ended with one of `eos`.
    """
    if cut is None:
        fed, mask, positions = last, None, None
    else:
        fed = torch.cat([last, cut.tokens])
        before = cut.sees.new_ones(len(fed), slot)
        mask, positions = torch.cat([before, cut.sees], 1), cut.depth + slot
    logits, states = target.forward_with_states(fed, slot, depths, mask=mask, positions=positions)
    picks = logits.argmax(-1)
    path = [0]
    if cut is not None:
        tokens, parents, chosen = torch.stack(
            [fed, torch.cat([last.new_zeros(1), cut.parent]), picks]
        ).tolist()
        nodes = {(parents[i], tokens[i]): i for i in range(1, len(tokens))}
        while (node := nodes.get((path[-1], chosen[path[-1]]))) is not None:
            path.append(node)
            if tokens[node] in eos:
                break
    places = torch.tensor(path, device=fed.device)
    if path != list(range(len(path))):
        target.cache.move(places + slot, slot)
    return picks[places], states[places], path
