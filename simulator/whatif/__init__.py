"""Answers to what-if questions: a better draft, another device, a larger batch.

Acceptance tilted, grids swept, break-even found, and the bound that no policy passes.
Figures live in `simulator.plots.whatif`.
"""
