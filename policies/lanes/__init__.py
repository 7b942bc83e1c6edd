"""How a policy's drafts are decided for many starts, or many runs, at once."""
