"""Timing of the parts of decoding: one file for each kind of cell of the latency table."""
