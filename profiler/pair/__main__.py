"""Trains the bundled target/draft pair and measures it.

    python -m profiler.pair --out profiler/bundled             # trains, saves, picks the prompts
    python -m profiler.pair --out profiler/bundled --measure   # the figures of CARD.md

The target is GROWN from the draft: it starts as the draft plus layers that add nothing yet, and
trains on. The two therefore agree far more often than two small models trained apart would. The
finished target is then trained out of its loops (`profiler.pair.repetition`), and last the draft
is distilled towards it. The seeds and step counts are fixed, so the weights are the same on every
run on one machine with one thread count.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from profiler.pair.measure import measure_pair
from profiler.pair.models import build_model, grow, load, save, train_tokenizer
from profiler.pair.prompts import pick_prompts
from profiler.pair.text import load_documents
from profiler.pair.training import Stage, Stream, train

DRAFT = Stage("draft", 800, 1)
MIDDLE = Stage("3 layers", 1400, 2)
TARGET = Stage("target", 1200, 3)
UNLOOP = Stage("unloop", 200, 4, rate=0.3, own_text=True)
DISTIL = Stage("distil draft", 450, 5, rate=0.5, own_text=True)
DRAFT_LAYERS, MIDDLE_LAYERS, TARGET_LAYERS = 1, 3, 8


def make_pair(out: Path, shrink: int = 1) -> None:
    """Trains and saves the pair and its prompts under `out`; `shrink` divides the step counts."""
    console = Console()
    documents, held_out = load_documents()
    tokenizer = train_tokenizer(documents)
    stream = Stream(documents, tokenizer)
    console.print(f"{len(documents)} documents, {len(stream.ids)} tokens, {len(held_out)} held out")
    torch.manual_seed(0)

    def run(
        model: LlamaForCausalLM, stage: Stage, teacher: LlamaForCausalLM | None = None
    ) -> LlamaForCausalLM:
        loss = train(model, stream, replace(stage, steps=stage.steps // shrink), teacher)
        console.print(f"{stage.name}: loss {loss:.3f} nats a token")
        return model

    draft = run(build_model(DRAFT_LAYERS), DRAFT)
    # Most of the learning is done at a depth that is cheap to train; the last layers come late.
    middle = run(grow(draft, MIDDLE_LAYERS), MIDDLE)
    target = run(grow(middle, TARGET_LAYERS), TARGET)
    target = run(target, UNLOOP)
    draft = run(draft, DISTIL, teacher=target)
    save(target, tokenizer, out / "target")
    save(draft, tokenizer, out / "draft")
    save_prompts(out)


def save_prompts(out: Path) -> None:
    """Picks the prompts and writes `out`/prompts.jsonl.

    The pair is read back for it: rounding to fp16 can change a greedy path.
    """
    target, _, tokenizer = load(out)
    documents, held_out = load_documents()
    rows, counts = pick_prompts(target, tokenizer, documents, held_out)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / "prompts.jsonl").write_text(text, encoding="utf-8")
    for category, (tried, dropped) in counts.items():
        print(f"{category}: {tried} candidates tried, {dropped} dropped for repetition")


def main() -> None:
    """The command line: trains the pair, or with --measure measures the one that is there."""
    parser = argparse.ArgumentParser(prog="python -m profiler.pair", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("profiler/bundled"))
    parser.add_argument("--measure", action="store_true", help="measure, train nothing")
    parser.add_argument("--prompts", action="store_true", help="pick the prompts, train nothing")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of the training")
    parser.add_argument("--shrink", type=int, default=1, help="divide the step counts (a trial)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        measure_pair(options.out)
    elif options.prompts:
        save_prompts(options.out)
    else:
        make_pair(options.out, options.shrink)


if __name__ == "__main__":
    main()
