"""The trained modules of one target, kept in a folder, and what can be recorded with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from profiler.features.drafters import FeatureDrafter
from profiler.features.heads import (
    FILES,
    Adapter,
    ExitHeads,
    MaskEmbeddings,
    ParallelHeads,
    load_module,
)
from profiler.models.stack import LayerRunner
from profiler.sources.exit_record import ExitRecorder, record_exits
from profiler.sources.start_record import (
    FeatureRecorder,
    GrownTrees,
    HeadsRecorder,
    MasksRecorder,
    SkipRecorder,
    StartRecorder,
    record_starts,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.sources.base import Recordings
from traces.sources.exits.early_exit import Kangaroo
from traces.sources.exits.recording import ExitSetting
from traces.sources.starts.features import OnFeatures
from traces.sources.starts.recording import StartRecording
from traces.sources.starts.trees import Eagle2


@dataclass(frozen=True, eq=False)
class Modules:
    """The modules trained for a target; one that was not trained is None or absent."""

    exits: ExitHeads | None = None
    parallel: Mapping[str, ParallelHeads] = field(default_factory=dict)
    masks: MaskEmbeddings | None = None
    adapter: Adapter | None = None
    drafters: Mapping[str, FeatureDrafter] = field(default_factory=dict)
    """On the target's features, by the name of their recording."""
    trees: Mapping[str, GrownTrees] = field(default_factory=dict)
    """Drafters that grow trees, likewise."""

    def heads(self, kind: str) -> ParallelHeads:
        """Parallel heads of a kind; DraftsimError if there are none."""
        if kind not in self.parallel:
            raise DraftsimError(f"no {kind!r} heads for this target: train some first")
        return self.parallel[kind]

    def drafter(self, source: OnFeatures) -> FeatureDrafter:
        """The drafter that `source` names; DraftsimError if it was not loaded."""
        mine = self.drafters
        if isinstance(source, Eagle2):
            mine = {name: grown.drafter for name, grown in self.trees.items()}
        if source.key in mine:
            return mine[source.key]
        fitting = [d for d in mine.values() if source.model in (None, d.kind)]
        if len(fitting) != 1:
            raise DraftsimError(
                f"no drafter {source.model or ''!r} for this target: name its folder, "
                f"{source.name}:model=DIR"
            )
        return fitting[0]


def load_modules(folder: Path, target: Any) -> Modules:
    """The modules kept in `folder` for the model `target`, as far as there are any.

    Raises
    ------
    DraftsimError
        If a file is damaged or belongs to another target.
    """

    def load(name: str, factory: type[Any]) -> Any:
        path = folder / FILES[name]
        return load_module(path, target, factory) if path.exists() else None

    parallel = {kind: load(kind, ParallelHeads) for kind in ParallelHeads.KINDS}
    return Modules(
        load("exit", ExitHeads),
        {kind: heads for kind, heads in parallel.items() if heads is not None},
        load("space", MaskEmbeddings),
        load("kangaroo", Adapter),
    )


def record_sources(
    target: Any,
    trace: Trace,
    modules: Modules,
    settings: Sequence[ExitSetting] = (),
    *,
    skip: Sequence[int] | None = None,
    skip_offsets: int = 8,
    adapter_gamma: int = 12,
    draft_offsets: int = 8,
    only: Sequence[str] | None = None,
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> Recordings:
    """Record every source that `modules` has parts for, and layer skip, along `trace`.

    Parameters
    ----------
    target:
        The model whose output `trace` holds.  Along sampled outputs early exits and drafters
        on features alone are recorded.
    settings:
        Exit settings whose wrong exits are followed (see `EarlyExit.setting`).
    skip, skip_offsets:
        Layers left out by layer skip (None: every second), and its longest draft.
    adapter_gamma:
        Longest draft recorded of Kangaroo's adapter.
    draft_offsets:
        Longest draft recorded of drafters on the target's features.
    only:
        Names of sources to record, drafters on features by that of their recording; None: all.
    seed:
        Of the draws along sampled outputs.
    advance:
        Called with the source's name after each request.
    """
    longest = max(r.prompt_length + r.tokens for r in trace.requests)
    exits = None
    if modules.exits is not None and (only is None or "early-exit" in only):
        gamma = max((s.gamma_max for s in settings), default=1)
        runner = LayerRunner(target, ExitRecorder.slots_needed(longest, gamma))
        eos = frozenset(trace.meta.get("eos_token_ids") or ())
        recorder = ExitRecorder(
            runner, modules.exits, settings, eos=eos, sampling=trace.sampling,
            generator=torch.Generator(runner.device).manual_seed(seed),
        )  # fmt: skip
        exits = record_exits(recorder, trace, partial(advance, "early-exit"))
    sampled, adapter = trace.temperature > 0, None
    if not sampled and modules.adapter is not None and (only is None or Kangaroo.name in only):
        wide = LayerRunner(target, ExitRecorder.slots_needed(longest, adapter_gamma))
        drafting = ExitRecorder(
            wide, modules.adapter, [Kangaroo().setting(adapter_gamma)], (0.0,),
            frozenset(trace.meta.get("eos_token_ids") or ()),
        )  # fmt: skip
        adapter = record_exits(drafting, trace, partial(advance, Kangaroo.name))
    makers: dict[str, Callable[[LayerRunner], StartRecorder]] = {
        kind: lambda runner, heads=heads: HeadsRecorder(runner, heads)  # type: ignore[misc]
        for kind, heads in modules.parallel.items()
    }
    if (masks := modules.masks) is not None:
        makers["space"] = lambda runner: MasksRecorder(runner, masks)
    chosen = None if skip is None else list(skip)
    makers["layer-skip"] = lambda runner: SkipRecorder(runner, chosen, skip_offsets)
    starts: dict[str, StartRecording] = {}
    if sampled:
        makers.clear()
    chance = torch.Generator(target.device).manual_seed(seed)
    for name, drafter in modules.drafters.items():
        makers[name] = lambda runner, drafter=drafter: FeatureRecorder(  # type: ignore[misc]
            runner, drafter, longest, draft_offsets, trace.sampling, chance
        )
    for name, make in makers.items():
        if only is None or name in only:
            small = make(LayerRunner(target, longest))
            recorder_of = make(LayerRunner(target, small.slots_needed(longest)))
            starts[name] = record_starts(recorder_of, trace, partial(advance, name))
    return Recordings(exits, starts, adapter)
