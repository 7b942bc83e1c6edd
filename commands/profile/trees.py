"""EAGLE-2's draft trees: recorded along a trace, timed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.profile.drafters import load_drafters
from commands.profile.said import say_recording
from commands.profile.source_modules import digest, timed_layers, with_sources
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.models.loading import Pair
    from profiler.sources.tree_latency import GrownTrees
    from traces.sources.base import Recordings, Source
    from traces.sources.starts.tree_source import Eagle2


def trees_among(sources: Iterable[Source], temperature: float) -> list[Eagle2]:
    """Return the tree sources among `sources`; DraftsimError if outputs are drawn, not greedy."""
    from traces.sources.starts.tree_source import Eagle2

    found = [s for s in sources if isinstance(s, Eagle2)]
    if found and temperature > 0:
        raise DraftsimError(
            "trees of --source eagle2 are recorded along greedy output alone: drop --temperature, "
            "or record them by a command of their own"
        )
    return found


def recorded_trees(recordings: Recordings) -> list[Eagle2]:
    """The trees of a run's recordings, with the folders that their drafters were read from."""
    from traces.sources.starts.tree_source import Eagle2

    return [
        Eagle2(str(r.meta["model"]), depth=r.layers, topk=r.topk) for r in recordings.trees.values()
    ]


def load_trees(pair: Pair, sources: Sequence[Eagle2]) -> dict[str, GrownTrees]:
    """The drafters that `sources` name, with the shape of their trees, by recording."""
    from profiler.sources.tree_latency import GrownTrees
    from profiler.sources.tree_record import LAYERS, TOPK

    drafters = load_drafters(pair, sources)
    return {
        s.key: GrownTrees(drafters[s.key], s.topk or TOPK, s.depth or LAYERS, s.budget)
        for s in sources
    }


def profile_trees(pair: Pair, out: Path, sources: Sequence[Eagle2], *, repeats: int) -> None:
    """Record the trees of `sources` along the trace in `out`, and measure their passes.

    Kept is what the folder already holds of this trace and these weights, as deep and as wide.
    """
    trees = load_trees(pair, sources)
    anew = _record(pair, out, {s.key: str(s.model) for s in sources}, trees)
    measure_trees(pair, out, trees, repeats=repeats, again=anew)
    note(f"recorded {', '.join(anew) or 'no new trees'} into {out}")


def _record(
    pair: Pair, out: Path, places: Mapping[str, str], trees: Mapping[str, GrownTrees]
) -> list[str]:
    """Record what is not yet recorded along the trace in `out`; names of what was."""
    from dataclasses import replace

    from profiler.sources.tree_record import record_trees
    from traces.sources.base import Recordings
    from traces.sources.files import read_recordings, write_recordings
    from traces.sources.found import STAMP, stamp_of
    from traces.store.files import read_trace

    trace, kept = read_trace(out / "trace.parquet"), read_recordings(out).trees
    stamp = stamp_of(trace)
    todo = {}
    for key, grown in trees.items():
        provenance = {STAMP: stamp, "drafter": digest(grown.drafter), "topk": grown.topk}
        found = kept.get(key)
        held = found is not None and found.layers >= grown.layers
        if found is None or not held or any(found.meta.get(n) != v for n, v in provenance.items()):
            todo[key] = {**provenance, "model": places[key]}
        elif found.meta.get("model") != places[key]:
            moved = replace(found, meta={**found.meta, "model": places[key]})
            write_recordings(Recordings(trees={key: moved}), out)
    say_recording([f"trees of {key}" for key in todo], trace, [f"trees of {key}" for key in trees])
    with progress_bar() as progress:
        task = progress.add_task("recording trees", total=len(todo) * len(trace.requests))
        for key, provenance in todo.items():
            grown = trees[key]
            made = record_trees(
                pair.target, trace, grown.drafter, grown.topk, grown.layers,
                advance=lambda: progress.advance(task),
            )  # fmt: skip
            stamped = replace(made, meta={**made.meta, **provenance})
            write_recordings(Recordings(trees={key: stamped}), out)
    return [*todo]


def measure_trees(
    pair: Pair, out: Path, trees: Mapping[str, GrownTrees], *, repeats: int, again: Collection[str]
) -> None:
    """Put cells of `trees` into the latency table of `out`.

    Those that are there are kept, but of the names in `again`.
    """
    from profiler.sources.tree_latency import measure_trees as measured
    from traces.store.files import read_latency, read_trace, write_latency

    path = out / "latency.parquet"
    table = read_latency(path)
    lacking = {
        name: grown for name, grown in trees.items()
        if name in again or not (table.has(name, "tree") and table.has("target", "tree"))
    }  # fmt: skip
    if not lacking:
        return
    note(f"measuring the latencies of {', '.join(lacking)}")
    longest = read_trace(out / "trace.parquet").longest
    cells = measured(timed_layers(pair, longest, lacking), lacking, repeats, longest=longest)
    write_latency(with_sources(table, cells), path)
