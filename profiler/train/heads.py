"""Training of the small modules of draft sources on any frozen target, in seconds.

The target continues beginnings of documents, greedily and sampled in turn, and the modules learn
to predict it: exit heads and Kangaroo's adapter by distillation of its final distribution,
parallel heads, Hydra's heads and mask embeddings from the tokens that it emitted.

`Descent` takes the gradient steps of every training, also those of whole models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.features.heads import (
    FILES,
    MODULES,
    Adapter,
    ExitHeads,
    HydraHeads,
    MaskEmbeddings,
    ParallelHeads,
    mask_layout,
    save_module,
)
from profiler.models.stack import LayerRunner
from traces.digits import counted
from traces.errors import DraftsimError

BEGINNING = 32
"""Tokens of a document that the target is given to continue."""


def states_of(
    target: LayerRunner, text: Tensor, layers: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the sequence and index of every token of a text, (tokens, 2), and a target's states.

    These are (tokens, hidden) each: after some layers, and the final ones.
    """
    with torch.inference_mode():
        rows = [
            [*target.through(target.embed(ids[ids >= 0]), 0, (*layers, target.layers))]
            for ids in text
        ]
        *exits, last = (torch.cat(depth) for depth in zip(*rows, strict=True))
        return torch.nonzero(text >= 0), exits, target.normed(last)


