"""Turns rounds into seconds: pricing, closed forms, batching and queueing.

Figures live in `simulator.plots`, closed forms in `simulator.formulas`.
"""

from simulator.check import Check, run_checks
from simulator.pricing import PassCount, Priced, autoregressive, price
from simulator.robustness import INITIAL_GAMMAS, robustness, speedup_by_gamma
from simulator.summary import (
    SUMMARY_COLUMNS,
    prompt_speedups,
    speedup_distribution,
    summarize,
    to_rows,
)
from simulator.validation import (
    VALIDATE_COLUMNS,
    Verdict,
    compare,
    predictions,
    verdict,
)

__distribution__ = "draftsim"

__all__ = [
    "INITIAL_GAMMAS",
    "SUMMARY_COLUMNS",
    "VALIDATE_COLUMNS",
    "Check",
    "PassCount",
    "Priced",
    "Verdict",
    "autoregressive",
    "compare",
    "predictions",
    "price",
    "prompt_speedups",
    "robustness",
    "run_checks",
    "speedup_by_gamma",
    "speedup_distribution",
    "summarize",
    "to_rows",
    "verdict",
]
