"""Spans: iterations between two changes of the batch, priced together.

The rounds of a request do not depend on the clock unless its policy looks at the load or
learns across requests.  `rounds` replays a sequence once and keeps its rounds as arrays,
`ledger` adds up what the requests of a batch will do iteration by iteration, and `engine`
runs and prices whole spans of it, through a closed loop from one request to the next (`loop`);
where the number of requests decides a length for all of
them, `planned` reads their rounds anew whenever it changes.  Everything else stays with the
engine that goes iteration by iteration (`simulator.serving.engine`), which is the reference.
"""

from simulator.serving.spans.engine import SpanEngine
from simulator.serving.spans.loop import LoopEngine, PlannedLoopEngine, keeps_no_clock
from simulator.serving.spans.planned import PlannedEngine, planned_rounds
from simulator.serving.spans.rounds import clock_free, replays_of

__all__ = [
    "LoopEngine", "PlannedEngine", "PlannedLoopEngine", "SpanEngine", "clock_free",
    "keeps_no_clock", "planned_rounds", "replays_of",
]  # fmt: skip
