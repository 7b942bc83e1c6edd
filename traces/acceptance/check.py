"""Checks that the arrays of a trace fit together, run whenever a trace is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from traces.acceptance.schema import (
    COLUMNS,
    KEYS,
    MATCH,
    MISMATCH,
    SIGNAL_COLUMNS,
    UNKNOWN,
    Array,
    Request,
)
from traces.errors import DraftsimError

_TAIL_MAY_LACK = frozenset(name for name in COLUMNS if name.startswith("target_")) | {
    "draft_path_logprob", "overlap",
}  # fmt: skip
"""Off the path there is no x_t, and a recording need not score tails with the target."""
_MAY_BE_MINUS_INF = frozenset({"draft_path_logprob", "target_path_logprob"})
"""Truncated sampling (top-k, top-p) gives tokens outside it no probability at all."""


def normalised(columns: Mapping[str, Array]) -> dict[str, Array]:
    """The columns in their declared dtypes, read-only: a trace never changes."""
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
    starts = np.cumsum(tokens) - tokens
    expected = np.arange(tokens.sum()) - np.repeat(starts, tokens)
    if not np.array_equal(position[on_path], expected):
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
