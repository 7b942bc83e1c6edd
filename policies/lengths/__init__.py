"""Policies that choose how many tokens one stream drafts."""
