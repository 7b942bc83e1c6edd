"""Verification rules: how many of the drafted tokens are accepted."""
