"""Real models that `draftsim fetch` downloads: their names, sources and folders."""
