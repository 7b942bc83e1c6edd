"""Drafting with the target's own first layers: early exit, and Kangaroo's adapter."""
