"""Drafts from every entry of whole sequences at once, with gradients.

On features that were computed once::

    drafter = Eagle3(layer_config(target.config), draft_tokens, default_depths(layers))
    drafter.attach(target)                         # embedding, and head where it is shared
    features = target_features(target, ids, drafter.feature_layers)   # (batch, tokens, width)
    states = unroll(drafter, ids, features, steps=3)    # 3 x (batch, tokens - 1, hidden)
    logits = drafter.logits(states[j])             # (batch, tokens - 1, draft vocabulary)
    labels = drafter.draft_ids(ids)                # -1 where the draft vocabulary lacks a token

``states[j][:, i]`` foresees token i + 2 + j, drafted from entry i on: `unroll` is EAGLE-3's
training-time test, in which later steps attend to the true entries up to i and to their own
steps before.  ``unroll(..., steps=1)`` is ordinary teacher forcing.  Rows padded on the right
need no mask, only labels that leave the padding out.  Trained parameters are
``drafter.parameters()``; the target's embedding and head, attached, are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.features.drafters import FeatureDrafter
from traces.errors import DraftsimError


@torch.no_grad()
def target_features(model: Any, ids: Tensor, depths: Sequence[int] = ()) -> Tensor:
    """Return features of every token, (batch, tokens, width x depths), by one pass of `model`.

    ``ids`` (batch, tokens), rows padded on the right with anything; ``depths`` as
    `FeatureDrafter.feature_layers`.
    """
    out = model(
        input_ids=ids.clamp(min=0), attention_mask=torch.ones_like(ids), use_cache=False,
        output_hidden_states=True, logits_to_keep=1,
    )  # fmt: skip
    if depths and not 0 <= min(depths) <= max(depths) < len(out.hidden_states) - 1:
        raise DraftsimError(
            f"depths {list(depths)} were asked of a target of {len(out.hidden_states) - 1} layers"
        )
    # The last entry is taken after the final norm.
    return torch.cat([out.hidden_states[d] for d in depths or (-1,)], -1)


class GrowingCache:
    """Keys and values by layer, appended to; gradients pass through."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

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
    predicts token i + 2 + j.

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
