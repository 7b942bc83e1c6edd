"""Another acceptance rate for a recorded trace, and how far it can be trusted."""
