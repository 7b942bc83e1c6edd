"""Figures of the results, in one restrained style.

Every function returns a matplotlib `Figure` and touches no global state; `save` writes
it, and `save_all_kinds` as PNG, SVG and PDF.  Colours are Okabe and Ito's, told apart by the
colour-blind; line style and marker tell series apart in greyscale.  Intervals are 95% bootstrap
intervals over prompts.
"""

from simulator.palette import COLOURS, DASHES, GREY, INK, MARKERS
from simulator.plots.look import save, save_all_kinds
from simulator.plots.recording import (
    plot_categories,
    plot_cost_ratio,
    plot_robustness,
    plot_speedup,
    plot_survival,
    plot_validation,
)

__all__ = [
    "COLOURS",
    "DASHES",
    "GREY",
    "INK",
    "MARKERS",
    "plot_categories",
    "plot_cost_ratio",
    "plot_robustness",
    "plot_speedup",
    "plot_survival",
    "plot_validation",
    "save",
    "save_all_kinds",
]
