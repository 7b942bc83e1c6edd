"""Trains the bundled target/draft pair and measures it.

    python -m profiler.pair --out profiler/bundled             # trains, saves, picks the prompts
    python -m profiler.pair --out profiler/bundled --measure   # the figures of CARD.md

The target is GROWN from the draft: it starts as the draft plus layers that add nothing yet, and
trains on. The two therefore agree far more often than two small models trained apart would. Last,
the draft is distilled towards the finished target. The seeds and step counts are fixed, so the
weights are the same on every run on one machine with one thread count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from profiler.pair_text import (
    Document,
    continue_greedily,
    load_documents,
    pick_prompts,
    stable_hash,
    unique_4gram_share,
)

EOS, PAD = "<|endoftext|>", "<|pad|>"  # EOS stands between documents, so it is BOS as well
_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Stage:
    """One training run: optimiser steps of _BATCH_TOKENS tokens, seed, learning-rate factor."""

    name: str
    steps: int
    seed: int
    rate: float = 1.0


DRAFT = Stage("draft", 800, 1)
MIDDLE = Stage("3 layers", 600, 2)
TARGET = Stage("target", 500, 3)
DISTIL = Stage("distil draft", 250, 4, rate=0.5)
VOCABULARY, HIDDEN, FEED_FORWARD, HEADS = 2048, 160, 432, 5
DRAFT_LAYERS, MIDDLE_LAYERS, TARGET_LAYERS = 1, 3, 8
POSITIONS = 1024


def train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens; encoding adds no special token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((document.text for document in documents), trainer)
    # The class's constructor has no type hints; a typed name for it keeps the check strict.
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=bpe,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(layers: int) -> LlamaForCausalLM:
    """A randomly initialised model of `layers` layers; all else is the same in both models."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FEED_FORWARD,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
        )
    )


def grow(small: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model of `layers` layers that computes what `small` does: its added layers write zeros."""
    grown = build_model(layers)
    grown.load_state_dict(small.state_dict(), strict=False)
    layers_added: Any = grown.model.layers[small.config.num_hidden_layers :]
    for layer in layers_added:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return grown


class Stream:
    """Documents as one line of token ids, in a shuffled order, an EOS after each."""

    def __init__(self, documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> None:
        ids: list[int] = []
        starts: list[int] = []
        texts = sorted((document.text for document in documents), key=stable_hash)
        for row in tokenizer(texts, verbose=False)["input_ids"]:
            starts.append(len(ids))
            ids += [*row, 0]
        self.ids = torch.tensor(ids)
        self.starts = torch.tensor(starts)

    def batch(self, length: int, generator: torch.Generator) -> Tensor:
        """Rows of length + 1 token ids, _BATCH_TOKENS in all: int64 (_BATCH_TOKENS // length, .).

        Half of the rows begin where a document does, which is how a prompt begins; the others
        begin anywhere, so that the far end of a long document is seen as well.
        """
        rows = _BATCH_TOKENS // length
        last = len(self.ids) - length - 1
        anywhere = torch.randint(last, (rows,), generator=generator)
        chosen = self.starts[torch.randint(len(self.starts), (rows,), generator=generator)]
        at_start = torch.arange(rows) % 2 == 0
        begin = torch.where(at_start, chosen, anywhere).clamp(max=last)
        return self.ids[begin[:, None] + torch.arange(length + 1)]


def _optimisers(model: LlamaForCausalLM, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms.

    Muon is what makes a run of minutes enough: at the same number of steps AdamW alone ended
    above it by one nat a token.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=0.03 * stage.rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=0.01 * stage.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: LlamaForCausalLM,
    stream: Stream,
    stage: Stage,
    teacher: LlamaForCausalLM | None = None,
) -> float:
    """Trains `model` in place; returns the mean loss (nats a token) of the last 50 steps.

    The loss is the cross-entropy to the next token, or to the teacher's distribution where one is
    given. Every eighth batch has rows of POSITIONS tokens, the others of a quarter of that. The
    rate rises over 30 steps, stays, and falls to zero over the second half.
    """
    generator = torch.Generator().manual_seed(stage.seed)
    optimisers = _optimisers(model, stage)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 30, 2 * (stage.steps - step) / stage.steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, factor) for each in optimisers]
    losses: list[float] = []
    for step in track(range(stage.steps), description=f"{stage.name:12}"):
        tokens = stream.batch(POSITIONS if step % 8 == 7 else POSITIONS // 4, generator)
        inputs, goal = tokens[:, :-1], tokens[:, 1:].flatten()
        # bfloat16 is several times faster than float32 where the CPU has it, and harms nothing.
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
            if teacher is None:
                loss = F.cross_entropy(logits, goal)
            else:
                with torch.no_grad():
                    wanted = teacher(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
                loss = F.cross_entropy(logits, wanted.float().softmax(-1))
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        losses.append(loss.item())
    return statistics.fmean(losses[-50:])


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes model (fp16) and tokenizer to `folder` as a Hugging Face directory."""
    torch.nn.Module.to(model, torch.float16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def load(folder: Path) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """(target, draft, tokenizer) under `folder`, in float32 and evaluation mode."""
    target, draft = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("target", "draft")
    )
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    return target, draft, tokenizer


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
    lines = (out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    table: dict[str, list[tuple[float, ...]]] = {}
    prompt: list[int] = []
    for row in track([json.loads(line) for line in lines], description="measuring   "):
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
