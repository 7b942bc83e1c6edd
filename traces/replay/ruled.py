"""Replay under a lossy rule: a decoder that reads recorded scores, and these scores as lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from policies.guard import SCORES, PolicyError, guarded
from policies.rules.base import ExactMatch, TokenRule, VerifyRule
from policies.rules.registry import describe_rule
from traces.acceptance.trace import MATCH, UNKNOWN, Trace, once_per_trace
from traces.errors import DraftsimError, SignalError
from traces.replay.decoder import ReplayDecoder, Rows

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


class RuleReplayDecoder(ReplayDecoder):
    """One recorded request, verified by a lossy rule.

    The rule gets the target's scores of every drafted token, also off the path, so a round is exact
    in itself.  After the first lossy acceptance later rounds are approximate: the real decoder
    continues a text that was not recorded, and this one the recording, the same number of tokens
    further.  A drafted EOS off the path does not end the output, so that every policy decodes the
    same number of tokens.  ``mismatched``: per round, emitted drafted tokens that the target would
    not have chosen.  ``departed``: some verdict differed from the recorded one.
    """

    def __init__(
        self, trace: Trace, request: int, rule: VerifyRule, first: int | None = None, batch: int = 1
    ) -> None:
        super().__init__(trace, request, first, batch)
        self._rule = rule
        lists = score_lists(trace)
        self._verdicts, self._scores = lists.verdicts, lists.scores(rule.needs)
        self._read = self._lists.tokens(rule.reads)
        one_by_one = type(rule).accept is TokenRule.accept
        self._accepts = rule.accepts if isinstance(rule, TokenRule) and one_by_one else None
        self.mismatched: list[int] = []
        self.departed = False

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept what the rule accepts and move on by as many tokens."""
        return self.judge(len(draft))

    def judge(self, count: int) -> int:
        """Verify the `count` tokens drafted from here; return how many were accepted."""
        row = self._rows[self._start + self.position]
        try:
            if self._accepts is not None:
                accepted = self._leading(row, count, self._accepts)
            else:
                tokens, scores = (kept.rows(row, count) for kept in (self._read, self._scores))
                accepted = self._rule.accept(tokens, scores)
        except PolicyError as error:
            raise error.by(self._rule) from None
        verdicts = self._verdicts[row : row + count]
        seen = verdicts[: accepted + 1 + self._rule.look_ahead]
        if None in seen:
            raise self._unobserved(seen.index(None))
        before = self.position
        self._advance(accepted)
        self.mismatched.append(verdicts[: min(accepted, self.position - before)].count(False))
        leading = verdicts.index(False) if False in verdicts else len(verdicts)
        # A greedy target corrects a refused match into the same token: still on the path.
        self.departed |= accepted > leading or (accepted < leading and self._trace.temperature > 0)
        return accepted

    def _leading(self, row: int, count: int, accepts: Callable[[Any, Any], bool]) -> int:
        """Return the tokens accepted before the first refusal, as `TokenRule.accept`."""
        read, scores = self._read, self._scores
        for at in range(row, row + count):
            token, score = read.known[at] or read.make(at), scores.known[at] or scores.make(at)
            if not accepts(token, score):
                return at - row
        return count


class RecordedScore:
    """A target score as it was recorded."""

    __slots__ = SCORES

    def __init__(self, values: Sequence[Any]) -> None:
        (
            self.match, self.token, self.top1, self.top2, self.logsumexp, self.entropy,
            self.draft_logit, self.draft_rank,
        ) = values  # fmt: skip


class ScoreLists:
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
        """Return the scores of every row, which hold those of `needs` and refuse any other."""
        key = frozenset(needs)
        if key not in self._kept:
            kind, names = guarded(RecordedScore, key, "needs"), [n for n in SCORES if n in key]
            self._kept[key] = Rows(kind, names, len(self.verdicts), self._columns.__getitem__)
        return self._kept[key]


score_lists = once_per_trace(ScoreLists)


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

    Raises SignalError if the trace lacks what the rule needs. Raises DraftsimError if the rule
    cannot run at the recording's temperature.
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
