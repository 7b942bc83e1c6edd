"""llama.cpp's server on SmolLM2: its rule, followed with the draft model, makes what it counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from docs.llamacpp_tables import COUNTS, answers, asked, settings
from profiler.fetched import places
from traces.acceptance.trace import Request

pytestmark = pytest.mark.real_model

LIKELIEST = 10
REQUESTS = ("81", "161", "401")
"""One of usual text, one whose draft proposes an end early, one that ends in a draft."""


class Draft:
    """The draft model's predictions after a text; no text is read twice."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, DynamicCache()
        self._held: list[int] = []
        self._said: dict[tuple[int, ...], tuple[float, int]] = {}

    @torch.inference_mode()
    def read(self, text: Sequence[int], last: int = 1) -> None:
        """In one pass, `text` and its beginnings that are up to `last` - 1 tokens shorter."""
        if tuple(text) in self._said:
            return
        held = 0
        while held < min(len(self._held), len(text) - last) and self._held[held] == text[held]:
            held += 1
        if held < len(self._held):
            self._cache.crop(held - len(self._held))
        new = torch.tensor([text[held:]])
        logits = self._model(new, past_key_values=self._cache, logits_to_keep=last).logits[0]
        best = logits.topk(LIKELIEST)
        first = best.values.softmax(-1)[:, 0].tolist(), best.indices[:, 0].tolist()
        for length, said in enumerate(zip(*first, strict=True), len(text) - last + 1):
            self._said[tuple(text[:length])] = said
        self._held = [*text]

    def says(self, text: Sequence[int]) -> tuple[float, int]:
        """The likeliest token, and its probability among the likeliest."""
        self.read(text)
        return self._said[tuple(text)]


@pytest.fixture(scope="module")
def draft() -> Draft:
    folder = places.folder("smollm2-draft")
    if not (folder / "config.json").is_file():
        pytest.skip("smollm2-draft is not there: `draftsim fetch smollm2` brings it")
    return Draft(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.mark.parametrize("run", sorted(settings()))
def test_its_rule_makes_its_counts(draft: Draft, run: str) -> None:
    given = [answer for answer in answers(run) if answer["id"] in REQUESTS]
    assert len(given) == len(REQUESTS)
    for answer, request in zip(given, asked(given).requests, strict=True):
        found = followed(draft, request, answer["tokens"], settings()[run])
        assert found == tuple(answer["timings"].get(name, 0) for name in COUNTS), request.id


def followed(
    draft: Draft, request: Request, output: Sequence[int], setting: Mapping[str, Any]
) -> tuple[int, int]:
    """Drafted and accepted tokens along `output`: probabilities over the likeliest tokens alone,
    no stop at a proposed end of the text, which is accepted as a draft's last token only."""
    assert request.prompt_ids is not None
    most, fewest, p_min = setting.values()
    ids = [*request.prompt_ids, *output]
    draft.read(ids[:-1], len(output) - 1)  # most drafts begin along it
    drafted = accepted = 0
    position = 1
    while position < len(output):
        known = ids[: len(request.prompt_ids) + position]
        tokens: list[int] = []
        while len(tokens) < min(most, request.max_new_tokens - 1 - position):
            sure, token = draft.says([*known, *tokens])
            if sure < p_min:
                break
            tokens.append(token)
        if len(tokens) < fewest:
            tokens = []
        ahead = output[position : position + len(tokens)]
        same = next((k for k, t in enumerate(ahead) if t != tokens[k]), len(ahead))
        own = position + same == len(output) and same < len(tokens)
        drafted, accepted = drafted + len(tokens), accepted + same - own
        position += same + 1
    return drafted, accepted
