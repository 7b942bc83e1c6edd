"""Trains the small modules of draft sources on a frozen target, in seconds.

    python -m profiler.heads.train --target DIR --out FOLDER [--text FILE] [--only exit ...]

The target continues beginnings of documents itself, greedily and sampled in turn, and the
modules learn to foresee it: exit heads by distillation of its final distribution, parallel
heads and mask embeddings from the tokens it went on to emit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from profiler.heads.modules import ExitHeads, MaskEmbeddings, ParallelHeads, save_module
from profiler.heads.train_adapter import train_adapter
from profiler.heads.training import States, optimise
from profiler.models.stack import LayerRunner
from profiler.prompts import read_prompts
from traces.errors import DraftsimError

BEGINNING = 32
"""Tokens of a document that the target is given to continue."""

MODULES = ("exit", *ParallelHeads.KINDS, "space", "kangaroo")
FILES = {name: f"{name}_heads.safetensors" for name in MODULES}


def default_exit_layers(layers: int) -> tuple[int, ...]:
    """Every quarter of the target's layers but the last."""
    step = max(1, layers // 4)
    return tuple(range(step, layers, step))


@torch.inference_mode()
def continuations(
    target: Any, beginnings: Tensor, new_tokens: int = 96, sampled: bool = False
) -> Tensor:
    """The target's own text: (sequences, BEGINNING) ids -> (sequences, tokens), -1 after EOS."""
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
    target: Any, encoded: Sequence[Sequence[int]], *, rounds: int = 16, batch: int = 64,
    seed: int = 0,
) -> Tensor:  # fmt: skip
    """Continuations of `rounds` batches of random document beginnings; (sequences, tokens)."""
    long = [ids[:BEGINNING] for ids in encoded if len(ids) >= BEGINNING]
    if not long:
        raise DraftsimError(f"no text of {BEGINNING} tokens or more to train on: give longer texts")
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    parts = []
    for i in range(rounds):
        some = torch.randint(len(long), (batch,), generator=random).tolist()
        beginnings = torch.tensor([long[j] for j in some], device=target.device)
        parts.append(continuations(target, beginnings, sampled=i % 2 == 1))
    width = max(p.shape[1] for p in parts)
    return torch.cat([nn.functional.pad(p, (0, width - p.shape[1]), value=-1) for p in parts])


def train_exit_heads(
    target: LayerRunner, text: Tensor, layers: tuple[int, ...], *, rank: int = 32,
    steps: int = 120, seconds: float = 30.0, seed: int = 0, batch: int = 768,
) -> ExitHeads:  # fmt: skip
    """Exit heads distilled from the target's final distribution over `text`.

    ``text``: (sequences, tokens) ids, -1 beyond a sequence's end.
    """
    torch.manual_seed(seed)
    states = States(target, text, layers)
    heads = ExitHeads(layers, states.final.shape[1], rank).to(text.device)
    heads.start_from(target.model.model.norm.weight.detach())
    weight = target.model.get_output_embeddings().weight.detach().float()

    def loss() -> Tensor:
        some = torch.randint(len(states.final), (batch,), device=text.device)
        teacher = torch.log_softmax(states.final[some].float() @ weight.T, -1)
        total = teacher.new_zeros(())
        for i in range(len(layers)):
            student = torch.log_softmax(heads.states(i, states.exits[i][some]) @ weight.T, -1)
            total = total + (teacher.exp() * (teacher - student)).sum(-1).mean()
        return total

    optimise(list(heads.parameters()), loss, steps=steps, seconds=seconds, rate=4e-3)
    return heads.eval()


def train_parallel_heads(
    target: LayerRunner, text: Tensor, kind: str, k: int = 4, *, rank: int = 64,
    steps: int = 400, seconds: float = 30.0, seed: int = 0, batch: int = 512,
) -> ParallelHeads:  # fmt: skip
    """Train heads that foresee the k tokens after the one that the target's own head gives."""
    torch.manual_seed(seed)
    states = States(target, text)
    heads = ParallelHeads(kind, k, states.final.shape[1], rank).to(text.device)
    weight = target.model.get_output_embeddings().weight.detach().float()
    embedding = target.model.get_input_embeddings().weight.detach().float()
    row, at = states.where.T
    padded = nn.functional.pad(text, (0, k + 2), value=-1)
    # From the state at index t, whose own token is t + 1, head i foresees t + 2 + i.
    labels = torch.stack([padded[row, at + 2 + i] for i in range(k)], 1)
    following = padded[row, at + 1]
    usable = torch.nonzero((labels[:, 0] >= 0) & (at >= BEGINNING - 1))[:, 0]

    def loss() -> Tensor:
        some = usable[torch.randint(len(usable), (batch,), device=text.device)]
        outputs = heads.states(states.final[some].float(), embedding[following[some]])
        logits = outputs @ weight.T  # (batch, k, vocab)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[some].flatten(), ignore_index=-1
        )

    optimise(list(heads.parameters()), loss, steps=steps, seconds=seconds, rate=4e-3)
    return heads.eval()


