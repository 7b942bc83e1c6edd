"""Batches, queues and serving in simulated time.

>>> from simulator.serving import Poisson, Scenario, serve
>>> Scenario(Poisson(2.0), requests=100).mode
'continuous'
"""

from simulator.serving.arrivals import (
    ArrivalFile,
    Arrivals,
    ArrivalTimes,
    ClosedLoop,
    Deterministic,
    Job,
    Poisson,
)
from simulator.serving.overlap import Devices
from simulator.serving.policy_cost import TableCost
from simulator.serving.report import Run, ServeResult
from simulator.serving.results import Results, ResultsFile, read_results
from simulator.serving.run import serve, simulate
from simulator.serving.scenario import MODES, Scenario
from simulator.serving.scheduler import Limits
from simulator.serving.sweep import break_even_load, over_batches, over_rates, speedup_grid, sweep
from simulator.serving.timeline import Timeline

__all__ = [
    "MODES",
    "ArrivalFile",
    "ArrivalTimes",
    "Arrivals",
    "ClosedLoop",
    "Deterministic",
    "Devices",
    "Job",
    "Limits",
    "Poisson",
    "Results",
    "ResultsFile",
    "Run",
    "Scenario",
    "ServeResult",
    "TableCost",
    "Timeline",
    "break_even_load",
    "over_batches",
    "over_rates",
    "read_results",
    "serve",
    "simulate",
    "speedup_grid",
    "sweep",
]
