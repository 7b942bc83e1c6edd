"""Drafters on the target's features: loaded, recorded along a trace, timed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.profile.said import say_recording
from commands.profile.source_modules import digest, timed_layers, with_sources
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.features import FeatureDrafter
    from profiler.models.loading import Pair
    from profiler.sources.modules import Modules
    from traces.sources.base import Recordings
    from traces.sources.starts.features import Eagle, OnFeatures
    from traces.sources.starts.parallel import Parallel

OFFSETS = 8
"""Longest draft recorded of a drafter that one layer drafts with."""


def split_drafters(texts: Sequence[str]) -> tuple[list[OnFeatures], list[str]]:
    """The drafters on features among sources given as text, and the others.

    A folder is named in full from here on, so that the run can be used from anywhere.
    Raises DraftsimError where one names no folder, or two are called alike.
    """
    import os

    from simulator.recording import load_source
    from traces.sources.starts.features import OnFeatures

    found: list[OnFeatures] = []
    others = []
    for text in texts:
        source = load_source(text)
        if not isinstance(source, OnFeatures):
            others.append(text)
            continue
        if source.model is None:
            raise DraftsimError(
                f"--source {text} names no drafter: give its folder, {source.name}:model=DIR"
            )
        if Path(source.model).is_dir():
            source = source.of(os.path.abspath(source.model))
        if any(source.key == other.key for other in found):
            raise DraftsimError(
                f"two drafters are called {Path(str(source.model)).name}, by which tables tell "
                "them apart: rename a folder"
            )
        found.append(source)
    return found, others


def load_drafters(pair: Pair, sources: Iterable[OnFeatures]) -> dict[str, FeatureDrafter]:
    """The drafters in the folders that `sources` name, by the name of their recording.

    Raises DraftsimError where the drafter and its source differ in kind: one of them drafts all
    tokens in one pass, the other token by token.
    """
    from profiler.features import read_drafter
    from profiler.recording.run import model_path
    from traces.sources.starts.parallel import Parallel

    found = {}
    for source in sources:
        if source.model is None:
            continue
        drafter = read_drafter(model_path(source.model, "draft"), pair.target)
        if drafter.one_pass != isinstance(source, Parallel):
            wanted = Parallel.name if drafter.one_pass else "eagle"
            raise DraftsimError(
                f"{source.model} holds a drafter of kind {drafter.kind}: name it "
                f"{wanted}:model={source.model}"
            )
        found[source.key] = drafter
    return found


def recorded_sources(recordings: Recordings) -> list[Eagle | Parallel]:
    """The drafters of a run's recordings, with the folders they were read from."""
    from traces.sources.starts.features import Eagle, recorded_drafters
    from traces.sources.starts.parallel import Parallel

    chains = [Eagle(str(r.meta["model"])) for r in recorded_drafters(recordings).values()]
    masks = [Parallel(str(r.meta["model"])) for r in Parallel().found(recordings).values()]
    return [*chains, *masks]


def profile_drafters(
    pair: Pair, out: Path, sources: Sequence[Eagle | Parallel], *, repeats: int
) -> None:
    """Record what `sources` draft along the traces in `out`, and measure their passes.

    What the folder already holds of these traces and weights is kept, wherever the weights lie by
    now; other drafters that it holds are left as they are.
    """
    from profiler.sources.modules import Modules

    modules = Modules(drafters=load_drafters(pair, sources))
    anew = record_drafters(pair, out, sources, modules)
    drawn = record_drafters(pair, out, sources, modules, sampled=True)
    measure_drafters(pair, out, modules.drafters, repeats=repeats, again=anew)
    note(f"recorded {', '.join(anew) or 'no new drafter'} into {out}")
    if drawn:
        note(f"recorded {', '.join(drawn)} along sampled outputs into {out}")


def record_drafters(
    pair: Pair,
    out: Path,
    sources: Sequence[Eagle | Parallel],
    modules: Modules,
    *,
    sampled: bool = False,
) -> list[str]:
    """Record what is not yet recorded along one trace in `out`; names of what was."""
    from dataclasses import replace

    from profiler.sources.modules import record_sources
    from traces.sources.base import Recordings
    from traces.sources.files import read_recordings, write_recordings
    from traces.sources.found import STAMP, stamp_of
    from traces.store.files import read_trace

    path = out / ("sampled.parquet" if sampled else "trace.parquet")
    if sampled and not path.is_file():
        return []
    trace, kept = read_trace(path), read_recordings(out, sampled=sampled)
    stamp, todo, places = stamp_of(trace), {}, {s.key: {"model": str(s.model)} for s in sources}
    for key, place in places.items():
        provenance = {STAMP: stamp, "drafter": digest(modules.drafters[key])}
        found = kept.starts.get(key)
        if found is None or any(found.meta.get(n) != v for n, v in provenance.items()):
            todo[key] = {**provenance, **place}
        elif found.meta.get("model") != place["model"]:
            moved = replace(found, meta={**found.meta, **place})
            write_recordings(Recordings(starts={key: moved}), out)
    say_recording(todo, trace, places)
    seed = int((trace.meta.get("sampling") or {}).get("seed", 0))
    with progress_bar() as progress:
        task = progress.add_task("recording drafters", total=len(todo) * len(trace.requests))
        for key, provenance in todo.items():
            made = record_sources(
                pair.target, trace, modules, draft_offsets=OFFSETS, only=[key], seed=seed,
                advance=lambda _: progress.advance(task),
            ).starts[key]  # fmt: skip
            stamped = replace(made, meta={**made.meta, **provenance})
            write_recordings(Recordings(starts={key: stamped}), out)
    return [*todo]


def measure_drafters(
    pair: Pair, out: Path, drafters: Mapping[str, FeatureDrafter], *, repeats: int,
    again: Collection[str],
) -> None:  # fmt: skip
    """Put cells of `drafters` into the latency table of `out`, at the target's batch sizes.

    Those that are there are kept, but of the names in `again`.
    """
    from profiler.sources.feature_latency import measure_drafters as measured
    from traces.store.files import read_latency, read_trace, write_latency

    path = out / "latency.parquet"
    table = read_latency(path)
    passes = table.cells[table.cells["phase"] == "forward"].groupby("model")["batch"].unique()
    batches = sorted(int(b) for b in passes["target"])
    lacking = {
        name: drafter for name, drafter in drafters.items()
        if name in again or not {*batches} <= {*passes.get(name, ())}
    }  # fmt: skip
    if not lacking:
        return
    note(f"measuring the latencies of {', '.join(lacking)}")
    longest = read_trace(out / "trace.parquet").longest
    cells = measured(
        timed_layers(pair, longest), lacking, repeats, batches=batches, longest=longest
    )
    write_latency(with_sources(table, cells), path)
