"""Batches, queues and serving in simulated time.

>>> from simulator.serving import Poisson, Scenario
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
from simulator.serving.cost import TableCost
from simulator.serving.outcome.report import Run
from simulator.serving.outcome.results import Results, ResultsFile, read_results
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.routers import (
    ROUTERS,
    LeastRequests,
    LeastTokens,
    RandomSplit,
    RoundRobin,
    Router,
)
from simulator.serving.run import simulate
from simulator.serving.scenario import MODES, Scenario
from simulator.serving.scheduler import Limits
from simulator.serving.study import break_even_load, over_batches, over_rates, sweep

__all__ = [
    "MODES",
    "ROUTERS",
    "ArrivalFile",
    "ArrivalTimes",
    "Arrivals",
    "ClosedLoop",
    "Deterministic",
    "Job",
    "LeastRequests",
    "LeastTokens",
    "Limits",
    "Poisson",
    "RandomSplit",
    "Results",
    "ResultsFile",
    "RoundRobin",
    "Router",
    "Run",
    "Scenario",
    "TableCost",
    "Timeline",
    "break_even_load",
    "over_batches",
    "over_rates",
    "read_results",
    "simulate",
    "sweep",
]
