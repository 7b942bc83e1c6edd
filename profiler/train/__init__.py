"""Training in minutes: heads for any target, and the pair of the GPU suite."""
