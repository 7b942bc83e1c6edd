"""Measures what other sources than a draft model spend: single layers, heads, lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
import torch

from profiler.features.heads import AdapterRunner, log_confidence
from profiler.latency.passes import UNTIMED, UNTIMED_PLAIN
from profiler.latency.table import Block, Step, Sweeps, reaching
from profiler.models.stack import LayerRunner
from profiler.recording.checkpoint import Checkpoint
from profiler.sources.drafters import head_logits
from profiler.sources.feature_latency import CONTEXTS, drafter_rounds
from profiler.sources.modules import Modules
from profiler.sources.tree_latency import tree_rounds
from traces.acceptance.trace import Trace
from traces.sources.base import prompt_tokens, true_tokens
from traces.sources.lookups.sources import LookupSource, served_before
from traces.sources.registry import SOURCES

WIDTHS = (1, 2, 3, 5, 9, 17, 25)


class SourceLatency:
    """The cells that sources add to the target's latency table, measured sweep by sweep.

    * ``exit``/``layer``: a layer as early exit runs it, over widths and contexts;
    * ``exit``/``head``: an exit head with its test, host wait included;
    * ``adapter``/``forward``: Kangaroo's adapter and the output projection, over contexts;
    * ``target``/``head``: final norm, output projection and argmax, over widths;
    * ``heads``/``forward``: all parallel heads in one go;
    * ``eagle.NAME``/``forward``, ``prefill``: passes of a drafter on features, over both;
    * ``eagle2.NAME``/``forward``, ``tree``, ``prefill``, and ``target``/``tree``: passes of a
      drafter over what was verified and over nodes of its tree, the target's over the best of them;
    * ``target``/``pass``: a whole pass in rounds where layers draft nothing, over both;
    * ``pld``, ``rest``, ``lookahead``, ``ngram``, ``ngram-simple``, ``suffix``/``forward``: one
      lookup, at a long context.

    Parameters
    ----------
    target, modules:
        The target and its trained modules.
    trace:
        Text to look up, and how long its requests get; None leaves lookups out.
    checkpoint:
        Keeps every sweep, as in `profiler.latency.table.Sweeps`.
    """

    def __init__(
        self, target: LayerRunner, modules: Modules, trace: Trace | None = None, *,
        widths: Sequence[int] = WIDTHS, contexts: Sequence[int] = CONTEXTS,
        lookups: Sequence[LookupSource] | None = None, checkpoint: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        contexts = reaching(contexts, 0 if trace is None else trace.longest)
        steps = []
        if trace is not None:
            if lookups is None:
                lookups = [s() for s in SOURCES.values() if issubclass(s, LookupSource)]
            steps = [Step(s.name, "forward", 1, 0, _lookup(trace, s)) for s in lookups]
        self._layers, self._depth = target.layers, first_exit(target, modules)
        with torch.inference_mode():
            blocks = [*_rounds(target, modules, self._depth, widths, contexts)]
            blocks += _passes(target, modules, widths, contexts)
            blocks += drafter_rounds(target, modules.drafters, widths, contexts)
            blocks += tree_rounds(target, modules.trees, contexts)
            blocks += (Block([[step]]) for step in steps)
            self._sweeps = Sweeps(blocks, target.device, checkpoint=checkpoint)

    def sweep(self) -> None:
        """Time everything once more."""
        with torch.inference_mode():
            self._sweeps.run()

    def advance(self, sweeps: float) -> None:
        """Time the next blocks until `sweeps` sweeps are done; a part of one counts."""
        with torch.inference_mode():
            while self._sweeps.steps < int(sweeps * len(self._sweeps.blocks)):
                self._sweeps.step()

    def cells(self) -> pd.DataFrame:
        """The sweeps so far; columns as in `traces.latency.schema.CELL_COLUMNS`."""
        cells = self._sweeps.cells()
        layers = cells["phase"] == "layer"
        ran = cells["new_tokens"].where(cells["new_tokens"] == 1, self._layers - self._depth)
        ran = ran.where(cells["new_tokens"] > 1, self._depth)
        for column in ("median_s", "spread_s"):
            cells.loc[layers, column] /= ran[layers]
        return cells


def measure_sources(
    target: LayerRunner, modules: Modules, trace: Trace | None = None, *,
    widths: Sequence[int] = WIDTHS, contexts: Sequence[int] = CONTEXTS, repeats: int = 15,
    lookups: Sequence[LookupSource] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Return the cells of `SourceLatency` from `repeats` sweeps, one after another."""
    latency = SourceLatency(
        target, modules, trace, widths=widths, contexts=contexts, lookups=lookups
    )
    for _ in range(repeats):
        latency.sweep()
    return latency.cells()


