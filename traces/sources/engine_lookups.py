"""Lookups as serving engines do them: n-grams of vLLM and llama.cpp, and suffix decoding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

from traces.acceptance.trace import Trace
from traces.replay.calls import CALL_KINDS
from traces.sources.base import Recordings, SourceReplay, prompt_tokens, true_tokens
from traces.sources.lookup import Lookup, Proposal
from traces.sources.lookup_sources import LookupReplay, LookupSource, Served
from traces.sources.ngram import NGramLookup, NGramSimpleLookup
from traces.sources.suffix import SuffixLookup, SuffixTree


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
        """Needs prompt and output tokens; the drafts of all starts are found once a trace."""
        del recordings
        if self._found is None or self._found[0]() is not trace:
            self._found = weakref.ref(trace), _Proposals(self, trace)
        proposals = self._found[1]
        kind = CALL_KINDS.index((self.name, "forward"))
        return lambda request: LookupReplay(
            trace, request, lambda: proposals.of(request), kind, first
        )


class _Proposals:
    """What suffix decoding drafts at every position of a trace, found request by request.

    A draft depends on the true tokens alone, so every policy meets the same.
    """

    def __init__(self, source: Suffix, trace: Trace) -> None:
        self._source = source
        self._output, self._starts = true_tokens(trace), trace.request_starts
        self._prompts = [prompt_tokens(trace, i) for i in range(len(trace.requests))]
        self._eos = frozenset(trace.meta.get("eos_token_ids") or ())
        self._served = SuffixTree(source.depth) if source.cached else None
        self._known: list[list[list[Proposal]]] = []

    def of(self, request: int) -> Lookup:
        """A lookup that says what was found for a request."""
        while len(self._known) <= request:
            self._known.append(self._next(len(self._known)))
        return _Known(self._known[request])

    def _next(self, request: int) -> list[list[Proposal]]:
        lookup = self._source.begin(self._served, self._eos)
        lookup.extend(self._prompts[request])
        found = [lookup.propose()]
        for token in self._output[int(self._starts[request]) : int(self._starts[request + 1])]:
            lookup.extend([token])
            found.append(lookup.propose())
        return found


class _Known(Lookup):
    def __init__(self, found: list[list[Proposal]]) -> None:
        self._found, self._position = found, -1

    def extend(self, tokens: Sequence[int]) -> None:
        self._position = 0 if self._position < 0 else self._position + len(tokens)

    def propose(self) -> list[Proposal]:
        return self._found[self._position]
