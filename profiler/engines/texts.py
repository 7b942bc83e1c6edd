"""The engine's own texts: prompts, greedy outputs, and the texts of runs that diverged from them.

The drafts of a check are forced along the engine's own output of plain decoding, which a request
under a policy therefore repeats token by token.  In bfloat16 a pass of another width or batch may
decide a near-tie otherwise: from there on the text is another, the drafts forced on it are wrong,
and the request takes more rounds than predicted.  That is no error of the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
import torch

from policies.lengths.basic import Autoregressive
from profiler.checks.differences import divergence, output_of
from profiler.engines.drafts import EngineDrafts
from profiler.engines.engine import Engine
from profiler.engines.session import Setup
from traces.acceptance.trace import Trace
from traces.store.checkpoint import Checkpoint, once
from traces.store.engine_runs import LoadRun, PolicyRuns
from traces.store.outputs import Divergence

FIRST_ID = 3
"""Made-up prompts have no ids below this one, which usually mean padding, begin and end."""
TEXTS = "texts"
"""Name under which an unfinished check stores the outputs."""


def prompts_of(
    trace: Trace, vocabulary: int, seed: int = 0, sequences: Container[int] | None = None
) -> dict[int, list[int]]:
    """Return prompt ids of `sequences` (None: all): recorded ones, or made-up ones as long.

    Prompts are made up, too, if the engine's model lacks some of their ids (another model).
    """
    rng = np.random.default_rng(seed)
    prompts = {}
    for i, request in enumerate(trace.requests):
        made_up = rng.integers(FIRST_ID, vocabulary, max(request.prompt_length, 1)).tolist()
        known = request.prompt_ids
        fits = known and max(known) < vocabulary
        if sequences is None or i in sequences:
            prompts[i] = list(known) if known and fits else made_up
    return prompts


def own_texts(engine: Engine, trace: Trace, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return the engine's greedy output of every sequence, as long as the recorded, undrafted."""
    engine.proposer.use(Setup(Autoregressive(), EngineDrafts()))
    for i, prompt in prompts.items():
        engine.add(f"{i}/alone", prompt, trace.requests[i].tokens)
    while engine.busy:
        engine.step()
    finished = engine.proposer.finished
    return {i: finished[f"{i}/alone"].output for i in prompts}


def texts_once(
    kept: Checkpoint | None, prompts: dict[int, list[int]], most: int,
    decoded: Callable[[dict[int, list[int]]], dict[int, list[int]]],
) -> dict[int, list[int]]:  # fmt: skip
    """Return the engine's own output of every prompt, by sequence: `kept`, or `decoded` and kept.

    The engine must run before a load is timed.  If the outputs are kept, it decodes the first
    `most` again.
    """
    if kept is not None and TEXTS in kept.names():
        decoded(dict(itertools.islice(prompts.items(), most)))
    return {int(i): text for i, text in once(kept, TEXTS, lambda: decoded(prompts)).items()}


def policy_runs(
    measured: Mapping[tuple[str, str], Sequence[LoadRun]], trace: Trace,
    own: Mapping[int, Sequence[int]], dtype: str,
) -> dict[tuple[str, str], PolicyRuns]:  # fmt: skip
    """Return the runs by load and policy.

    ``own``: by sequence, what the engine writes by plain decoding; ``dtype``: its number format.
    """
    kind = getattr(torch, dtype)

    def diverged_in(run: LoadRun) -> dict[str, Divergence]:
        found = {}
        for name, text in run.texts.items():
            i = int(name.partition("/")[0])
            one = divergence(trace, i, text, kind, expected=own[i][: len(text)])
            if one is not None:
                found[name] = one
        return found

    diverged = {key: [diverged_in(run) for run in runs] for key, runs in measured.items()}
    left_out: dict[str, set[str]] = {}
    for (load, _), each in diverged.items():
        left_out.setdefault(load, set()).update(*each)
    # The outputs are those of the recorded model if most begin as recorded.
    known = "token" in trace.columns and 2 * sum(
        output_of(trace, i)[:1] == [*text[:1]] for i, text in own.items()
    ) > len(own)
    return {
        (load, text): PolicyRuns(
            load, text, runs, diverged[load, text], frozenset(left_out[load]),
            max(unlike_recording(run, trace) for run in runs) if known else None,
        )
        for (load, text), runs in measured.items()
    }  # fmt: skip


def unlike_recording(run: LoadRun, trace: Trace) -> int:
    """Count the requests of a run whose text is not the recorded one."""
    return sum(
        [*text] != output_of(trace, int(name.partition("/")[0]))[: len(text)]
        for name, text in run.texts.items()
    )
