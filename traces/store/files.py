"""Reading and writing traces, latency tables and round logs.

Every reader returns an object that passed its own checks, or raises `FileError` in one
line that names the file, the field and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from policies.rules.registry import RULES
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import COLUMNS, KEYS, MOST_DRAFTED, MOST_TOKENS, Request, Trace
from traces.latency.table import CELL_COLUMNS, LatencyTable
from traces.replay.rounds import ROUND_DTYPE, Fidelity, RoundLog
from traces.store.header import (
    FieldCheck,
    PathLike,
    check,
    check_rows,
    file_error,
    is_whole,
    meta_of,
    named,
    requests_of,
)
from traces.store.parquet import (
    columns_of,
    frame_of,
    lists_of,
    read_file,
    table_of,
    write_file,
)

CHECKED = "latency-check.parquet"
"""File of a run folder that keeps latencies measured between real runs."""


def write_trace(trace: Trace, path: PathLike) -> None:
    """Write a trace: one row per drafted token, requests and provenance in the header."""
    header = {
        "max_gamma": trace.max_gamma,
        "requests": [asdict(r) for r in trace.requests],
        "meta": dict(trace.meta),
    }
    columns = {name: trace.columns[name] for name in COLUMNS if name in trace.columns}
    write_file(path, "trace", pa.table(columns), header)


def read_trace(path: PathLike) -> Trace:
    """Return the trace in the file at `path`.

    Raises
    ------
    FileError
        If the file is missing, damaged, of another schema or kind, or contradicts itself.
    """
    header, table = read_file(path, "trace")
    dtypes = {name: dtype for name, (dtype, _) in COLUMNS.items()}
    if unknown := sorted(set(table.column_names) - set(dtypes)):
        raise file_error(path, f"unknown column(s) {', '.join(unknown)}", "upgrade draftsim")
    columns = columns_of(path, table, {n: dtypes[n] for n in dtypes if n in table.column_names})
    if missing := [name for name in KEYS if name not in columns]:
        raise file_error(path, f"lacks the column(s) {', '.join(missing)}")
    max_gamma = header.get("max_gamma")
    sound = max_gamma is None or is_whole(max_gamma, 1, MOST_DRAFTED)
    check(path, "max_gamma", max_gamma, sound, f"null, or 1 to {MOST_DRAFTED}")
    meta, requests = meta_of(path, header), requests_of(path, header)
    with named(path):
        trace = Trace(columns, requests, max_gamma, meta)
    _check_ids(path, trace)
    return trace


def _check_ids(path: PathLike, trace: Trace) -> None:
    """Raise FileError if a token is outside the vocabulary, as far as its size is known."""
    size, draft = trace.vocab_size, trace.meta.get("draft")
    if size is None:
        return
    padded: Any = draft.get("vocab_size") if isinstance(draft, dict) else None
    if is_whole(padded, 1):  # a padded vocabulary of the draft model may be the larger one
        size = max(size, padded)
    largest = {
        f"column {name!r}": int(trace.columns[name].max(initial=-1))
        for name in ("token", "draft_token", "target_token") if name in trace.columns
    }  # fmt: skip
    for i, request in enumerate(trace.requests):
        largest[f"request {i} of the header"] = max(request.prompt_ids or (-1,))
    for where, token in largest.items():
        if token >= size:
            raise file_error(path, f"{where} holds token {token}, of a vocabulary of {size}")


def write_latency(table: LatencyTable, path: PathLike) -> None:
    """Write a latency table: one row per cell, provenance in the header."""
    cells = table_of(table.cells, CELL_COLUMNS)
    write_file(path, "latency", cells, {"meta": dict(table.meta)})


def read_latency(path: PathLike) -> LatencyTable:
    """Return the latency table in the file at `path`.

    Raises
    ------
    FileError
        If the file is missing, damaged, of another schema or kind, or contradicts itself.
    """
    header, table = read_file(path, "latency")
    cells, meta = frame_of(path, table, CELL_COLUMNS), meta_of(path, header)
    with named(path):
        return LatencyTable(cells, meta)


_LOG_FIELDS: Mapping[str, tuple[FieldCheck, str]] = {
    **dict.fromkeys(
        ("policy", "source", "verify", "drafter"), (lambda value: isinstance(value, str), "text")
    ),
    "fidelity": (lambda value: value in get_args(Fidelity), ", ".join(get_args(Fidelity))),
    "reads": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of signals",
    ),
    "first": (lambda value: is_whole(value, 0, 1), "0 or 1"),
    "takes_verified": (lambda value: isinstance(value, bool), "true or false"),
}
"""Fields of a log in its header: each one's check, and the expected value in words."""


