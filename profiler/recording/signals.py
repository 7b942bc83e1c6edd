"""Addition of draft signals that a recording lacks, by passes over its texts, without decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from profiler.models.runner import Runner
from profiler.models.seq2seq import make_runner
from profiler.recording.trace import (
    SCORE_TOKENS,
    Branches,
    draft_columns,
    slots_needed,
    spans_of,
)
from traces.acceptance.sampling import Sampling
from traces.acceptance.schema import SIGNAL_COLUMNS, Request, signal_columns
from traces.acceptance.trace import Trace

Arrays = Mapping[str, npt.NDArray[Any]]


def lacking(trace: Trace) -> list[str]:
    """Return the columns of draft signals that an older recording does not have."""
    wanted = {c for s in SIGNAL_COLUMNS for c in signal_columns(s, trace.sampling)}
    return sorted(wanted - trace.columns.keys())


def with_signals(trace: Trace, draft: Any, advance: Callable[[], object]) -> Trace:
    """Return `trace` with the columns that it is `lacking`.

    Parameters
    ----------
    trace:
        Recorded by `profiler.recording.trace.Recorder`.
    draft:
        The model that drafted.
    advance:
        Called after every request.
    """
    slots = (
        slots_needed(r.prompt_length, r.max_new_tokens, trace.max_gamma or 0)
        for r in trace.requests
    )
    runner = make_runner(draft, max(slots))
    wanted = lacking(trace)
    bounds = np.searchsorted(trace.columns["request"], np.arange(len(trace.requests) + 1))
    parts = []
    for i, request in enumerate(trace.requests):
        rows = slice(int(bounds[i]), int(bounds[i + 1]))
        mine = {name: values[rows] for name, values in trace.columns.items()}
        parts.append(_signals(runner, request, mine, trace.sampling, wanted))
        advance()
    added = {name: np.concatenate([part[name] for part in parts]) for name in wanted}
    return replace(trace, columns={**trace.columns, **added})


@torch.inference_mode()
def _signals(
    runner: Runner, request: Request, columns: Arrays, sampling: Sampling, wanted: list[str]
) -> Arrays:
    """Return columns of one request, in the order of its rows."""
    rows = {
        name: torch.tensor(columns[name], dtype=torch.long, device=runner.device)
        for name in ("position", "offset", "token", "draft_token")
    }
    prompt = runner.begin(torch.tensor(request.prompt_ids, device=runner.device))
    on_path = torch.nonzero(rows["offset"] == 0)[:, 0]
    path = torch.cat([prompt, rows["token"][on_path[:-1]]])
    order = [on_path]
    logits = runner.forward(path, 0, keep=len(on_path))
    found = [draft_columns(logits, rows["draft_token"][on_path], sampling)]
    tail = torch.nonzero(rows["offset"])[:, 0]
    step = rows["offset"][tail] - 1
    branch = (step == 0).cumsum(0) - 1
    branches = Branches(len(path), len(prompt) + rows["position"][tail[step == 0]])
    for span in spans_of(branch, SCORE_TOKENS) if len(tail) else ():
        at = tail[span]
        fed = rows["draft_token"][at - 1]
        logits = branches.forward(runner, fed, branch[span], step[span])
        order.append(at)
        found.append(draft_columns(logits, rows["draft_token"][at], sampling))
    back = torch.cat(order).argsort()
    return {n: _merged([part[n] for part in found], back) for n in wanted}


def _merged(parts: list[Tensor], order: Tensor) -> npt.NDArray[np.float32]:
    return torch.cat(parts)[order].float().cpu().numpy()
