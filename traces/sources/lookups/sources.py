"""Lookup as a draft source: the replay recomputes each proposal where a round begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from policies.arrays import Ints
from policies.spec import parameter, parameters, whole, within
from policies.vectorised import VectorisedPlan, own_word
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import CALL_KINDS, Calls, pack_counted
from traces.replay.decoder import RecordedToken
from traces.replay.layout import Foreseen, Lockstep
from traces.replay.rounds import Fidelity
from traces.sources.as_draft import laid_out, with_searches
from traces.sources.base import (
    DRAFTER_SIGNALS,
    ReplayedRounds,
    Source,
    SourceReplay,
    eos_of,
    leading,
    leading_right,
    prompt_tokens,
    true_tokens,
)
from traces.sources.lookups.occurrences import (
    BETWEEN,
    copied,
    first_ends,
    last_end,
    retrieved,
    strings,
    text_of,
    until_eos,
)
from traces.sources.lookups.suffix import SuffixLookup, SuffixTree
from traces.sources.lookups.text import (
    Datastore,
    Lookup,
    NGramLookup,
    NGramPool,
    NGramSimpleLookup,
    PromptLookup,
    Proposal,
    Retrieval,
)
from traces.sources.recording import Recordings
from traces.store.text import json_lines

EARLIER = "earlier"


class ServedRequest(NamedTuple):
    """The text of a request."""

    prompt: list[int]
    output: list[int]


class LookupReplay(SourceReplay):
    """Decodes one recorded request with a lookup over its own true tokens."""

    def __init__(self, trace: Trace, request: int, first: int, source: LookupSource) -> None:
        super().__init__(trace, request, first)
        self._source, self._kind, self._place = source, source.kind, (trace, request)
        self._ask: Callable[[int], list[Proposal]] | None = None
        self._proposed: tuple[int, list[Proposal]] = (-1, [])
        prompt_tokens(trace, request)  # refuses a trace without them

    def _proposals(self) -> list[Proposal]:
        if self._proposed[0] != self.position:
            self._ask = self._ask or self._source.along(*self._place)
            self._proposed = (self.position, self._ask(self.position))
        return self._proposed[1]

    def run_length(self) -> int:
        """Return the number of leading proposals that are the target's own tokens."""
        return leading((p.token_id for p in self._proposals()), self.output[self.position :])

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the next token of this round's proposal; None at its end."""
        if not so_far:
            self.calls.add(self._kind, 1)
        proposals = self._proposals()
        if len(so_far) >= len(proposals):
            return None
        return proposed(proposals[len(so_far)])

    def at_once(
        self, trace: Trace, plan: VectorisedPlan, first: int, chosen: Sequence[int]
    ) -> ReplayedRounds | None:
        """Return the rounds of a length, where all proposals of `trace` can be found at once."""
        if not plan.is_length:
            return None
        try:
            proposed: Ints | None = own_word(self._source, "drafted", trace)
        except DraftsimError:
            return None
        if proposed is None:
            return None
        places = Foreseen(trace)
        right = leading_right(proposed[:, : plan.cap], true_tokens(trace), places.ends)
        places.foresee((proposed >= 0).sum(axis=1), right)
        lockstep = Lockstep(places, first, False)
        drafts = lockstep.drafts(plan)
        assert drafts is not None
        drafted = drafts[0]
        start, rounds = lockstep.of(chosen, drafted, drafted, np.minimum(drafted, lockstep.runs))
        # A search that finds nothing is one too.
        asked = np.flatnonzero(np.minimum(places.left[start], plan.cap) > 0)
        return rounds, pack_counted([Calls.of(self._kind, asked)])


