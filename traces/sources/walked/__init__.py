"""Rounds of draft sources without the loop: what they draft from every start, read off at once."""
