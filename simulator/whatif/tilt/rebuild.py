"""A trace with other matches: tails lent where a draft now fails, dropped where it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.whatif.tilt.matchmodel import Bools, signal_table
from traces.acceptance.schema import COLUMNS, MATCH, MISMATCH, SIGNAL_COLUMNS, UNKNOWN
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

Ints = npt.NDArray[np.int64]

NEIGHBOURS = 8
"""Recorded mismatches of like signals among which a lender is drawn."""
STALE = frozenset(n for n in COLUMNS if n.startswith("target_")) | {"draft_path_logprob", "overlap"}
"""Scores of the recorded drafts by the target, which new outcomes would contradict."""

SCORES = frozenset(n for needed in SIGNAL_COLUMNS.values() for n in needed) - {"draft_token"}
"""What the signals of a draft are computed from; its token is none of it."""


class Rebuilder:
    """Makes traces of one recording with given matches; call it with them.

    Parameters
    ----------
    trace:
        The recording.
    seed:
        Of the choice among lenders; one choice per position, whatever the matches.

    Raises
    ------
    DraftsimError
        If the recording holds tails, but not one that is whole.
    """

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        self.trace = trace
        self.seed = seed
        self._kept = {n: v for n, v in trace.columns.items() if n not in STALE}
        if trace.max_gamma is None:
            return
        recorded = trace.columns["match"][trace.on_path]
        bounds = np.append(trace.on_path, len(trace))
        self._tails: Ints = np.diff(bounds) - 1
        self._needed = _tail_lengths(trace)
        self._lender = self._lenders(np.flatnonzero(recorded == MISMATCH))

    def __call__(self, match: Bools, meta: Mapping[str, Any], shown: Ints | None = None) -> Trace:
        """The trace whose on-path matches are `match`, shape (positions,), with more `meta`.

        ``shown``: per position the one whose recorded signals it shows, by default its own.
        """
        trace = self.trace
        meta = {**trace.meta, **meta}
        outcome = np.where(match, MATCH, MISMATCH).astype(np.int8)
        if trace.max_gamma is None:
            columns = {**self._kept, "match": outcome}
            return Trace(columns | self._signals(columns, shown), trace.requests, None, meta)
        recorded = trace.columns["match"][trace.on_path]
        source = np.where(recorded == MISMATCH, np.arange(len(match)), self._lender)
        lengths = np.where(
            recorded == MISMATCH, self._tails, np.minimum(self._needed, self._tails[source])
        )
        lengths[match] = 0
        # Each position's own row, then the rows of the tail it has or borrows.
        counts = lengths + 1
        place = np.repeat(np.arange(len(match)), counts)
        offset = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        tail = offset > 0
        rows = np.where(tail, trace.on_path[source[place]] + offset, trace.on_path[place])
        columns = {name: values[rows] for name, values in self._kept.items()}
        own = trace.on_path[place]
        columns |= {
            "request": trace.columns["request"][own],
            "position": trace.columns["position"][own],
            "offset": offset.astype(np.int16),
            "match": np.where(tail, UNKNOWN, outcome[place]).astype(np.int8),
        }
        if "draft_token" in columns:
            heads = np.flatnonzero(~tail)
            drafted = columns["draft_token"][heads]
            if "token" in columns:
                drafted = np.where(match, columns["token"][heads], drafted)
            lost = np.flatnonzero(~match & (recorded == MATCH))
            drafted[lost] = trace.columns["draft_token"][trace.on_path[source[lost]]]
            columns["draft_token"][heads] = drafted
        columns |= self._signals(columns, shown)
        return Trace(columns, trace.requests, trace.max_gamma, meta)

    def _signals(
        self, columns: Mapping[str, npt.NDArray[Any]], shown: Ints | None
    ) -> dict[str, npt.NDArray[Any]]:
        """The columns behind the signals, on the path as recorded where `shown` says."""
        if shown is None:
            return {}
        moved = {}
        heads = np.flatnonzero(columns["offset"] == 0)
        for name in SCORES & columns.keys():
            values = moved[name] = columns[name].copy()
            values[heads] = self.trace.columns[name][self.trace.on_path[shown]]
        return moved

    def _lenders(self, mismatches: Ints) -> Ints:
        """Per position the recorded mismatch that would lend its tail, shape (positions,)."""
        from scipy.spatial import cKDTree

        trace = self.trace
        whole = (
            self._tails[mismatches]
            >= min(trace.max_gamma or 1, int(self._needed.max(initial=0)) + 1) - 1
        )
        if "draft_token" in trace.columns:
            # A tail that the draft ended with EOS is whole, however short.
            last = trace.on_path[mismatches] + self._tails[mismatches]
            whole |= np.isin(
                trace.columns["draft_token"][last], trace.meta.get("eos_token_ids") or []
            )
        pool = mismatches[whole]
        if not len(pool):
            raise DraftsimError(
                "the trace has no mismatch with a whole off-path tail to lend: record longer "
                "outputs, or with a smaller --max-gamma"
            )
        signals = signal_table(trace)[trace.on_path]
        scale = signals.std(axis=0)
        scale[scale == 0] = 1.0
        signals = signals / scale
        count = min(NEIGHBOURS, len(pool))
        _, near = cKDTree(signals[pool]).query(signals, k=count)
        near = pool[near.reshape(len(signals), count)]
        shuffled = np.random.default_rng(self.seed).permuted(near, axis=1)
        if "draft_token" not in trace.columns or "token" not in trace.columns:
            return np.asarray(shuffled[:, 0])
        # A wrong draft must be another token than the right one.
        lent = trace.columns["draft_token"][trace.on_path][shuffled]
        differs = lent != trace.columns["token"][trace.on_path][:, None]
        return np.asarray(shuffled[np.arange(len(shuffled)), differs.argmax(axis=1)])


def _tail_lengths(trace: Trace) -> Ints:
    """Tail tokens a mismatch at each position may need, shape (positions,).

    A draft ends one token before the output limit, which verification fills.
    """
    limit = np.repeat([r.max_new_tokens for r in trace.requests], np.diff(trace.request_starts))
    position = trace.columns["position"][trace.on_path].astype(np.int64)
    return np.clip(limit - position - 2, 0, (trace.max_gamma or 1) - 1)
