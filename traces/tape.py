"""A recorded trace laid out for replay: plain lists, read token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from policies.guard import guarded
from traces.trace import MATCH, UNKNOWN, Trace


class RecordedToken:
    """A drafted token as it was recorded; a field that was not recorded is None."""

    __slots__ = ("ends", "entropy", "logit_margin", "prob", "prob_margin", "token_id")

    def __init__(
        self,
        token_id: int,
        ends: bool,
        prob: float,
        entropy: float,
        logit_margin: float,
        prob_margin: float,
    ) -> None:
        self.token_id = token_id
        self.ends = ends
        self.prob = prob
        self.entropy = entropy
        self.logit_margin = logit_margin
        self.prob_margin = prob_margin


BLANK, END = (guarded(RecordedToken, ())(-1, at_end, *[0.0] * 4) for at_end in (False, True))
"""A drafted token of which nothing can be read, and one that ends the draft."""


class Tape:
    """A trace laid out for replay: Python lists, one entry per row, built once per trace."""

    def __init__(self, trace: Trace) -> None:
        match = trace.columns["match"][trace.on_path]
        starts = trace.request_starts
        self.starts: list[int] = starts.tolist()
        self.runs: list[int] = trace.run_lengths.tolist()
        self.unknown = set(np.flatnonzero(match == UNKNOWN).tolist())
        self.signals = bool(trace.signals)
        self.rows: list[int] = []
        self.row_limit: list[int] = []
        self._kept: dict[frozenset[str], Tokens] = {}
        self.fields: list[Sequence[Any]] = []
        if not self.signals:
            # Nothing to tell one draft from another: two tokens stand for all of them.
            return
        self.rows = trace.on_path.tolist()
        self.fields = _fields(trace)
        # A round may walk from its first row to the end of the next mismatch's tail,
        # never into the next request.
        bounds = np.append(trace.on_path, len(trace))
        mismatch = np.flatnonzero(match != MATCH)
        tail_end = np.append(bounds[mismatch + 1], len(trace))
        own_end = np.repeat(bounds[starts[1:]], np.diff(starts))
        next_mismatch = np.searchsorted(mismatch, np.arange(len(match)))
        self.row_limit = np.minimum(tail_end[next_mismatch], own_end).tolist()

    def tokens(self, reads: Collection[str]) -> Tokens:
        """The drafted tokens, one per row, that can be asked for the signals `reads` alone."""
        key = frozenset(reads)
        if (tokens := self._kept.get(key)) is None:
            tokens = self._kept[key] = Tokens(self.fields, key)
        return tokens


class Tokens:
    """The drafted token of every row, for readers that declare the same signals."""

    def __init__(self, fields: Sequence[Sequence[Any]], reads: Collection[str]) -> None:
        self._fields, self._kind = fields, guarded(RecordedToken, reads)
        # Made when first drafted: most rows of a recording are tails no policy reaches.
        ends: Sequence[bool] = fields[1] if fields else []
        self.known: list[RecordedToken | None] = [None] * len(ends)
        if not reads:
            # Nothing can be read of them, so two tokens stand for all.
            self.known = [END if at_end else BLANK for at_end in ends]

    def make(self, row: int) -> RecordedToken:
        """The token of a row, from now on kept."""
        token = self.known[row] = self._kind(*(values[row] for values in self._fields))
        return token

    def rows(self, start: int, count: int) -> list[RecordedToken]:
        """The tokens of `count` rows from `start`: a draft walks over consecutive rows."""
        return [self.known[row] or self.make(row) for row in range(start, start + count)]


def _fields(trace: Trace) -> list[Sequence[Any]]:
    """Per row the arguments of `RecordedToken`."""
    count = len(trace)
    if "draft_token" in trace.columns:
        ends = np.isin(trace.columns["draft_token"], trace.meta.get("eos_token_ids") or [])
    else:
        ends = np.zeros(count, dtype=bool)
    # A match at the end of an output that ended with EOS is EOS, whatever else is recorded.
    last = trace.on_path[trace.request_starts[1:] - 1]
    last = last[[r.ended == "eos" for r in trace.requests]]
    ends[last] |= trace.columns["match"][last] == MATCH

    def values(name: str) -> Sequence[Any]:
        return trace.signal(name).tolist() if name in trace.signals else [None] * count

    names = ("prob", "entropy", "logit_margin", "prob_margin")
    return [values("token_id"), ends.tolist(), *map(values, names)]


_tapes: WeakKeyDictionary[Trace, Tape] = WeakKeyDictionary()


def tape_of(trace: Trace) -> Tape:
    """The tape of a trace, laid out once."""
    # Derived data cached beside an immutable trace: every policy replays the same tape.
    if (tape := _tapes.get(trace)) is None:
        tape = _tapes[trace] = Tape(trace)
    return tape
