"""Logs of other programs, made into traces or counts: one class per format."""
