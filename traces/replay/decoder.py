"""A decoder that reads a recorded trace instead of running two models, and that trace as lists.

`ReplayDecoder` keeps the contract of `policies.core.Decoder`, so `speculate` runs over a recording
as it runs over real models.  It reads `TraceLists`, made once per trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from policies.core import Load
from policies.guard import SIGNALS, guarded
from traces.acceptance.trace import MATCH, Trace, once_per_trace
from traces.errors import DraftsimError, SignalError, TailError

T = TypeVar("T")


class ReplayDecoder:
    """One recorded request, decoded again under any policy.

    Parameters
    ----------
    trace, request:
        The recording and the index of the request in it.
    first:
        Output position to begin at: 1 if prefill emits the first token (engines),
        0 if the first verification includes the prompt (transformers); None: the trace's own.
    batch:
        Number of sequences decoded together, as the policy is told.

    Raises
    ------
    TailError
        When the policy drafts past the recorded off-path tail.
    """

    def __init__(
        self, trace: Trace, request: int, first: int | None = None, batch: int = 1
    ) -> None:
        self._trace = trace
        self._batch = batch
        self._info = trace.requests[request]
        lists = self._lists = trace_lists(trace)
        self._start = lists.starts[request]
        self.length = self._info.tokens
        self._limit = self._info.max_new_tokens
        self._rows, self._runs = lists.rows, lists.runs
        self._row_limit, self._signals = lists.row_limit, lists.signals
        # Where a drafted match would be EOS; the drafter stops at it, and only at it.
        self._eos_at = self.length - 1 if self._info.ended == "eos" else -1
        self._tokens = lists.tokens(SIGNALS)
        self.takes_verified = trace.takes_verified
        self.position = min(trace.first if first is None else first, self.length)

    def declare(self, reads: Collection[str]) -> None:
        """Give from now on tokens with these signals only."""
        self._tokens = self._lists.tokens(reads)

    @property
    def remaining(self) -> int:
        """Tokens to the limit; 0 at the end, known from the recording."""
        # The drafter does not know where EOS will fall, so the cap is the limit's.
        return self._limit - self.position if self.position < self.length else 0

    @property
    def load(self) -> Load:
        """The batch at the current context."""
        start = self._start + self.position
        run = self._runs[start]
        known = start not in self._lists.unknown
        length = min(run, self._limit - self.position - 1) if known else None
        return Load(self._batch, self._info.prompt_length + self.position, length)

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the recorded proposal after `so_far`; None where a draft ends."""
        start = self._start + self.position
        if not self._signals:
            drafted = len(so_far)
            at_eos = self.position + drafted == self._eos_at and self._runs[start] > drafted
            return END if at_eos else BLANK
        row = self._rows[start] + len(so_far)
        if row >= self._row_limit[start]:
            if self._trace.drafts_end:
                return None
            longest = self._trace.max_gamma
            recorded = f"past the recorded tail (max_gamma={longest})"
            more = "with a larger --max-gamma"
            if self._trace.by_start:
                recorded, more = f"and {longest} were recorded", "longer drafts"
            raise TailError(
                f"the policy drafted {len(so_far) + 1} tokens at position {self.position} of "
                f"request {self._info.id!r}, {recorded}: lower its maximum, or record {more}"
            )
        return self._tokens.known[row] or self._tokens.make(row)

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept the leading matches and move on to where the output then stands."""
        start = self._start + self.position
        run = self._runs[start]
        accepted = len(draft)
        if run < accepted:
            accepted = run
            if self._lists.open_ended and start in self._lists.open_ended:
                raise self._unobserved(run)
        self._advance(accepted)
        return accepted

    def _unobserved(self, ahead: int) -> DraftsimError:
        if self._trace.by_start:
            return TailError(
                f"request {self._info.id!r} had all {ahead} drafts accepted at position "
                f"{self.position}, and no more were ever tried: lower the policy's maximum"
            )
        return SignalError(
            f"request {self._info.id!r} was not observed at position {self.position + ahead}, "
            "where this policy drafts: impute the trace first (`traces.acceptance.survival.impute`)"
        )

    def _advance(self, accepted: int) -> None:
        # An accepted EOS ends the output: no bonus token follows it.
        position = self.position + accepted + 1
        self.position = position if position < self.length else self.length


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

    Most rows are tails that no policy reaches.  The class `kind` is not called: only the attributes
    `names` are set, whose values by row are asked of `column` when the first object is made.
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
        """Return the objects of `count` rows from `start`: a draft reads consecutive rows."""
        return [self.known[row] or self.make(row) for row in range(start, start + count)]


class TraceLists:
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
        """Return the drafted tokens, one per row, with the signals `reads` alone."""
        key = frozenset(reads)
        if key not in self._kept:
            ends = self._columns.get("ends", ())
            names = ("ends", *(s for s in SIGNALS if s in key))
            tokens = Rows(guarded(RecordedToken, key), names, len(ends), self._column)
            if not reads:
                # Nothing can be read of them, so two tokens serve for all.
                tokens.known = [END if at_end else BLANK for at_end in ends]
            self._kept[key] = tokens
        return self._kept[key]

    def _column(self, name: str) -> Sequence[Any]:
        """Return a token's attribute, one value per row; None each if it was not recorded."""
        if name not in self._columns:
            trace = self._trace()
            assert trace is not None
            held = name in trace.signals
            self._columns[name] = trace.signal(name).tolist() if held else [None] * len(trace)
        return self._columns[name]


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


trace_lists = once_per_trace(TraceLists)
