"""Logs of other programs, made into traces or counts: one file a format, one interface."""
