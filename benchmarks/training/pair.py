"""Training of the bundled target and draft: their models, the batches, and the stages.

The target is GROWN from the draft: it starts as the draft plus layers that add nothing yet, and
trains on. The two therefore agree far more often than two small models trained apart would. The
finished target is then trained out of its loops, and last the draft is distilled towards it. The
seeds and step counts are fixed, so the weights are the same on every run on one machine with one
thread count.

Training out of loops: a small model's greedy text repeats itself for ever, because a phrase just
written makes the same phrase likely again, and its training text never shows it its own loops. So
some training steps write text greedily and lower the probability of each token that completed a
repeated 4-gram (Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training",
arXiv:1908.04319).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.training.fit import rise_and_fall
from profiler.train.documents import Document, load_documents
from profiler.train.minutes import (
    POSITIONS,
    VOCABULARY,
    descent,
    prediction_loss,
    token_line,
    train_tokenizer,
)

HIDDEN, FEED_FORWARD, HEADS = 160, 432, 5
_BATCH_TOKENS = 2048
_OWN_ROWS, _OWN_PROMPT, _OWN_NEW = 16, 32, 96  # the batches that a model writes itself


@dataclass(frozen=True)
class Stage:
    """One training run: optimiser steps of _BATCH_TOKENS tokens, seed, learning-rate factor."""

    name: str
    steps: int
    seed: int
    rate: float = 1.0
    own_text: bool = False  # every odd step is on text that a model writes, see `train`


DRAFT = Stage("draft", 800, 1)
MIDDLE = Stage("3 layers", 1400, 2)
TARGET = Stage("target", 1200, 3)
UNLOOP = Stage("unloop", 200, 4, rate=0.3, own_text=True)
DISTIL = Stage("distil draft", 450, 5, rate=0.5, own_text=True)
DRAFT_LAYERS, MIDDLE_LAYERS, TARGET_LAYERS = 1, 3, 8


def build_model(layers: int) -> LlamaForCausalLM:
    """Return a randomly initialised model of `layers` layers; all else is the same in both."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FEED_FORWARD,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def grow(small: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a model that computes the same as `small`: its added layers write zeros."""
    grown = build_model(layers)
    grown.load_state_dict(small.state_dict(), strict=False)
    layers_added: Any = grown.model.layers[small.config.num_hidden_layers :]
    for layer in layers_added:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return grown


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model (fp16) and tokenizer to `folder` as a Hugging Face directory."""
    torch.nn.Module.to(model, torch.float16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def load(folder: Path) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return (target, draft, tokenizer) under `folder`, in float32 and evaluation mode."""
    target, draft = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("target", "draft")
    )
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    return target, draft, tokenizer


class DocumentBatches:
    """Batches of a line of documents (`token_line`)."""

    def __init__(self, documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> None:
        self.ids = token_line(documents, tokenizer)
        ends = (self.ids == tokenizer.eos_token_id).nonzero()[:, 0]
        self.starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])

    def batch(self, length: int, generator: torch.Generator) -> Tensor:
        """Return rows of length + 1 token ids, _BATCH_TOKENS in all: int64 (_BATCH_TOKENS //
        length, .).

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


@torch.no_grad()
def write_greedily(model: LlamaForCausalLM, prompts: Tensor, new: int) -> Tensor:
    """Return `prompts`, int64 (rows, tokens), each with `new` greedy tokens; EOS ends nothing."""
    cache = DynamicCache(config=model.config)
    written = [prompts]
    for _ in range(new):
        logits = model(input_ids=written[-1], past_key_values=cache, logits_to_keep=1).logits
        written.append(logits[:, -1:].argmax(-1))
    return torch.cat(written, dim=1)


def repeats(rows: Tensor, prompt: int, eos: int) -> Tensor:
    """Return bool (rows, tokens): tokens past the first `prompt` that complete a 4-gram seen
    before.

    Only tokens up to the first EOS past the prompt count: a new document begins after it.
    """
    found = torch.zeros_like(rows, dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(4, len(row) + 1):
            gram = tuple(row[end - 4 : end])
            if end > prompt:
                found[i, end - 1] = gram in seen
                if gram[-1] == eos:
                    break
            seen.add(gram)
    return found


def unlikelihood(logits: Tensor, rows: Tensor, repeated: Tensor) -> Tensor:
    """Return the mean -log(1 - p) of the repeated tokens, a scalar; 0 where none is repeated.

    `logits`, float (rows, tokens - 1, vocabulary), are those at all but the last of `rows`.
    """
    chosen = logits.softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
    loss = -torch.log((1 - chosen).clamp(min=1e-6))
    mask = repeated[:, 1:]
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def train(
    model: LlamaForCausalLM,
    stream: DocumentBatches,
    stage: Stage,
    teacher: LlamaForCausalLM | None = None,
) -> float:
    """Train `model` in place; return the mean loss (nats a token) of the last 50 steps.

    The loss is the cross-entropy to the next token, or to the teacher's distribution where one is
    given. Every eighth batch has rows of POSITIONS tokens, the others of a quarter of that. The
    rate rises over 30 steps, stays, and falls to zero over the second half.

    Where `stage.own_text`, every odd step is on text written greedily: by the teacher, to be
    imitated; or, without one, by the model itself, to lower the probability of its repetitions.
    """
    generator = torch.Generator().manual_seed(stage.seed)

    def written(step: int) -> bool:
        return stage.own_text and step % 2 == 1

    def loss(step: int) -> Tensor:
        tokens = stream.batch(POSITIONS if step % 8 == 6 else POSITIONS // 4, generator)
        if written(step):
            heads = stream.batch(_OWN_PROMPT, generator)[: _OWN_ROWS * 2 : 2, :-1]
            tokens = write_greedily(teacher or model, heads, _OWN_NEW)
            if teacher is None:
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
                return unlikelihood(logits, tokens, repeats(tokens, _OWN_PROMPT, eos=0))
        return prediction_loss(model, tokens, teacher)

    values = descent(model, stage.rate).steps(loss, rise_and_fall(stage.steps))
    shown = track(values, total=stage.steps, description=f"{stage.name:12}")
    losses = [value.item() for step, value in enumerate(shown) if not written(step)]
    return statistics.fmean(losses[-50:])


def make_pair(out: Path, shrink: int = 1) -> None:
    """Train and save the pair under `out`; `shrink` divides the step counts."""
    console = Console()
    documents, held_out = load_documents()
    tokenizer = train_tokenizer(documents)
    stream = DocumentBatches(documents, tokenizer)
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
