"""Drafts of the engines' own lookups: vLLM's n-grams, and arctic-inference's suffix trees.

vLLM uses the latter for its own suffix decoding. Runs in the engine's environment
(`tests.engine_runs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

NGRAMS = [(5, 5, 5), (3, 1, 4), (4, 2, 3), (1, 1, 1), (8, 2, 6)]
"""Tokens drafted, and the shortest and longest n-gram looked for."""
SUFFIXES = [(24, 1.0, 0.1, 6), (6, 2.0, 0.0, 3), (10, 1.5, 0.3, 12), (64, 0.5, 0.1, 2)]
"""The tree's depth, tokens drafted for each matched, the least probability, and the vocabulary."""


def random_texts(seed: int, count: int, longest: int, vocabulary: int) -> Iterator[list[int]]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield random.integers(vocabulary, size=random.integers(1, longest)).tolist()


def ngram_texts() -> list[list[int]]:
    return [
        ids
        for seed, vocabulary in ((2, 2), (3, 5), (4, 30))
        for ids in random_texts(seed, 300, 80, vocabulary)
    ]


def suffix_texts(depth: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what is said to them, one request after another."""
    texts = list(random_texts(depth, 24, 120, vocabulary))
    return list(zip(texts[::2], texts[1::2], strict=True))


def _ngrams(k: int, min_n: int, max_n: int) -> list[list[int]]:
    from vllm.v1.spec_decode import ngram_proposer

    drafts = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
    return [
        drafts(np.array(ids, np.int32), min_n, max_n, 10_000, k).tolist() for ids in ngram_texts()
    ]


def _suffixes(depth: int, factor: float, least: float, vocabulary: int) -> list[Any]:
    """Tokens and their probabilities, at every token of every request."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache, drafts = SuffixDecodingCache(depth, 10_000), []
    for number, (prompt, output) in enumerate(suffix_texts(depth, vocabulary)):
        cache.start_request(number, prompt)
        for i, token in enumerate(output):
            cache.add_active_response(number, [token])
            draft = cache.speculate(
                number, [*prompt, *output[: i + 1]][-depth:], max_spec_tokens=depth,
                max_spec_factor=factor, min_token_prob=least,
            )  # fmt: skip
            drafts.append([list(draft.token_ids), list(draft.probs)])
        cache.stop_request(number)
    return drafts


def looked_up() -> dict[str, Any]:
    """``{"ngrams": one list of drafts a setting, "suffixes": the same}``; suffixes None where
    arctic-inference is not installed."""
    try:
        suffixes = [_suffixes(*setting) for setting in SUFFIXES]
    except ModuleNotFoundError as error:
        if error.name != "arctic_inference":
            raise
        suffixes = None
    return {"ngrams": [_ngrams(*setting) for setting in NGRAMS], "suffixes": suffixes}