def write_rounds(log: RoundLog, path: PathLike) -> None:
    """Write a round log: one row per round, requests and policy in the header.

    The calls of sources other than a draft model become lists, one per round.

    The rule object a lossy run ended with is not kept, its description is (``verify``).
    """
    names = ROUND_DTYPE.names or ()
    columns = {name: np.ascontiguousarray(log.rounds[name]) for name in names}
    if log.mismatched is not None:
        columns["mismatched"] = np.asarray(log.mismatched, np.int32)
    if log.recorded_calls is not None:
        columns |= _call_lists(log.recorded_calls, len(log))
    header = {name: getattr(log, name) for name in _LOG_FIELDS} | {"sampling": log.sampling.meta}
    header["requests"] = [asdict(r) for r in log.requests]
    write_file(path, "rounds", pa.table(columns), header)


def read_rounds(path: PathLike) -> RoundLog:
    """Return the round log in the file at `path`.

    Raises
    ------
    FileError
        If the file is missing, damaged, of another schema or kind, or contradicts itself.
    """
    header, table = read_file(path, "rounds")
    names = ROUND_DTYPE.names or ()
    dtypes = {name: ROUND_DTYPE[name].name for name in names}
    if "mismatched" in table.column_names:
        dtypes["mismatched"] = "int32"
    columns = columns_of(path, table, dtypes)
    rounds = np.empty(table.num_rows, dtype=ROUND_DTYPE)
    for name in names:
        rounds[name] = columns[name]
    requests = requests_of(path, header)
    header = {"drafter": "draft", "takes_verified": False, **header}  # older files have neither
    for name, (sound, expected) in _LOG_FIELDS.items():
        check(path, name, header.get(name), sound(header.get(name)), expected)
    rule = RULES.get(header["verify"].partition(":")[0])
    if rule is not None and not rule.lossless and "mismatched" not in columns:
        raise file_error(path, f"lacks the column 'mismatched', which {header['verify']} has")
    _check_rounds(path, rounds, requests, columns.get("mismatched"))
    told = {name: header[name] for name in _LOG_FIELDS} | {"reads": tuple(header["reads"])}
    mismatched, calls = columns.get("mismatched"), _calls(path, table)
    older = {"temperature": float(told["verify"] == "rejection-sampling")}
    drawn = header.get("sampling", older)
    check(path, "sampling", drawn, isinstance(drawn, dict), "a table")
    with named(path):
        sampling = Sampling.of(drawn)
    return RoundLog(
        rounds, requests, mismatched=mismatched, recorded_calls=calls, sampling=sampling, **told
    )


