"""Speculative decoding for real: one sequence, under a rule, in a batch, or dictated."""
