"""Seconds of one engine iteration, read from a latency table."""
