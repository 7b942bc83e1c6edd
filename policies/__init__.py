"""Draft-length policies, verification rules and the loop that drives them."""
