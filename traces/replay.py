"""Clock-free replay: a recorded trace in the place of two models.

`ReplayDecoder` keeps the contract of `policies.core.Decoder`, so `speculate` runs over
a recording as it runs over real models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from policies.core import DraftPolicy, Load, Round, speculate
from traces.errors import SignalError, TailError
from traces.rounds import Fidelity, RoundLog
from traces.trace import MATCH, UNKNOWN, Trace


class RecordedToken:
    """A drafted token as it was recorded; a field that was not recorded is None."""

    __slots__ = (
        "ends", "entropy", "logit_margin", "prob", "prob_margin", "row", "token_id"
    )

    def __init__(
        self,
        row: int,
        token_id: int,
        ends: bool,
        prob: float,
        entropy: float,
        logit_margin: float,
        prob_margin: float,
    ) -> None:
        self.row = row
        self.token_id = token_id
        self.ends = ends
        self.prob = prob
        self.entropy = entropy
        self.logit_margin = logit_margin
        self.prob_margin = prob_margin


class _Tape:
    """A trace laid out for replay: Python lists, one entry per row, built once per trace."""

    def __init__(self, trace: Trace) -> None:
        c = trace.columns
        count = len(trace)
        eos = trace.meta.get("eos_token_ids") or []
        drafted = c.get("draft_token")
        ends = np.isin(drafted, eos) if drafted is not None else np.zeros(count, bool)
        blank: Iterator[Any] = repeat(None)

        def values(name: str) -> Iterator[Any]:
            return iter(trace.signal(name).tolist()) if name in trace.signals else blank

        self.tokens: list[RecordedToken] = list(
            map(
                RecordedToken, range(count), values("token_id"), ends.tolist(), values("prob"),
                values("entropy"), values("logit_margin"), values("prob_margin"),
            )
        )  # fmt: skip
        self.rows: list[int] = trace.on_path.tolist()
        self.runs: list[int] = trace.run_lengths.tolist()
        self.starts: list[int] = trace.request_starts.tolist()
        self.unknown = set(np.flatnonzero(c["match"][trace.on_path] == UNKNOWN).tolist())
        # Without tails there are no signals, so one blank token stands for every draft.
        self.blank = None if trace.max_gamma else RecordedToken(-1, -1, False, *repeat(0.0, 4))
        # A round may walk from its first row to the end of the next mismatch's tail.
        bounds = np.append(trace.on_path, count)
        mismatch = np.flatnonzero(c["match"][trace.on_path] != MATCH)
        tail_end = np.append(bounds[mismatch + 1], count)
        self.row_limit: list[int] = tail_end[
            np.searchsorted(mismatch, np.arange(len(trace.on_path)))
        ].tolist()


_tapes: WeakKeyDictionary[Trace, _Tape] = WeakKeyDictionary()


def _tape(trace: Trace) -> _Tape:
    # Derived data cached beside an immutable trace: every policy replays the same tape.
    if (tape := _tapes.get(trace)) is None:
        tape = _tapes[trace] = _Tape(trace)
    return tape


class ReplayDecoder:
    """One recorded request, decoded again under any policy.

    Parameters
    ----------
    trace, request:
        The recording and the index of the request in it.
    first:
        Output position to begin at: 1 if prefill emits the first token (engines),
        0 if the first verification includes the prompt (transformers).

    Raises
    ------
    TailError
        When the policy drafts past the recorded off-path tail.
    """

    def __init__(self, trace: Trace, request: int, first: int = 1) -> None:
        self._trace = trace
        self._info = trace.requests[request]
        tape = self._tape = _tape(trace)
        self._start = tape.starts[request]
        self._length = self._info.tokens
        self._limit = self._info.max_new_tokens
        self._tokens, self._rows, self._runs = tape.tokens, tape.rows, tape.runs
        self._blank, self._row_limit = tape.blank, tape.row_limit
        self.position = min(first, self._length)

    @property
    def remaining(self) -> int:
        """Tokens to the limit; 0 at the end, known from the recording."""
        # The drafter does not know where EOS will fall, so the cap is the limit's.
        return self._limit - self.position if self.position < self._length else 0

    @property
    def load(self) -> Load:
        """A single stream: batch 1 at the current context."""
        run = min(self._runs[self._start + self.position], self._limit - self.position - 1)
        return Load(1, self._info.prompt_length + self.position, run)

    def draft(self, so_far: Sequence[Any]) -> RecordedToken:
        """The recorded proposal after the output so far and `so_far`."""
        if self._blank is not None:
            return self._blank
        start = self._start + self.position
        row = self._rows[start] + len(so_far)
        if row >= self._row_limit[start]:
            raise TailError(
                f"the policy drafted {len(so_far) + 1} tokens at position {self.position} of request "
                f"{self._info.id!r}, past the recorded tail (max_gamma={self._trace.max_gamma}): "
                "lower its maximum, or record with a larger --max-gamma"
            )
        return self._tokens[row]

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept the leading matches and move on to where the output then stands."""
        start = self._start + self.position
        run = self._runs[start]
        accepted = len(draft)
        if run < accepted:
            accepted = run
            if self._tape.unknown and start + run in self._tape.unknown:
                raise SignalError(
                    f"request {self._info.id!r} was not observed at position {self.position + run}, "
                    "where this policy drafts: impute the trace first (`Trace.impute`)"
                )
        self._advance(accepted)
        return accepted

    def _advance(self, accepted: int) -> None:
        # An accepted EOS ends the output: no bonus token follows it.
        self.position = min(self.position + accepted + 1, self._length)


def replay(
    trace: Trace,
    policy: DraftPolicy,
    *,
    name: str | None = None,
    first: int = 1,
) -> RoundLog:
    """Replay every request of `trace` under `policy`, in recording order.

    Raises
    ------
    SignalError
        If the policy reads a signal the trace does not hold.
    TailError
        If the policy drafts past the recorded tails.
    """
    if missing := [s for s in policy.reads if s not in trace.signals]:
        raise SignalError(
            f"{type(policy).__name__} reads {', '.join(missing)}, which this trace does not hold "
            f"(it holds {', '.join(sorted(trace.signals)) or 'no draft signals'}): "
            "record one with `draftsim profile`, or choose a policy that reads none"
        )
    shared = policy.fresh()
    rounds: list[list[Round]] = []
    for i in range(len(trace.requests)):
        mine = shared if policy.learns_across_requests else policy.fresh()
        rounds.append(list(speculate(ReplayDecoder(trace, i, first), mine)))
    sampled = trace.temperature > 0
    fidelity: Fidelity = "exact in distribution" if sampled else "exact"
    return RoundLog(
        RoundLog.pack(rounds), trace.requests, name or type(policy).__name__,
        verify="rejection-sampling" if sampled else "exact",
        fidelity=fidelity, reads=policy.reads, first=first,
    )  # fmt: skip
