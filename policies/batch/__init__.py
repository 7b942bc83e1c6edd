"""Policies that decide once for a whole batch."""
