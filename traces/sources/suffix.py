"""Suffix decoding: drafts from counted continuations of what the sequence ends with.

As the ``SuffixDecodingCache`` of arctic-inference 0.1.1, which vLLM's method ``suffix`` calls
(Oliaro et al., arXiv:2411.04975): a tree of the request's own tokens, and one of the outputs
of all requests served, this one's included.  Its trees are compressed; here every token is a
node, which counts the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies.parameters import whole, within
from traces.sources.lookup import Lookup, Proposal


class Node:
    """What sequences hold behind one string: how often it occurs, and what follows."""

    __slots__ = ("children", "count", "order")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}
        self.order: list[int] = []
        """Tokens of the children, most frequent first."""

    def follow(self, token: int) -> Node:
        """The child of `token`, counted once more."""
        child = self.children.get(token)
        if child is None:
            child = self.children[token] = Node()
            child.count = 1
            self.order.append(token)
        else:
            self._rise(token, child)
            child.count += 1
        return child

    def _rise(self, token: int, child: Node) -> None:
        """Move a child, about to count one more, past those it then exceeds.

        Ties decide drafts, so they fall as they do there: a child that only joins those of the
        next count goes before them, one that leaves equals behind goes after.
        """
        order, children = self.order, self.children
        at = order.index(token)
        if not at or (above := children[order[at - 1]].count) > child.count + 1:
            return
        to = at
        while to and children[order[to - 1]].count == above:
            to -= 1
        order.insert(to, order.pop(at))


class SuffixTree:
    """Counts of all strings up to `depth` tokens in sequences that grow one at a time."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node()
        self._active: deque[Node] = deque()

    def begin(self) -> None:
        """A new sequence: no string spans it and the one before."""
        self._active = deque()

    def append(self, token: int) -> None:
        """The sequence grows by a token."""
        if len(self._active) == self.depth:
            self._active.popleft()
        self._active = deque(node.follow(token) for node in self._active)
        # What is most frequent of all is never asked, and long to keep in order.
        first = self.root.children.setdefault(token, Node())
        first.count += 1
        self._active.append(first)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence grows by `tokens`."""
        for token in tokens:
            self.append(token)

    def find(self, tokens: Sequence[int]) -> Node | None:
        """The node behind a string, None if it does not occur."""
        node: Node | None = self.root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
        return node


class Draft(NamedTuple):
    """Tokens, the probability of each by the counts, and their sum."""

    tokens: list[int]
    probs: list[float]
    score: float


def speculate(
    tree: SuffixTree, context: Sequence[int], most: int, factor: float, least: float
) -> Draft:
    """The best-scored draft over all lengths of the context's end, the longest among equals.

    A match of n tokens allows ``n factor`` drafted ones; each is the most frequent behind those
    before, as long as the product of their shares is at least `least`.  In float32, as there.
    """
    best, score = Draft([], [], 0.0), np.float32(0)
    for matched in range(1, len(context)):
        node = tree.find(context[len(context) - matched :])
        if node is None:
            break
        allowed = max(min(most, int(float(np.float32(matched) * np.float32(factor)) + 1e-6)), 0)
        tokens: list[int] = []
        probs: list[float] = []
        prob, total = np.float32(1), np.float32(0)
        while len(tokens) < allowed and node.order:
            token = node.order[0]
            child = node.children[token]
            prob = prob * (np.float32(child.count) / np.float32(node.count))
            if prob < np.float32(least):
                break
            tokens.append(token)
            probs.append(float(prob))
            total = total + prob
            node = child
        if total >= score:
            best, score = Draft(tokens, probs, float(total)), total
    return best


class SuffixLookup(Lookup):
    """Suffix decoding of one request.

    Parameters
    ----------
    served:
        Holds the outputs of the requests before, and takes this one's; None: nothing is kept
        across requests (vLLM's ``suffix_decoding_max_cached_requests=0``).
    num_tokens, depth, factor, min_prob:
        vLLM's ``num_speculative_tokens``, ``suffix_decoding_max_tree_depth``,
        ``suffix_decoding_max_spec_factor`` and ``suffix_decoding_min_token_prob``.
    eos:
        Ids behind which nothing is proposed.
    """

    def __init__(
        self, served: SuffixTree | None, num_tokens: int = 24, depth: int = 24,
        factor: float = 1.0, min_prob: float = 0.1, eos: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        whole("num_tokens", num_tokens, 1)
        whole("depth", depth, 1)
        within("factor", factor, 0)
        within("min_prob", min_prob, 0, 1)
        self.num_tokens, self.depth, self.factor = num_tokens, depth, factor
        self.min_prob, self.eos = min_prob, eos
        self._own, self._served = SuffixTree(depth), served
        if served is not None:
            served.begin()
        self._context: list[int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """The prompt, and then outputs: these alone join what was served."""
        self._own.extend(tokens)
        if self._context is None:
            self._context = []
        elif self._served is not None:
            self._served.extend(tokens)
        self._context = [*self._context, *tokens][-self.depth :]

    def propose(self) -> list[Proposal]:
        """The better-scored draft of both trees, the request's own among equals."""
        context, trees = self._context or [], [self._own]
        if self._served is not None:
            trees.append(self._served)
        drafts = [
            speculate(tree, context, self.num_tokens, self.factor, self.min_prob) for tree in trees
        ]
        best = max(drafts, key=lambda draft: draft.score)
        chosen: list[Proposal] = []
        for token, prob in zip(best.tokens, best.probs, strict=True):
            chosen.append(Proposal(token, prob))
            if token in self.eos:
                break
        return chosen