class LookupSource(Source):
    """A source that searches token sequences."""

    searches: ClassVar[Callable[..., Lookup] | None] = None
    """Class of the search, if it needs nothing but the text, parameters, and the end token."""

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """One search a draft."""
        return ((self.name, "forward"),)

    @property
    def reads_earlier(self) -> bool:
        """True if it searches requests that were served before, too."""
        return False

    @property
    def kind(self) -> int:
        """Index of a search in `CALL_KINDS`."""
        return CALL_KINDS.index((self.name, "forward"))

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[ServedRequest]]) -> Lookup:
        """Return a lookup for one request; ``corpus()`` gives the requests served before.

        An engine keeps them for a source that `reads_earlier` alone.
        """
        assert self.searches is not None, "a subclass without a class that searches has a method"
        return self.searches(*(getattr(self, name) for name in parameters(type(self))), eos)

    def drafted(self, trace: Trace) -> Ints | None:
        """Return tokens proposed at every output position, where all can be found at once.

        Shape (positions, tokens), `BETWEEN` at the end; None: the lookup is asked at every round.
        """
        return None

    def drafts_along(self, trace: Trace, recordings: Recordings) -> Trace:
        """Return the outputs with what is found after every position: often nothing."""
        drafted = self.drafted(trace)
        assert drafted is not None, "`unlike` says which lookups find all at once"
        held = drafted >= 0
        held[:, 0] = True
        meta: dict[str, Any] = {
            "drafts": self.name, "drafter": self.name, "takes_verified": False, "drafts_end": True,
            "finds_nothing": True,
        }  # fmt: skip
        if self.fidelity != "exact":
            meta["fidelity"] = self.fidelity
        return laid_out(trace, np.where(drafted < 0, -1, drafted), held, {}, meta)

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with a search for every sequence in every round."""
        return with_searches(latency, self.name)

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Open the decoders, which need prompt and output tokens."""
        return lambda request: LookupReplay(trace, request, first, self)

    def along(self, trace: Trace, request: int) -> Callable[[int], list[Proposal]]:
        """Return a function from later and later positions of an output to the proposals there."""
        lookup = self.lookup(eos_of(trace), lambda: served_before(trace, request))
        text, seen = served_in(trace, request), 0
        lookup.extend(text.prompt)

        def at(position: int) -> list[Proposal]:
            nonlocal seen
            lookup.extend(text.output[seen:position])
            seen = position
            return lookup.propose()

        return at


def served_before(trace: Trace, request: int) -> list[ServedRequest]:
    """Return prompt and output of every request recorded before this one."""
    return [served_in(trace, i) for i in range(request)]


def served_in(trace: Trace, request: int) -> ServedRequest:
    """Return prompt and output of a recorded request."""
    begin, end = trace.request_starts[request : request + 2].tolist()
    return ServedRequest(prompt_tokens(trace, request), true_tokens(trace)[begin:end])


@dataclass(eq=False)
class PLD(LookupSource):
    """Prompt lookup decoding, as transformers 5.23 does it (see `PromptLookup`)."""

    name = "pld"
    unlike = None
    searches = PromptLookup
    what = "prompt lookup (transformers 5.23 PromptLookupCandidateGenerator), recomputed from ids"

    num_tokens: int = parameter(10, whole, 1)
    max_ngram: int = parameter(2, whole, 1)

    def drafted(self, trace: Trace) -> Ints:
        """Return the tokens proposed everywhere; longer n-grams stand in for shorter ones."""
        text = text_of(trace)
        found = first_ends(text, 1, self.max_ngram)
        tokens = copied(text.ids, found, text.places, self.num_tokens)
        return until_eos(tokens, eos_of(trace), proposed=False)


