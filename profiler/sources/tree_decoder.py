"""Real decoding with EAGLE-2's draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.decoding.tokens import Fetched
from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import Cut, DrafterChain, Layer, Trees, check_tree, layer_signals
from profiler.models.sampling import top10_log_prob
from profiler.models.stack import LayerRunner
from profiler.sources.start_decoders import StateDecoder
from traces.replay.calls import DRAFTER, DRAFTER_TREE, TREE


class LayerToken(Fetched):
    """A layer of the tree, as a policy sees it; its signals come to the host when one is read."""

    __slots__ = ("_layer", "_values")

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._values: tuple[float, ...] | None = None

    def _fetch(self) -> tuple[float, ...]:
        if self._values is None:
            score, top, second, entropy = layer_signals(self._layer)[0].tolist()
            # Log-probabilities instead of logits, whose log-sum-exp is then 0.
            self._values = (top, second, 0.0, entropy, score, top, top)
        return self._values

    def _fetch_top10(self) -> float:
        return float(top10_log_prob(self._layer.logits[:1]))

    @property
    def token_id(self) -> int:
        """None of its own: a layer has several."""
        return -1

    @property
    def ends(self) -> bool:
        """Return False: a tree grows on next to a node that ends the text."""
        return False


class TreeDecoder(StateDecoder):
    """Decodes one prompt, drafting trees with `drafter` (`policies.core.Decoder`).

    The target keeps the keys and values of the accepted path, moved together; the drafter reads
    accepted tokens again in a round's first pass, with the target's features instead of its own, as
    the authors' code does.

    ``target`` with room for the `budget` besides the text; ``depth`` layers at most.
    """

    takes_verified = True

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, prompt: Tensor, max_new_tokens: int,
        eos: frozenset[int] = frozenset(), *, budget: int, topk: int, depth: int,
    ) -> None:  # fmt: skip
        super().__init__(target, prompt, max_new_tokens, eos)
        check_tree(drafter.modules_in_turn)
        self._budget, self._topk, self._depth = budget, topk, depth
        self._features = drafter.feature_layers
        self._chain = DrafterChain(drafter, target.cache.slots + topk * (depth - 1))
        logits, states = target.forward_with_states(prompt, 0, self._features)
        self._last = logits[-1:].argmax(-1)  # (1,)
        self._chain.prefill(prompt, states)
        self._chain.learn(self._last)
        self._trees: Trees | None = None
        self._emit(self._last.tolist())

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> LayerToken | None:
        """Return the next layer; None at the tree's full depth."""
        if len(so_far) >= self._depth:
            return None
        if not so_far:
            self._trees, width = self._chain.tree(self._topk)
            self.calls.add(DRAFTER, width)
            return LayerToken(self._trees.layers[0])
        assert self._trees is not None
        self.calls.add(DRAFTER_TREE, self._topk)
        return LayerToken(self._trees.grow())

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """One pass over the last token and the tree's best nodes."""
        cut = None if self._trees is None else self._trees.cut(self._budget, len(draft))
        picks, states, path = verify_tree(
            self._target, self._last, cut, self._slot, self._features, self.eos
        )
        self.calls.add(TREE, 1 if cut is None else len(cut.depth), verify=True)
        self.calls.end_round()
        self._trees = None
        self._last = picks[-1:]
        self._chain.learn(picks, states)
        self._emit(picks.tolist())
        return len(path) - 1


def verify_tree(
    target: LayerRunner, last: Tensor, cut: Cut | None, slot: int, depths: Sequence[int],
    eos: frozenset[int],
) -> tuple[Tensor, Tensor, list[int]]:  # fmt: skip
    """Run one pass over the last true token (1,), in `slot`, and the nodes of `cut` after it.

    The accepted path is moved together in the target's cache.

    Returns
    -------
    The target's tokens after each token of the path, (path,), their states, (path, width), and
    the path's places in the tree, the root's 0 first: its last token is the target's own, unless
    the path ended with one of `eos`.
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
