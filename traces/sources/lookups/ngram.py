"""N-grams as vLLM and llama.cpp look them up: what followed an earlier occurrence."""

from __future__ import annotations

from collections.abc import Sequence

from policies.parameters import whole
from traces.sources.lookups.text import FirstOccurrences, Lookup, Proposal


class NGramLookup(Lookup):
    """Copies what followed the earliest occurrence of the longest n-gram at the sequence's end.

    As vLLM's ``NgramProposer`` (``v1/spec_decode/ngram_proposer.py``): of the n-grams at the
    end, n from ``max_n`` down to ``min_n``, the longest that ends earlier too wins, among its
    occurrences the leftmost; up to ``k`` tokens that follow are proposed.  Unlike transformers'
    prompt lookup it does not fall below ``min_n``, and copies end-of-sequence tokens, after which
    the sequence would be over.

    Parameters
    ----------
    k:
        vLLM's ``num_speculative_tokens``.
    min_n, max_n:
        vLLM's ``prompt_lookup_min`` and ``prompt_lookup_max``.
    eos:
        Ids after which nothing is proposed.
    """

    def __init__(
        self, k: int = 5, min_n: int = 5, max_n: int = 5, eos: frozenset[int] = frozenset()
    ) -> None:
        whole("k", k, 1)
        whole("min_n", min_n, 1)
        whole("max_n", max_n, min_n)
        self.k, self.min_n, self.max_n, self.eos = k, min_n, max_n, eos
        self._seen = FirstOccurrences(min_n, max_n)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append and index."""
        self._seen.extend(tokens)

    def propose(self) -> list[Proposal]:
        """Return the tokens that followed; empty if no n-gram recurs."""
        return until_eos(self._seen.following(self.k), self.eos)


class NGramSimpleLookup(Lookup):
    """Copies what followed the latest earlier occurrence of the last n-gram.

    As llama.cpp's ``ngram-simple`` (``common/ngram-map.cpp``, 2026): n-grams of `size_n` tokens
    alone, of which the last one and one at the beginning of the sequence do not count; up to
    `size_m` tokens that follow, the sequence's last one excepted, and none if they are fewer than
    `size_n`; none at all in a sequence of at most ``size_n + size_m + 2`` tokens.  The server
    copies on past an end of the text, after which nothing could be accepted.

    Parameters
    ----------
    size_n, size_m:
        ``--spec-ngram-simple-size-n`` and ``-size-m``, with the server's defaults.
    eos:
        Ids after which nothing is proposed.
    """

    def __init__(
        self, size_n: int = 12, size_m: int = 48, eos: frozenset[int] = frozenset()
    ) -> None:
        whole("size_n", size_n, 1)
        whole("size_m", size_m, 1)
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
        """Return the tokens that followed; empty if the n-gram does not recur or if they are too
        few.
        """
        ids = self._ids
        start = self._after.get(tuple(ids[-self.size_n :]))
        if start is None or len(ids) <= self.size_n + self.size_m + 2:
            return []
        copied = ids[start : min(start + self.size_m, len(ids) - 1)]
        return until_eos(copied, self.eos) if len(copied) >= self.size_n else []


def until_eos(tokens: Sequence[int], eos: frozenset[int]) -> list[Proposal]:
    """Proposals of `tokens` up to the first that ends a sequence, which is proposed too."""
    chosen: list[Proposal] = []
    for token in tokens:
        chosen.append(Proposal(token))
        if token in eos:
            break
    return chosen
