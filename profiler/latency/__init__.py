"""How long the parts of decoding take: one file a kind of cell of the latency table."""
