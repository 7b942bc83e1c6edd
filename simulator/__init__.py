"""Turns rounds into seconds: pricing, closed forms, batching and queueing.

Figures live in `simulator.plots`, closed forms in `simulator.formulas`.
"""

__distribution__ = "draftsim"
