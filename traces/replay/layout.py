"""A recording laid out for many replays at once: one entry per place where a round may begin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from weakref import WeakKeyDictionary, ref

import numpy as np

from policies.arrays import Bools, Floats, Ints, next_true, ranges
from policies.vectorised import UNBOUNDED, Watch
from traces.acceptance.tape import ends_drafts
from traces.acceptance.trace import Trace


class Places(ABC):
    """Every output position of a trace, as one where a round may begin.

    Attributes
    ----------
    rows, most, context, run_lengths:
        As in `policies.vectorised.Starts`.
    runs:
        Drafts that were accepted in a row from each start.
    recorded:
        Drafted tokens that each start's recording holds; a longer draft has left it.
    open_ended:
        True if more than `runs` might have been accepted.
    position, request:
        Output tokens before each start, and the index of its request.
    begins, ends:
        The first start of each request; one past the last of each start's own.
    left:
        Tokens that may be drafted: verification emits the last of a request's limit.
    """

    rows: Ints
    most: Ints
    runs: Ints
    run_lengths: Ints
    recorded: Ints
    open_ended: Bools

    def __init__(self, trace: Trace) -> None:
        starts = np.asarray(trace.request_starts, dtype=np.int64)
        tokens = np.diff(starts)

        def each(field: str) -> Ints:
            values = [getattr(r, field) for r in trace.requests]
            return np.repeat(np.array(values, dtype=np.int64), tokens)

        self.begins = starts[:-1]
        self.ends: Ints = trace.request_ends
        self.position = ranges(tokens)
        self.request: Ints = np.repeat(np.arange(len(tokens)), tokens)
        self.context: Ints = self.position + each("prompt_length")
        self.left: Ints = each("max_new_tokens") - self.position - 1
        self._signals: dict[str, Floats] = {}
        self._watched: dict[Hashable, Floats] = {}

    @abstractmethod
    def read(self, name: str) -> Floats:
        """Return a draft signal of every row."""

    def signal(self, name: str) -> Floats:
        if name not in self._signals:
            self._signals[name] = self.read(name)
        return self._signals[name]

    def watched(self, watch: Watch) -> Floats:
        if watch not in self._watched:
            while len(self._watched) >= KEPT:
                del self._watched[next(iter(self._watched))]
            self._watched[watch] = watch.values(self)
        return self._watched[watch]


class Layout(Places):
    """The starts of a trace that a draft model drafted (`policies.vectorised.Starts`)."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        # Not the trace itself: data cached for a trace must not keep it alive.
        self._trace = ref(trace)
        count = len(self.position)
        left = self.left
        self.runs = np.asarray(trace.run_lengths, dtype=np.int64)
        self.open_ended = np.asarray(trace.open_ended)
        self.run_lengths = np.minimum(self.runs, left)
        if not trace.by_start:
            self.run_lengths[self.open_ended] = -1
        self.recorded = np.full(count, UNBOUNDED - 1, dtype=np.int64)
        if trace.signals:
            self.rows = np.asarray(trace.on_path, dtype=np.int64)
            self.recorded = trace.draft_ends - self.rows
            at_eos = next_true(ends_drafts(trace))[self.rows] - self.rows + 1
            self.most = np.minimum(np.minimum(left, at_eos), self.recorded + (not trace.drafts_end))
        else:
            # Without signals a draft ends the output only where it matches all the way there.
            self.rows = np.zeros(count, dtype=np.int64)
            until = self.ends - np.arange(count)
            ended = np.array([r.ended == "eos" for r in trace.requests], dtype=bool)
            eos = ended[self.request] & (self.runs >= until)
            self.most = np.where(eos, np.minimum(left, until), left)

    def read(self, name: str) -> Floats:
        trace = self._trace()
        assert trace is not None
        return trace.signal(name)


class Foreseen(Places):
    """Places from which drafts were found beforehand; no signal of theirs is read."""

    def foresee(self, most: Ints, runs: Ints) -> None:
        """Return the longest draft from each position, and how many of its tokens are right."""
        self.rows = np.zeros(len(self.position), dtype=np.int64)
        self.most = np.minimum(most, self.left)
        self.runs = self.run_lengths = runs
        self.recorded = np.full(len(self.position), UNBOUNDED - 1, dtype=np.int64)
        self.open_ended = np.zeros(len(self.position), dtype=bool)

    def read(self, name: str) -> Floats:
        raise NotImplementedError(f"{name} of a token that is only counted")


KEPT = 8
"""Arrays of watched values, of the size of the recording, that are kept."""
_layouts: WeakKeyDictionary[Trace, Layout] = WeakKeyDictionary()


def layout_of(trace: Trace) -> Layout:
    """Return the layout of a trace, made once."""
    if (layout := _layouts.get(trace)) is None:
        layout = _layouts[trace] = Layout(trace)
    return layout
