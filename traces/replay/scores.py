"""The scores that a verification rule reads, served from the target columns of a recording."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from policies.guard import SCORES, guarded
from policies.rules.base import ExactMatch, VerifyRule
from policies.rules.registry import describe_rule
from traces.acceptance.tape import Rows
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.errors import DraftsimError, SignalError

SCORE_COLUMNS: dict[str, str] = {
    "match": "match",
    "token": "target_token",
    "top1": "target_top1",
    "top2": "target_top2",
    "logsumexp": "target_logsumexp",
    "entropy": "target_entropy",
    "draft_logit": "target_draft_logit",
    "draft_rank": "target_draft_rank",
}
"""Target score (`policies.rules.base.TargetScore`) -> the column that holds it."""


class RecordedScore:
    """A target score as it was recorded."""

    __slots__ = SCORES

    def __init__(self, values: Sequence[Any]) -> None:
        (
            self.match, self.token, self.top1, self.top2, self.logsumexp, self.entropy,
            self.draft_logit, self.draft_rank,
        ) = values  # fmt: skip


class ScoreTape:
    """The target scores of every row of a trace."""

    def __init__(self, trace: Trace) -> None:
        known = {MATCH: True, UNKNOWN: None}
        self.verdicts = [known.get(m, False) for m in trace.columns["match"].tolist()]
        """Per row the lossless verdict; None if it was not recorded."""
        self._columns: dict[str, Sequence[Any]] = {
            n: trace.columns[c].tolist() for n, c in SCORE_COLUMNS.items() if c in trace.columns
        }
        self._columns["match"] = self.verdicts
        self._kept: dict[frozenset[str], Rows[RecordedScore]] = {}

    def scores(self, needs: Collection[str]) -> Rows[RecordedScore]:
        """Return the scores, one per row, that can be asked for those of `needs` alone, which it
        holds.
        """
        key = frozenset(needs)
        if (scores := self._kept.get(key)) is None:
            kind, names = guarded(RecordedScore, key, "needs"), [n for n in SCORES if n in key]
            column = self._columns.__getitem__
            scores = self._kept[key] = Rows(kind, names, len(self.verdicts), column)
        return scores


_tapes: WeakKeyDictionary[Trace, ScoreTape] = WeakKeyDictionary()


def score_tape(trace: Trace) -> ScoreTape:
    """Return the trace's `ScoreTape`, laid out at the first call."""
    if (tape := _tapes.get(trace)) is None:
        tape = _tapes[trace] = ScoreTape(trace)
    return tape


def check_rule_columns(trace: Trace, rule: VerifyRule) -> None:
    """Raise SignalError if `trace` cannot tell what the lossy `rule` needs to know."""
    name = type(rule).__name__
    trace.check_reads(rule.reads, name, "a lossless rule")
    needed = [SCORE_COLUMNS[s] for s in rule.needs]
    if missing := [c for c in needed if c not in trace.columns]:
        raise SignalError(
            f"{name} needs the target's scores, but this trace lacks the column(s) "
            f"{', '.join(missing)}: record one with `draftsim profile`, or choose a lossless rule"
        )
    if not trace.signals:
        raise SignalError(
            f"{name} may accept tokens the target did not choose, but this trace holds no draft "
            "tokens off the path: record one with `draftsim profile`, or choose a lossless rule"
        )


def prepared_rule(rule: VerifyRule | None, trace: Trace) -> VerifyRule | None:
    """Return the run's own copy of a lossy rule; None if the recorded verdicts decide.

    Raises
    ------
    SignalError
        If the trace lacks what the rule needs.
    DraftsimError
        If the rule cannot run at the recording's temperature.
    """
    if isinstance(rule, ExactMatch) and trace.temperature > 0:
        raise DraftsimError(
            f"ExactMatch verifies greedy decoding, and this trace was sampled at temperature "
            f"{trace.temperature:g}: use RejectionSampling (rejection-sampling)"
        )
    if rule is None or rule.lossless:
        return None
    check_rule_columns(trace, rule)
    mine = rule.fresh()
    try:
        mine.begin_run(trace.vocab_size, trace.temperature, trace.sampling.top_p)
    except ValueError as error:
        raise DraftsimError(f"{describe_rule(rule)}: {error}") from None
    return mine
