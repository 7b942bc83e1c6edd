"""Drafters that read the target's own states: EAGLE, EAGLE-3 and MTP modules.

Every drafter works on *entries*.  Entry i pairs the target's feature at token i with token
i + 1, sits at position i, and foresees token i + 2:

    entry i:   (feature of token i, embedding of token i + 1)  ->  token i + 2

The kind decides what a feature is (`FeatureDrafter.feature_layers`): the target's final normed
state (EAGLE, MTP), or its states after three depths, concatenated (EAGLE-3).  A second drafted
token has no feature of its own: the drafter's output takes its place, at the next position, and so
on.

Training, on features that were computed once::

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

Reading and writing: `read_drafter` and `write_drafter`.  Decoding: `DrafterRunner`.
"""

from profiler.features.checkpoint import read_drafter, write_drafter
from profiler.features.drafters import (
    Eagle3,
    EagleDrafter,
    FeatureDrafter,
    Mtp,
    ParallelEagle3,
    default_depths,
    layer_config,
    target_features,
)
from profiler.features.runner import DrafterRunner, unroll

__all__ = [
    "DrafterRunner",
    "Eagle3",
    "EagleDrafter",
    "FeatureDrafter",
    "Mtp",
    "ParallelEagle3",
    "default_depths",
    "layer_config",
    "read_drafter",
    "target_features",
    "unroll",
    "write_drafter",
]
