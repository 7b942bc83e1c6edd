"""Drafters that read the target's own states: EAGLE, EAGLE-3 and MTP modules.

Every drafter works on *entries*.  Entry i pairs the target's feature at token i with token
i + 1, sits at position i, and foresees token i + 2:

    entry i:   (feature of token i, embedding of token i + 1)  ->  token i + 2

The kind decides what a feature is (`FeatureDrafter.feature_layers`): the target's final normed
state (EAGLE, MTP), or its states after three depths, concatenated (EAGLE-3).  A second drafted
token has no feature of its own: the drafter's output takes its place, at the next position, and so
on.

Reading and writing: `profiler.features.checkpoint`.  Decoding: `profiler.features.runner`.
"""
