"""Lookups as serving engines do them: n-grams of vLLM and llama.cpp, and suffix decoding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from policies.vectorised import Ints
from traces.acceptance.trace import Trace
from traces.replay.calls import CALL_KINDS
from traces.sources.base import Recordings, SourceReplay, eos_of, prompt_tokens, true_tokens
from traces.sources.lookups.ngram import NGramLookup, NGramSimpleLookup
from traces.sources.lookups.occurrences import (
    BETWEEN,
    copied,
    first_ends,
    last_end,
    strings,
    text_of,
    until_eos,
)
from traces.sources.lookups.sources import LookupReplay, LookupSource, Served
from traces.sources.lookups.suffix import SuffixLookup, SuffixTree
from traces.sources.lookups.text import Lookup, Proposal


class NGram(LookupSource):
    """vLLM's method ``ngram`` (see `NGramLookup`)."""

    name = "ngram"
    what = "vLLM's n-gram proposer, recomputed from token ids"

    def __init__(self, k: int = 5, min_n: int = 5, max_n: int = 5) -> None:
        NGramLookup(k, min_n, max_n)
        self.k, self.min_n, self.max_n = k, min_n, max_n

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[Served]]) -> Lookup:
        """Searches the request's own tokens."""
        del corpus
        return NGramLookup(self.k, self.min_n, self.max_n, eos)

    def drafted(self, trace: Trace) -> Ints:
        """Longer n-grams stand in for shorter ones."""
        text = text_of(trace)
        found = first_ends(text, self.min_n, self.max_n)
        tokens = copied(text.ids, found, text.places, self.k)
        return until_eos(tokens, eos_of(trace), proposed=True)


class NGramSimple(LookupSource):
    """llama.cpp's ``--spec-type ngram-simple`` (see `NGramSimpleLookup`)."""

    name = "ngram-simple"
    what = "llama.cpp's ngram-simple, recomputed from token ids"

    def __init__(self, size_n: int = 12, size_m: int = 48) -> None:
        NGramSimpleLookup(size_n, size_m)
        self.size_n, self.size_m = size_n, size_m

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[Served]]) -> Lookup:
        """Searches the request's own tokens."""
        del corpus
        return NGramSimpleLookup(self.size_n, self.size_m, eos)

    def drafted(self, trace: Trace) -> Ints:
        """Return all drafts.  An n-gram at the start, or before the last token, does not count."""
        text = text_of(trace)
        ids, begins, places = text
        found = last_end(strings(ids, self.size_n), text, begins + self.size_n, places - 2)
        short = places - begins < self.size_n + self.size_m + 2
        few = np.minimum(places - 1 - found, self.size_m) < self.size_n
        found = np.where(short | few, BETWEEN, found)
        return until_eos(copied(ids, found, places - 1, self.size_m), eos_of(trace), proposed=True)


class Suffix(LookupSource):
    """vLLM's method ``suffix`` (see `SuffixLookup`), requests served one after another.

    ``cached``: whether outputs of the requests recorded before are searched too; the engine
    evicts the oldest beyond 10,000, which is not replayed.
    """

    name = "suffix"
    what = "suffix decoding (arXiv:2411.04975) as in vLLM, recomputed from token ids; exact"
    signals: ClassVar[frozenset[str]] = frozenset({"token_id", "prob"})

    def __init__(
        self, num_tokens: int = 24, depth: int = 24, factor: float = 1.0, min_prob: float = 0.1,
        cached: bool = True,
    ) -> None:  # fmt: skip
        SuffixLookup(None, num_tokens, depth, factor, min_prob)
        self.num_tokens, self.depth, self.factor = num_tokens, depth, factor
        self.min_prob, self.cached = min_prob, cached
        self._found: tuple[weakref.ref[Trace], _Proposals] | None = None

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[Served]]) -> Lookup:
        """Searches the request's own tokens and what was served."""
        if not self.cached:
            return self.begin(None, eos)
        served = SuffixTree(self.depth)
        for one in corpus():
            served.begin()
            served.extend(one.output)
        return self.begin(served, eos)

    def begin(self, served: SuffixTree | None, eos: frozenset[int]) -> SuffixLookup:
        """A lookup over `served`, which its outputs join."""
        return SuffixLookup(served, self.num_tokens, self.depth, self.factor, self.min_prob, eos)

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Return the decoder of one request; drafts are looked up once per trace."""
        del recordings
        if self._found is None or self._found[0]() is not trace:
            self._found = weakref.ref(trace), _Proposals(self, trace)
        proposals = self._found[1]
        kind = CALL_KINDS.index((self.name, "forward"))
        return lambda request: LookupReplay(
            trace, request, lambda: _Known(proposals, request), kind, first
        )


class _Proposals:
    """The drafts of suffix decoding along a trace, found when they are asked for.

    A draft depends on the true tokens alone, so every policy gets the same.  The trees grow with
    the first policy that is replayed, and nothing is looked up between its rounds.  After the first
    question about an earlier position, the trees are read at every position.
    """

    def __init__(self, source: Suffix, trace: Trace) -> None:
        self._source = source
        output, starts = true_tokens(trace), trace.request_starts.tolist()
        self._outputs = [output[begin:end] for begin, end in pairwise(starts)]
        self._prompts = [prompt_tokens(trace, i) for i in range(len(trace.requests))]
        self._eos = eos_of(trace)
        self._known: dict[tuple[int, int], list[Proposal]] = {}
        self._every = False
        self._rewind()

    def at(self, request: int, position: int) -> list[Proposal]:
        """Return the draft after the first `position` output tokens of a request."""
        place = request, position
        if place not in self._known:
            if place < (self._request, self._position):
                self._every = True
                self._rewind()
            while self._request < request:
                self._next()
            self._go(position)
            self._look_up()
        return self._known[place]

    def _rewind(self) -> None:
        self._served = SuffixTree(self._source.depth) if self._source.cached else None
        self._lookup: SuffixLookup | None = None
        self._request, self._position = -1, 0

    def _next(self) -> None:
        if self._lookup is not None:
            self._go(len(self._outputs[self._request]))
        self._request, self._position = self._request + 1, 0
        self._lookup = self._source.begin(self._served, self._eos)
        self._lookup.extend(self._prompts[self._request])

    def _go(self, until: int) -> None:
        """Take in the output up to a position."""
        while self._position < until:
            if self._every:
                self._look_up()
            end = self._position + 1 if self._every else until
            assert self._lookup is not None
            self._lookup.extend(self._outputs[self._request][self._position : end])
            self._position = end

    def _look_up(self) -> None:
        place = self._request, self._position
        if place not in self._known and self._lookup is not None:
            self._known[place] = self._lookup.propose()


class _Known(Lookup):
    """A lookup that returns what was found for a request."""

    def __init__(self, proposals: _Proposals, request: int) -> None:
        self._proposals, self._request, self._position = proposals, request, -1

    def extend(self, tokens: Sequence[int]) -> None:
        self._position = 0 if self._position < 0 else self._position + len(tokens)

    def propose(self) -> list[Proposal]:
        return self._proposals.at(self._request, self._position)