def _check_rounds(
    path: PathLike, rounds: npt.NDArray[Any], requests: Sequence[Request],
    mismatched: npt.NDArray[Any] | None,
) -> None:  # fmt: skip
    """Raise FileError if a round of a log cannot have been, naming its row."""
    own = {name: rounds[name].astype(np.int64) for name in rounds.dtype.names or ()}
    request = own["request"]
    named = (request >= 0) & (request < len(requests))
    check_rows(path, {f"0 <= request < {len(requests)}": named})
    decoded = np.bincount(request, minlength=len(requests)) > 0
    for i in np.flatnonzero(~decoded).tolist():
        if requests[i].tokens > 1:
            raise file_error(path, f"holds no round of request {i}, of {requests[i].tokens} tokens")
    prompt = np.array([r.prompt_length for r in requests], dtype=np.int64)[request]
    tokens = np.array([r.tokens for r in requests], dtype=np.int64)[request]
    position, emitted = own["position"], own["emitted"]
    # Rounds of a request follow on one another.
    same = np.append(request[1:] == request[:-1], False)
    follows = ~same | (np.append(position[1:], 0) == position + emitted)
    checks = {
        "the order of requests": np.append(True, request[1:] >= request[:-1])[: len(request)],
        "0 <= position": position >= 0,
        "1 <= emitted": emitted >= 1,
        "position + emitted <= the request's tokens": position + emitted <= tokens,
        "position + emitted = the next round's position": follows,
        "position + emitted = the request's tokens in its last round": (
            same | (position + emitted == tokens)
        ),
        f"0 <= accepted <= drafted <= {MOST_DRAFTED}": (
            (own["accepted"] >= 0)
            & (own["accepted"] <= own["drafted"])
            & (own["drafted"] <= MOST_DRAFTED)
        ),
        "emitted <= accepted + 1": emitted <= own["accepted"] + 1,
        f"0 <= draft_forwards <= {MOST_DRAFTED}": (
            (own["draft_forwards"] >= 0) & (own["draft_forwards"] <= MOST_DRAFTED)
        ),
        "0 <= catch_up <= the tokens before the round": (
            (own["catch_up"] >= 0) & (own["catch_up"] <= prompt + position + 1)
        ),
    }
    if mismatched is not None:
        among = (mismatched >= 0) & (mismatched <= own["accepted"])
        checks["0 <= mismatched <= accepted"] = among
    check_rows(path, checks)


CALL_FIELDS = ("verify", "kind", "new_tokens", "count")


def _call_lists(calls: npt.NDArray[np.void], rounds: int) -> dict[str, Any]:
    """Return the calls of each round as one list per field of theirs."""
    ordered = calls[np.argsort(calls["round"], kind="stable")]
    stops = np.searchsorted(ordered["round"], np.arange(rounds + 1)).astype(np.int32)
    return {
        f"calls_{name}": pa.ListArray.from_arrays(
            pa.array(stops), pa.array(np.ascontiguousarray(ordered[name]))
        )
        for name in CALL_FIELDS
    }


def _calls(path: PathLike, table: pa.Table) -> npt.NDArray[np.void] | None:
    """Return what `_call_lists` laid out; None if the rounds are those of a draft model."""
    # `traces.sources` reads its own files through this module.
    from traces.replay.calls import CALL_DTYPE, CALL_KINDS

    if not any(f"calls_{name}" in table.column_names for name in CALL_FIELDS):
        return None
    parts: dict[str, npt.NDArray[Any]] = {}
    counts: npt.NDArray[Any] | None = None
    for name in CALL_FIELDS:
        column = f"calls_{name}"
        parts[name], mine = lists_of(path, table, column, CALL_DTYPE[name])
        if counts is not None and not np.array_equal(counts, mine):
            raise file_error(path, f"column {column!r} has lists of other lengths than the others")
        counts = mine
    assert counts is not None
    calls = np.zeros(int(counts.sum()), dtype=CALL_DTYPE)
    calls["round"] = np.repeat(np.arange(len(counts)), counts)
    for name, values in parts.items():
        calls[name] = values
    if ((calls["kind"] < 0) | (calls["kind"] >= len(CALL_KINDS))).any():
        raise file_error(path, "column 'calls_kind' names an unknown kind", "upgrade draftsim")
    for name in ("new_tokens", "count"):
        if ((calls[name] < 0) | (calls[name] > MOST_TOKENS)).any():
            raise file_error(path, f"column 'calls_{name}' holds values beyond 0 to {MOST_TOKENS}")
    return calls
