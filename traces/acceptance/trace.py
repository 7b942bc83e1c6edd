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
the prefix and the wrong token, never on where the round began.  So a draft is a run of
consecutive rows: a match is followed by the next position's row, a mismatch by the first
row of its own tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.arrays import next_true, ranges
from traces.acceptance.sampling import Sampling
from traces.digits import counted
from traces.errors import DraftsimError, SignalError

Array = npt.NDArray[Any]

MATCH, MISMATCH, UNKNOWN = 1, 0, -1

MOST_DRAFTED = 4096
"""Most tokens drafted in one round, in any file that is read."""
MOST_TOKENS = 10_000_000
"""Most tokens of one prompt or output, in any file that is read."""

COLUMNS: dict[str, tuple[str, str]] = {
    "request": ("int32", "row of the request table"),
    "position": ("int32", "output position t, 0 = first generated token"),
    "offset": (
        "int16",
        "0 on the path; k for token k of the off-path tail, or of a draft that begins here",
    ),
    "match": ("int8", "1 accepted by lossless verification, 0 rejected, -1 not recorded"),
    "token": ("int32", "the true output token x_t; -1 in tails"),
    "draft_token": ("int32", "token the draft proposes; -1 not recorded"),
    "draft_logprob": ("float32", "log-probability of draft_token as sampled, nats (greedy: T = 1)"),
    "draft_raw_logprob": (
        "float32",
        "log-probability of draft_token at T = 1 without top-p, nats; only if drawn otherwise",
    ),
    "draft_top1": ("float32", "draft's largest raw logit"),
    "draft_top2": ("float32", "draft's second largest raw logit"),
    "draft_logsumexp": ("float32", "log-sum-exp of the draft's raw logits (T = 1)"),
    "draft_top10_logprob": (
        "float32",
        "log-probability of the draft's likeliest token among its ten likeliest (T = 1), nats",
    ),
    "draft_entropy": ("float32", "entropy of the draft's full distribution at T = 1, nats"),
    "draft_path_logprob": (
        "float32",
        "draft's log-probability of x_t as sampled; -inf if top-p cuts it",
    ),
    "target_token": ("int32", "target's argmax after the same prefix"),
    "target_top1": ("float32", "target's largest raw logit"),
    "target_top2": ("float32", "target's second largest raw logit"),
    "target_logsumexp": ("float32", "log-sum-exp of the target's raw logits (T = 1)"),
    "target_entropy": ("float32", "entropy of the target's full distribution at T = 1, nats"),
    "target_draft_logit": ("float32", "target's raw logit of draft_token"),
    "target_draft_rank": ("int32", "rank of draft_token under the target, 0 = argmax"),
    "target_path_logprob": ("float32", "target's log-probability of x_t as sampled"),
    "accepted": (
        "int16",
        "tokens accepted in a round that begins here (acceptance by start); 0 in tails",
    ),
    "overlap": ("float32", "sum over v of min(target, draft) as sampled"),
}
"""Name -> (numpy dtype, meaning) of the long table."""

KEYS = ("request", "position", "offset", "match")
SIGNAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "token_id": ("draft_token",),
    "prob": ("draft_logprob",),
    "entropy": ("draft_entropy",),
    "logit_margin": ("draft_top1", "draft_top2"),
    "prob_margin": ("draft_top1", "draft_top2", "draft_logsumexp"),
    "top_prob": ("draft_top1", "draft_logsumexp"),
    "raw_prob": ("draft_raw_logprob",),
    "top10_prob": ("draft_top10_logprob",),
}
"""Draft signal -> columns it is computed from, unless `signal_columns` says otherwise."""


def signal_columns(signal: str, sampling: Sampling) -> tuple[str, ...]:
    """Return the columns that `signal` is computed from in a recording drawn under `sampling`."""
    same = (signal == "top_prob" and sampling.greedy) or (signal == "raw_prob" and sampling.plain)
    return SIGNAL_COLUMNS["prob" if same else signal]


def signal_in(columns: Mapping[str, Array], name: str, sampling: Sampling) -> Array:
    """Return the draft signal `name` of every row of `columns`, drawn under `sampling`."""
    first, *others = (columns[column] for column in signal_columns(name, sampling))
    if name == "token_id":
        return np.asarray(first)
    if name in ("prob", "top_prob", "raw_prob", "top10_prob"):
        # The difference in float32, as the models' side takes it.
        return np.exp((first - others[0] if others else first).astype(np.float64))
    top1, *rest = (values.astype(np.float64) for values in (first, *others))
    if name == "logit_margin":
        return np.asarray(top1 - rest[0])
    if name == "prob_margin":
        return np.asarray(np.exp(top1 - rest[1]) - np.exp(rest[0] - rest[1]))
    return np.asarray(top1)


