"""Serving engines: our policies inside them, and the cost of their iterations.

`engine` says what an engine provides; a folder here holds one engine.  `session` decides drafts for
the rows of an engine's batch; `drafts` is where tokens come from; `cells` and `measure` turn
iterations into a latency table; `loads` runs loads in an engine, `served` sends them to its HTTP
server, and `notes` is what its processes write down.
"""
