"""Recordings on disk: one checked container, whose files belong together."""