@dataclass(eq=False)
class REST(LookupSource):
    """Retrieval from a datastore (arXiv:2311.08252), its heaviest chain.

    ``corpus`` is ``earlier`` (prompts and outputs of the requests recorded before, as a
    server's history) or a file of token sequences: JSON, one list of ids a line.
    """

    name = "rest"
    what = "REST (arXiv:2311.08252), heaviest chain of its tree; exact for the chain"
    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS - {"logit_margin"}

    corpus: str = EARLIER
    num_tokens: int = parameter(10, whole, 1)
    max_suffix: int = 16
    min_suffix: int = parameter(1, whole, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("max_suffix", self.max_suffix, self.min_suffix)
        self._store: Datastore | None = None

    @property
    def reads_earlier(self) -> bool:
        """True without a file as corpus."""
        return self.corpus == EARLIER

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[ServedRequest]]) -> Lookup:
        """Search the datastore; one from a file is read once."""
        if self.reads_earlier:
            store = Datastore([served.prompt + served.output for served in corpus()])
        else:
            store = self._read()
        return Retrieval(store, self.num_tokens, self.max_suffix, self.min_suffix, eos)

    def _read(self) -> Datastore:
        if self._store is None:
            self._store = Datastore(read_corpus(self.corpus))
        return self._store

    def drafted(self, trace: Trace) -> Ints:
        """Search all requests in one text, each in what comes before it."""
        earlier = self.reads_earlier
        before = [BETWEEN] if earlier else self._read().ids.tolist()
        text = text_of(trace, before)
        until = text.begins if earlier else np.full_like(text.begins, len(before))
        return retrieved(
            text.ids, text.places, until, self.num_tokens, self.max_suffix, self.min_suffix,
            sorted(eos_of(trace)),
        )  # fmt: skip


@dataclass(eq=False)
class Lookahead(LookupSource):
    """An n-gram pool after lookahead decoding (arXiv:2402.02057; see `NGramPool`)."""

    name = "lookahead"
    unlike = None
    searches = NGramPool
    what = (
        "n-gram pool after lookahead decoding (arXiv:2402.02057), of prompt and output only: the "
        "paper's Jacobi n-grams are missing, so it accepts fewer tokens"
    )
    fidelity: ClassVar[Fidelity] = "approximate"

    ngram: int = parameter(5, whole, 2)
    guesses: int = parameter(5, whole, 1)

    def drafted(self, trace: Trace) -> Ints:
        """Return what follows the last token's newest occurrence that begins a whole n-gram."""
        text = text_of(trace)
        found = last_end(text.ids, text, text.begins, text.places + 1 - self.ngram)
        tokens = copied(text.ids, found, text.places, self.ngram - 1)
        return until_eos(tokens, eos_of(trace), proposed=False)


def proposed(proposal: Proposal) -> RecordedToken:
    """Return the drafted token of a proposal, which is the likeliest one and nobody draws."""
    token, prob, entropy, margin = proposal
    return RecordedToken(token, False, prob, entropy, None, margin, top_prob=prob, raw_prob=prob)


def read_corpus(path: str | Path) -> list[list[int]]:
    """Read a file of one JSON list of token ids a line; DraftsimError names a wrong line."""
    sequences: list[list[int]] = []
    for number, ids in json_lines(path, remedy="write a JSON list of token ids a line"):
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise DraftsimError(
                f"{path} line {number}: is not a JSON list of token ids: write one a line"
            )
        sequences.append(ids)
    return sequences


@dataclass(eq=False)
class NGram(LookupSource):
    """vLLM's method ``ngram`` (see `NGramLookup`)."""

    name = "ngram"
    unlike = None
    searches = NGramLookup
    what = "vLLM's n-gram proposer, recomputed from token ids"

    k: int = parameter(5, whole, 1)
    min_n: int = parameter(5, whole, 1)
    max_n: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("max_n", self.max_n, self.min_n)

    def drafted(self, trace: Trace) -> Ints:
        """Return the tokens proposed everywhere; longer n-grams stand in for shorter ones."""
        text = text_of(trace)
        found = first_ends(text, self.min_n, self.max_n)
        tokens = copied(text.ids, found, text.places, self.k)
        return until_eos(tokens, eos_of(trace), proposed=True)


