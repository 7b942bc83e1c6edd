"""The work on real models that other draft sources need: trained heads, recordings, latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.profile.drafters import (
    load_drafters,
    load_trees,
    measure_drafters,
    measure_trees,
    recorded_sources,
    recorded_trees,
)
from commands.profile.recording import say_recording
from commands.profile.source_modules import (
    adapter_digest,
    heads_digest,
    modules_of,
    timed_layers,
    with_sources,
)
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.models.loading import Pair
    from profiler.recording.run import RunInfo
    from profiler.sources.modules import Modules
    from traces.acceptance.trace import Trace
    from traces.sources.base import Recordings, Source
    from traces.sources.exits.early_exit import EarlyExit
    from traces.sources.exits.recording import ExitSetting
    from traces.sources.starts.sources import LayerSkip

SKIP_OFFSETS = 8
"""Longest draft recorded of layer skip."""


def check_layers(pair: Pair) -> None:
    """DraftsimError if the target cannot be run layer by layer."""
    from profiler.models.stack import LayerRunner

    LayerRunner(pair.target, 8)


def settable(text: str) -> EarlyExit | LayerSkip:
    """The source that `text` names; DraftsimError if no recording hangs on its parameters."""
    from simulator.recording import load_source
    from traces.sources.exits.early_exit import EarlyExit
    from traces.sources.starts.sources import LayerSkip

    source = load_source(text)
    if isinstance(source, LayerSkip) or type(source) is EarlyExit:
        return source
    raise DraftsimError(
        f"--source {text} has nothing to set in a recording: name early-exit or layer-skip with "
        "its parameters"
    )


def has_sources(folder: Path) -> bool:
    """Return True if a run folder holds recordings of other sources than the draft model."""
    return any(any(folder.glob(f"{name}*.parquet")) for name in ("exits", "starts-", "trees-"))


def profile_sources(
    pair: Pair,
    info: RunInfo,
    out: Path,
    *,
    sources: Sequence[str] = (),
    text: Path | None = None,
    repeats: int = 15,
) -> None:
    """Record every other source along the trace in `out`, and measure what its parts cost.

    What the folder already holds of this trace is kept, so a stopped run goes on with the
    source it stopped at.

    Parameters
    ----------
    sources:
        Further early-exit settings, and the layers of layer skip, as text.
    text:
        Texts to train heads on where the target has none.
    """
    from profiler.sources.modules import record_sources
    from traces.sources.base import Recordings
    from traces.sources.files import read_recordings, write_recordings
    from traces.sources.found import STAMP, stamp_of
    from traces.store.files import read_trace

    trace = read_trace(out / "trace.parquet")
    settings, skip = wanted(trace, sources)
    modules = modules_of(pair, info, out, trace, text)
    record_sampled(pair, out, modules, sources)
    stamp, kept = stamp_of(trace), read_recordings(out)
    if kept.exits is not None and kept.exits.meta.get(STAMP) == stamp:
        settings = list(dict.fromkeys([*kept.exits.settings, *settings]))
    provenance = {STAMP: stamp, "heads": heads_digest(modules)}
    todo = missing(kept, modules, settings, skip, provenance)
    say_recording(todo, trace, missing(Recordings(), modules, settings, skip, provenance))
    with progress_bar() as progress:
        task = progress.add_task("recording sources", total=len(todo) * len(trace.requests))
        for name in todo:
            found = record_sources(
                pair.target, trace, modules, settings, skip=skip, skip_offsets=SKIP_OFFSETS,
                only=[name], advance=lambda _: progress.advance(task),
            )  # fmt: skip
            own = provenance
            if found.adapter is not None:
                own = {**provenance, "adapter": adapter_digest(modules)}
            write_recordings(_stamped(found, own), out)
    measure(pair, out, trace, modules, repeats=repeats)
    note(f"recorded {', '.join(todo) or 'nothing new'} into {out}")


def record_sampled(pair: Pair, out: Path, modules: Modules, sources: Sequence[str]) -> None:
    """Record early exits along the sampled outputs in `out`, unless they are there.

    Followed are the settings of the named systems and of `sources`.
    """
    from profiler.sources.modules import record_sources
    from traces.sources.files import read_recordings, write_recordings
    from traces.sources.found import STAMP, stamp_of
    from traces.store.files import read_trace

    path = out / "sampled.parquet"
    if modules.exits is None or not path.is_file():
        return
    trace = read_trace(path)
    settings, _ = wanted(trace, sources, sweeps=False)
    kept = read_recordings(out, sampled=True)
    provenance = {STAMP: stamp_of(trace), "heads": heads_digest(modules)}
    if "early-exit" not in missing(kept, modules, settings, None, provenance):
        return
    say_recording(["early-exit"], trace)
    seed = int((trace.meta.get("sampling") or {}).get("seed", 0))
    found = record_sources(pair.target, trace, modules, settings, only=["early-exit"], seed=seed)
    write_recordings(_stamped(found, provenance), out)
    note(f"recorded early exits along sampled outputs into {out}")


def wanted(
    trace: Trace, sources: Sequence[str], *, sweeps: bool = True
) -> tuple[list[ExitSetting], list[int] | None]:
    """Return early-exit settings to follow after wrong exits, and the layers to skip.

    The settings are those of the named systems, with ``sweeps`` of SpecBound's Figure 3, and
    `sources`.
    """
    from policies.registry import parse_policy
    from simulator.papers.early_exit import FOLLOWED_SOURCES, START
    from traces.sources.exits.early_exit import EarlyExit, Kangaroo
    from traces.sources.registry import SYSTEMS, parse_source
    from traces.sources.starts.sources import LayerSkip

    most = trace.max_gamma or 24
    lengths: dict[ExitSetting, int] = {}

    def follow(source: Source, gamma: int) -> None:
        if isinstance(source, EarlyExit) and not isinstance(source, Kangaroo):
            key = source.setting(1)
            lengths[key] = max(lengths.get(key, 0), gamma)

    for system in SYSTEMS.values():
        policy = parse_policy(system.policy, max_gamma=most)
        follow(parse_source(system.source), int(getattr(policy, "gamma", most)))
    skip = None
    for text in sources:
        source = settable(text)
        if isinstance(source, LayerSkip):
            skip = None if source.skip is None else list(source.skip)
        follow(source, most)
    for text in FOLLOWED_SOURCES if sweeps else ():
        follow(parse_source(text), int(START.width))
    return [key._replace(gamma_max=gamma) for key, gamma in lengths.items()], skip


def missing(
    kept: Recordings, modules: Modules, settings: Sequence[ExitSetting],
    skip: Sequence[int] | None, provenance: dict[str, str],
) -> list[str]:  # fmt: skip
    """Names of the sources whose recording in the folder is absent, or of something else."""

    def same(meta: Any) -> bool:
        return all(meta.get(name) == value for name, value in provenance.items())

    todo = []
    if modules.exits is not None and not (
        kept.exits is not None
        and same(kept.exits.meta)
        and set(settings) <= set(kept.exits.settings)
    ):
        todo.append("early-exit")
    if modules.adapter is not None:
        own = {**provenance, "adapter": adapter_digest(modules)}
        if kept.adapter is None or any(kept.adapter.meta.get(n) != v for n, v in own.items()):
            todo.append("kangaroo")
    names = [*modules.parallel, *(["space"] if modules.masks is not None else []), "layer-skip"]
    for name in names:
        found = kept.starts.get(name)
        other = found is not None and skip is not None and list(skip) != found.meta.get("skip")
        if found is None or not same(found.meta) or (name == "layer-skip" and other):
            todo.append(name)
    return todo


def _stamped(found: Recordings, provenance: dict[str, str]) -> Recordings:
    from traces.sources.base import Recordings

    exits = found.exits
    if exits is not None:
        exits = replace(exits, meta={**exits.meta, **provenance})
    starts = {
        name: replace(part, meta={**part.meta, **provenance}) for name, part in found.starts.items()
    }
    adapter = found.adapter
    if adapter is not None:
        adapter = replace(adapter, meta={**adapter.meta, **provenance})
    return Recordings(exits, starts, adapter)


def measure(
    pair: Pair, out: Path, trace: Trace, modules: Modules, *, repeats: int, again: bool = False
) -> None:
    """Put the cells of the sources into the latency table of `out`, unless they are there."""
    from profiler.sources.latency import measure_sources
    from traces.store.files import read_latency, write_latency

    path = out / "latency.parquet"
    table = read_latency(path)
    complete = modules.adapter is None or table.has("adapter", "forward")
    if table.has("exit", "layer") and complete and not again:
        return
    note("measuring the latencies of single layers, heads and lookups")
    found = measure_sources(timed_layers(pair, trace.longest), modules, trace, repeats=repeats)
    write_latency(with_sources(table, found), path)


def remeasure(pair: Pair, info: RunInfo, out: Path, *, repeats: int) -> None:
    """Measure the sources of a run folder again; its recordings are kept."""
    from traces.sources.files import read_recordings
    from traces.store.files import read_trace

    recordings = read_recordings(out)
    drafters = load_drafters(pair, recorded_sources(recordings))
    if drafters:
        measure_drafters(pair, out, drafters, repeats=repeats, again=drafters)
    if trees := load_trees(pair, recorded_trees(recordings)):
        measure_trees(pair, out, trees, repeats=repeats, again=trees)
    if recordings.exits is not None or len(recordings.starts) > len(drafters):
        modules = modules_of(pair, info, out)
        measure(pair, out, read_trace(out / "trace.parquet"), modules, repeats=repeats, again=True)
