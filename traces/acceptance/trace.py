"""A recorded acceptance trace: what the draft would propose at every position.

One row per drafted token in a long table sorted by (request, position, offset):

* ``offset 0``: the token the draft proposes after the true output so far (*on the
  path*), with the draft's signals and the target's scores of it;
* ``offset k > 0``, present only where the on-path proposal was wrong: the k-th further
  token the draft would have proposed after that wrong token (*off-path tail*).

Where drafts depend on where their round began (`Trace.by_start`), the rows after every on-path row
are those of its own draft, right or wrong, and ``accepted`` says how many of it are right.

Why one recording replays every length policy exactly: under lossless verification the
output is fixed; an on-path signal depends on the true prefix alone; an off-path one on
the prefix and the wrong token, never on where the round began.  It also makes drafting
a walk over consecutive rows: a match is followed by the next position's row, a mismatch
by the first row of its own tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from traces.acceptance.check import check_trace, normalised
from traces.acceptance.sampling import Sampling
from traces.acceptance.schema import (
    COLUMNS,
    KEYS,
    MATCH,
    MISMATCH,
    SIGNAL_COLUMNS,
    UNKNOWN,
    Array,
    Request,
    signal_columns,
)
from traces.errors import DraftsimError, SignalError

__all__ = [
    "COLUMNS",
    "KEYS",
    "MATCH",
    "MISMATCH",
    "SIGNAL_COLUMNS",
    "UNKNOWN",
    "Request",
    "Trace",
]


@dataclass(frozen=True, eq=False)
class Trace:
    """A recording of one target/draft pair over many requests.

    Parameters
    ----------
    columns:
        Arrays of equal length, named as in `COLUMNS`; `KEYS` are required.
    requests:
        The request table, in recording order.
    max_gamma:
        Longest draft the off-path tails allow, or that was tried from every start; None if
        the recording holds neither (imported logs, synthetic traces).
    meta:
        Provenance: models and revisions, tokenizer, dtype, sampling, seeds, device,
        library versions.  `sampling` is read from ``meta["sampling"]``.

    Raises
    ------
    DraftsimError
        If the arrays contradict each other or the request table, or the sampling is impossible.
    """

    columns: Mapping[str, Array]
    requests: Sequence[Request]
    max_gamma: int | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", normalised(self.columns))
        check_trace(self.columns, self.requests, self.max_gamma)
        _ = self.sampling

    def __len__(self) -> int:
        return len(self.columns["match"])

    def __repr__(self) -> str:
        signals = ", ".join(sorted(self.signals)) or "no signals"
        return f"<Trace: {len(self.requests)} requests, {self.tokens} tokens, {signals}>"

    @property
    def tokens(self) -> int:
        """Output tokens over all requests."""
        return sum(r.tokens for r in self.requests)

    @cached_property
    def sampling(self) -> Sampling:
        """How the recorded outputs were drawn."""
        return Sampling.of(self.meta.get("sampling"))

    @property
    def temperature(self) -> float:
        """Sampling temperature of the recording; 0 is greedy."""
        return self.sampling.temperature

    @property
    def is_lower_bound(self) -> bool:
        """Return True if every unseen end was taken as a rejection (see `impute`).

        Predictions are then lower bounds, looser for policies other than the log's own: these meet
        its round ends as rejections.  Policies cannot be ranked on such a trace.
        """
        return (self.meta.get("imputed") or {}).get("method") == "rejected"

    @property
    def vocab_size(self) -> int | None:
        """Tokens in the target's vocabulary; None where the recording does not say."""
        target = self.meta.get("target")
        size = target.get("vocab_size") if isinstance(target, Mapping) else None
        return self.meta.get("vocab_size") if size is None else size

    @cached_property
    def longest(self) -> int:
        """Tokens that the longest request may get to, its prompt included."""
        return max(r.prompt_length + r.max_new_tokens for r in self.requests)

    @cached_property
    def first(self) -> int:
        """Output position decoding began at: 1 where prefill emits the first token, as engines
        do; 0 where the first verification includes the prompt (``meta["first"]``; default 1)."""
        return int(self.meta.get("first", 1))

    @cached_property
    def signals(self) -> frozenset[str]:
        """The draft signals the recording holds."""
        return frozenset(
            name
            for name in SIGNAL_COLUMNS
            if all(column in self.columns for column in signal_columns(name, self.sampling))
        )

    @cached_property
    def on_path(self) -> Array:
        """Indices of the on-path rows, in (request, position) order."""
        return np.flatnonzero(self.columns["offset"] == 0)

    @cached_property
    def request_starts(self) -> Array:
        """Offsets into `on_path` at which each request begins, with the end appended."""
        lengths = [r.tokens for r in self.requests]
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @cached_property
    def run_lengths(self) -> Array:
        """Number of consecutive matches from each on-path position, within its request.

        Under lossless verification a draft of n tokens started at s has
        ``min(n, run_lengths[s])`` accepted.  A position whose match was not recorded
        ends a run.

        A drafter on the target's features drafts differently from every start, so its accepted
        drafts are no runs of matches: where the trace holds ``accepted``, these are they.
        """
        index = np.arange(len(self.on_path))
        starts = self.request_starts
        stops = np.repeat(starts[1:], np.diff(starts))
        if self.by_start:
            return np.minimum(self.columns["accepted"][self.on_path], stops - index)
        ends = np.flatnonzero(self.columns["match"][self.on_path] != MATCH)
        nearest = np.append(ends, len(index))[np.searchsorted(ends, index)]
        return np.asarray(np.minimum(nearest, stops) - index)

    @property
    def by_start(self) -> bool:
        """Return True if acceptance was recorded for every start of a round."""
        return "accepted" in self.columns

    @property
    def source(self) -> str:
        """The name of the drafter: the draft model, or the source that replaces it."""
        return str(self.meta.get("drafts", "draft-model"))

    @property
    def drafter(self) -> str:
        """Name of the drafter in latency tables."""
        return str(self.meta.get("drafter", "draft")) if "drafts" in self.meta else "draft"

    @property
    def takes_verified(self) -> bool:
        """Return True if a round's first draft pass reads all tokens verified since the last.

        Such a drafter reads the target's features instead of its own.
        """
        return bool(self.meta.get("takes_verified"))

    @property
    def drafts_end(self) -> bool:
        """Return True if no draft can be longer than was recorded: heads are used up."""
        return bool(self.meta.get("drafts_end"))

    @cached_property
    def open_ended(self) -> Array:
        """For each on-path position, True if its run may be longer than `run_lengths` says."""
        starts, ends = self.request_starts, np.arange(len(self.on_path)) + self.run_lengths
        inside = ends < np.repeat(starts[1:], np.diff(starts))
        if self.by_start:
            return np.asarray(inside & (self.run_lengths == self.max_gamma))
        match = np.append(self.columns["match"][self.on_path], MISMATCH)
        return np.asarray(inside & (match[ends] == UNKNOWN))

    def signal(self, name: str) -> Array:
        """The draft signal `name` for every row (see `policies.core.DraftToken`)."""
        c = self.columns
        if name not in self.signals:
            raise DraftsimError(
                f"signal {name!r} is not in this trace (it holds "
                f"{', '.join(sorted(self.signals)) or 'none'}): "
                "record one with `draftsim profile`"
            )
        if name == "token_id":
            return np.asarray(c["draft_token"])
        if name == "entropy":
            return c["draft_entropy"].astype(np.float64)
        if name in ("prob", "top_prob", "raw_prob", "top10_prob"):
            first, *less = (c[n] for n in signal_columns(name, self.sampling))
            # The difference in float32, as the models' side takes it.
            return np.exp((first - less[0] if less else first).astype(np.float64))
        top1, top2 = c["draft_top1"].astype(np.float64), c["draft_top2"].astype(np.float64)
        if name == "logit_margin":
            return np.asarray(top1 - top2)
        lse = c["draft_logsumexp"].astype(np.float64)
        return np.asarray(np.exp(top1 - lse) - np.exp(top2 - lse))

    def check_reads(self, reads: Sequence[str], reader: str) -> None:
        """Raise SignalError, naming `reader`, if it reads a draft signal that is not recorded."""
        if missing := [s for s in reads if s not in self.signals]:
            remedy = "record one with `draftsim profile`, or "
            if self.signals:
                again = "record it again with `draftsim profile` (--signals-only adds it), or "
                remedy = "" if "drafts" in self.meta else again
            raise SignalError(
                f"{reader} reads {', '.join(missing)}, which this trace does not hold (it holds "
                f"{', '.join(sorted(self.signals)) or 'no draft signals'}): {remedy}choose a "
                "policy that reads none"
            )

    def select(self, keep: Sequence[int]) -> Trace:
        """The trace of the requests with these indices, in this order."""
        rows, numbers = [], []
        bounds = np.searchsorted(self.columns["request"], np.arange(len(self.requests) + 1))
        for new, old in enumerate(keep):
            rows.append(np.arange(bounds[old], bounds[old + 1]))
            numbers.append(np.full(len(rows[-1]), new, dtype=np.int32))
        index = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        columns = {name: values[index] for name, values in self.columns.items()}
        columns["request"] = np.concatenate(numbers) if numbers else np.empty(0, dtype=np.int32)
        return Trace(columns, [self.requests[i] for i in keep], self.max_gamma, self.meta)

    def impute(self, seed: int = 0, method: Literal["hazard", "rejected"] = "hazard") -> Trace:
        """The trace with the matches that were not recorded filled in, marked in ``meta``.

        ``hazard`` draws each from the trace's own Kaplan-Meier hazard (`survival`) at the
        run of recorded matches before it.  ``rejected`` takes every one as a mismatch: no
        start then has more accepted than it would have had, a lower bound.  A replay of
        the result has fidelity ``approximate``, or of the latter ``lower bound``.

        Raises
        ------
        DraftsimError
            If nothing was recorded to estimate the hazard from, or the draft lengths
            of an imported log are not known.
        """
        from traces.acceptance.survival import impute_matches

        return impute_matches(self, seed, method)
