"""The outputs of real runs, compared with the recorded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.models.loading import Pair
from traces.acceptance.trace import Trace
from traces.replay.exact_match import solved
from traces.store.outputs import Output, RealRun

if TYPE_CHECKING:
    from profiler.checks.spot_check import Arm, Measured


def real_run(
    pair: Pair, greedy: Trace, arm: Arm, measured: Measured, meta: Mapping[str, Any],
    answers: Mapping[str, str] | None = None,
) -> RealRun:  # fmt: skip
    """The rounds and outputs of an arm with a lossy rule.

    ``greedy`` is the recording of the target's own outputs, which may hold more requests;
    ``answers`` holds the numbers that solve requests, by id (`profiler.checks.score.answers_to`).
    """
    place = {request.id: i for i, request in enumerate(greedy.requests)}
    log = measured.logs[arm.label]
    outputs = []
    for request, tokens, nats in zip(
        log.requests, measured.outputs[arm.label], measured.log_likelihoods[arm.label], strict=True
    ):
        at, answer = place[request.id], (answers or {}).get(request.id)
        own, ended = output_of(greedy, at), greedy.requests[at].ended
        outputs.append(
            Output(
                request.id, tokens, pair.tokenizer.decode(tokens), pair.tokenizer.decode(own),
                float(nats), solves(pair, tokens, request.ended, answer),
                solves(pair, own, ended, answer),
            )
        )  # fmt: skip
    table = getattr(log.rule, "table", None)
    memory = {} if table is None else {"sizes": list(table.sizes), "evictions": table.evictions}
    return RealRun(log, outputs, {**pair.meta, **meta, "memory": memory})


def output_of(trace: Trace, request: int) -> list[int]:
    """The recorded output of a request."""
    starts = trace.request_starts
    rows = trace.on_path[starts[request] : starts[request + 1]]
    tokens: list[int] = np.asarray(trace.columns["token"])[rows].tolist()
    return tokens


def solves(pair: Pair, tokens: Sequence[int], ended: str | None, answer: str | None) -> bool | None:
    """Return True if an output ends in the number `answer`; None if its prompt has none.

    An output that its token limit cut solves nothing: its last number is one on the way.
    """
    if answer is None:
        return None
    # A special token may have a number in its name.
    text = pair.tokenizer.decode(tokens, skip_special_tokens=True)
    return ended == "eos" and solved(text, answer)
