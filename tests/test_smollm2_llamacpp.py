"""llama.cpp's server on SmolLM2: its rule, followed with the draft model, makes what it counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from docs.llamacpp_tables import COUNTS, answers, asked, settings
from profiler.smollm2 import places
from simulator.tune.llamacpp import LlamaCppSetting
from traces.acceptance.trace import Request

pytestmark = pytest.mark.real_model

LIKELIEST = 10
REQUESTS = ("81", "161", "401")
"""One of usual text, one whose draft proposes an end early, one that ends in a draft."""


@pytest.fixture(scope="module")
def draft() -> Any:
    folder = places.folder("smollm2-draft")
    if not (folder / "config.json").is_file():
        pytest.skip("smollm2-draft is not there: `draftsim fetch smollm2` brings it")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("run", sorted(settings()))
def test_its_rule_makes_its_counts(draft: Any, run: str) -> None:
    given = [answer for answer in answers(run) if answer["id"] in REQUESTS]
    assert len(given) == len(REQUESTS)
    for answer, request in zip(given, asked(given).requests, strict=True):
        found = followed(draft, request, answer["tokens"], settings()[run])
        assert found == tuple(answer["timings"].get(name, 0) for name in COUNTS), request.id


@torch.inference_mode()
def followed(
    model: Any, request: Request, output: Sequence[int], setting: LlamaCppSetting
) -> tuple[int, int]:
    """Drafted and accepted tokens along `output`: probabilities over the likeliest tokens alone,
    no stop at a proposed end of the text, which is accepted as a draft's last token only."""
    assert request.prompt_ids is not None
    ids, cache = [*request.prompt_ids, *output], DynamicCache()
    drafted = accepted = 0
    position, read = 1, 0
    while position < len(output):
        known = len(request.prompt_ids) + position
        tokens: list[int] = []
        new = ids[read:known]
        while len(tokens) < min(setting.tokens, request.max_new_tokens - 1 - position):
            logits = model(torch.tensor([new]), past_key_values=cache).logits[0, -1]
            best = logits.topk(LIKELIEST)
            if best.values.softmax(-1)[0] < setting.p_min:
                break
            new = [int(best.indices[0])]
            tokens += new
        if cache.get_seq_length() > known:
            cache.crop(known - cache.get_seq_length())
        read = cache.get_seq_length()
        if len(tokens) < setting.fewest:
            tokens = []
        ahead = output[position : position + len(tokens)]
        same = next((k for k, t in enumerate(ahead) if t != tokens[k]), len(ahead))
        own = position + same == len(output) and same < len(tokens)
        drafted, accepted = drafted + len(tokens), accepted + same - own
        position += same + 1
    return drafted, accepted