@dataclass(eq=False)
class NGramSimple(LookupSource):
    """llama.cpp's ``--spec-type ngram-simple`` (see `NGramSimpleLookup`)."""

    name = "ngram-simple"
    unlike = None
    searches = NGramSimpleLookup
    what = "llama.cpp's ngram-simple, recomputed from token ids"

    size_n: int = parameter(12, whole, 1)
    size_m: int = parameter(48, whole, 1)

    def drafted(self, trace: Trace) -> Ints:
        """Return all drafts.  An n-gram at the start, or before the last token, does not count."""
        text = text_of(trace)
        ids, begins, places = text
        found = last_end(strings(ids, self.size_n), text, begins + self.size_n, places - 2)
        short = places - begins < self.size_n + self.size_m + 2
        few = np.minimum(places - 1 - found, self.size_m) < self.size_n
        found = np.where(short | few, BETWEEN, found)
        return until_eos(copied(ids, found, places - 1, self.size_m), eos_of(trace), proposed=True)


@dataclass(eq=False)
class Suffix(LookupSource):
    """vLLM's method ``suffix`` (see `SuffixLookup`), requests served one after another.

    ``cached``: whether outputs of the requests recorded before are searched too; the engine
    evicts the oldest beyond 10,000, which is not replayed.
    """

    name = "suffix"
    what = "suffix decoding (arXiv:2411.04975) as in vLLM, recomputed from token ids; exact"
    signals: ClassVar[frozenset[str]] = frozenset({"token_id", "prob"})

    num_tokens: int = parameter(24, whole, 1)
    depth: int = parameter(24, whole, 1)
    factor: float = parameter(1.0, within, 0)
    min_prob: float = parameter(0.1, within, 0, 1)
    cached: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._found: tuple[weakref.ref[Trace], _Proposals] | None = None

    @property
    def reads_earlier(self) -> bool:
        """True if outputs are `cached`."""
        return self.cached

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[ServedRequest]]) -> Lookup:
        """Search the request's own tokens and what was served."""
        if not self.cached:
            return self.begin(None, eos)
        served = SuffixTree(self.depth)
        for one in corpus():
            served.begin()
            served.extend(one.output)
        return self.begin(served, eos)

    def begin(self, served: SuffixTree | None, eos: frozenset[int]) -> SuffixLookup:
        """Return a lookup over `served`, which its outputs join."""
        return SuffixLookup(served, self.num_tokens, self.depth, self.factor, self.min_prob, eos)

    def along(self, trace: Trace, request: int) -> Callable[[int], list[Proposal]]:
        """Return the drafts of a recorded request, which are looked up once per trace."""
        if self._found is None or self._found[0]() is not trace:
            self._found = weakref.ref(trace), _Proposals(self, trace)
        return partial(self._found[1].at, request)


class _Proposals:
    """The drafts of suffix decoding along a trace, found when they are asked for.

    A draft depends on the true tokens alone, so every policy gets the same.  The trees grow with
    the first policy that is replayed, and nothing is looked up between its rounds.  After the first
    question about an earlier position, the trees are read at every position.
    """

    def __init__(self, source: Suffix, trace: Trace) -> None:
        self._source = source
        self._texts = served_before(trace, len(trace.requests))
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
            self._go(len(self._texts[self._request].output))
        self._request, self._position = self._request + 1, 0
        self._lookup = self._source.begin(self._served, self._eos)
        self._lookup.extend(self._texts[self._request].prompt)

    def _go(self, until: int) -> None:
        """Take in the output up to a position."""
        while self._position < until:
            if self._every:
                self._look_up()
            end = self._position + 1 if self._every else until
            assert self._lookup is not None
            self._lookup.extend(self._texts[self._request].output[self._position : end])
            self._position = end

    def _look_up(self) -> None:
        place = self._request, self._position
        if place not in self._known and self._lookup is not None:
            self._known[place] = self._lookup.propose()
