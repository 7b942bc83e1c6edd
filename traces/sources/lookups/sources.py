"""Lookup as a draft source: the replay recomputes each proposal where a round begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from policies.core import Round, caught_up
from policies.vectorised import Ints, VectorisedPlan, own_word
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import CALL_KINDS, Counted, pack_counted
from traces.replay.layout import Foreseen
from traces.replay.rounds import Fidelity
from traces.replay.walk import Walk
from traces.sources.base import (
    DRAFTER_SIGNALS,
    Recordings,
    Source,
    SourceReplay,
    SourceToken,
    Walked,
    eos_of,
    prompt_tokens,
    true_tokens,
)
from traces.sources.lookups.occurrences import (
    BETWEEN,
    copied,
    first_ends,
    last_end,
    text_of,
    until_eos,
)
from traces.sources.lookups.retrieval import retrieved
from traces.sources.lookups.text import (
    Datastore,
    Lookup,
    NGramPool,
    PromptLookup,
    Proposal,
    Retrieval,
)
from traces.store.text import json_lines

EARLIER = "earlier"


class Served(NamedTuple):
    """A request that was served before."""

    prompt: list[int]
    output: list[int]


class LookupReplay(SourceReplay):
    """Decodes one recorded request with a lookup over its own true tokens.

    ``begin`` gives the lookup, when it is first asked.
    """

    def __init__(
        self, trace: Trace, request: int, begin: Callable[[], Lookup], kind: int, first: int
    ) -> None:
        super().__init__(trace, request, first)
        self._begin, self._kind = begin, kind
        self._lookup: Lookup | None = None
        self._prompt = prompt_tokens(trace, request)
        self._seen = 0
        self._proposed: tuple[int, list[Proposal]] = (-1, [])

    def _proposals(self) -> list[Proposal]:
        if self._lookup is None:
            self._lookup = self._begin()
            self._lookup.extend(self._prompt)
        if self._proposed[0] != self.position:
            self._lookup.extend(self.output[self._seen : self.position])
            self._seen = self.position
            self._proposed = (self.position, self._lookup.propose())
        return self._proposed[1]

    def run_length(self) -> int:
        """Leading proposals that are the target's own tokens."""
        true = self.output[self.position :]
        run = 0
        for proposal, token in zip(self._proposals(), true, strict=False):
            if proposal.token_id != token:
                break
            run += 1
        return run

    def draft(self, so_far: Sequence[Any]) -> SourceToken | None:
        """The next token of this round's proposal; None at its end."""
        if not so_far:
            self.calls.add(self._kind, 1)
        proposals = self._proposals()
        if len(so_far) >= len(proposals):
            return None
        return proposed(proposals[len(so_far)])

    def charge(self, submitted: int) -> int:
        """An ordinary verification over the draft and the last token."""
        return submitted + 1

    def rounds(self, longest: int) -> Iterator[Round]:
        """Return the rounds of drafts of `longest` tokens, or what is proposed if less.

        As `policies.core.speculate` makes them, without a question before every token.
        """
        catch_up = 1
        while (remaining := self.remaining) > 0:
            at, drafted, accepted = self.position, 0, 0
            if most := min(longest, remaining - 1):
                self.calls.add(self._kind, 1)
                proposals = self._proposals()
                drafted = min(most, len(proposals))
                for proposal, true in zip(proposals, self.output[at : at + drafted], strict=False):
                    if proposal.token_id != true:
                        break
                    accepted += 1
            self.calls.end_round()
            self.position = min(at + accepted + 1, self.length)
            yield Round(at, drafted, accepted, self.position - at, drafted, catch_up)
            catch_up = caught_up(catch_up, drafted, accepted, False)

    def at_once(
        self, trace: Trace, source: Source, plan: VectorisedPlan, first: int, chosen: Sequence[int]
    ) -> Walked | None:
        """Return the rounds of a length, where all proposals of `trace` can be found at once."""
        if not plan.is_length:
            return None
        try:
            proposed: Ints | None = own_word(source, "drafted", trace)
        except DraftsimError:
            return None
        if proposed is None:
            return None
        places = Foreseen(trace)
        right = _right(trace, proposed[:, : plan.cap], places.ends)
        places.foresee((proposed >= 0).sum(axis=1), right)
        walk = Walk(places, first, False)
        drafts = walk.drafts(plan)
        assert drafts is not None
        drafted, accepted = drafts[0], np.minimum(drafts[0], walk.runs)
        start = walk.begun(accepted + 1, chosen)
        rounds = walk.told(start, *(values[start] for values in (drafted, drafted, accepted)))
        rounds["request"] = np.searchsorted(chosen, rounds["request"])
        # A search that finds nothing is one too.
        asked = np.flatnonzero(np.minimum(places.left[start], plan.cap) > 0)
        ones = np.ones_like(asked)
        return rounds, pack_counted([Counted(False, self._kind, asked, ones, ones)])


def _right(trace: Trace, proposed: Ints, ends: Ints) -> Ints:
    """Leading proposals that are the target's own tokens, at every position."""
    output = np.array(true_tokens(trace))
    at = np.arange(len(output))[:, None] + np.arange(proposed.shape[1])
    right = (at < ends[:, None]) & (proposed == output.take(at, mode="clip"))
    found: Ints = np.cumprod(right, axis=1).sum(axis=1)
    return found


