"""A recording laid out for many replays at once: one entry per place where a round may begin."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary, ref

import numpy as np

from policies.lanes.base import UNBOUNDED, Floats, Ints, Watch
from traces.acceptance.tape import ends_drafts
from traces.acceptance.trace import Trace


class Layout:
    """The starts of a trace (`policies.lanes.base.Starts`), on-path positions in their order.

    Attributes
    ----------
    rows, most, context, run_lengths:
        As of the protocol.
    runs:
        Drafts that were accepted in a row from each start.
    recorded:
        Drafted tokens that each start's recording holds; a longer draft has left it.
    open_ended:
        Whether more than `runs` might have been accepted.
    position, request:
        Of each start: output tokens before it, and the index of its request.
    ends:
        One past the last start of each start's request.
    """

    def __init__(self, trace: Trace) -> None:
        # Not the trace itself: what is kept beside it must not keep it.
        self._trace = ref(trace)
        starts = np.asarray(trace.request_starts, dtype=np.int64)
        tokens = np.diff(starts)
        count = int(starts[-1])
        self.begins = starts[:-1]
        self.ends: Ints = np.repeat(starts[1:], tokens)
        self.position: Ints = np.arange(count) - np.repeat(starts[:-1], tokens)
        self.request: Ints = np.repeat(np.arange(len(tokens)), tokens)
        self.runs: Ints = np.asarray(trace.run_lengths, dtype=np.int64)
        self.open_ended = np.asarray(trace.open_ended)
        self.context: Ints = self.position + self._each("prompt_length")
        left = self._each("max_new_tokens") - self.position - 1
        self.run_lengths: Ints = np.minimum(self.runs, left)
        if not trace.by_start:
            self.run_lengths[self.open_ended] = -1
        self._signals: dict[str, Floats] = {}
        self._watched: dict[Hashable, Floats] = {}
        self.recorded: Ints = np.full(count, UNBOUNDED - 1, dtype=np.int64)
        if trace.signals:
            self.rows: Ints = np.asarray(trace.on_path, dtype=np.int64)
            bounds = np.append(self.rows, len(trace))
            index = np.arange(count)
            # A draft walks on through matches and the tail of the next mismatch.
            last = index + 1 if trace.by_start else np.minimum(index + self.runs + 1, self.ends)
            self.recorded = bounds[last] - self.rows
            ends = np.flatnonzero(np.append(ends_drafts(trace), True))
            at_eos = ends[np.searchsorted(ends, self.rows)] - self.rows + 1
            self.most = np.minimum(np.minimum(left, at_eos), self.recorded + (not trace.drafts_end))
        else:
            # Without signals a draft ends the output only where it matches all the way there.
            self.rows = np.zeros(count, dtype=np.int64)
            until = self.ends - np.arange(count)
            ended = np.array([r.ended == "eos" for r in trace.requests], dtype=bool)
            eos = ended[self.request] & (self.runs >= until)
            self.most = np.where(eos, np.minimum(left, until), left)

    def signal(self, name: str) -> Floats:
        if name not in self._signals:
            trace = self._trace()
            assert trace is not None
            self._signals[name] = trace.signal(name)
        return self._signals[name]

    def watched(self, watch: Watch) -> Floats:
        if watch not in self._watched:
            while len(self._watched) >= KEPT:
                del self._watched[next(iter(self._watched))]
            self._watched[watch] = watch.values(self)
        return self._watched[watch]

    def _each(self, field: str) -> Ints:
        trace = self._trace()
        assert trace is not None
        values = [getattr(r, field) for r in trace.requests]
        return np.array(values, dtype=np.int64)[self.request]


KEPT = 8
"""Arrays of watched values, of the size of the recording, that are kept."""
_layouts: WeakKeyDictionary[Trace, Layout] = WeakKeyDictionary()


def layout_of(trace: Trace) -> Layout:
    """The layout of a trace, made once."""
    if (layout := _layouts.get(trace)) is None:
        layout = _layouts[trace] = Layout(trace)
    return layout
