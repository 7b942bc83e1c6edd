"""Operators timed one by one on a GPU, and the passes that they add up to."""
