"""Training runs that made the weights in the repository: the bundled pair, SmolLM2's drafters."""
