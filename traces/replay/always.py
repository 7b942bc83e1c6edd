"""Draft passes that an engine runs in every round, whatever is drafted and verified.

Some engines call the drafter in every round, even without drafts; others always fill all draft
slots.  A table that says so prices at least that many passes in each round of a policy that
speculates; plain decoding, of an engine without a drafter, is left alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.walk import caught_up

ALWAYS, AT_ONCE = "always_drafts", "drafts_at_once"
WIDEST = 1 << 20
"""A width beyond any: cells at both ends hold for all widths between."""
MOST_BEHIND = 2
"""Tokens that a drafter called in every round has to read at most: the last of its own and the
target's."""


def drafting_always(latency: LatencyTable, passes: int | None) -> LatencyTable:
    """Return the table of an engine that runs `passes` draft passes in every round; None: as it is.

    Raises DraftsimError if ``passes < 1``.
    """
    if passes is None:
        return latency
    if passes < 1:
        raise DraftsimError(f"draft passes of every round are {passes}, expected at least 1")
    return LatencyTable(latency.cells, {**latency.meta, ALWAYS: passes})


def in_one_pass(latency: LatencyTable) -> LatencyTable:
    """Return the table of a drafter that drafts all tokens of a round in one pass, whatever their
    number.

    A round's first draft pass costs what it cost, at any width, and the others nothing.

    Raises DraftsimError if the table has no draft passes.
    """
    cells = latency.cells
    own = cells[cells["model"] == "draft"]
    passes = own[own["phase"] == "forward"]
    if not len(passes):
        raise DraftsimError(
            "the latency table has no draft passes: what a drafter's one pass costs is not known"
        )
    others = cells[~cells.index.isin(own[own["phase"].isin(("forward", "settling"))].index)]
    once = passes[passes["new_tokens"] == 1].assign(phase="catch_up")
    first = [] if latency.has("draft", "catch_up") else [once, once.assign(new_tokens=WIDEST)]
    parts = [others, passes.assign(median_s=0.0, spread_s=0.0), *first]
    return LatencyTable(pd.concat(parts, ignore_index=True), {**latency.meta, AT_ONCE: True})


def is_one_pass(latency: LatencyTable) -> bool:
    """Return True if the table is of a drafter that drafts in one pass (`in_one_pass`)."""
    return bool(latency.meta.get(AT_ONCE))


def most_behind(takes_verified: bool) -> int:
    """Return tokens that a drafter called in every round has to read at most; any number if it
    takes verified tokens.
    """
    return WIDEST if takes_verified else MOST_BEHIND


def passes_always(latency: LatencyTable) -> int:
    """Draft passes of every round in the engine of a table; 0 where it drafts as asked."""
    return int(latency.meta.get(ALWAYS) or 0)


def always_drafted(log: RoundLog, passes: int) -> RoundLog:
    """Return the rounds of `log` in an engine that runs `passes` draft passes in each, or more if
    drafted.

    Verified and accepted tokens stay the same.  The drafter, called every time, is always up to
    date, so its first pass reads one token, or two if all that it had read was accepted; one that
    takes verified tokens reads all that the last round emitted.  Sources that draft without model
    passes, and plain decoding, are returned unchanged.
    """
    if not passes or log.is_plain or log.calls is not None:
        return log
    rounds = log.rounds.copy()
    forwards = np.maximum(rounds["draft_forwards"], passes)
    begins = np.diff(rounds["request"], prepend=-1) != 0
    unread = caught_up(begins, forwards, rounds["accepted"], log.takes_verified)
    rounds["draft_forwards"] = forwards
    rounds["catch_up"] = np.minimum(rounds["catch_up"], unread)
    return replace(log, rounds=rounds)
