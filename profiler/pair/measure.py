"""The figures of the bundled pair's CARD.md, measured again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from scipy.stats import kruskal
from transformers import DynamicCache, LlamaForCausalLM

from profiler.pair.models import load
from profiler.pair.prompts import continue_greedily, unique_4gram_share
from profiler.pair.text import load_documents
from profiler.pair.training import Stream
from traces.store.text import json_lines


@torch.inference_mode()
def step_seconds(model: LlamaForCausalLM, prompt: Sequence[int], steps: int = 100) -> float:
    """Median seconds of one cached decoding step at batch 1 after `prompt`."""
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
    """Prints the figures of CARD.md as Markdown: agreement and repetition, held-out loss, times."""
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
    stream = Stream(load_documents()[1], tokenizer)
    tokens = torch.cat([stream.batch(512, torch.Generator().manual_seed(i)) for i in range(8)])
    for label, model in (("target", target), ("draft", draft)):
        logits = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten()).item()
        print(f"held-out loss of the {label}: {loss:.3f} nats a token")
    torch.set_num_threads(1)
    slow, fast = (step_seconds(model, prompt) for model in (target, draft))
    print(
        f"1 thread, batch 1: T_target {slow * 1e3:.2f} ms, T_draft {fast * 1e3:.2f} ms a token, "
        f"T_target/T_draft {slow / fast:.2f}"
    )
