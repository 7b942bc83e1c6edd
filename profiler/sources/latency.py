"""Measures what other sources than a draft model spend: single layers, heads, lookups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
import torch

from profiler.latency import Step, measure_steps
from profiler.sources.drafters import head_logits
from profiler.sources.modules import Modules
from profiler.sources.numbers import log_confidence
from profiler.sources.stack import LayerRunner
from traces.sources.base import prompt_tokens, true_tokens
from traces.sources.lookup_sources import PLD, REST, Lookahead, LookupSource, served_before
from traces.trace import Trace

WIDTHS = (1, 2, 3, 5, 9, 17, 25)
CONTEXTS = (32, 128, 256)


def measure_sources(
    target: LayerRunner, modules: Modules, trace: Trace | None = None, *,
    widths: Sequence[int] = WIDTHS, contexts: Sequence[int] = CONTEXTS, repeats: int = 15,
    lookups: Sequence[LookupSource] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Cells to add to the target's latency table; columns as in `traces.latency`.

    * ``exit``/``layer``: a layer as early exit runs it, over widths and contexts;
    * ``exit``/``head``: an exit head with its test, host wait included;
    * ``target``/``head``: final norm, output projection and argmax, over widths;
    * ``heads``/``forward``: all parallel heads in one go;
    * ``pld``, ``rest``, ``lookahead``/``forward``: one lookup, at a long context.
    """
    steps = [*_layers(target, widths, contexts), *_heads(target, modules, widths)]
    if trace is not None:
        if lookups is None:
            lookups = [PLD(), REST(), Lookahead()]
        steps += [Step(s.name, "forward", 1, 0, _lookup(trace, s)) for s in lookups]
    with torch.inference_mode():
        cells = measure_steps(steps, target.device, repeats=repeats)
    layers = cells["phase"] == "layer"
    cells.loc[layers, ["median_s", "spread_s"]] /= target.layers
    return cells


def _layers(target: LayerRunner, widths: Sequence[int], contexts: Sequence[int]) -> list[Step]:
    room = target.cache.slots
    states = target.embed(torch.zeros(room, dtype=torch.long, device=target.device))
    with torch.inference_mode():
        target.run_layers(states, 0, range(target.layers))  # real states in every slot
    # All layers per timing: a single one is too short to time.
    every = range(target.layers)

    def run(width: int, context: int) -> Callable[[], object]:
        return lambda: target.run_layers(states[:width], context, every)

    return [
        Step("exit", "layer", width, context, run(width, context))
        for width in widths
        for context in contexts
        if context + width <= room
    ]


def _heads(target: LayerRunner, modules: Modules, widths: Sequence[int]) -> list[Step]:
    token = torch.zeros(1, dtype=torch.long, device=target.device)
    one = target.embed(token)
    steps = []
    for width in widths:
        states = one.expand(width, -1)
        steps.append(
            Step("target", "head", width, 0, lambda s=states: target.logits(s).argmax(-1).tolist())  # type: ignore[misc]
        )
    if (exits := modules.exits) is not None:
        steps.append(
            Step("exit", "head", 1, 0,
                 lambda: float(log_confidence(target.project(exits.states(0, one)), 1.1)))
        )  # fmt: skip
    if modules.parallel:
        heads = next(iter(modules.parallel.values()))
        steps.append(Step("heads", "forward", 1, 0, lambda: head_logits(target, heads, one, token)))
    return steps


def _lookup(trace: Trace, source: LookupSource) -> Callable[[], object]:
    """One round's work of a lookup on the longest request: take in a few tokens and propose."""
    longest = max(range(len(trace.requests)), key=lambda i: trace.requests[i].tokens)
    starts, output = trace.request_starts, true_tokens(trace)
    ids = prompt_tokens(trace, longest) + output[int(starts[longest]) : int(starts[longest + 1])]
    eos = frozenset(trace.meta.get("eos_token_ids") or ())
    lookup = source.lookup(eos, lambda: served_before(trace, longest))
    lookup.extend(ids)
    turn = iter(ids * 1000)

    def once() -> None:
        lookup.extend([next(turn), next(turn)])
        lookup.propose()

    return once
