"""The features of a target that drafters read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from traces.errors import DraftsimError


def default_depths(layers: int) -> tuple[int, int, int]:
    """Depths that EAGLE-3 reads of a target of `layers` layers: 2, half, and all but 3.

    As EAGLE's repository and vLLM have them; where these are not three in ascending order the
    target is too small for them, and it is the first, the middle and the last but one.

    >>> default_depths(30), default_depths(4)
    ((2, 15, 27), (1, 2, 3))
    """
    usual = (2, layers // 2, layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    if layers < 4:
        raise DraftsimError(
            f"a target of {layers} layers has no three depths to read: name the depths"
        )
    return 1, layers // 2, layers - 1


@torch.no_grad()
def target_features(model: Any, ids: Tensor, depths: Sequence[int] = ()) -> Tensor:
    """Features of every token, (batch, tokens, width x depths), by one pass of `model`.

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
