"""Replay: a recording takes the place of the two models, and a policy makes its rounds along it."""