class LookupSource(Source):
    """A source that searches token sequences."""

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """One search a draft."""
        return ((self.name, "forward"),)

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[Served]]) -> Lookup:
        """A lookup for one request; ``corpus()`` gives the requests served before it."""
        raise NotImplementedError

    def drafted(self, trace: Trace) -> Ints | None:
        """Tokens proposed at every output position, where all can be found at once.

        Shape (positions of all requests, tokens); `BETWEEN` after the last that is proposed.  None:
        the lookup is asked wherever a round begins.  A subclass needs its own method.
        """
        del trace
        return None

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Needs prompt and output tokens, which `draftsim profile` records."""
        del recordings
        kind = CALL_KINDS.index((self.name, "forward"))
        eos = eos_of(trace)

        def decoder(request: int) -> LookupReplay:
            def begin() -> Lookup:
                return self.lookup(eos, lambda: served_before(trace, request))

            return LookupReplay(trace, request, begin, kind, first)

        return decoder


def served_before(trace: Trace, request: int) -> list[Served]:
    """Prompt and output of every request recorded before this one."""
    output, starts = true_tokens(trace), trace.request_starts
    return [
        Served(prompt_tokens(trace, i), output[int(starts[i]) : int(starts[i + 1])])
        for i in range(request)
    ]


class PLD(LookupSource):
    """Prompt lookup decoding, as transformers 5.23 does it (see `PromptLookup`)."""

    name = "pld"
    what = "prompt lookup (transformers 5.23 PromptLookupCandidateGenerator), recomputed from ids"

    def __init__(self, num_tokens: int = 10, max_ngram: int = 2) -> None:
        PromptLookup(num_tokens, max_ngram)
        self.num_tokens, self.max_ngram = num_tokens, max_ngram

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[Served]]) -> Lookup:
        """Searches the request's own tokens."""
        del corpus
        return PromptLookup(self.num_tokens, self.max_ngram, eos)

    def drafted(self, trace: Trace) -> Ints:
        """Longer n-grams stand in for shorter ones."""
        text = text_of(trace)
        found = first_ends(text, 1, self.max_ngram)
        tokens = copied(text.ids, found, text.places, self.num_tokens)
        return until_eos(tokens, eos_of(trace), proposed=False)


class REST(LookupSource):
    """Retrieval from a datastore (arXiv:2311.08252), its heaviest chain.

    ``corpus`` is ``earlier`` (prompts and outputs of the requests recorded before, as a
    server's history) or a file of token sequences: JSON, one list of ids a line.
    """

    name = "rest"
    what = "REST (arXiv:2311.08252), heaviest chain of its tree; exact for the chain"
    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS - {"logit_margin"}

    def __init__(
        self,
        corpus: str = EARLIER,
        num_tokens: int = 10,
        max_suffix: int = 16,
        min_suffix: int = 1,
    ) -> None:
        Retrieval(Datastore([]), num_tokens, max_suffix, min_suffix)
        self.corpus, self.num_tokens = corpus, num_tokens
        self.max_suffix, self.min_suffix = max_suffix, min_suffix
        self._store: Datastore | None = None

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[Served]]) -> Lookup:
        """Searches the datastore; one from a file is read once."""
        if self.corpus == EARLIER:
            store = Datastore([served.prompt + served.output for served in corpus()])
        else:
            store = self._read()
        return Retrieval(store, self.num_tokens, self.max_suffix, self.min_suffix, eos)

    def _read(self) -> Datastore:
        if self._store is None:
            self._store = Datastore(read_corpus(self.corpus))
        return self._store

    def drafted(self, trace: Trace) -> Ints:
        """All requests in one text, of which each searches what stands before it."""
        earlier = self.corpus == EARLIER
        before = [BETWEEN] if earlier else self._read().ids.tolist()
        text = text_of(trace, before)
        until = text.begins if earlier else np.full_like(text.begins, len(before))
        return retrieved(
            text.ids, text.places, until, self.num_tokens, self.max_suffix, self.min_suffix,
            sorted(eos_of(trace)),
        )  # fmt: skip


class Lookahead(LookupSource):
    """An n-gram pool after lookahead decoding (arXiv:2402.02057; see `NGramPool`)."""

    name = "lookahead"
    what = (
        "n-gram pool after lookahead decoding (arXiv:2402.02057), of prompt and output only: the "
        "paper's Jacobi n-grams are missing, so it accepts fewer tokens"
    )
    fidelity: ClassVar[Fidelity] = "approximate"

    def __init__(self, ngram: int = 5, guesses: int = 5) -> None:
        NGramPool(ngram, guesses)
        self.ngram, self.guesses = ngram, guesses

    def lookup(self, eos: frozenset[int], corpus: Callable[[], Sequence[Served]]) -> Lookup:
        """Pools the request's own tokens."""
        del corpus
        return NGramPool(self.ngram, self.guesses, eos)

    def drafted(self, trace: Trace) -> Ints:
        """Return what follows the last token's newest occurrence that begins a whole n-gram."""
        text = text_of(trace)
        found = last_end(text.ids, text, text.begins, text.places + 1 - self.ngram)
        tokens = copied(text.ids, found, text.places, self.ngram - 1)
        return until_eos(tokens, eos_of(trace), proposed=False)


def proposed(proposal: Proposal) -> SourceToken:
    """The drafted token of a proposal, which is the likeliest one and nobody draws."""
    token, prob, entropy, margin = proposal
    return SourceToken(token, False, prob, entropy, None, margin, top_prob=prob, raw_prob=prob)


def read_corpus(path: str | Path) -> list[list[int]]:
    """Token sequences from a file of one JSON list of ids a line; DraftsimError naming the line."""
    sequences: list[list[int]] = []
    for number, ids in json_lines(path, remedy="write a JSON list of token ids a line"):
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise DraftsimError(
                f"{path} line {number}: is not a JSON list of token ids: write one a line"
            )
        sequences.append(ids)
    return sequences
