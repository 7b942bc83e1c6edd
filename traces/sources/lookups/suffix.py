"""Suffix decoding: drafts from counted continuations of what the sequence ends with.

As the ``SuffixDecodingCache`` of arctic-inference 0.1.1, which vLLM's method ``suffix`` calls
(Oliaro et al., arXiv:2411.04975): a tree of the request's own tokens, and one of the outputs
of all requests served, this one's included.  Both keep what occurred once as a place in the
text alone; the strings of its nodes, their counts and order are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from traces.sources.lookups.occurrences import BETWEEN
from traces.sources.lookups.text import Lookup, Proposal, until_eos


class Node:
    """The number of times that one string occurs in the sequences, and what follows it.

    Most strings of a text occur once: a child is then no node, but the place in the text that
    its one occurrence goes on at.
    """

    __slots__ = ("children", "count", "order")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node | int] = {}
        self.order: list[int] = []
        """Tokens of the children, most frequent first."""

    def rise(self, token: int, count: int) -> None:
        """Move a child of `count`, about to count one more, past those it then exceeds.

        Not the first, which has none before it.  Ties decide drafts, so they fall as they do
        there: a child that only joins those of the next count goes before them, one that leaves its
        equals goes after.
        """
        order, children = self.order, self.children
        at = order.index(token)
        if (above := _count(children[order[at - 1]])) > count + 1:
            return
        to = at
        while to and _count(children[order[to - 1]]) == above:
            to -= 1
        order.insert(to, order.pop(at))


def _count(child: Node | int) -> int:
    return 1 if isinstance(child, int) else child.count


class SuffixTree:
    """Counts of all strings up to `depth` tokens in sequences that grow one at a time."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._root = Node()
        self._text: list[int] = []
        # The ends of the sequence that occurred before, by their length less one.
        self._ends: list[Node] = []

    def begin(self) -> None:
        """Begin a new sequence: no string spans it and the one before."""
        self._text.append(BETWEEN)
        self._ends = []

    def append(self, token: int) -> None:
        """Let the sequence grow by a token."""
        self._text.append(token)
        first = self._root.children.get(token)
        if not isinstance(first, Node):
            first = self._root.children[token] = Node()
        # What is most frequent of all is never asked, and long to keep in order.
        first.count += 1
        ends = [first]
        for length, node in enumerate(self._ends[: self.depth - 1], 2):
            child = node.children.get(token)
            if child is None:
                # An end that did not occur before makes no longer one occur.
                node.children[token] = len(self._text)
                node.order.append(token)
                continue
            if node.order[0] != token:
                node.rise(token, _count(child))
            if isinstance(child, int):
                child = node.children[token] = self._seen_once(child, length)
            child.count += 1
            ends.append(child)
        self._ends = ends

    def extend(self, tokens: Sequence[int]) -> None:
        """Let the sequence grow by `tokens`."""
        for token in tokens:
            self.append(token)

    def _seen_once(self, place: int, length: int) -> Node:
        """Return the node of a string of `length` whose one occurrence goes on at `place`."""
        node = Node()
        node.count = 1
        if (after := self.after(place, length)) is not None:
            node.children[after] = place + 1
            node.order.append(after)
        return node

    def after(self, place: int, length: int) -> int | None:
        """Return what follows the one occurrence of a string of `length`; None if nothing does."""
        if length >= self.depth or place >= len(self._text) or self._text[place] == BETWEEN:
            return None
        return self._text[place]

    def matches(self, context: Sequence[int]) -> Iterator[tuple[int, Node | int]]:
        """Yield ever longer ends of a context, short of all of it, that something follows.

        Each with its length and its node, or the place where its one occurrence goes on.
        """
        text, ends = self._text, self._ends
        same, most = 0, len(context) - 1
        if text[-most:] == context[-most:]:
            same = most
        while same < min(most, len(text)) and text[-1 - same] == context[-1 - same]:
            same += 1
        for matched in range(1, most + 1):
            if matched <= same:
                # Of what the text itself ends with, nothing follows what did not occur before.
                if matched > len(ends):
                    return
                node: Node | int | None = ends[matched - 1]
            else:
                node = self._find(context[len(context) - matched :])
            if node is None or self.next(node, matched) is None:
                return
            yield matched, node

    def next(self, at: Node | int, length: int) -> int | None:
        """Return the token most frequent after a string of `length`; None if nothing follows."""
        if isinstance(at, int):
            return self.after(at, length)
        return at.order[0] if at.order else None

    def _find(self, tokens: Sequence[int]) -> Node | int | None:
        at: Node | int | None = self._root
        for length, token in enumerate(tokens):
            if isinstance(at, Node):
                at = at.children.get(token)
            elif at is None or self.after(at, length) != token:
                return None
            else:
                at += 1
        return at


