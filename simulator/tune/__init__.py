"""Offline search for what a serving engine reads, with the gain it should bring."""
