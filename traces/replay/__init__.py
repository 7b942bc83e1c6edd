"""A recording in the place of two models: the rounds that a policy takes along it."""
