"""What a verification rule reads, served from the target columns of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from policies.rule_registry import describe_rule
from policies.rules import SCORES, ExactMatch, VerifyRule
from traces.errors import DraftsimError, SignalError
from traces.trace import MATCH, UNKNOWN, Trace

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
"""Target score (`policies.rules.TargetScore`) -> the column that holds it."""


class RecordedScore:
    """A target score as it was recorded; a field that was not recorded is None."""

    __slots__ = SCORES

    def __init__(self, values: Sequence[Any]) -> None:
        (
            self.match, self.token, self.top1, self.top2, self.logsumexp, self.entropy,
            self.draft_logit, self.draft_rank,
        ) = values  # fmt: skip


class ScoreTape:
    """The target scores of every row of a trace, made when first read and then kept."""

    def __init__(self, trace: Trace) -> None:
        count = len(trace)
        verdicts = {MATCH: True, UNKNOWN: None}
        columns = {
            n: trace.columns[c].tolist() for n, c in SCORE_COLUMNS.items() if c in trace.columns
        }
        columns["match"] = [verdicts.get(m, False) for m in columns["match"]]
        self._fields = [columns.get(name) or [None] * count for name in SCORES]
        self._scores: list[RecordedScore | None] = [None] * count

    def rows(self, start: int, count: int) -> list[RecordedScore]:
        """The scores of `count` rows from `start`: a draft walks over consecutive rows."""
        return [self._scores[row] or self._make(row) for row in range(start, start + count)]

    def _make(self, row: int) -> RecordedScore:
        score = self._scores[row] = RecordedScore([values[row] for values in self._fields])
        return score


_tapes: WeakKeyDictionary[Trace, ScoreTape] = WeakKeyDictionary()


def score_tape(trace: Trace) -> ScoreTape:
    """The trace's `ScoreTape`, laid out at the first call."""
    if (tape := _tapes.get(trace)) is None:
        tape = _tapes[trace] = ScoreTape(trace)
    return tape


def check_rule_columns(trace: Trace, rule: VerifyRule) -> None:
    """Raise SignalError if `trace` cannot tell what the lossy `rule` needs to know."""
    name = type(rule).__name__
    if missing := [s for s in rule.reads if s not in trace.signals]:
        raise SignalError(
            f"{name} reads the draft signals {', '.join(missing)}, which this trace does not hold "
            f"(it holds {', '.join(sorted(trace.signals)) or 'none'}): record one with "
            "`draftsim profile`, or choose a lossless rule"
        )
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
    """The run's own copy of a lossy rule; None where the recorded verdicts decide.

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