SuffixDraft = tuple[list[int], list[float], float]
"""Tokens, the probability of each by the counts, and their sum."""
NOTHING: SuffixDraft = [], [], 0.0


def best_draft(
    tree: SuffixTree, context: Sequence[int], most: int, factor: float, least: float,
    best: SuffixDraft = NOTHING,
) -> SuffixDraft:  # fmt: skip
    """Return the best-scored draft over all lengths of the context's end, the longest among equals.

    A match of n tokens allows ``n factor`` drafted ones; each is the most frequent after those
    before it, as long as the product of their shares is at least `least`.  In float32, as there.
    ``best``: another tree's draft, which is kept unless it is outscored.
    """
    # Sums, products and quotients of float32 are rounded alike by way of double: it is as exact.
    single = array("f", (factor, least))
    factor, least = single
    for matched, end in reversed([*tree.matches(context)]):
        node = end
        single[0] = matched * factor
        allowed = max(min(most, int(single[0] + 1e-6)), 0)
        # A token scores one at most, and a shorter match allows no more of them.
        if allowed <= best[2]:
            break
        tokens: list[int] = []
        probs: list[float] = []
        prob, total = 1.0, 0.0
        while len(tokens) < allowed:
            token = tree.next(node, matched + len(tokens))
            if token is None:
                break
            # What occurred once is followed by what occurred once.
            if isinstance(node, int):
                node += 1
            else:
                child = node.children[token]
                single[0] = _count(child) / node.count
                single[0] = prob * single[0]
                prob, node = single[0], child
            if prob < least:
                break
            tokens.append(token)
            probs.append(prob)
            single[0] = total + prob
            total = single[0]
        if total > best[2]:
            best = tokens, probs, total
    return best


class SuffixLookup(Lookup):
    """Suffix decoding of one request.

    ``served`` holds the outputs of the requests before, and takes this one's; None keeps nothing
    across requests (vLLM's ``suffix_decoding_max_cached_requests=0``).  The parameters are vLLM's
    ``num_speculative_tokens``, ``suffix_decoding_max_tree_depth``,
    ``suffix_decoding_max_spec_factor`` and ``suffix_decoding_min_token_prob``; nothing is proposed
    after ids of ``eos``.
    """

    def __init__(
        self, served: SuffixTree | None, num_tokens: int, depth: int, factor: float,
        min_prob: float, eos: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.num_tokens, self.depth, self.factor = num_tokens, depth, factor
        self.min_prob, self.eos = min_prob, eos
        self._own, self._served = SuffixTree(depth), served
        if served is not None:
            served.begin()
        self._context: list[int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the prompt, and then outputs: these alone join what was served."""
        self._own.extend(tokens)
        if self._context is None:
            self._context = []
        elif self._served is not None:
            self._served.extend(tokens)
        self._context = [*self._context, *tokens][-self.depth :]

    def propose(self) -> list[Proposal]:
        """Return the better-scored draft of both trees, the request's own among equals."""
        context, best = self._context or [], NOTHING
        for tree in (self._own, self._served):
            if tree is not None:
                best = best_draft(tree, context, self.num_tokens, self.factor, self.min_prob, best)
        tokens, probs, _ = best
        return until_eos(map(Proposal, tokens, probs), self.eos)