def default_exit_layers(layers: int) -> tuple[int, ...]:
    """Return every quarter of the target's layers but the last.

    Raises DraftsimError if there is none before the last.
    """
    if layers < 2:
        raise DraftsimError(
            f"a target of {counted(layers, 'layer')} has no exit before its last one: profile it "
            "without --exit-layers"
        )
    step = max(1, layers // 4)
    return tuple(range(step, layers, step))


@torch.inference_mode()
def continuations(
    target: Any, beginnings: Tensor, new_tokens: int = 96, sampled: bool = False
) -> Tensor:
    """Return the target's text: (sequences, BEGINNING) ids -> (sequences, tokens), -1 after EOS."""
    out: Tensor = target.generate(
        input_ids=beginnings, attention_mask=torch.ones_like(beginnings),
        max_new_tokens=new_tokens, do_sample=sampled, temperature=0.8 if sampled else None,
        top_p=None, top_k=0 if sampled else None, pad_token_id=0,
    )  # fmt: skip
    ids = target.generation_config.eos_token_id
    eos = torch.tensor(ids if isinstance(ids, list) else [-1 if ids is None else ids])
    ended = torch.isin(out[:, BEGINNING:], eos.to(out.device)).long().cumsum(-1)
    after = torch.zeros_like(out, dtype=torch.bool)
    after[:, BEGINNING + 1 :] = ended[:, :-1] > 0
    return out.masked_fill(after, -1)


def own_text(
    target: Any, encoded: Sequence[Sequence[int]], *, rounds: int = 16, batch: int = 64
) -> Tensor:
    """Return continuations of `rounds` batches of random beginnings; (sequences, tokens)."""
    long = [ids[:BEGINNING] for ids in encoded if len(ids) >= BEGINNING]
    if not long:
        raise DraftsimError(f"no text of {BEGINNING} tokens or more to train on: give longer texts")
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    parts = []
    for i in range(rounds):
        some = torch.randint(len(long), (batch,), generator=random).tolist()
        beginnings = torch.tensor([long[j] for j in some], device=target.device)
        parts.append(continuations(target, beginnings, sampled=i % 2 == 1))
    width = max(p.shape[1] for p in parts)
    return torch.cat([F.pad(p, (0, width - p.shape[1]), value=-1) for p in parts])


def _too_short(text: Tensor) -> DraftsimError:
    return DraftsimError(
        f"the target ends its texts within {counted(text.shape[1] - BEGINNING, 'token')}, too few "
        "to train heads on: give texts that it goes on with for longer (--heads-text)"
    )


class Descent:
    """Gradient steps on one module.

    `apart` lists parts of parameter names: AdamW trains these parameters and all vectors, Muon
    the other matrices. Without `muon_rate` AdamW trains everything. `clip` bounds the norm of the
    gradient. `low`: compute the loss in bfloat16, about three times as fast as float32 on a CPU
    that has it.
    """

    def __init__(
        self, module: nn.Module, adam_rate: float, muon_rate: float | None = None, *,
        apart: Sequence[str] = (), betas: tuple[float, float] = (0.9, 0.95),
        clip: float = 1.0, device: str = "cpu", low: bool = True,
    ) -> None:  # fmt: skip
        self.module, self.clip, self.device, self.low = module, clip, device, low
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                is_layer = parameter.ndim == 2 and not any(part in name for part in apart)
                (others if muon_rate is None or not is_layer else matrices).append(parameter)
        self.steppers: list[torch.optim.Optimizer] = []
        if matrices and muon_rate is not None:
            self.steppers.append(torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01))
        if others:
            adam = torch.optim.AdamW(others, lr=adam_rate, betas=betas, weight_decay=0.0)
            self.steppers.append(adam)
        self._full = [[group["lr"] for group in each.param_groups] for each in self.steppers]

    def steps(
        self, loss: Callable[[int], Tensor], factors: Iterable[float], begin: int = 0
    ) -> Iterator[Tensor]:
        """Take one step for each factor of the learning rates; yield the loss of each step.

        `loss` is given the number of its step; the first one is `begin`.
        """
        for step, factor in enumerate(factors, begin):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.low):
                value = loss(step)
            self.module.zero_grad()
            torch.autograd.backward(value)
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
            for stepper, rates in zip(self.steppers, self._full, strict=True):
                for group, rate in zip(stepper.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                stepper.step()
            yield value.detach()


def _minimise(
    module: nn.Module, loss: Callable[[int], Tensor], rate: float, steps: int, seconds: float
) -> None:
    """Minimise with AdamW and a cosine rate for `steps` steps; stop after `seconds`."""
    begin = time.perf_counter()
    descent = Descent(module, rate, betas=(0.9, 0.999), clip=math.inf, low=False)
    factors = ((1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps))
    for value in descent.steps(loss, factors):
        value.item()  # or the host runs ahead of the device, whose seconds count
        if time.perf_counter() - begin > seconds:
            break


def _divergence(teacher: Tensor, states: Tensor, weight: Tensor) -> Tensor:
    """Return the mean KL divergence from the target, in nats a token.

    ``teacher`` (tokens, vocab): the target's log-probabilities; ``states`` (tokens, hidden): the
    module's, of which ``weight`` makes logits.
    """
    student = torch.log_softmax(states @ weight.T, -1)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def train_exit_heads(
    target: LayerRunner, text: Tensor, layers: tuple[int, ...], *, rank: int = 32,
    steps: int = 120, seconds: float = 30.0, batch: int = 768,
) -> ExitHeads:  # fmt: skip
    """Distil exit heads from the target's final distribution over `text`.

    ``text``: (sequences, tokens) ids, -1 beyond a sequence's end.
    """
    torch.manual_seed(0)
    _, exits, final = states_of(target, text, layers)
    heads = ExitHeads(layers, final.shape[1], rank).to(text.device)
    heads.start_from(target.model.model.norm.weight.detach())
    weight = target.model.get_output_embeddings().weight.detach().float()

    def loss(_: int) -> Tensor:
        some = torch.randint(len(final), (batch,), device=text.device)
        teacher = torch.log_softmax(final[some].float() @ weight.T, -1)
        total = teacher.new_zeros(())
        for i in range(len(layers)):
            total = total + _divergence(teacher, heads.states(i, exits[i][some]), weight)
        return total

    _minimise(heads, loss, 4e-3, steps, seconds)
    return heads.eval()


def train_parallel_heads(
    target: LayerRunner, text: Tensor, kind: str, k: int = 4, *, rank: int = 64,
    steps: int = 400, seconds: float = 30.0, batch: int = 512,
) -> Any:  # fmt: skip
    """Train heads that foresee the k tokens after the one that the target's own head gives.

    ``kind``: one of `ParallelHeads.KINDS`, or ``hydra``, whose heads are given the true tokens
    before the one that they foresee.
    """
    torch.manual_seed(0)
    where, _, final = states_of(target, text)
    width, hydra = final.shape[1], kind == "hydra"
    heads = HydraHeads(k, width, rank) if hydra else ParallelHeads(kind, k, width, rank)
    heads.to(text.device)
    weight = target.model.get_output_embeddings().weight.detach().float()
    embedding = target.model.get_input_embeddings().weight.detach().float()
    row, at = where.T
    padded = F.pad(text, (0, k + 2), value=-1)
    # From the state at index t, whose own token is t + 1, head i foresees t + 2 + i.
    labels = torch.stack([padded[row, at + 2 + i] for i in range(k)], 1)
    following = padded[row, at + 1]
    if hydra:  # where one is missing, its head has no label
        following = torch.cat([following[:, None], labels[:, :-1]], 1)
    usable = torch.nonzero((labels[:, 0] >= 0) & (at >= BEGINNING - 1))[:, 0]
    if not len(usable):
        raise _too_short(text)

    def loss(_: int) -> Tensor:
        some = usable[torch.randint(len(usable), (batch,), device=text.device)]
        outputs = heads.states(final[some].float(), embedding[following[some]])
        logits = outputs @ weight.T  # (batch, k, vocab)
        return F.cross_entropy(logits.flatten(0, 1), labels[some].flatten(), ignore_index=-1)

    _minimise(heads, loss, 4e-3, steps, seconds)
    return heads.eval()


def train_masks(
    target: LayerRunner, text: Tensor, k: int = 4, *, steps: int = 60, seconds: float = 30.0,
    starts: int = 24, batch: int = 4,
) -> MaskEmbeddings:  # fmt: skip
    """Train mask embeddings after which the frozen target foresees its own next tokens."""
    if text.shape[1] < BEGINNING + k + 2:
        raise _too_short(text)
    torch.manual_seed(0)
    model, device = target.model, text.device
    table = model.get_input_embeddings().weight.detach()
    masks = MaskEmbeddings(k, table.shape[1]).to(device)
    masks.weight.data += table.float().mean(0)
    length = text.shape[1]
    usable = text[(text >= 0).all(1)]
    if not len(usable):
        usable = text.clamp(min=0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def loss(_: int) -> Tensor:
        ids = usable[torch.randint(len(usable), (batch,), device=device)]
        at = torch.randint(BEGINNING, length - k - 1, (starts,), device=device)
        mask, positions = mask_layout(length, at, k)
        masked = masks.weight.repeat(starts, 1)[None].expand(batch, -1, -1)
        embedded = torch.cat([table[ids].float(), masked], 1).to(table.dtype)
        out = model(
            inputs_embeds=embedded, attention_mask=mask[None, None].expand(batch, -1, -1, -1),
            position_ids=positions[None].expand(batch, -1), use_cache=False,
        )  # fmt: skip
        logits = out.logits[:, length:].float()  # (batch, starts * k, vocab)
        offsets = at[:, None] + 2 + torch.arange(k, device=device)
        wanted = ids[:, offsets.flatten()].flatten()
        return F.cross_entropy(logits.flatten(0, 1), wanted)

    _minimise(masks, loss, 2e-2, steps, seconds)
    return masks.eval()


def train_adapter(
    target: LayerRunner, text: Tensor, layer: int, *, steps: int = 150, seconds: float = 30.0
) -> Adapter:  # fmt: skip
    """Train Kangaroo's adapter, distilled from the target's final distribution over `text`.

    ``text``: (sequences, tokens) ids, -1 beyond a sequence's end; ``layer``: the exit it reads.
    """
    torch.manual_seed(0)
    where, [exit_states], final = states_of(target, text, (layer,))
    config = target.model.config.get_text_config()
    cos, sin = (t[0, : text.shape[1]].float().clone() for t in target.rotary)
    width = final.shape[1]
    adapter = Adapter(layer, width, config.num_attention_heads, cos.shape[-1]).to(text.device)
    adapter.start_from(target.model.model.norm.weight.detach())
    weight = target.model.get_output_embeddings().weight.detach().float()
    row, at = where.T
    exits, finals = (torch.zeros(*text.shape, width, device=text.device) for _ in range(2))
    exits[row, at], finals[row, at] = exit_states.float(), final.float()
    there = text >= 0
    mask = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=text.device).tril()

    def loss(_: int) -> Tensor:
        some = torch.randint(len(text), (8,), device=text.device)
        hidden, known = exits[some], there[some]
        query, keys, values = adapter.projected(hidden, cos, sin)
        found = adapter.attended(hidden, query, keys, values, mask)[known]
        teacher = torch.log_softmax(finals[some][known] @ weight.T, -1)
        return _divergence(teacher, found, weight)

    _minimise(adapter, loss, 4e-3, steps, seconds)
    return adapter.eval()


def train_all(
    target: LayerRunner, text: Tensor, out: Path, only: Sequence[str] = MODULES,
    seconds: float = 30.0,
) -> None:  # fmt: skip
    """Train the modules named in `only`, each for at most `seconds`, and write them to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    layers = default_exit_layers(target.layers)
    module: nn.Module
    for name in only:
        if name == "exit":
            module = train_exit_heads(target, text, layers, seconds=seconds)
        elif name == "kangaroo":
            module = train_adapter(target, text, layers[0], seconds=seconds)
        elif name == "space":
            module = train_masks(target, text, seconds=seconds)
        else:
            module = train_parallel_heads(target, text, name, seconds=seconds)
        save_module(module, target.model, out / FILES[name])
