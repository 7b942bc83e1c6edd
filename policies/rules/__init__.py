"""Verification rules: how many of the drafted tokens the target lets stand."""
