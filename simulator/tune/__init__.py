"""Offline search for an engine's setting, with the gain to expect."""
