"""Real models that `draftsim fetch` brings: what they are, where they come from, their folders."""
