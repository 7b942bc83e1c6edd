"""Draft sources other than a draft model: early exit, heads, lookups, drafters on features."""
