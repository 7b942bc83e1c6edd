"""Drafts found in text: lookups as sources, those of serving engines among them."""
