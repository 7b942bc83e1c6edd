"""The draft model as a draft source: its recording is the trace itself."""

from __future__ import annotations

from policies.core import SIGNALS
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.sources.base import Source
from traces.sources.recording import Recordings


class DraftModelSource(Source):
    """The trace's own draft model."""

    name = "draft-model"
    what = "The trace's own draft model"
    signals = frozenset(SIGNALS)
    unlike = None
    sampled = True
    scored = True
    chained = True
    record = "`draftsim profile`"

    def by_passes(self, recordings: Recordings) -> bool:
        """Return True: a drafted token is a pass."""
        return True

    def check(self, trace: Trace, recordings: Recordings, first: int) -> None:
        """Check nothing: a trace has its drafts."""

    def drafts_along(self, trace: Trace, recordings: Recordings) -> Trace:
        """Return `trace`, whose drafts these are."""
        return trace

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency`, whose draft passes these are."""
        return latency