def first_exit(target: LayerRunner, modules: Modules) -> int:
    """Layers that every draft runs: up to the first exit, or the adapter's."""
    if modules.exits is not None:
        return modules.exits.layers[0]
    return modules.adapter.layer if modules.adapter is not None else max(1, target.layers // 4)


def _rounds(
    target: LayerRunner, modules: Modules, depth: int, widths: Sequence[int],
    contexts: Sequence[int],
) -> Iterator[Block]:  # fmt: skip
    """Rounds that draft token by token from the first `depth` layers, then run the others.

    A call of few layers is dearer per layer than one of many: a single token's layers are
    timed `depth` at a time, as drafting runs them, and wider ones up to the end, as verifying.
    """
    room, layers = target.cache.slots, target.layers
    states = target.embed(torch.zeros(room, dtype=torch.long, device=target.device))
    target.run_layers(states, 0, range(layers))  # real states in every slot
    one = states[:1]
    exits, adapter = modules.exits, modules.adapter
    runner = None if adapter is None else AdapterRunner(adapter, target)
    if runner is not None:
        runner.run(states, 0)

    def part(width: int, context: int, which: range) -> Step:
        pieces = list(states[:width].split(1))

        def run() -> object:
            return target.run_layers(torch.cat(pieces), context, which).split(1)

        return Step("exit", "layer", width, context, run)

    def head(width: int) -> Step:
        pieces = list(states[:width].split(1))
        return Step(
            "target", "head", width, 0,
            lambda: target.logits(torch.cat(pieces)).argmax(-1).tolist(),
        )  # fmt: skip

    def confidence() -> object:
        assert exits is not None
        return float(log_confidence(target.project(exits.states(0, one)), 1.1))

    def adapt(width: int, context: int) -> Step:
        assert runner is not None
        pieces, own = list(states[:width].split(1)), runner

        def run() -> object:
            return target.project(own.run(torch.cat(pieces), context)[-1:]).argmax(-1)

        return Step("adapter", "forward", width, context, run)

    for context in contexts:
        for width in [w for w in widths if context + w <= room]:
            draft = [part(1, context, range(depth))]
            if exits is not None:
                draft.append(Step("exit", "head", 1, 0, confidence))
            if width > 1:
                round_ = [*draft * (width - 1), part(width, context, range(depth, layers))]
            else:  # plain decoding, exit by exit
                round_ = draft * (layers // depth)
            before = UNTIMED if width > 1 else UNTIMED_PLAIN
            yield Block([[*round_, head(width)]] * (before + 3), before)
        if runner is not None and context + 4 <= room:
            wide = max(w for w in widths if w <= max(4, min(widths)))
            ends = [part(wide, context, range(depth, layers)), head(wide)] if wide > 1 else []
            yield Block(
                [
                    [
                        step
                        for width in (first, 1, 1)
                        for step in (part(1, context, range(depth)), adapt(width, context))
                    ]
                    + ends
                    for first in (1, 2) * (UNTIMED + 1)
                ],
                2 * UNTIMED,
            )


def _passes(
    target: LayerRunner, modules: Modules, widths: Sequence[int], contexts: Sequence[int]
) -> Iterator[Block]:
    """Rounds of a lookup or of parallel heads: a pass of the target follows the one before."""
    tokens = torch.zeros(max(widths), dtype=torch.long, device=target.device)
    one = target.embed(tokens[:1])
    draft = []
    if modules.parallel:
        heads = next(iter(modules.parallel.values()))
        draft = [
            Step("heads", "forward", 1, 0, lambda: head_logits(target, heads, one, tokens[:1]))
        ]

    def verify(width: int, context: int) -> Step:
        pieces = list(tokens[:width].split(1))

        def run() -> object:
            return target.forward(torch.cat(pieces), context).argmax(-1).tolist()

        return Step("target", "pass", width, context, run)

    for context in contexts:
        for width in [w for w in widths if context + w <= target.cache.slots]:
            yield Block([[*draft, verify(width, context)]] * (UNTIMED_PLAIN + 3), UNTIMED_PLAIN)


def _lookup(trace: Trace, source: LookupSource) -> Callable[[], object]:
    """One round's work of a lookup on the longest request: take in a few tokens and propose."""
    longest = max(range(len(trace.requests)), key=lambda i: trace.requests[i].tokens)
    starts, output = trace.request_starts, true_tokens(trace)
    prompt = prompt_tokens(trace, longest)
    said = output[int(starts[longest]) : int(starts[longest + 1])]
    eos = frozenset(trace.meta.get("eos_token_ids") or ())
    lookup = source.lookup(eos, lambda: served_before(trace, longest))
    lookup.extend(prompt)
    lookup.extend(said)
    turn = iter((prompt + said) * 1000)

    def once() -> None:
        lookup.extend([next(turn), next(turn)])
        lookup.propose()

    return once
