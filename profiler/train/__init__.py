"""Training of what drafts: the bundled pair, SmolLM2's drafters, heads for any target."""
