"""Answers to what-if questions: a better draft, another device, a larger batch.

Acceptance tilted, grids swept, break-even found, and the bound that no policy passes.
Figures live in `simulator.plots.whatif`.
"""

from simulator.executors import Cluster, Local
from simulator.whatif.breakeven import (
    THRESHOLDS,
    break_even,
    crossing,
    fastest,
    overview,
    select,
    surface,
    thresholds,
)
from simulator.whatif.ladder import best_fixed, ladder, split_prompts
from simulator.whatif.rate import LatencyCost, RateFit, fit_rate_optimal
from simulator.whatif.sweep.cells import COLUMNS, references
from simulator.whatif.sweep.grid import expand, parse_axis, with_gammas
from simulator.whatif.sweep.prices import Prices
from simulator.whatif.sweep.run import Sweep, read_sweep, write_sweep, write_thresholds
from simulator.whatif.tilt.fidelity import (
    TiltError,
    TiltErrors,
    compare_groups,
    compare_tilt,
    summarize_error,
    tilt_errors,
)
from simulator.whatif.tilt.trace import Tilter, acceptance, iid_like, tilt_to
from simulator.whatif.tuning import Tuning, tune

__all__ = [
    "COLUMNS",
    "THRESHOLDS",
    "Cluster",
    "LatencyCost",
    "Local",
    "Prices",
    "RateFit",
    "Sweep",
    "TiltError",
    "TiltErrors",
    "Tilter",
    "Tuning",
    "acceptance",
    "best_fixed",
    "break_even",
    "compare_groups",
    "compare_tilt",
    "crossing",
    "expand",
    "fastest",
    "fit_rate_optimal",
    "iid_like",
    "ladder",
    "overview",
    "parse_axis",
    "read_sweep",
    "references",
    "select",
    "split_prompts",
    "summarize_error",
    "surface",
    "thresholds",
    "tilt_errors",
    "tilt_to",
    "tune",
    "with_gammas",
    "write_sweep",
    "write_thresholds",
]
