"""Every draft source on the device: modules loaded, drafts recorded, timed and decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from profiler.features.heads import (
    FILES,
    Adapter,
    ExitHeads,
    HydraHeads,
    MaskEmbeddings,
    ParallelHeads,
    load_module,
)
from profiler.latency.table import Block, Sweeps, reaching
from profiler.models.stack import LayerRunner
from profiler.sources.exits import (
    ROOM,
    Begin,
    Draws,
    EarlyExitDecoder,
    KangarooDecoder,
    Modules,
    SourceDecoder,
)
from profiler.sources.feature_decoder import (
    FeatureDecoder,
    HeadsDecoder,
    HydraDecoder,
    LayerSkipDecoder,
    LookupDecoder,
    ParallelDecoder,
    SpaceDecoder,
    TreeDecoder,
)
from profiler.sources.latency import (
    CONTEXTS,
    WIDTHS,
    LayerRounds,
    lookup_step,
    pass_rounds,
    without_verifications,
)
from profiler.sources.start_record import RecordOptions, record_along
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.sources.base import Source, eos_of, prompt_tokens
from traces.sources.lookups.sources import LookupSource, served_before
from traces.sources.recording import SourceRecording
from traces.sources.registry import SOURCES
from traces.store.checkpoint import Checkpoint

REAL: Mapping[str, type[Any]] = {
    "early-exit": EarlyExitDecoder, **dict.fromkeys(ParallelHeads.KINDS, HeadsDecoder),
    "hydra": HydraDecoder, "space": SpaceDecoder, "kangaroo": KangarooDecoder,
    "layer-skip": LayerSkipDecoder, "eagle": FeatureDecoder, "parallel": ParallelDecoder,
    "eagle2": TreeDecoder,
}  # fmt: skip
"""The real side (`profiler.sources.exits.SourceDecoder`) of every recorded source that has one."""
TRAINED: Mapping[str, tuple[str, type[torch.nn.Module]]] = {
    "early-exit": ("exit", ExitHeads),
    **{kind: (kind, ParallelHeads) for kind in ParallelHeads.KINDS},
    "hydra": ("hydra", HydraHeads), "space": ("space", MaskEmbeddings),
    "kangaroo": ("kangaroo", Adapter),
}  # fmt: skip
"""Name in `profiler.features.heads.FILES` and class of the module that is kept for a source."""


def real_of(key: str) -> type[Any]:
    """Return the real side of the source whose recording is called `key`."""
    return REAL[key.partition(".")[0]]


def load_modules(folder: Path, target: Any) -> dict[str, Any]:
    """Return the modules kept in `folder` for the model `target`, as far as there are any.

    Raises DraftsimError if a file is damaged or belongs to another target.
    """
    paths = {name: folder / FILES[file] for name, (file, _) in TRAINED.items()}
    return {
        name: load_module(path, target, TRAINED[name][1])
        for name, path in paths.items() if path.exists()
    }  # fmt: skip


def record_sources(
    target: Any, trace: Trace, modules: Modules, how: RecordOptions | None = None, *,
    only: Sequence[str] | None = None, advance: Callable[[str], None] = lambda name: None,
) -> dict[str, SourceRecording]:  # fmt: skip
    """Record every source that `modules` has parts for, and layer skip, along `trace`.

    Parameters
    ----------
    target: The model whose output `trace` holds.  Along sampled outputs early exits and drafters on
        features alone are recorded.
    only: Names of recordings to make; None: all.
    advance: Called with the recording's name after each request.
    """
    found = {}
    for key in [*modules, "layer-skip"]:
        real = real_of(key)
        if (only is None or key in only) and (trace.sampling.greedy or real.recorded_sampled):
            recorder = real.recorder(target, trace, modules.get(key), how or RecordOptions())
            found[key] = record_along(recorder, trace, partial(advance, key))
    return found


class SourceLatency:
    """The cells that sources add to the target's latency table, measured sweep by sweep.

    * ``exit``/``layer``: a layer as early exit runs it, over widths and contexts;
    * ``exit``/``head``: an exit head with its test, host wait included;
    * ``adapter``/``forward``: an adapter and the output projection, over contexts;
    * ``target``/``head``: final norm, output projection and argmax, over widths;
    * ``heads``/``forward``: all parallel heads in one go;
    * ``hydra``/``forward``: one of Hydra's heads;
    * ``eagle.NAME``/``forward``, ``prefill``: passes of a drafter on features, over both;
    * ``eagle2.NAME``/``forward``, ``tree``, ``prefill``, and ``target``/``tree``: passes of a
      drafter over what was verified and over nodes of its tree, the target's over the best of them;
    * ``target``/``pass``: a whole pass in rounds where layers draft nothing, over both;
    * ``pld``, ``rest``, ``lookahead``, ``ngram``, ``ngram-simple``, ``suffix``/``forward``: one
      lookup, at a long context.

    Parameters
    ----------
    target, modules: The target and its trained modules.
    trace: Text to look up, and how long its requests get; None leaves lookups out.
    checkpoint: Keeps every sweep, as in `profiler.latency.table.Sweeps`.
    """

    def __init__(
        self, target: LayerRunner, modules: Modules, trace: Trace | None = None, *,
        widths: Sequence[int] = WIDTHS, contexts: Sequence[int] = CONTEXTS,
        checkpoint: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        contexts = reaching(contexts, 0 if trace is None else trace.longest)
        depths = [d for key, m in modules.items() if (d := real_of(key).depth(m)) is not None]
        self._layers = target.layers
        self._depth = depths[0] if depths else max(1, target.layers // 4)
        with torch.inference_mode():
            rounds = LayerRounds(target, self._depth, widths, contexts)
            blocks = [*rounds.by_exits(modules.get("early-exit"))]
            heads = [m for m in modules.values() if isinstance(m, ParallelHeads)][:1]
            blocks += pass_rounds(target, heads, widths, contexts)
            for name, module in modules.items():
                blocks += real_of(name).blocks(rounds, name, module)
            if trace is not None:
                lookups = [s() for s in SOURCES.values() if issubclass(s, LookupSource)]
                blocks += (Block([[lookup_step(trace, source)]]) for source in lookups)
            self._sweeps = Sweeps(blocks, target.device, checkpoint=checkpoint)

    def advance(self, sweeps: float) -> None:
        """Time the next blocks until `sweeps` sweeps are done; a part of one counts."""
        with torch.inference_mode():
            while self._sweeps.steps < int(sweeps * len(self._sweeps.blocks)):
                self._sweeps.step()

    def cells(self) -> pd.DataFrame:
        """Return the sweeps so far; columns as in `traces.latency.table.CELL_COLUMNS`."""
        cells = without_verifications(self._sweeps.cells())
        layers = cells["phase"] == "layer"
        ran = cells["new_tokens"].where(cells["new_tokens"] == 1, self._layers - self._depth)
        ran = ran.where(cells["new_tokens"] > 1, self._depth)
        for column in ("median_s", "spread_s"):
            cells.loc[layers, column] /= ran[layers]
        return cells


def measure_sources(
    target: LayerRunner, modules: Modules, trace: Trace | None = None, *,
    widths: Sequence[int] = WIDTHS, contexts: Sequence[int] = CONTEXTS, repeats: int = 15,
) -> pd.DataFrame:  # fmt: skip
    """Return the cells of `SourceLatency` from `repeats` sweeps."""
    latency = SourceLatency(target, modules, trace, widths=widths, contexts=contexts)
    latency.advance(repeats)
    return latency.cells()


class SourceRunner:
    """Really decodes the requests of a trace with any source.

    Parameters
    ----------
    target: The model whose output `trace` holds.
    trace: Its prompts are decoded again, sampled as it was; its outputs serve as the datastore of
        retrieval.
    modules: Trained modules of this target.
    """

    def __init__(self, target: Any, trace: Trace, modules: Modules | None = None) -> None:
        self.target = LayerRunner(target, trace.longest + ROOM)
        self.trace, self.modules = trace, modules or {}

    def decoder(self, source: Source, request: int) -> SourceDecoder:
        """Return a decoder after the prefill of one request.

        Raises DraftsimError if the source has no real decoder (under the trace's sampling), or its
        heads were not trained.
        """
        trace, real = self.trace, REAL.get(source.name)
        if not trace.sampling.greedy and not (real and real.sampled):
            raise DraftsimError(
                f"{source.name!r} is decoded greedily alone: give a trace of temperature 0"
            )
        prompt = torch.tensor(prompt_tokens(trace, request), device=self.target.device)
        limit = trace.requests[request].max_new_tokens
        begin = Begin(prompt, limit, eos_of(trace), self.drawn(request))
        if isinstance(source, LookupSource):
            lookup = source.lookup(begin.eos, lambda: served_before(trace, request))
            return LookupDecoder(self.target, lookup, source.kind, begin)
        if real is None:
            raise DraftsimError(f"{source.name!r} is replayed alone: it has no real decoder")
        if (slots := trace.longest + real.room(source, self.modules)) > self.target.cache.slots:
            self.target = LayerRunner(self.target.model, slots)
        made: SourceDecoder = real(self.target, real.module(self.modules, source), source, begin)
        return made

    def drawn(self, request: int) -> Draws | None:
        """Return the draws of a sampled run of `request`, from torch's global generator.

        None if the trace is greedy.
        """
        return None if self.trace.sampling.greedy else Draws(self.trace.sampling)
