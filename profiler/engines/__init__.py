"""Serving engines: our policies inside them, and what their iterations cost.

`rounds` is the loop of `policies.core.speculate` taken apart, because an engine verifies
when it likes; `drafts` is where tokens come from; `proposer` is the class that vLLM loads
by name; `vllm` steps an engine by hand, and `visits`, `plan` and `table` turn its
iterations into a latency table.  Only `vllm` and `proposer` know the engine.
"""