@dataclass(frozen=True)
class Request:
    """One recorded sequence, without its per-position rows."""

    id: str
    """Id in the prompts' file, or else the place in it."""
    category: str
    """Kind of prompt, by which rows are grouped; empty if none was given."""
    prompt_length: int
    """Prompt tokens."""
    tokens: int
    """Output tokens recorded, EOS included."""
    max_new_tokens: int
    """Output limit; drafts are no longer than what remains of it."""
    ended: Literal["eos", "length"]
    """Why the output ends: the target's end-of-sequence token, or the limit."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the prompt, which lookups search; None if they were not recorded."""
    wall_s: float | None = None
    """Measured seconds of decoding without speculation; None if they were not measured."""


T = TypeVar("T")


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

    @classmethod
    def without_tails(
        cls, requests: Sequence[Request], max_gamma: int | None, meta: Mapping[str, Any],
        **columns: Array,
    ) -> Trace:  # fmt: skip
        """Return a trace whose `columns` have an entry per output token, requests in turn.

        Without ``match`` they have ``accepted``, of drafts by start.
        """
        tokens = np.array([r.tokens for r in requests], dtype=np.int64)
        if "match" not in columns:
            columns["match"] = (columns["accepted"] > 0).astype(np.int8)
        places = {
            "request": np.repeat(np.arange(len(tokens)), tokens),
            "position": ranges(tokens),
            "offset": np.zeros(tokens.sum(), dtype=np.int16),
        }
        return cls({**places, **columns}, requests, max_gamma, meta)

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
    def said_longest(self) -> str:
        """How long the recorded drafts are at most, in words."""
        if self.max_gamma is None:
            return "drafts of any length"
        return f"drafts of up to {counted(self.max_gamma, 'token')}"

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
    def request_ends(self) -> Array:
        """For each on-path position, one past the last position of its request."""
        return np.repeat(self.request_starts[1:], np.diff(self.request_starts))

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
        if self.by_start:
            return np.minimum(self.columns["accepted"][self.on_path], self.request_ends - index)
        nearest = next_true(self.columns["match"][self.on_path] != MATCH)
        return np.asarray(np.minimum(nearest, self.request_ends) - index)

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
    def nothing_drafted(self) -> Array:
        """For each on-path position, True if a draft from there is empty: a search finds nothing.

        Its row holds no drafted token.
        """
        if not self.meta.get("finds_nothing"):
            return np.zeros(len(self.on_path), dtype=bool)
        return np.asarray(self.columns["draft_token"][self.on_path] < 0)

    @cached_property
    def draft_ends(self) -> Array:
        """For each on-path position, one past the last row that a draft from there may reach.

        A draft goes on through matches and the tail of the next mismatch, never into the next
        request.
        """
        after = np.arange(1, len(self.on_path) + 1)
        last = after if self.by_start else np.minimum(after + self.run_lengths, self.request_ends)
        bounds = np.append(self.on_path, len(self))
        return np.asarray(bounds[last] - self.nothing_drafted)

    @cached_property
    def open_ended(self) -> Array:
        """For each on-path position, True if its run may be longer than `run_lengths` says."""
        ends = np.arange(len(self.on_path)) + self.run_lengths
        inside = ends < self.request_ends
        if self.by_start:
            return np.asarray(inside & (self.run_lengths == self.max_gamma))
        match = np.append(self.columns["match"][self.on_path], MISMATCH)
        return np.asarray(inside & (match[ends] == UNKNOWN))

    def signal(self, name: str) -> Array:
        """Return the draft signal `name` for every row (see `policies.core.DraftToken`)."""
        if name not in self.signals:
            raise DraftsimError(
                f"signal {name!r} is not in this trace (it holds "
                f"{', '.join(sorted(self.signals)) or 'none'}): "
                "record one with `draftsim profile`"
            )
        return signal_in(self.columns, name, self.sampling)

    def check_reads(
        self, reads: Sequence[str], reader: str, instead: str = "a policy that reads none"
    ) -> None:
        """Raise SignalError, naming `reader`, if it reads a draft signal that is not recorded."""
        if missing := [s for s in reads if s not in self.signals]:
            remedy = "record one with `draftsim profile`, or "
            if self.signals:
                again = "record it again with `draftsim profile` (--signals-only adds it), or "
                remedy = "" if "drafts" in self.meta else again
            raise SignalError(
                f"{reader} reads {', '.join(missing)}, which this trace does not hold (it holds "
                f"{', '.join(sorted(self.signals)) or 'no draft signals'}): "
                f"{remedy}choose {instead}"
            )

    def select(self, keep: Sequence[int]) -> Trace:
        """Return the trace of the requests with these indices, in this order."""
        bounds = np.searchsorted(self.columns["request"], np.arange(len(self.requests) + 1))
        chosen = np.array(keep, dtype=np.int64)
        lengths = np.diff(bounds)[chosen]
        index = ranges(lengths, bounds[chosen])
        columns = {name: values[index] for name, values in self.columns.items()}
        columns["request"] = np.repeat(np.arange(len(keep), dtype=np.int32), lengths)
        return Trace(columns, [self.requests[i] for i in keep], self.max_gamma, self.meta)


