"""The bundled pair's prompts, and the figures of its CARD.md.

Prompts are beginnings of held-out documents whose continuations do not end in a loop.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from scipy.stats import kruskal
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.training.pair import DocumentBatches, load, write_greedily
from profiler.train.documents import (
    CATEGORIES,
    Document,
    Known,
    cuts,
    load_documents,
    stable_hash,
)
from profiler.train.minutes import prediction_loss
from traces.store.text import json_lines

MAX_NEW_TOKENS = 128  # limit of a greedy continuation when prompts are picked or measured
MIN_UNIQUE_4GRAMS = 0.6  # a prompt whose continuation repeats itself more than this is dropped
PROMPTS_PER_CATEGORY = 14
PICKED = tuple(c for c in CATEGORIES if c != "table")  # too few tables are no charmap


def continue_greedily(
    model: LlamaForCausalLM, prompt: Sequence[int], limit: int = MAX_NEW_TOKENS
) -> list[int]:
    """Return token ids that follow `prompt`, the likeliest each time: at most `limit`, EOS
    included.
    """
    written = write_greedily(model, torch.tensor([list(prompt)]), limit)
    new: list[int] = written[0, len(prompt) :].tolist()
    end = model.config.eos_token_id
    return new[: new.index(end) + 1] if end in new else new


def unique_4gram_share(tokens: Sequence[int]) -> float:
    """Return distinct 4-grams over all 4-grams of `tokens` (1.0 = no repetition; 1.0 below 4
    tokens).
    """
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
    """Return the prompts, and per category how many candidates were (tried, dropped for
    repetition).

    Candidates come in hash order from held-out documents; one whose text occurs anywhere in the
    training text is no candidate. The first PROMPTS_PER_CATEGORY whose greedy continuation has a
    unique 4-gram share of at least MIN_UNIQUE_4GRAMS are kept. The draft takes no part in this.
    """
    known = Known(train_documents)
    encode = partial(tokenizer.encode, verbose=False)  # documents may be longer than the context
    rows: list[dict[str, str]] = []
    counts: dict[str, tuple[int, int]] = {}
    ordered = sorted(held_out, key=lambda document: stable_hash(document.text))
    for category in track(PICKED, description="prompts     "):
        candidates = list(cuts(ordered, category, known, encode))
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


def save_prompts(out: Path) -> None:
    """Pick the prompts and write `out`/prompts.jsonl.

    The pair is read back for it: rounding to fp16 can change a greedy path.
    """
    target, _, tokenizer = load(out)
    documents, held_out = load_documents()
    rows, counts = pick_prompts(target, tokenizer, documents, held_out)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / "prompts.jsonl").write_text(text, encoding="utf-8")
    for category, (tried, dropped) in counts.items():
        print(f"{category}: {tried} candidates tried, {dropped} dropped for repetition")


@torch.inference_mode()
def step_seconds(model: LlamaForCausalLM, prompt: Sequence[int], steps: int = 100) -> float:
    """Return the median seconds of one cached decoding step at batch 1 after `prompt`."""
    cache = DynamicCache(config=model.config)
    step = torch.tensor([list(prompt)])
    seconds: list[float] = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        step = model(input_ids=step, past_key_values=cache).logits[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


@torch.inference_mode()
def measure_pair(out: Path) -> None:
    """Print the figures of CARD.md as Markdown: agreement and repetition, held-out loss, times."""
    target, draft, tokenizer = load(out)
    lines = [row for _, row in json_lines(out / "prompts.jsonl")]
    table: dict[str, list[tuple[float, ...]]] = {}
    prompt: list[int] = []
    for row in track(lines, description="measuring   "):
        prompt = tokenizer.encode(row["prompt"])
        new = continue_greedily(target, prompt)
        path = torch.tensor([prompt + new[:-1]])
        p, q = (
            model(input_ids=path).logits[0, len(prompt) - 1 :].softmax(-1)
            for model in (target, draft)
        )
        agreed = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
        overlap = torch.minimum(p, q).sum(-1).mean().item()
        ended = float(new[-1] == target.config.eos_token_id)
        figures = (agreed, overlap, unique_4gram_share(new), len(prompt), len(new), ended)
        table.setdefault(row["category"], []).append(figures)
    print(
        "| category | prompts | greedy agreement | overlap of distributions | unique 4-grams "
        "| prompt tokens | new tokens | end in EOS |"
    )
    print("|---|---|---|---|---|---|---|---|")
    everything = [row for rows in table.values() for row in rows]
    for name, rows in [*table.items(), ("all", everything)]:
        a, o, u, n, new_tokens, ended = (statistics.fmean(c) for c in zip(*rows, strict=True))
        print(
            f"| {name} | {len(rows)} | {a:.2f} | {o:.2f} | {u:.2f} | {n:.0f} | {new_tokens:.0f} "
            f"| {ended * len(rows):.0f} |"
        )
    told = kruskal(*([row[0] for row in rows] for rows in table.values())).pvalue
    print(f"chance of such differences in agreement between like categories: {told:.3f}")
    stream = DocumentBatches(load_documents()[1], tokenizer)
    tokens = torch.cat([stream.batch(512, torch.Generator().manual_seed(i)) for i in range(8)])
    for label, model in (("target", target), ("draft", draft)):
        loss = prediction_loss(model, tokens).item()
        print(f"held-out loss of the {label}: {loss:.3f} nats a token")
    torch.set_num_threads(1)
    slow, fast = (step_seconds(model, prompt) for model in (target, draft))
    print(
        f"1 thread, batch 1: T_target {slow * 1e3:.2f} ms, T_draft {fast * 1e3:.2f} ms a token, "
        f"T_target/T_draft {slow / fast:.2f}"
    )
