"""Training of drafters: the bundled pair, SmolLM2's drafters, heads for any target."""
