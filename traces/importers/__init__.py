"""Logs of other programs, made into traces or counts: a module a kind, a class a format."""
