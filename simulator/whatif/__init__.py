"""Answers to what-if questions: a better draft, another device, a larger batch.

It reweights acceptance, sweeps grids, finds break-even points, and the bound of all policies.
Figures live in `simulator.plots.whatif`.
"""
