"""Which recorded drafts verification judges, to fit estimates of acceptance to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from traces.acceptance.schema import MATCH
from traces.acceptance.trace import Trace
from traces.replay.layout import layout_of
from traces.replay.walk import Walk

Ints = npt.NDArray[np.int64]


def judged_rows(trace: Trace) -> Ints:
    """Rows of drafted tokens that verification reached in some round, ascending.

    Where every start has drafts of its own these are its own, up to the first wrong one.
    """
    if not (trace.by_start and trace.signals):
        return np.asarray(trace.on_path)
    accepted = np.repeat(
        trace.columns["accepted"][trace.on_path], np.diff(np.append(trace.on_path, len(trace)))
    )
    return np.flatnonzero(trace.columns["offset"] <= accepted)


def ends_draft(trace: Trace, judged: Ints) -> npt.NDArray[np.bool_]:
    """Whether no judged token follows one of `judged` in its draft."""
    if trace.by_start and trace.signals:
        follows = np.diff(judged, append=-1) == 1
        follows[:-1] &= trace.columns["offset"][judged[1:]] > 0
        return np.asarray(~follows)
    last = np.zeros(len(judged), dtype=bool)
    last[trace.request_starts[1:] - 1] = True
    return last


def first_acceptance(trace: Trace) -> float:
    """Share of matches right after a mismatch's position or at a request's begin."""
    match = trace.columns["match"][trace.on_path] == MATCH
    fresh = np.zeros(len(match), dtype=bool)
    fresh[trace.request_starts[:-1]] = True
    fresh[1:] |= ~match[:-1]
    return float((match[fresh].sum() + 0.5) / (fresh.sum() + 1))


def drafts_of_rounds(trace: Trace, judged: Ints, gamma: int) -> tuple[Ints, Ints]:
    """Indices into `judged` of tokens drafted by rounds of `gamma`, and their places in the draft.

    A draft counts up to its first mismatch: what follows has no outcome of its own.
    """
    walk = Walk(layout_of(trace), 0, trace.takes_verified)
    begins = walk.begun(np.minimum(walk.runs, gamma) + 1)
    # By start a draft's tokens follow its first, else they are where those before it are right.
    firsts = np.searchsorted(judged, trace.on_path[begins])
    counts = np.minimum(np.minimum(walk.runs + 1, gamma), walk.room)[begins].astype(np.int64)
    if trace.by_start:
        own = np.diff(np.append(np.searchsorted(judged, trace.on_path), len(judged)))
        counts = np.minimum(counts, own[begins])
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(firsts, counts) + offset, offset
