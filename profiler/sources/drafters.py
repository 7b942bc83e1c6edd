"""Where the tokens of start-dependent drafts come from, for recording and for real decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.features.heads import MaskEmbeddings, ParallelHeads, mask_layout
from profiler.models.stack import LayerRunner
from traces.errors import DraftsimError


def head_logits(target: LayerRunner, heads: ParallelHeads, normed: Tensor, last: Tensor) -> Tensor:
    """Return the logits of every head after some states: (starts, k, vocab).

    ``normed`` (starts, hidden): the target's last state that was verified; ``last``
    (starts,): the token emitted from it.
    """
    states = heads.states(normed.float(), target.embed(last).float())
    return target.project(states)


def mask_logits(
    target: LayerRunner, masks: MaskEmbeddings, path: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one pass over `path` (tokens,) with the masks after each index of `at` (starts,).

    Returns the target's logits along the path, (tokens, vocab), and the masks', (starts, k,
    vocab).  Path tokens do not see the masks, so the former are the plain ones.
    """
    length, k = int(path.shape[0]), masks.k
    layout, positions = mask_layout(length, at, k)
    hidden = torch.cat([target.embed(path), mask_states(target, masks, int(at.shape[0]))])
    hidden = target.run_layers(hidden, 0, range(target.layers), mask=layout, positions=positions)
    logits = target.logits(hidden)
    return logits[:length], logits[length:].reshape(-1, k, logits.shape[-1])


def mask_states(target: LayerRunner, masks: MaskEmbeddings, groups: int) -> Tensor:
    """Embeddings of `groups` groups of masks, (groups k, hidden), in the target's dtype."""
    like = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
    return masks.weight.repeat(groups, 1).to(like.dtype)


def kept_layers(layers: int, skip: list[int]) -> list[int]:
    """0-based layers that remain when those of `skip` (1-based) are left out.

    Raises DraftsimError if `skip` names layers the target does not have, or all of them.
    """
    if wrong := [layer for layer in skip if not 1 <= layer <= layers]:
        raise DraftsimError(f"skip names layer {wrong[0]}: the target has layers 1 to {layers}")
    kept = [i for i in range(layers) if i + 1 not in skip]
    if not kept or not skip:
        raise DraftsimError(
            f"skip={skip} leaves {len(kept)} of {layers} layers: skip some, and not all"
        )
    return kept


def default_skip(layers: int) -> list[int]:
    """Return every second layer, the first and the last kept."""
    return list(range(2, layers, 2))
