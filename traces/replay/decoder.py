"""A decoder that reads a recorded trace instead of running two models.

`ReplayDecoder` keeps the contract of `policies.core.Decoder`, so `speculate` runs over
a recording as it runs over real models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from policies.core import SIGNALS, Load
from traces.acceptance.tape import BLANK, END, RecordedToken, tape_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError, TailError


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
        tape = self._tape = tape_of(trace)
        self._start = tape.starts[request]
        self.length = self._info.tokens
        self._limit = self._info.max_new_tokens
        self._rows, self._runs = tape.rows, tape.runs
        self._row_limit, self._signals = tape.row_limit, tape.signals
        # Where a drafted match would be EOS; the drafter stops at it, and only at it.
        self._eos_at = self.length - 1 if self._info.ended == "eos" else -1
        self._tokens = tape.tokens(SIGNALS)
        self.takes_verified = trace.takes_verified
        self.position = min(trace.first if first is None else first, self.length)

    def declare(self, reads: Collection[str]) -> None:
        """Give from now on tokens with these signals only."""
        self._tokens = self._tape.tokens(reads)

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
        known = start not in self._tape.unknown
        length = min(run, self._limit - self.position - 1) if known else None
        return Load(self._batch, self._info.prompt_length + self.position, length)

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the recorded proposal after the output so far and `so_far`; None at a draft's
        end.
        """
        start = self._start + self.position
        if not self._signals:
            drafted = len(so_far)
            at_eos = self.position + drafted == self._eos_at and self._runs[start] > drafted
            return END if at_eos else BLANK
        row = self._rows[start] + len(so_far)
        if row >= self._row_limit[start]:
            if self._trace.drafts_end:
                return None
            raise TailError(
                f"the policy drafted {len(so_far) + 1} tokens at position {self.position} of "
                f"request {self._info.id!r}, past the recorded tail "
                f"(max_gamma={self._trace.max_gamma}): lower its maximum, "
                "or record with a larger --max-gamma"
            )
        return self._tokens.known[row] or self._tokens.make(row)

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept the leading matches and move on to where the output then stands."""
        start = self._start + self.position
        run = self._runs[start]
        accepted = len(draft)
        if run < accepted:
            accepted = run
            if self._tape.open_ended and start in self._tape.open_ended:
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
