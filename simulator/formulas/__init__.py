"""Closed forms of the literature, each with its paper and equation.

One module per paper; the names inside are the papers'.  Tests, `draftsim check` and the
notebooks share them, so a formula is written down once.
"""

from simulator.formulas import (
    batching,
    dsi,
    gammatune,
    general,
    leviathan,
    magicdec,
    pearl,
    specbound,
)

__all__ = ["batching", "dsi", "gammatune", "general", "leviathan", "magicdec", "pearl", "specbound"]
