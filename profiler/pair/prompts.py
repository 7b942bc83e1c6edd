"""The prompts of the bundled pair: beginnings of held-out documents that do not end in a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.progress import track
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from profiler.pair.text import CATEGORIES, Document, stable_hash

MAX_NEW_TOKENS = 128  # limit of a greedy continuation when prompts are picked or measured
MIN_UNIQUE_4GRAMS = 0.6  # a prompt whose continuation repeats itself more than this is dropped
PROMPTS_PER_CATEGORY = 14
PICKED = tuple(c for c in CATEGORIES if c != "table")  # too few tables are no charmap
_PROMPT_TOKENS = (48, 128)  # least and most
_MIN_LEFT_TOKENS = 24  # of a document after the prompt, so that there is something to continue


def cut_prompt(text: str, encode: Callable[[str], list[int]]) -> str | None:
    """The first lines of a document as a prompt of _PROMPT_TOKENS tokens, or None if none fits.

    The length aimed at differs by document. The cut is at the end of a line, before its line
    break: there the prompt's tokens are the first tokens of the document, as in training.
    """
    shortest, longest = _PROMPT_TOKENS
    aim = shortest + stable_hash(text) % (longest - shortest + 1)
    total = len(encode(text))
    lines = text.split("\n")
    for count in range(len(lines) - 1, 0, -1):
        prompt = "\n".join(lines[:count])
        length = len(encode(prompt))
        if lines[count - 1] and shortest <= length <= min(aim, total - _MIN_LEFT_TOKENS):
            return prompt
    return None


@torch.inference_mode()
def continue_greedily(
    model: LlamaForCausalLM, prompt: Sequence[int], limit: int = MAX_NEW_TOKENS
) -> list[int]:
    """Token ids that follow `prompt`, the likeliest each time: at most `limit`, EOS included."""
    cache = DynamicCache(config=model.config)
    new: list[int] = []
    step = torch.tensor([list(prompt)])
    while len(new) < limit and (not new or new[-1] != model.config.eos_token_id):
        step = model(input_ids=step, past_key_values=cache).logits[:, -1:].argmax(-1)
        new.append(int(step))
    return new


def unique_4gram_share(tokens: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams of `tokens` (1.0 = no repetition; 1.0 below 4 tokens)."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _screen(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> list[bool]:
    """Return True for each greedy continuation that repeats itself little enough, in one batch."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    model: Any = target  # the type hints of `generate` do not fit the class they are on
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    width = inputs["input_ids"].shape[1]
    rows = [
        [token for token in row[width:] if token != tokenizer.pad_token_id] for row in out.tolist()
    ]
    return [unique_4gram_share(row) >= MIN_UNIQUE_4GRAMS for row in rows]


def pick_prompts(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train_documents: Sequence[Document],
    held_out: Sequence[Document],
) -> tuple[list[dict[str, str]], dict[str, tuple[int, int]]]:
    """The prompts, and per category how many candidates were (tried, dropped for repetition).

    Candidates come in hash order from held-out documents; one whose text occurs anywhere in the
    training text is no candidate. The first PROMPTS_PER_CATEGORY whose greedy continuation has a
    unique 4-gram share of at least MIN_UNIQUE_4GRAMS are kept. The draft takes no part in this.
    """
    seen_in_training = "\0".join(document.text for document in train_documents)
    encode = partial(tokenizer.encode, verbose=False)  # documents may be longer than the context
    rows: list[dict[str, str]] = []
    counts: dict[str, tuple[int, int]] = {}
    ordered = sorted(held_out, key=lambda document: stable_hash(document.text))
    for category in track(PICKED, description="prompts     "):
        cuts = (cut_prompt(d.text, encode) for d in ordered if d.category == category)
        candidates = list(dict.fromkeys(c for c in cuts if c and c not in seen_in_training))
        kept: list[str] = []
        tried = 0
        while len(kept) < PROMPTS_PER_CATEGORY and tried < len(candidates):
            batch = candidates[tried : tried + PROMPTS_PER_CATEGORY]
            for prompt, passed in zip(batch, _screen(target, tokenizer, batch), strict=True):
                tried += 1
                # A batch rounds differently from one prompt alone, so what passed is done again.
                alone = continue_greedily(target, encode(prompt)) if passed else []
                if passed and unique_4gram_share(alone) >= MIN_UNIQUE_4GRAMS:
                    kept.append(prompt)
                if len(kept) == PROMPTS_PER_CATEGORY:
                    break
        counts[category] = (tried, tried - len(kept))
        rows += [
            {"id": f"{category}-{i:02}", "category": category, "prompt": prompt}
            for i, prompt in enumerate(kept)
        ]
    return rows, counts
