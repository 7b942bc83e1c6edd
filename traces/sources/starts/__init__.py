"""Drafts recorded for every start of a round: heads, drafters on features, their trees."""
