"""A recorded acceptance trace: what the draft would propose at every position.

One row per drafted token in a long table sorted by (request, position, offset):

* ``offset 0``: the token the draft proposes after the true output so far (*on the
  path*), with the draft's signals and the target's scores of it;
* ``offset k > 0``, present only where the on-path proposal was wrong: the k-th further
  token the draft would have proposed after that wrong token (*off-path tail*).

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
import numpy.typing as npt

from traces.errors import DraftsimError

Array = npt.NDArray[Any]

MATCH, MISMATCH, UNKNOWN = 1, 0, -1

COLUMNS: dict[str, tuple[str, str]] = {
    "request": ("int32", "row of the request table"),
    "position": ("int32", "output position t, 0 = first generated token"),
    "offset": ("int16", "0 on the path; k for the k-th token of the off-path tail"),
    "match": ("int8", "1 accepted by lossless verification, 0 rejected, -1 not recorded"),
    "token": ("int32", "the true output token x_t; -1 in tails"),
    "draft_token": ("int32", "token the draft proposes; -1 not recorded"),
    "draft_logprob": ("float32", "log-probability of draft_token at the sampling temperature, nats"),
    "draft_top1": ("float32", "draft's largest raw logit"),
    "draft_top2": ("float32", "draft's second largest raw logit"),
    "draft_logsumexp": ("float32", "log-sum-exp of the draft's raw logits (T = 1)"),
    "draft_entropy": ("float32", "entropy of the draft's full distribution at T = 1, nats"),
    "draft_path_logprob": ("float32", "draft's log-probability of x_t at the sampling temperature"),
    "target_token": ("int32", "target's argmax after the same prefix"),
    "target_top1": ("float32", "target's largest raw logit"),
    "target_top2": ("float32", "target's second largest raw logit"),
    "target_logsumexp": ("float32", "log-sum-exp of the target's raw logits (T = 1)"),
    "target_entropy": ("float32", "entropy of the target's full distribution at T = 1, nats"),
    "target_draft_logit": ("float32", "target's raw logit of draft_token"),
    "target_draft_rank": ("int32", "rank of draft_token under the target, 0 = argmax"),
    "target_path_logprob": ("float32", "target's log-probability of x_t at the sampling temperature"),
    "overlap": ("float32", "sum over v of min(target, draft) at the sampling temperature"),
}
"""Name -> (numpy dtype, meaning) of the long table."""

KEYS = ("request", "position", "offset", "match")
SIGNAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "token_id": ("draft_token",),
    "prob": ("draft_logprob",),
    "entropy": ("draft_entropy",),
    "logit_margin": ("draft_top1", "draft_top2"),
    "prob_margin": ("draft_top1", "draft_top2", "draft_logsumexp"),
}
"""Draft signal -> columns it is computed from."""


@dataclass(frozen=True)
class Request:
    """One recorded sequence, without its per-position rows."""

    id: str
    category: str
    prompt_length: int
    """Prompt tokens."""
    tokens: int
    """Output tokens recorded, EOS included."""
    max_new_tokens: int
    """The limit the output was decoded under; the draft is capped by what remains of it."""
    ended: Literal["eos", "length"]
    prompt_ids: tuple[int, ...] | None = None
    wall_s: float | None = None
    """Measured seconds of plain decoding, where the recording has them."""


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
        Longest draft the off-path tails allow; None if the recording holds no tails
        because it holds no signals either (imported logs, synthetic traces).
    meta:
        Provenance: models and revisions, tokenizer, dtype, sampling, seeds, device,
        library versions.  ``meta["sampling"]["temperature"]`` is 0 for greedy.

    Raises
    ------
    DraftsimError
        If the arrays contradict each other or the request table.
    """

    columns: Mapping[str, Array]
    requests: Sequence[Request]
    max_gamma: int | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return int(len(self.columns["match"]))

    @property
    def tokens(self) -> int:
        """Output tokens over all requests."""
        return sum(r.tokens for r in self.requests)

    @property
    def temperature(self) -> float:
        """Sampling temperature of the recording; 0 is greedy."""
        return float(self.meta.get("sampling", {}).get("temperature", 0.0))

    @cached_property
    def signals(self) -> frozenset[str]:
        """The draft signals the recording holds."""
        return frozenset(
            name for name, needed in SIGNAL_COLUMNS.items() if all(c in self.columns for c in needed)
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
        """Matches in a row starting at each on-path position, within its request.

        Under lossless verification a draft of n tokens started at s has
        ``min(n, run_lengths[s])`` accepted.  A position whose match was not recorded
        ends a run.
        """
        match = self.columns["match"][self.on_path] == MATCH
        ends = np.flatnonzero(~match)
        runs = np.empty(len(match), dtype=np.int64)
        for start, stop in zip(self.request_starts[:-1], self.request_starts[1:], strict=True):
            stops = ends[(ends >= start) & (ends < stop)]
            bounds = np.append(stops, stop)
            index = np.arange(start, stop)
            runs[start:stop] = bounds[np.searchsorted(bounds, index)] - index
        return runs

    def signal(self, name: str) -> Array:
        """The draft signal `name` for every row (see `policies.core.DraftToken`)."""
        c = self.columns
        if name not in self.signals:
            raise DraftsimError(
                f"signal {name!r} is not in this trace (it holds {sorted(self.signals) or 'none'}): "
                "record one with `draftsim profile`"
            )
        if name == "token_id":
            return np.asarray(c["draft_token"])
        if name == "prob":
            return np.exp(c["draft_logprob"].astype(np.float64))
        if name == "entropy":
            return c["draft_entropy"].astype(np.float64)
        top1, top2 = c["draft_top1"].astype(np.float64), c["draft_top2"].astype(np.float64)
        if name == "logit_margin":
            return np.asarray(top1 - top2)
        lse = c["draft_logsumexp"].astype(np.float64)
        return np.asarray(np.exp(top1 - lse) - np.exp(top2 - lse))

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


def _check(trace: Trace) -> None:
    columns, requests = trace.columns, trace.requests
    if missing := [k for k in KEYS if k not in columns]:
        raise DraftsimError(f"trace lacks the column(s) {', '.join(missing)}: record it again")
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise DraftsimError(f"trace has unknown column(s) {', '.join(unknown)}")
    length = len(columns["match"])
    for name, values in columns.items():
        if values.ndim != 1 or len(values) != length:
            raise DraftsimError(
                f"trace column {name!r} has shape {values.shape}, expected ({length},)"
            )
    request, offset = columns["request"], columns["offset"]
    on_path = offset == 0
    counts = np.bincount(request[on_path].astype(np.int64), minlength=len(requests)) if length else np.zeros(len(requests), int)
    if len(counts) != len(requests) or (length and request.min() < 0):
        raise DraftsimError(
            f"trace column 'request' names request {int(request.max())}, the table has {len(requests)}"
        )
    for i, r in enumerate(requests):
        if counts[i] != r.tokens:
            raise DraftsimError(
                f"trace request {r.id!r} has {int(counts[i])} on-path rows for {r.tokens} tokens"
            )
        if not 0 < r.tokens <= r.max_new_tokens:
            raise DraftsimError(
                f"trace request {r.id!r} has tokens={r.tokens}, expected 1..max_new_tokens={r.max_new_tokens}"
            )
        if r.prompt_ids is not None and len(r.prompt_ids) != r.prompt_length:
            raise DraftsimError(
                f"trace request {r.id!r} has prompt_length={r.prompt_length} but {len(r.prompt_ids)} prompt ids"
            )
    if length == 0:
        return
    key = (request.astype(np.int64) << 40) | (columns["position"].astype(np.int64) << 16) | offset.astype(np.int64)
    if (np.diff(key) <= 0).any() or offset.min() < 0 or columns["position"].min() < 0:
        raise DraftsimError("trace rows are not sorted by (request, position, offset), or repeat")
    starts = np.concatenate([[0], np.cumsum([r.tokens for r in requests])])
    expected = np.arange(starts[-1]) - np.repeat(starts[:-1], [r.tokens for r in requests])
    if not np.array_equal(columns["position"][on_path], expected):
        raise DraftsimError("trace positions of a request are not 0, 1, 2, ... on the path")
    if not np.isin(columns["match"], (MATCH, MISMATCH, UNKNOWN)).all():
        raise DraftsimError("trace column 'match' holds values other than 1, 0 and -1")
    tails = ~on_path
    if tails.any():
        if trace.max_gamma is None:
            raise DraftsimError("trace has off-path tails but no max_gamma")
        first = np.flatnonzero(tails)
        if not np.array_equal(offset[first], offset[first - 1] + 1):
            raise DraftsimError("trace off-path tails are not numbered 1, 2, 3, ... after their mismatch")
        if (columns["match"][first[offset[first] == 1] - 1] == MATCH).any():
            raise DraftsimError("trace has an off-path tail after a position that matched")