def once_per_trace(make: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Return `make` with its result kept as long as the trace, which must not be held by it."""
    made: WeakKeyDictionary[Trace, T] = WeakKeyDictionary()

    def kept(trace: Trace) -> T:
        # Traces do not change, and every replay asks for the same.
        if (found := made.get(trace)) is None:
            found = made[trace] = make(trace)
        return found

    return kept


_TAIL_MAY_LACK = frozenset(name for name in COLUMNS if name.startswith("target_")) | {
    "draft_path_logprob", "overlap",
}  # fmt: skip
"""Off the path there is no x_t, and a recording need not score tails with the target."""
_MAY_BE_MINUS_INF = frozenset({"draft_path_logprob", "target_path_logprob"})
"""Truncated sampling (top-k, top-p) gives tokens outside it no probability at all."""


def normalised(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Return the columns in their declared dtypes, read-only: a trace never changes."""
    result = {}
    for name, values in columns.items():
        if name not in COLUMNS:
            result[name] = values  # named by `check_trace`
            continue
        dtype = np.dtype(COLUMNS[name][0])
        given = np.asarray(values)
        if given.dtype != dtype:
            if given.dtype.kind not in "iufb" or (dtype.kind == "i" and given.dtype.kind == "f"):
                raise DraftsimError(
                    f"trace column {name!r} has dtype {given.dtype}, expected {dtype}: convert it"
                )
            limits = np.iinfo(dtype) if dtype.kind == "i" else np.finfo(dtype)
            finite = given[np.isfinite(given)] if given.dtype.kind == "f" else given
            if finite.size and not (finite.min() >= limits.min and finite.max() <= limits.max):
                raise DraftsimError(
                    f"trace column {name!r} holds values beyond {dtype}: give smaller ones"
                )
        view = given.astype(dtype, copy=False).view()
        view.flags.writeable = False
        result[name] = view
    return result


def check_trace(
    columns: Mapping[str, Array], requests: Sequence[Request], max_gamma: int | None
) -> None:
    """Raise `DraftsimError` where columns, request table and `max_gamma` disagree."""
    if missing := [k for k in KEYS if k not in columns]:
        raise DraftsimError(f"trace lacks the column(s) {', '.join(missing)}: record it again")
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise DraftsimError(f"trace has unknown column(s) {', '.join(unknown)}")
    length = columns["match"].size
    for name, values in columns.items():
        if values.ndim != 1 or len(values) != length:
            raise DraftsimError(
                f"trace column {name!r} has shape {values.shape}, expected ({length},)"
            )
    for r in requests:
        _check_request(r)
    if max_gamma is not None and max_gamma < 1:
        raise DraftsimError(f"trace has max_gamma={max_gamma}, expected None or >= 1")
    _check_rows(columns, requests)
    _check_tails(columns, max_gamma)
    _check_values(columns)
    _check_by_start(columns, max_gamma)
    signals = [s for s, needed in SIGNAL_COLUMNS.items() if all(c in columns for c in needed)]
    if signals and max_gamma is None:
        raise DraftsimError(
            f"trace holds the draft signal(s) {', '.join(signals)} but no max_gamma: "
            "say how long its off-path tails allow a draft to be"
        )


def _check_request(r: Request) -> None:
    if not 0 < r.tokens <= r.max_new_tokens:
        raise DraftsimError(
            f"trace request {r.id!r} has tokens={r.tokens}, expected 1..max_new_tokens="
            f"{r.max_new_tokens}"
        )
    if r.ended not in ("eos", "length"):
        raise DraftsimError(f"trace request {r.id!r} has ended={r.ended!r}, not 'eos' or 'length'")
    if r.ended == "length" and r.tokens != r.max_new_tokens:
        raise DraftsimError(
            f"trace request {r.id!r} ended at the token limit with tokens={r.tokens}, but its "
            f"max_new_tokens is {r.max_new_tokens}"
        )
    if r.prompt_length < 0:
        raise DraftsimError(f"trace request {r.id!r} has prompt_length={r.prompt_length}, not >= 0")
    if r.prompt_ids is not None and len(r.prompt_ids) != r.prompt_length:
        raise DraftsimError(
            f"trace request {r.id!r} has prompt_length={r.prompt_length} but "
            f"{len(r.prompt_ids)} prompt ids"
        )


def _check_rows(columns: Mapping[str, Array], requests: Sequence[Request]) -> None:
    request, position, offset = (columns[k] for k in ("request", "position", "offset"))
    if len(request) and not (request.min() >= 0 and request.max() < len(requests)):
        raise DraftsimError(
            f"trace column 'request' names request {int(request.max())}, "
            f"the table has {len(requests)}"
        )
    if len(request) and (position.min() < 0 or offset.min() < 0):
        raise DraftsimError("trace columns 'position' and 'offset' hold negative values")
    same_request = request[1:] == request[:-1]
    same_position = same_request & (position[1:] == position[:-1])
    in_order = (
        (request[1:] > request[:-1])
        | (same_request & (position[1:] > position[:-1]))
        | (same_position & (offset[1:] > offset[:-1]))
    )
    if not in_order.all():
        row = int(np.flatnonzero(~in_order)[0]) + 1
        raise DraftsimError(
            f"trace rows are not sorted by (request, position, offset), or repeat, at row {row}"
        )
    on_path = offset == 0
    tokens = np.array([r.tokens for r in requests], dtype=np.int64)
    counts = np.bincount(request[on_path], minlength=len(requests))
    if (wrong := np.flatnonzero(counts != tokens)).size:
        r = requests[wrong[0]]
        raise DraftsimError(
            f"trace request {r.id!r} has {int(counts[wrong[0]])} on-path rows for {r.tokens} tokens"
        )
    if not np.array_equal(position[on_path], ranges(tokens)):
        raise DraftsimError("trace positions of a request are not 0, 1, 2, ... on the path")


def _check_tails(columns: Mapping[str, Array], max_gamma: int | None) -> None:
    offset, match = columns["offset"], columns["match"]
    tail = np.flatnonzero(offset)
    if not tail.size:
        return
    if max_gamma is None:
        raise DraftsimError("trace has off-path tails but no max_gamma")
    if (longest := int(offset.max())) >= max_gamma:
        raise DraftsimError(
            f"trace has an off-path tail of {longest} tokens, its max_gamma={max_gamma} allows "
            f"{max_gamma - 1}"
        )
    # The first row is on the path, so every tail row has one before it.
    numbered = offset[tail] == offset[tail - 1] + 1
    for name in ("request", "position"):
        numbered &= columns[name][tail] == columns[name][tail - 1]
    if not numbered.all():
        raise DraftsimError(
            "trace off-path tails are not numbered 1, 2, 3, ... after their mismatch"
        )
    heads = tail[offset[tail] == 1] - 1
    if "accepted" not in columns and (match[heads] != MISMATCH).any():
        raise DraftsimError("trace has an off-path tail after a position that was no mismatch")


def _check_by_start(columns: Mapping[str, Array], max_gamma: int | None) -> None:
    if "accepted" not in columns:
        return
    accepted, match = columns["accepted"], columns["match"]
    if max_gamma is None:
        raise DraftsimError("trace holds drafts accepted by start but no max_gamma: say how many")
    first = columns["offset"] == 0
    if accepted[~first].any():
        raise DraftsimError("trace column 'accepted' holds values off the path, expected 0")
    if len(accepted) and not (accepted.min() >= 0 and accepted.max() <= max_gamma):
        raise DraftsimError(f"trace column 'accepted' holds values beyond 0 to {max_gamma}")
    if not np.array_equal(accepted[first] > 0, match[first] == MATCH):
        raise DraftsimError("trace columns 'accepted' and 'match' disagree on a first draft")


def _check_values(columns: Mapping[str, Array]) -> None:
    match, offset = columns["match"], columns["offset"]
    if not np.isin(match, (MATCH, MISMATCH, UNKNOWN)).all():
        raise DraftsimError("trace column 'match' holds values other than 1, 0 and -1")
    for name in ("token", "draft_token", "target_token", "target_draft_rank"):
        if name in columns and (columns[name] < -1).any():
            raise DraftsimError(f"trace column {name!r} holds values below -1")
    undrafted = columns["draft_token"] < 0 if "draft_token" in columns else np.False_
    for name, values in columns.items():
        if values.dtype.kind != "f":
            continue
        bad = ~np.isfinite(values)
        if not bad.any():
            continue
        if name in _MAY_BE_MINUS_INF:
            bad &= values != -np.inf
        if name in _TAIL_MAY_LACK:
            bad &= ~((offset > 0) & np.isnan(values))
        bad &= ~undrafted
        if (rows := np.flatnonzero(bad)).size:
            row = rows[0]
            raise DraftsimError(
                f"trace column {name!r} is {values[row]} at request {columns['request'][row]}, "
                f"position {columns['position'][row]}, offset {offset[row]}: the model's logits "
                "were not finite there; record in a wider dtype"
            )
