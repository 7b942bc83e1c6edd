"""A recorded trace laid out for replay: plain lists, read token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

from policies.guard import SIGNALS, guarded
from traces.acceptance.trace import MATCH, Trace

T = TypeVar("T")


@dataclass(eq=False, repr=False, slots=True)
class RecordedToken:
    """A drafted token as it was recorded; a signal that was not recorded is None."""

    token_id: int
    ends: bool = False
    prob: Any = None
    entropy: Any = None
    logit_margin: Any = None
    prob_margin: Any = None
    top_prob: Any = None
    raw_prob: Any = None
    top10_prob: Any = None


BLANK, END = (guarded(RecordedToken, ())(-1, at_end) for at_end in (False, True))
"""A drafted token of which nothing can be read, and one that ends the draft."""


class Rows(Generic[T]):
    """An object per row of a trace, made when first asked for and then kept.

    Most rows of a recording are tails that no policy reaches.

    Parameters
    ----------
    kind:
        Class of the objects, which is not called: only their attributes `names` are set.
    count:
        Rows.
    column:
        The values of an attribute, one per row; asked for when the first object is made.
    """

    def __init__(
        self,
        kind: type[T],
        names: Iterable[str],
        count: int,
        column: Callable[[str], Sequence[Any]],
    ) -> None:
        self.known: list[T | None] = [None] * count
        self._kind, self._names, self._column = kind, tuple(names), column
        self._values: list[tuple[str, Sequence[Any]]] = []

    def make(self, row: int) -> T:
        """Return the object of a row, from now on kept."""
        if not self._values:
            self._values = [(name, self._column(name)) for name in self._names]
        made = self._kind.__new__(self._kind)
        for name, values in self._values:
            setattr(made, name, values[row])
        self.known[row] = made
        return made

    def rows(self, start: int, count: int) -> list[T]:
        """Return the objects of `count` rows from `start`: a draft walks over consecutive rows."""
        return [self.known[row] or self.make(row) for row in range(start, start + count)]


class Tape:
    """A trace laid out for replay: Python lists, one entry per row, built once per trace."""

    def __init__(self, trace: Trace) -> None:
        self.starts: list[int] = trace.request_starts.tolist()
        self.runs: list[int] = trace.run_lengths.tolist()
        self.open_ended = set(np.flatnonzero(trace.open_ended).tolist())
        # As far as drafts were tried from every start, what was accepted is all there is.
        self.unknown = set() if trace.by_start else self.open_ended
        self.signals = bool(trace.signals)
        self.rows: list[int] = []
        self.row_limit: list[int] = []
        self._kept: dict[frozenset[str], Rows[RecordedToken]] = {}
        self._columns: dict[str, Sequence[Any]] = {}
        self._trace = ref(trace)
        # Without signals nothing tells one draft from another: two tokens serve for all of them.
        if self.signals:
            self.rows = trace.on_path.tolist()
            self._columns["ends"] = ends_drafts(trace).tolist()
            self.row_limit = trace.draft_ends.tolist()

    def tokens(self, reads: Collection[str]) -> Rows[RecordedToken]:
        """Return the drafted tokens, one per row, that can be asked for the signals `reads`
        alone.
        """
        key = frozenset(reads)
        if (tokens := self._kept.get(key)) is None:
            tokens = self._kept[key] = self._laid_out(key)
        return tokens

    def _laid_out(self, reads: frozenset[str]) -> Rows[RecordedToken]:
        ends = self._columns.get("ends", ())
        kind = guarded(RecordedToken, reads)
        tokens = Rows(kind, ("ends", *(s for s in SIGNALS if s in reads)), len(ends), self._column)
        if not reads:
            # Nothing can be read of them, so two tokens serve for all.
            tokens.known = [END if at_end else BLANK for at_end in ends]
        return tokens

    def _column(self, name: str) -> Sequence[Any]:
        """Return the values of a token's attribute, one per row; None each if it was not
        recorded.
        """
        if (values := self._columns.get(name)) is None:
            trace = self._trace()
            assert trace is not None
            held = name in trace.signals
            values = trace.signal(name).tolist() if held else [None] * len(trace)
            self._columns[name] = values
        return values


def ends_drafts(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return per row whether the drafted token ends the draft."""
    if "draft_token" in trace.columns:
        ends = np.isin(trace.columns["draft_token"], trace.meta.get("eos_token_ids") or [])
    else:
        ends = np.zeros(len(trace), dtype=bool)
    # A match at the end of an output that ended with EOS is EOS, whatever else is recorded.
    last = trace.on_path[trace.request_starts[1:] - 1]
    last = last[[r.ended == "eos" for r in trace.requests]]
    ends[last] |= trace.columns["match"][last] == MATCH
    return ends


_tapes: WeakKeyDictionary[Trace, Tape] = WeakKeyDictionary()


def tape_of(trace: Trace) -> Tape:
    """Return the tape of a trace, laid out once."""
    # Derived data cached for an immutable trace: every policy replays the same tape.
    if (tape := _tapes.get(trace)) is None:
        tape = _tapes[trace] = Tape(trace)
    return tape
