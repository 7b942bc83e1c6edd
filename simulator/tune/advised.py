"""The setting that a server's own runs advise (`simulator.aggregate.advice`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from simulator.aggregate.advice import Choice
from simulator.tune.launch import ALGORITHMS, DRAFT, TARGET, NamedDrafter, launch_line


def setting(engine: str, rows: Sequence[Choice], method: str | None) -> dict[str, Any] | None:
    """Return an engine's setting; None if no speculation is best at every concurrency."""
    longest = max(row.k for row in rows)
    if not longest:
        return None
    ranges: list[list[int]] = []
    start = 1
    for i, row in enumerate(rows):
        if i + 1 < len(rows) and rows[i + 1].k == row.k:
            continue
        ranges.append([start, row.batch, row.k])
        start = row.batch + 1
    if engine == "vllm":
        document: dict[str, Any] = {} if method is None else {"method": method}
        document["num_speculative_tokens"] = longest
        if len(ranges) > 1:
            document["num_speculative_tokens_per_batch_size"] = ranges
        return document
    if engine == "tensorrt-llm":
        # Its longest draft is that of the smallest batch; after the last batch nothing is drafted.
        first = rows[0].k or longest
        schedule = {str(high): min(k or first * (low == 1), first) for low, high, k in ranges}
        while len(schedule) > 1 and not [*schedule.values()][-1]:
            schedule.popitem()
        return {"max_draft_len": first, "draft_len_schedule": schedule}
    # These take one draft length: that of the smallest concurrency asked about.
    k = rows[0].k or longest
    if engine == "sglang":
        return {
            "speculative-num-steps": k, "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": k + 1,
        }  # fmt: skip
    if engine == "llamacpp":
        stop = {"spec-draft-p-min": rows[0].p_min} if rows[0].p_min else {}
        return {"spec-draft-n-max": k, **stop}
    return {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant"}


def start_line(
    engine: str, document: Mapping[str, Any] | None, target: str | None, draft: str | None,
    method: str | None,
) -> str:  # fmt: skip
    """Return the command that starts the engine with a `setting`."""
    model = target or TARGET
    drafter = NamedDrafter(method, draft)
    if engine != "sglang":
        return launch_line(engine, document, target=model, drafter=drafter)
    line = f"python -m sglang.launch_server --model-path {shlex.quote(model)}"
    if document is None:
        return line
    algorithm = ALGORITHMS.get(method or "eagle3", "EAGLE3")
    options = " ".join(f"--{name} {value}" for name, value in document.items())
    return (
        f"{line} --speculative-algorithm {algorithm} --speculative-draft-model-path "
        f"{shlex.quote(draft or DRAFT)} {options}"
    )
