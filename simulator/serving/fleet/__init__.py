"""Several replicas with a router: who takes a request, and what they all did together."""
