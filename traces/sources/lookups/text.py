"""Drafts found in text instead of computed: what a lookup proposes, from token ids alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Proposal(NamedTuple):
    """A proposed token, with its distribution where the lookup has one."""

    token_id: int
    prob: float | None = None
    entropy: float | None = None
    prob_margin: float | None = None


class Lookup(ABC):
    """Proposals for one growing sequence.

    `extend` appends true tokens, first the prompt by itself; `propose` gives the
    continuation that the lookup would draft now.  Both sides, replay and real decoding, run
    this very object.
    """

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Take in that the sequence has grown by `tokens`."""

    @abstractmethod
    def propose(self) -> list[Proposal]:
        """Return the proposed continuation, possibly empty."""


def searching(lookup: Lookup, text: Sequence[int]) -> Callable[[], list[Proposal]]:
    """Return a round's work of a lookup over `text`: take in two tokens more, and propose."""
    lookup.extend(text)
    around = cycle(text)

    def once() -> list[Proposal]:
        lookup.extend([next(around), next(around)])
        return lookup.propose()

    return once


class NGramLookup(Lookup):
    """Copies what followed the earliest occurrence of the longest n-gram at the sequence's end.

    As vLLM's ``NgramProposer`` (``v1/spec_decode/ngram_proposer.py``): of the n-grams at the end, n
    from ``max_n`` down to ``min_n`` (``prompt_lookup_max`` and ``_min``), the longest that ends
    earlier too wins, among its occurrences the leftmost; up to ``k`` (``num_speculative_tokens``)
    tokens that follow are proposed, an id of ``eos`` as the last.
    """

    def __init__(
        self, k: int = 5, min_n: int = 5, max_n: int = 5, eos: frozenset[int] = frozenset()
    ) -> None:
        self.k, self.min_n, self.max_n, self.eos = k, min_n, max_n, eos
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append, and index every n-gram that ends before the last token."""
        self.ids += tokens
        for end in range(self._indexed + 1, len(self.ids)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                self._after.setdefault(tuple(self.ids[end - n : end]), end)
        self._indexed = max(len(self.ids) - 1, 0)

    def propose(self) -> list[Proposal]:
        """Return the tokens that followed; empty if no n-gram recurs."""
        for n in range(min(self.max_n, len(self.ids) - 1), self.min_n - 1, -1):
            if (start := self._after.get(tuple(self.ids[-n:]))) is not None:
                return until_eos(map(Proposal, self.ids[start : start + self.k]), self.eos)
        return []


class PromptLookup(NGramLookup):
    """The same for any n up to ``max_ngram``, with nothing proposed from an id of ``eos`` on.

    As transformers 5.23 ``PromptLookupCandidateGenerator`` (``max_matching_ngram_size`` and, for
    ``num_tokens``, ``prompt_lookup_num_tokens``).
    """

    def __init__(
        self, num_tokens: int = 10, max_ngram: int = 2, eos: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(num_tokens, 1, max_ngram, eos)

    def propose(self) -> list[Proposal]:
        """Return the tokens that followed; empty if no n-gram recurs or EOS followed."""
        return [p for p in super().propose() if p.token_id not in self.eos]


class Datastore:
    """Token sequences to retrieve from (REST, arXiv:2311.08252, sec. 3.1)."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        parts: list[int] = [-1]
        for sequence in sequences:
            parts += [*sequence, -1]  # no match or continuation crosses a sequence's end
        self.ids: npt.NDArray[np.int64] = np.array(parts, dtype=np.int64)
        self._order = np.argsort(self.ids, kind="stable")
        self._sorted = self.ids[self._order]

    def __len__(self) -> int:
        return int((self.ids >= 0).sum())

    def after(self, token: int) -> npt.NDArray[np.int64]:
        """Return indices just after every occurrence of `token`, ascending."""
        low, high = np.searchsorted(self._sorted, [token, token + 1])
        return np.sort(self._order[low:high]) + 1