def train_masks(
    target: LayerRunner, text: Tensor, k: int = 4, *, steps: int = 60, seconds: float = 30.0,
    seed: int = 0, starts: int = 24, batch: int = 4,
) -> MaskEmbeddings:  # fmt: skip
    """Train mask embeddings after which the frozen target foresees its own next tokens."""
    torch.manual_seed(seed)
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

    def loss() -> Tensor:
        ids = usable[torch.randint(len(usable), (batch,), device=device)]
        at = torch.randint(BEGINNING, length - k - 1, (starts,), device=device)
        mask, positions = mask_layout(length, at, k)
        behind = masks.weight.repeat(starts, 1)[None].expand(batch, -1, -1)
        embedded = torch.cat([table[ids].float(), behind], 1).to(table.dtype)
        out = model(
            inputs_embeds=embedded, attention_mask=mask[None, None].expand(batch, -1, -1, -1),
            position_ids=positions[None].expand(batch, -1), use_cache=False,
        )  # fmt: skip
        logits = out.logits[:, length:].float()  # (batch, starts * k, vocab)
        offsets = at[:, None] + 2 + torch.arange(k, device=device)
        wanted = ids[:, offsets.flatten()].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted)

    optimise([masks.weight], loss, steps=steps, seconds=seconds, rate=2e-2)
    return masks.eval()


def mask_layout(length: int, at: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return attention mask and positions of a sequence with k mask tokens after each index `at`.

    Returns ((length + n k) x itself booleans, (length + n k,) positions), n = len(at).  A mask
    token sees the sequence up to its index and the masks before it in its group.
    """
    count = at.shape[0]
    whole = torch.zeros(length + count * k, length + count * k, dtype=torch.bool, device=at.device)
    whole[:length, :length] = torch.ones(length, length, dtype=torch.bool, device=at.device).tril()
    sees = torch.arange(length, device=at.device)[None] <= at[:, None]
    whole[length:, :length] = sees.repeat_interleave(k, 0)
    own = torch.ones(k, k, dtype=torch.bool, device=at.device).tril()
    whole[length:, length:] = torch.block_diag(*[own] * count)
    ahead = at[:, None] + 1 + torch.arange(k, device=at.device)
    return whole, torch.cat([torch.arange(length, device=at.device), ahead.flatten()])


def train_all(
    target: LayerRunner, text: Tensor, out: Path, only: Sequence[str] = MODULES, *,
    exit_layers: tuple[int, ...] | None = None, k: int = 4, seconds: float = 30.0,
) -> None:  # fmt: skip
    """Train the modules named in `only` and write them to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    module: nn.Module
    for name in only:
        if name == "exit":
            layers = exit_layers or default_exit_layers(target.layers)
            module = train_exit_heads(target, text, layers, seconds=seconds)
        elif name == "kangaroo":
            layer = (exit_layers or default_exit_layers(target.layers))[0]
            module = train_adapter(target, text, layer, seconds=seconds)
        elif name == "space":
            module = train_masks(target, text, k, seconds=seconds)
        else:
            module = train_parallel_heads(target, text, name, k, seconds=seconds)
        save_module(module, target.model, out / FILES[name])


def main() -> None:
    """The command line of this module."""
    from profiler.models.loading import load_pair

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="texts as in a prompts file")
    parser.add_argument("--only", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=30.0, help="at most, per module")
    given = parser.parse_args()
    pair = load_pair(given.target, given.target, device=given.device)
    if given.text:
        texts = [p.text for p in read_prompts(given.text)]
    else:
        from profiler.pair.text import load_documents

        texts = [document.text for document in load_documents()[0]][:4000]
    encoded = [pair.tokenizer(t)["input_ids"] for t in texts]
    text = own_text(pair.target, encoded)
    runner = LayerRunner(pair.target, 512)
    train_all(runner, text, given.out, given.only, seconds=given.seconds)


if __name__ == "__main__":
    main()
