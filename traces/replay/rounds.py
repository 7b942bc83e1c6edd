"""The log of a run: one row per draft-verify round, in counts and never in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.core import Round
from policies.registry import PLAIN
from policies.rules.base import VerifyRule
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Request
from traces.replay.calls import CallRows, Calls, passes_of, unpacked, verification

Fidelity = Literal[
    "exact",
    "exact up to near-ties",
    "exact in distribution",
    "exact within the round",
    "approximate",
    "lower bound",
]
"""How a replayed round log relates to really decoding the same requests."""

ROUND_DTYPE = np.dtype([("request", np.int32)] + [(name, np.int32) for name in Round._fields])
Rounds = npt.NDArray[np.void]
"""Rows of `ROUND_DTYPE`, request by request."""


@dataclass(frozen=True, eq=False)
class RoundLog:
    """Every round of every request under one policy.

    ``rounds`` is a structured array (see `ROUND_DTYPE`; fields as in
    `policies.core.Round` plus the request's index).  ``first`` is the output position
    decoding began at: 1 where prefill emits the first token, as engines do; 0 where the
    first verification processes the prompt, as transformers' assisted generation does.

    Under a lossy rule, ``mismatched`` counts per round the emitted drafted tokens that the
    target would not have chosen after the tokens before them, shape (rounds,), and
    ``rule`` is the rule as the run left it; both are None where verification is lossless.

    ``recorded_calls`` is the work of sources other than a draft model, which is not a pass per
    drafted token: rows of `traces.replay.calls.CALL_DTYPE`; None if it is, as for a draft model.
    ``drafter`` is the model of the latency table that these passes are of; ``takes_verified`` and
    ``sampling`` as in `traces.acceptance.trace.Trace`.
    """

    rounds: Rounds
    requests: Sequence[Request]
    policy: str
    source: str = "draft-model"
    verify: str = "exact"
    fidelity: Fidelity = "exact"
    reads: tuple[str, ...] = ()
    first: int = 1
    mismatched: npt.NDArray[np.int32] | None = None
    rule: VerifyRule | None = None
    recorded_calls: CallRows | None = None
    drafter: str = "draft"
    takes_verified: bool = False
    sampling: Sampling = GREEDY

    def __len__(self) -> int:
        return len(self.rounds)

    def __repr__(self) -> str:
        return (
            f"<RoundLog {self.policy} / {self.verify}, {self.source}: {len(self)} rounds of "
            f"{len(self.requests)} requests, {self.fidelity}>"
        )

    @property
    def is_plain(self) -> bool:
        """True for plain decoding, of an engine without a drafter."""
        # A replay tells by its source, a real run by the name it was recorded under.
        return self.source == "none" or self.policy in (PLAIN, "fixed:gamma=0")

    @property
    def context(self) -> npt.NDArray[np.int64]:
        """Tokens in the target's cache when each round began (prompt + output)."""
        prompt = np.array([r.prompt_length for r in self.requests], dtype=np.int64)
        return np.asarray(prompt[self.rounds["request"]] + self.rounds["position"])

    @property
    def calls(self) -> list[Calls]:
        """The calls of the rounds: recorded, or the passes of a draft model; and the verification.

        They are derived at every access, and take more memory than the rounds.
        """
        drafted, forwards, catch_up = (
            self.rounds[name].astype(np.int64) for name in ("drafted", "draft_forwards", "catch_up")
        )
        context = self.context
        cached = np.maximum(context - 1, 0)
        if self.recorded_calls is None:
            return verification(drafted, cached) + passes_of(forwards, catch_up, context)
        found = unpacked(self.recorded_calls, cached)
        if any(calls.verify for calls in found):
            return found
        light = not any(calls.phase == "layer" for calls in found)
        return verification(drafted, cached, light) + found

    def per_request(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Sum `values`, one per round, over each request: shape (requests,)."""
        sums = np.bincount(
            self.rounds["request"], weights=np.asarray(values, float), minlength=len(self.requests)
        )
        return sums.astype(np.float64)

    def of_request(self, index: int) -> list[Round]:
        """Return the rounds of one request."""
        return [Round(*row[1:]) for row in self.rounds[self.rounds["request"] == index].tolist()]

    def to_frame(self) -> pd.DataFrame:
        """Return the rounds as a data frame, one row each."""
        return pd.DataFrame({name: self.rounds[name] for name in ROUND_DTYPE.names or ()})

    @staticmethod
    def pack(per_request: Iterable[Sequence[Round]]) -> Rounds:
        """Return a structured array of the rounds of each request in turn.

        Requests are taken one at a time, so a generator's rounds are freed as they are
        packed: half a million live tuples keep the garbage collector busier than replay.
        """
        width = len(Round._fields)
        parts, counts = [np.empty(0, dtype=np.int32)], []
        for rounds in per_request:
            parts.append(np.fromiter(chain.from_iterable(rounds), np.int32, len(rounds) * width))
            counts.append(len(rounds))
        flat = np.concatenate(parts).reshape(-1, width)
        packed = np.empty(len(flat), dtype=ROUND_DTYPE)
        packed["request"] = np.repeat(np.arange(len(counts)), counts)
        for i, name in enumerate(Round._fields):
            packed[name] = flat[:, i]
        return packed


def before(rounds: Iterable[Round], position: int) -> list[Round]:
    """Return the comparable rounds of a request whose text diverged at `position`.

    These are the rounds that begin at or before the position, with the tokens accepted and emitted
    before it: their drafts were decided when the texts were still the same.
    """
    return [
        r._replace(
            accepted=min(r.accepted, position - r.position),
            emitted=min(r.emitted, position - r.position),
        )
        for r in rounds
        if r.position <= position
    ]
