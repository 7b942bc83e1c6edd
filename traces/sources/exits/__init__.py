"""Drafting with the target's own first layers: early exit, with heads or an adapter."""
