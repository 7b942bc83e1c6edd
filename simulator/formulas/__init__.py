"""Closed forms of the literature, each with its paper and equation.

The names inside a module are the papers'.  Tests, `draftsim check` and the notebooks share them, so
a formula is written down once.
"""

from simulator.formulas import batching, gammatune, general, leviathan, parallel, specbound

__all__ = ["batching", "gammatune", "general", "leviathan", "parallel", "specbound"]
