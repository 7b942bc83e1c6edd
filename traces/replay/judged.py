"""Lossy rules over drafts that no round changes: every row judged at once, or round by round."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from policies.arrays import Bools, Ints, next_true
from policies.rules.base import VerifyRule
from policies.vectorised import own_word
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.replay.layout import Lengths32, Lockstep, Rounds, layout_of
from traces.replay.ruled import SCORE_COLUMNS, RuleReplayDecoder


class Judged(NamedTuple):
    """Rounds, and as in `traces.replay.ruled.RuleReplayDecoder` what the rule made of them."""

    rounds: Rounds
    mismatched: Sequence[int]
    departed: bool


def judged_rounds(
    trace: Trace, rule: VerifyRule, lockstep: Lockstep, forwards: Lengths32, sent: Lengths32
) -> Judged | None:
    """Return the rounds of drafts known by start, (starts + 1,) each, under a run's own lossy
    `rule`.

    None if one leaves what was recorded: there the loop says what is missing.
    """
    verdicts = trace.columns["match"]
    if not (verdicts == UNKNOWN).any():
        tokens, scores = columns_of(trace, rule)
        accepts: Bools | None = own_word(rule, "accepts_each", tokens, scores)
        if accepts is not None:
            return _at_once(trace, rule, lockstep, forwards, sent, accepts)
    return _one_by_one(trace, rule, lockstep, forwards, sent)


def columns_of(trace: Trace, rule: VerifyRule) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the fields of tokens and of scores that a rule reads, an array over the rows each."""
    layout = layout_of(trace)
    scores = {name: trace.columns[SCORE_COLUMNS[name]] for name in rule.needs}
    for name, values in scores.items():
        if name == "match":
            scores[name] = values == MATCH
        elif values.dtype.kind == "f":
            # The loop's numbers are Python's.
            scores[name] = values.astype(np.float64)
    tokens = {name: layout.signal(name) for name in rule.reads}
    return SimpleNamespace(**tokens), SimpleNamespace(**scores)


def _at_once(
    trace: Trace, rule: VerifyRule, lockstep: Lockstep, forwards: Lengths32, sent: Lengths32,
    accepts: Bools,
) -> Judged | None:  # fmt: skip
    row = np.append(lockstep.layout.rows, 0)
    accepted = np.minimum(sent, _leading(accepts, row)).astype(np.int32)
    start = lockstep.begun(accepted + 1)
    if (forwards[start] > lockstep.recorded[start]).any():
        return None
    for _ in trace.requests:
        rule.end_request()
    match = trace.columns["match"] == MATCH
    count, taken = sent[start], accepted[start]
    wrong = np.append(0, np.cumsum(~match))
    kept = np.minimum(taken, lockstep.room[start])
    leading = np.minimum(count, _leading(match, row[start]))
    # A greedy target corrects a refused match into the same token: still on the path.
    departed = (taken > leading) | ((taken < leading) & (trace.temperature > 0))
    return Judged(
        lockstep.told(start, forwards[start], count, taken),
        (wrong[row[start] + kept] - wrong[row[start]]).tolist(),
        bool(departed.any()),
    )


def _leading(which: Bools, rows: Ints) -> Ints:
    """Return how many rows in a row from each of `rows` are of `which`."""
    return next_true(~which)[rows] - rows


def _one_by_one(
    trace: Trace, rule: VerifyRule, lockstep: Lockstep, forwards: Lengths32, sent: Lengths32
) -> Judged | None:
    drafted, given, recorded = forwards.tolist(), sent.tolist(), lockstep.recorded.tolist()
    starts: list[int] = []
    accepted: list[int] = []
    mismatched: list[int] = []
    departed = False
    for i, begin in enumerate(lockstep.layout.begins.tolist()):
        decoder = RuleReplayDecoder(trace, i, rule, lockstep.first)
        while decoder.remaining > 0:
            start = begin + decoder.position
            if drafted[start] > recorded[start]:
                return None
            starts.append(start)
            accepted.append(decoder.judge(given[start]))
        rule.end_request()
        mismatched += decoder.mismatched
        departed |= decoder.departed
    rounds = lockstep.told(np.array(starts, np.int64), *(np.array(v, np.int32) for v in (
        [drafted[s] for s in starts], [given[s] for s in starts], accepted
    )))  # fmt: skip
    return Judged(rounds, mismatched, departed)
