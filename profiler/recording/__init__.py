"""A run folder while it is written: the trace, its tails, its checkpoints, its lock."""
