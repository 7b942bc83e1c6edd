"""Reading the per-request metrics of vLLM into a trace.

A response carries ``metrics.speculative_decoding`` with ``per_step_drafted`` and
``per_step_accepted``, one entry a step.  vLLM emits the first token with the prompt
(prefill), so that the steps begin at output position 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from traces.errors import FileError
from traces.logs import LoggedRound, logged_trace, matches, read_json_rows
from traces.schema import Request
from traces.trace import Trace

_STEPS = ("per_step_drafted", "per_step_accepted")


def import_vllm(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Trace:
    """A trace of the requests in vLLM response files (JSON or JSON Lines).

    The metrics may stand at the top of an object or in its ``choices``; of the rest,
    ``id``, ``usage`` (``prompt_tokens``, ``completion_tokens``), ``finish_reason`` and
    ``category`` are used where present.  Within a step the accepted positions match and
    the next, if more was drafted, does not; after a fully accepted step it is unknown,
    as is the first token (see `Trace.impute`).  Without ``usage`` a request has the tokens
    that its steps emitted, and ``completion_tokens`` may cut the last step short.

    Raises
    ------
    FileError
        If a file is damaged, an object holds no such metrics, or its numbers contradict
        each other.
    """
    if isinstance(files, str | os.PathLike):
        files = [files]
    requests, match = [], []
    for file in files:
        for where, row in zip(*read_json_rows(file), strict=True):
            for at, outer, holder, steps in _found(where, row):
                request, rounds = _request(at, outer, holder, steps)
                requests.append(request)
                match.append(matches(rounds, request.tokens, first=1))
    meta = {
        "kind": "vllm",
        "source": [os.path.basename(os.fspath(file)) for file in files],
        "first": 1,
        "draft_lengths": "recorded",
        "draft_lengths_known": True,
        "prompt_lengths_known": all(r.prompt_length for r in requests),
    }
    return logged_trace(requests, match, meta)


def _found(
    where: str, row: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]]:
    """Every set of step metrics in an object, with the objects around it."""
    if (steps := _metrics(row)) is not None:
        choices = row.get("choices")
        single = choices[0] if isinstance(choices, list) and len(choices) == 1 else row
        yield where, row, single if isinstance(single, dict) else row, steps
        return
    choices = row.get("choices")
    any_found = False
    for i, choice in enumerate(choices if isinstance(choices, list) else []):
        if isinstance(choice, dict) and (steps := _metrics(choice)) is not None:
            any_found = True
            yield f"{where}, choice {i}", row if len(choices or ()) == 1 else {
                **row, "usage": None, "id": f"{row.get('id', where)}/{i}",
            }, choice, steps  # fmt: skip
    if not any_found:
        raise FileError(
            f"{where}: has no metrics.speculative_decoding with {' and '.join(_STEPS)}: ask vLLM "
            "for per-request metrics with speculative decoding switched on"
        )


def _metrics(holder: Mapping[str, Any]) -> Mapping[str, Any] | None:
    inner = holder.get("metrics")
    for candidate in (inner, holder):
        found = candidate.get("speculative_decoding") if isinstance(candidate, dict) else None
        if isinstance(found, dict):
            return found
    return None


def _request(
    at: str, outer: Mapping[str, Any], holder: Mapping[str, Any], steps: Mapping[str, Any]
) -> tuple[Request, list[LoggedRound]]:
    drafted, accepted = (_counts(at, steps, name) for name in _STEPS)
    if len(drafted) != len(accepted):
        raise FileError(
            f"{at}: per_step_drafted has {len(drafted)} steps, per_step_accepted {len(accepted)}: "
            "expected one entry a step in both"
        )
    for step, (n, a) in enumerate(zip(drafted, accepted, strict=True)):
        if a > n:
            raise FileError(
                f"{at}, step {step}: per_step_accepted={a} exceeds per_step_drafted={n}: "
                "the two lists do not belong together"
            )
    emitted = 1 + sum(accepted) + len(accepted)
    tokens, prompt = _usage(at, outer, emitted, accepted[-1] if accepted else 0)
    limited = (holder.get("finish_reason") or outer.get("finish_reason")) == "length"
    ended: Literal["eos", "length"] = "length" if limited else "eos"
    # Without the request's own limit, one that caps no draft that was made.
    limit = tokens if limited else tokens + max(drafted, default=0) + 1
    request = Request(
        id=str(outer.get("id") or outer.get("request_id") or at), prompt_length=prompt,
        category=str(outer.get("category") or ""), tokens=tokens, max_new_tokens=limit, ended=ended,
    )  # fmt: skip
    rounds = [LoggedRound(a, n) for n, a in zip(drafted, accepted, strict=True)]
    return request, rounds


def _usage(at: str, outer: Mapping[str, Any], emitted: int, last: int) -> tuple[int, int]:
    """Output and prompt tokens."""
    usage = outer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    tokens, prompt = usage.get("completion_tokens", emitted), usage.get("prompt_tokens", 0)
    for name, value in (("completion_tokens", tokens), ("prompt_tokens", prompt)):
        if type(value) is not int or value < 0:
            raise FileError(f"{at}: usage.{name} is {value!r}, expected a whole number of tokens")
    if not emitted - last <= tokens <= emitted:
        raise FileError(
            f"{at}: the steps emit {emitted} tokens (the first with the prompt), "
            f"usage.completion_tokens is {tokens}: a step is missing or does not belong here"
        )
    return tokens, prompt


def _counts(at: str, steps: Mapping[str, Any], name: str) -> list[int]:
    values = steps.get(name)
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise FileError(f"{at}: {name} is no list of whole numbers >= 0: expected one a step")
    return values
