"""Replay: a recording replaces the two models, and a policy makes its rounds along it."""
