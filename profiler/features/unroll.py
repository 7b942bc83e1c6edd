"""Drafts several tokens from every entry of whole sequences at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from profiler.features.base import FeatureDrafter
from traces.errors import DraftsimError


class GrowingCache:
    """Keys and values by layer, appended to; gradients pass through."""

    def __init__(self, kept: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self._kept = dict(kept or {})

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object
    ) -> tuple[Tensor, Tensor]:
        """Append (batch, kv_heads, entries, head_dim) and return all of the layer."""
        del args
        if layer in self._kept:
            before = self._kept[layer]
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        self._kept[layer] = keys, values
        return keys, values

    def branch(self) -> GrowingCache:
        """A cache that holds the same and grows by itself."""
        return GrowingCache(self._kept)


def unroll(
    drafter: FeatureDrafter, tokens: Tensor, features: Tensor, steps: int, *,
    pick: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Draft `steps` tokens from every entry (training-time test, arXiv:2503.01840, sec. 3.2).

    Parameters
    ----------
    tokens: (batch, tokens) target ids; what lies beyond the last counts as token 0.
    features: (batch, tokens or tokens - 1, feature_width) of the target, see `target_features`.
    steps: tokens drafted from each entry; at most the modules of a drafter with several.
    pick: what the drafter feeds itself: (batch, entries, hidden) states of a step -> (batch,
        entries) target ids.  None: the true tokens.

    Returns
    -------
    For each step, what the head reads, (batch, tokens - 1, hidden): at ``[:, i]`` of step j it
    foresees token i + 2 + j.

    Raises
    ------
    DraftsimError
        If a drafter has fewer modules than `steps`, or several and a `pick`.
    """
    turns = drafter.modules_in_turn
    if turns > 1 and (steps > turns or pick is not None):
        raise DraftsimError(
            f"a drafter of {turns} modules drafts at most {turns} tokens from the true ones, "
            f"not {steps}"
        )
    batch, count = tokens.shape[0], tokens.shape[1] - 1
    device = tokens.device
    at = torch.arange(count, device=device)
    causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    own = torch.eye(count, dtype=torch.bool, device=device)
    padded = torch.cat([tokens.clamp(min=0), tokens.new_zeros(batch, steps)], 1)
    feed, fed_back = padded[:, 1 : 1 + count], drafter.fuse(features[:, :count])
    cache, mask, outputs = GrowingCache(), causal, []
    for step in range(steps):
        # A module in turn meets its own true entries at every step; one for all meets them
        # at the first, and from then on its own.
        shift = 0 if turns > 1 else step
        states, fed_back = drafter.step(
            drafter.embed(feed), fed_back, drafter.rotary((at + shift)[None]), mask[None, None],
            cache, step if turns > 1 else 0,
        )  # fmt: skip
        outputs.append(states)
        if step + 1 < steps:
            feed = padded[:, 2 + step : 2 + step + count] if pick is None else pick(states)
            feed, fed_back = drafter.following(feed, fed_back)
            mask = causal if turns > 1 else torch.cat([mask, own], 1)
    return outputs
