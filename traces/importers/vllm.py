"""Reading the per-request metrics of vLLM.

A response carries ``metrics.speculative_decoding``: with ``--per-request-spec-decode-metrics
detailed`` it holds ``per_step_drafted`` and ``per_step_accepted``, one entry a step, and so a
trace; with ``summary`` a histogram of accepted lengths alone (`traces.importers.totals`).
vLLM emits the first token with the prompt (prefill), so that the steps begin at output
position 1.  Source of the format: vllm-project/vllm, ``docs``, "Per-Request Acceptance
Metrics".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal

from traces.acceptance.trace import MOST_DRAFTED, MOST_TOKENS, Request, Trace
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.rows import LoggedRound, choices_of, read_json_rows, trace_of
from traces.importers.totals import Summary, Totals, pooled
from traces.store.text import label, whole, wholes

STEPS = ("per_step_drafted", "per_step_accepted")
"""Drafted and accepted tokens of each verification."""
SUMMED = (
    "acceptance_histogram", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
)  # fmt: skip
"""A summary's rounds by accepted tokens, its rounds, and its drafted and accepted tokens."""
OTHERS = ("spec_decode_acceptance", "total_accepted_draft_tokens")
"""Fields found with the same names in AIPerf's and TensorRT-LLM's files."""
Stepped = tuple[str, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
"""A request: where it is from, for error messages; the response (``id``, ``category``, ``usage``);
what holds ``finish_reason``; and what holds the lists `STEPS`, one entry a verification."""


def stepped_trace(found: Sequence[Stepped], meta: Mapping[str, Any]) -> Trace:
    """Return the trace of requests that tell each verification's tokens.

    Raises FileError if a request contradicts itself, or none drafted anything.
    """
    told = [_request(*one) for one in found]
    if not any(r.drafted for _, rounds in told for r in rounds):
        raise FileError(
            f"{found[0][0]}: is a log without speculation, no request drafted a token: serve with "
            "speculative decoding switched on"
        )
    requests = [request for request, _ in told]
    lengths = {
        "first": 1, "draft_lengths": "recorded", "draft_lengths_known": True,
        "prompt_lengths_known": all(r.prompt_length for r in requests),
    }  # fmt: skip
    return trace_of(requests, [rounds for _, rounds in told], {**meta, **lengths})


class VLLM(Importer):
    """vLLM's responses with per-request metrics, detailed or in summary (JSON or JSON Lines).

    The metrics may be at the top of an object or in its ``choices``; of the rest,
    ``id``, ``usage`` (``prompt_tokens``, ``completion_tokens``), ``finish_reason`` and
    ``category`` are used where present.  Within a step the accepted positions match and
    the next, if more was drafted, does not; after a fully accepted step it is unknown,
    as is the first token (see `traces.acceptance.survival.impute`).  Requests that were
    aborted, that failed, or that report null (several sequences to a request) are left out and
    named in ``meta["left_out"]``.  Without ``usage`` a request has the tokens
    that its steps emitted, and ``completion_tokens`` may cut the last step short.
    """

    name = "vllm"
    summary = "vLLM's responses, --per-request-spec-decode-metrics detailed or summary"

    def sniff(self, text: str) -> bool:
        own = any(f'"{key}"' in text for key in ("speculative_decoding", *STEPS))
        return own and not any(f'"{key}"' in text for key in OTHERS)

    def read(self, files: Sequence[Path], options: Options) -> Trace | Totals:
        rows = [row for file in files for row in read_json_rows(file)]
        reasons = {where: reason for where, row in rows if (reason := _unfinished(row))}
        finished = [(where, row) for where, row in rows if where not in reasons]
        left_out = [f"{where}: {reason}" for where, reason in reasons.items()]
        if not finished:
            raise FileError(f"{files[0]}: no request of it finished: {left_out[0]}")
        meta = self.meta(files, left_out=left_out)
        found = [(where, list(_found(where, row))) for where, row in finished]
        without = [where for where, metrics in found if not metrics]
        told = [one for _, metrics in found for one in metrics]
        if told and not any(name in held for *_, held in told for name in STEPS):
            left_out += [f"{where}: no metrics" for where in without]
            meta = self.meta(files, left_out=left_out)
            return pooled([Summary(at, *map(held.get, SUMMED)) for at, *_, held in told], meta)
        if without:
            raise FileError(
                f"{without[0]}: has no metrics.speculative_decoding with {' and '.join(STEPS)}: "
                "ask vLLM for per-request metrics with speculative decoding switched on"
            )
        return stepped_trace(told, meta)


def _unfinished(row: Mapping[str, Any]) -> str | None:
    """Return why a response cannot be used: aborted, failed, or without metrics."""
    reasons = [c.get("finish_reason") for c in (row, *choices_of(row))]
    if ended := next((r for r in reasons if r in ("abort", "error")), None):
        return f"ended by {ended}"
    if row.get("error") is not None:
        return "an error in place of a response"
    metrics = row.get("metrics")
    if isinstance(metrics, dict) and metrics.get("speculative_decoding", 0) is None:
        return "its metrics are null"
    return None


def _found(where: str, row: Mapping[str, Any]) -> Iterator[Stepped]:
    """Yield every set of metrics in an object, with the objects around it."""
    choices = choices_of(row)
    if (steps := _metrics(row)) is not None:
        yield where, row, choices[0] if len(choices) == 1 else row, steps
        return
    for i, choice in enumerate(choices):
        if (steps := _metrics(choice)) is not None:
            yield f"{where}, choice {i}", row if len(choices) == 1 else {
                **row, "usage": None, "id": f"{row.get('id', where)}/{i}",
            }, choice, steps  # fmt: skip


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
    """Return a `Stepped` request and its rounds; its first token was emitted before them."""
    drafted, accepted = (wholes(at, name, steps.get(name), most=MOST_DRAFTED) for name in STEPS)
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
        id=_name(at, outer), prompt_length=prompt,
        category=label(at, "category", outer.get("category")), tokens=tokens,
        max_new_tokens=limit, ended=ended,
    )  # fmt: skip
    rounds = [LoggedRound(a, n) for n, a in zip(drafted, accepted, strict=True)]
    return request, rounds


def _name(at: str, outer: Mapping[str, Any]) -> str:
    given = next((n for n in ("id", "request_id") if outer.get(n) not in (None, "")), "id")
    return label(at, given, outer.get(given), at) or at


def _usage(at: str, outer: Mapping[str, Any], emitted: int, last: int) -> tuple[int, int]:
    """Return the output and prompt tokens."""
    usage = outer.get("usage")
    if usage is not None and not isinstance(usage, dict):
        raise FileError(f"{at}: usage is {shown(usage)}, expected an object")
    usage = usage or {}
    tokens, prompt = usage.get("completion_tokens", emitted), usage.get("prompt_tokens", 0)
    for name, value in (("completion_tokens", tokens), ("prompt_tokens", prompt)):
        whole(at, f"usage.{name}", value, most=MOST_TOKENS)
    if not emitted - last <= tokens <= emitted:
        raise FileError(
            f"{at}: the steps emit {emitted} tokens (the first with the prompt), "
            f"usage.completion_tokens is {tokens}: a step is missing or does not belong here"
        )
    return tokens, prompt
