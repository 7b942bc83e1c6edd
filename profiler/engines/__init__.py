"""Serving engines: our policies inside them, and what their iterations cost.

`rounds` drives `policies.together`, whose rounds an engine verifies when it likes; `drafts` is
where tokens come from; `proposer` is the class that vLLM loads by name; `engine` steps an engine by
hand, and `plan`, `bench` and `table` turn its iterations into a latency table; `server` runs the
engine in its HTTP server.  Only `engine`, `start`, `proposer`, `watch`, `own_drafter` and `server`
know vLLM.
"""
