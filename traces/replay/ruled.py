"""A decoder that reads a recorded trace and accepts tokens by a lossy rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies.guard import UndeclaredSignal
from policies.rules.base import TokenRule, VerifyRule
from traces.acceptance.trace import Trace
from traces.replay.decoder import ReplayDecoder
from traces.replay.scores import score_tape


class RuleReplayDecoder(ReplayDecoder):
    """One recorded request, verified by a lossy rule.

    The rule gets the target's scores of every drafted token, also off the path, so a round is exact
    in itself.  Later rounds are approximate after the first lossy acceptance: the real decoder
    continues a text that was not recorded, and this one continues along the recording, the same
    number of tokens further.  A drafted EOS off the path does not end the output, so that every
    policy decodes the same number of tokens.

    Attributes
    ----------
    mismatched:
        Per round, the emitted drafted tokens that the target would not have chosen.
    departed:
        True if any verdict so far differed from the recorded one.
    """

    def __init__(
        self, trace: Trace, request: int, rule: VerifyRule, first: int | None = None, batch: int = 1
    ) -> None:
        super().__init__(trace, request, first, batch)
        self._rule = rule
        tape = score_tape(trace)
        self._verdicts, self._scores = tape.verdicts, tape.scores(rule.needs)
        self._read = self._tape.tokens(rule.reads)
        one_by_one = type(rule).accept is TokenRule.accept
        self._accepts = rule.accepts if isinstance(rule, TokenRule) and one_by_one else None
        self.mismatched: list[int] = []
        self.departed = False

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept what the rule accepts and move on by as many tokens."""
        return self.judge(len(draft))

    def judge(self, count: int) -> int:
        """Return `verify` of the `count` tokens that are drafted here."""
        row = self._rows[self._start + self.position]
        try:
            if self._accepts is not None:
                accepted = self._leading(row, count, self._accepts)
            else:
                tokens, scores = (kept.rows(row, count) for kept in (self._read, self._scores))
                accepted = self._rule.accept(tokens, scores)
        except UndeclaredSignal as error:
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