class Retrieval(Lookup):
    """Drafts the most frequent continuation of the longest suffix found in a datastore.

    REST (arXiv:2311.08252) builds a tree of the most frequent continuations; this is the tree's
    heaviest chain, of up to ``num_tokens``.  Every proposal carries its share among the matching
    continuations, which is REST's weight.  Suffixes of ``max_suffix`` (REST: 16) down to
    ``min_suffix`` (1) tokens are looked for; ids of ``eos`` are never proposed.
    """

    def __init__(
        self,
        store: Datastore,
        num_tokens: int = 10,
        max_suffix: int = 16,
        min_suffix: int = 1,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self.store, self.num_tokens, self.eos = store, num_tokens, eos
        self.max_suffix, self.min_suffix = max_suffix, min_suffix
        self._ids: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in that the sequence has grown by `tokens`."""
        self._ids += tokens

    def propose(self) -> list[Proposal]:
        """Return the heaviest chain; ties go to the smallest token id."""
        at = self._matches()
        ids = self.store.ids
        chosen: list[Proposal] = []
        while len(chosen) < self.num_tokens and len(at):
            following = ids[at]
            if following[0] >= 0 and (following == following[0]).all():
                # One continuation is the usual case: nothing to count.
                token = int(following[0])
                if token in self.eos:
                    break
                chosen.append(Proposal(token, 1.0, 0.0, 1.0))
                at = at + 1
                continue
            found, counts = np.unique(following[following >= 0], return_counts=True)
            if not len(found):
                break
            best = int(counts.argmax())
            token = int(found[best])
            if token in self.eos:
                break
            share = counts / counts.sum()
            top2 = np.sort(share)[-2] if len(share) > 1 else 0.0
            entropy = float(-(share * np.log(share)).sum())
            margin = float(share[best] - top2)
            chosen.append(Proposal(token, float(share[best]), abs(entropy), margin))
            at = at[following == token] + 1
        return chosen

    def _matches(self) -> npt.NDArray[np.int64]:
        """Return indices just after the occurrences of the longest suffix that occurs."""
        ids, store = self._ids, self.store.ids
        at = self.store.after(ids[-1]) if ids else np.empty(0, dtype=np.int64)
        length = 1 if len(at) else 0
        for n in range(2, min(self.max_suffix, len(ids)) + 1):
            # Index 0 of the store is a separator, so at - n never wraps to a token.
            longer = at[store[np.maximum(at - n, 0)] == ids[-n]]
            if not len(longer):
                break
            at, length = longer, n
        return at if length >= self.min_suffix else at[:0]


class NGramPool(Lookup):
    """Drafts the n-gram that most recently followed the last token.

    Lookahead decoding (arXiv:2402.02057) keeps such a pool, keyed by first token, of n-grams from
    its Jacobi iterations in addition to those of prompt and output, and verifies several at once.
    Jacobi iterations need the model, so this pool holds the n-grams of prompt and output alone, and
    the newest is drafted as a chain.  ``ngram``: tokens of an n-gram, key included (N).
    ``guesses``: n-grams kept per key (G).  Ids of ``eos`` are never proposed.
    """

    def __init__(self, ngram: int = 5, guesses: int = 5, eos: frozenset[int] = frozenset()) -> None:
        self.ngram, self.guesses, self.eos = ngram, guesses, eos
        self._ids: list[int] = []
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append, and put every new whole n-gram into the pool."""
        self._ids += tokens
        for start in range(self._indexed, len(self._ids) - self.ngram + 1):
            key, *rest = self._ids[start : start + self.ngram]
            kept = self._pool.setdefault(key, OrderedDict())
            kept[tuple(rest)] = None
            kept.move_to_end(tuple(rest))
            if len(kept) > self.guesses:
                kept.popitem(last=False)
        self._indexed = max(len(self._ids) - self.ngram + 1, 0)

    def propose(self) -> list[Proposal]:
        """Return the newest n-gram after the last token."""
        kept = self._pool.get(self._ids[-1]) if self._ids else None
        newest = next(reversed(kept)) if kept else ()
        return [Proposal(t) for t in takewhile(lambda t: t not in self.eos, newest)]


class NGramSimpleLookup(Lookup):
    """Copies what followed the latest earlier occurrence of the last n-gram.

    As llama.cpp's ``ngram-simple`` (``common/ngram-map.cpp``, 2026): n-grams of `size_n` tokens
    alone, of which the last one and one at the beginning of the sequence do not count; up to
    `size_m` tokens that follow, the sequence's last one excepted, and none if they are fewer than
    `size_n`; none at all in a sequence of at most ``size_n + size_m + 2`` tokens.  The server
    copies on past an end of the text (``eos``), after which nothing could be accepted.
    """

    def __init__(
        self, size_n: int = 12, size_m: int = 48, eos: frozenset[int] = frozenset()
    ) -> None:
        self.size_n, self.size_m, self.eos = size_n, size_m, eos
        self._ids: list[int] = []
        # Of every n-gram that something but the last token follows, the index after its last one.
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = self.size_n

    def extend(self, tokens: Sequence[int]) -> None:
        """Append, and index every n-gram that ends before the last token but one."""
        self._ids += tokens
        for end in range(self._indexed + 1, len(self._ids) - 1):
            self._after[tuple(self._ids[end - self.size_n : end])] = end
        self._indexed = max(len(self._ids) - 2, self._indexed)

    def propose(self) -> list[Proposal]:
        """Return the tokens that followed; empty if there are too few, or no n-gram recurs."""
        ids = self._ids
        start = self._after.get(tuple(ids[-self.size_n :]))
        if start is None or len(ids) <= self.size_n + self.size_m + 2:
            return []
        copied = ids[start : min(start + self.size_m, len(ids) - 1)]
        few = len(copied) < self.size_n
        return [] if few else until_eos(map(Proposal, copied), self.eos)


def until_eos(proposals: Iterable[Proposal], eos: frozenset[int]) -> list[Proposal]:
    """Return `proposals` up to the first that ends a sequence, which is proposed too."""
    chosen: list[Proposal] = []
    for proposal in proposals:
        chosen.append(proposal)
        if proposal.token_id in eos:
            break
    return chosen
