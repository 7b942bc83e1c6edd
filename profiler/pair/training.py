"""How the bundled pair is trained: batches of documents, the optimisers, one stage of steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from profiler.pair.models import POSITIONS
from profiler.pair.repetition import repeats, unlikelihood, write_greedily
from profiler.pair.text import Document, stable_hash

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


def optimisers(model: torch.nn.Module, rate: float = 1.0) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms, at `rate` times theirs.

    Muon is what makes a run of minutes enough: at the same number of steps AdamW alone ended
    above it by one nat a token.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    made: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.03 * rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=0.01 * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimiser in made:
        for group in optimiser.param_groups:
            group["full_lr"] = group["lr"]  # what `update` scales
    return made


def prediction_loss(model: Any, tokens: Tensor, teacher: Any | None = None) -> Tensor:
    """Cross-entropy, nats a token, to the next token, or to the teacher's distribution over it.

    `tokens` is int64 (rows, length + 1): the first `length` of each row are read.
    """
    inputs = tokens[:, :-1]
    logits = model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
    if teacher is None:
        return F.cross_entropy(logits, tokens[:, 1:].flatten())
    with torch.no_grad():
        wanted = teacher(input_ids=inputs, use_cache=False).logits.float().softmax(-1)
    return F.cross_entropy(logits, wanted.flatten(0, 1))


def update(
    model: torch.nn.Module, steppers: list[torch.optim.Optimizer], loss: Tensor, factor: float
) -> None:
    """One step down the gradient of `loss`, clipped to norm 1, at `factor` times the full rates."""
    model.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in steppers:
        for group in optimiser.param_groups:
            group["lr"] = group["full_lr"] * factor
        optimiser.step()


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

    Where `stage.own_text`, every odd step is on text written greedily: by the teacher, to be
    imitated; or, without one, by the model itself, to lower the probability of its repetitions.
    """
    generator = torch.Generator().manual_seed(stage.seed)
    own_optimisers = optimisers(model, stage.rate)
    losses: list[float] = []
    for step in track(range(stage.steps), description=f"{stage.name:12}"):
        tokens = stream.batch(POSITIONS if step % 8 == 6 else POSITIONS // 4, generator)
        written = stage.own_text and step % 2 == 1
        # bfloat16 is several times faster than float32 where the CPU has it, and harms nothing.
        with torch.autocast("cpu", torch.bfloat16):
            if written:
                heads = stream.batch(_OWN_PROMPT, generator)[: _OWN_ROWS * 2 : 2, :-1]
                tokens = write_greedily(teacher or model, heads, _OWN_NEW)
            if written and teacher is None:
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
                loss = unlikelihood(logits, tokens, repeats(tokens, _OWN_PROMPT, eos=0))
            else:
                loss = prediction_loss(model, tokens, teacher)
        factor = min(1.0, (step + 1) / 30, 2 * (stage.steps - step) / stage.steps)
        update(model, own_optimisers, loss, factor)
        if not written:
            losses.append(loss.item())
    return statistics.fmean(losses[-50:])
