"""Tables of what `draftsim papers` finds on the real pair, for the page about the papers."""

from __future__ import annotations

from functools import cache

from docs.reading import table
from simulator.papers.ours import Ours
from simulator.papers.specbound import order_rows, system_rows
from traces.sources.found import find_recordings
from traces.store.recordings import find_latency, find_trace


@cache
def order_of_systems(name: str) -> str:
    """Return where SpecBound's Table 1 and this recording put its systems, and why they differ."""
    trace = find_trace(name)
    ours = Ours(trace, find_latency(name), recordings=find_recordings(name, trace))
    rows = [
        (row.row.removeprefix("order, "), f"{row.published:.0f}", f"{row.ours:.0f}", row.note)
        for row in order_rows(system_rows(ours))
    ]
    if not rows:
        raise KeyError(name)
    return table(("system", "place in the paper", "here", "why"), rows)
