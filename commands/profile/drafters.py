"""Drafters on the target's features, chains and EAGLE-2's trees: loaded, recorded, timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.profile.recording import say_recording
from commands.profile.source_modules import digest, timed_layers, with_sources
from traces.errors import DraftsimError

if TYPE_CHECKING:
    import pandas as pd

    from profiler.features import FeatureDrafter
    from profiler.models.loading import Pair
    from profiler.sources.modules import Modules
    from profiler.sources.start_record import GrownTrees
    from traces.acceptance.trace import Trace
    from traces.sources.base import Recordings, Source
    from traces.sources.starts.features import Eagle, OnFeatures
    from traces.sources.starts.parallel import Parallel
    from traces.sources.starts.trees import Eagle2

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


def trees_among(sources: Iterable[Source], temperature: float) -> list[Eagle2]:
    """Return the tree sources among `sources`; DraftsimError if outputs are drawn, not greedy."""
    from traces.sources.starts.trees import Eagle2

    found = [s for s in sources if isinstance(s, Eagle2)]
    if found and temperature > 0:
        raise DraftsimError(
            "trees of --source eagle2 are recorded along greedy output alone: drop --temperature, "
            "or record them by a command of their own"
        )
    return found


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


def load_trees(pair: Pair, sources: Sequence[Eagle2]) -> dict[str, GrownTrees]:
    """The drafters that `sources` name, with the shape of their trees, by recording."""
    from profiler.sources.start_record import LAYERS, TOPK, GrownTrees

    drafters = load_drafters(pair, sources)
    return {
        s.key: GrownTrees(drafters[s.key], s.topk or TOPK, s.depth or LAYERS, s.budget)
        for s in sources
    }


def recorded_sources(recordings: Recordings) -> list[Eagle | Parallel]:
    """The drafters of a run's recordings, with the folders they were read from."""
    from traces.sources.starts.features import Eagle, recorded_drafters
    from traces.sources.starts.parallel import Parallel

    chains = [Eagle(str(r.meta["model"])) for r in recorded_drafters(recordings).values()]
    masks = [Parallel(str(r.meta["model"])) for r in Parallel().found(recordings).values()]
    return [*chains, *masks]


def recorded_trees(recordings: Recordings) -> list[Eagle2]:
    """The trees of a run's recordings, with the folders that their drafters were read from."""
    from traces.sources.starts.trees import Eagle2

    return [
        Eagle2(str(r.meta["model"]), depth=r.layers, topk=r.topk) for r in recordings.trees.values()
    ]


def profile_drafters(
    pair: Pair, out: Path, sources: Sequence[Eagle | Parallel], *, repeats: int
) -> None:
    """Record what `sources` draft along the traces in `out`, and measure their passes.

    What the folder already holds of these traces and weights is kept, wherever the weights lie by
    now; other drafters that it holds are left as they are.
    """
    from profiler.sources.modules import Modules

    modules = Modules(drafters=load_drafters(pair, sources))
    recorded = record_drafters(pair, out, sources, modules)
    drawn = record_drafters(pair, out, sources, modules, sampled=True)
    measure_drafters(pair, out, modules.drafters, repeats=repeats, again=recorded)
    note(f"recorded {', '.join(recorded) or 'no new drafter'} into {out}")
    if drawn:
        note(f"recorded {', '.join(drawn)} along sampled outputs into {out}")


def profile_trees(pair: Pair, out: Path, sources: Sequence[Eagle2], *, repeats: int) -> None:
    """Record the trees of `sources` along the trace in `out`, and measure their passes.

    Kept is what the folder already holds of this trace and these weights, as deep and as wide.
    """
    trees = load_trees(pair, sources)
    recorded = record_trees(pair, out, sources, trees)
    measure_trees(pair, out, trees, repeats=repeats, again=recorded)
    note(f"recorded {', '.join(recorded) or 'no new trees'} into {out}")


def record_drafters(
    pair: Pair, out: Path, sources: Sequence[Eagle | Parallel], modules: Modules, *,
    sampled: bool = False,
) -> list[str]:  # fmt: skip
    """Record what is not yet recorded along one trace in `out`; names of what was."""
    from profiler.sources.modules import record_sources
    from traces.sources.files import read_recordings
    from traces.store.files import read_trace

    path = out / ("sampled.parquet" if sampled else "trace.parquet")
    if sampled and not path.is_file():
        return []
    trace = read_trace(path)
    seed = int((trace.meta.get("sampling") or {}).get("seed", 0))

    def made(key: str, advance: Callable[..., None]) -> Any:
        return record_sources(
            pair.target, trace, modules, draft_offsets=OFFSETS, only=[key], seed=seed,
            advance=advance,
        ).starts[key]  # fmt: skip

    wanted = {
        s.key: {"drafter": digest(modules.drafters[s.key]), "model": str(s.model)} for s in sources
    }
    return _record(out, trace, wanted, read_recordings(out, sampled=sampled).starts, "starts", made)


def record_trees(
    pair: Pair, out: Path, sources: Sequence[Eagle2], trees: Mapping[str, GrownTrees]
) -> list[str]:
    """Record what is not yet recorded along the trace in `out`; names of what was."""
    from profiler.sources import start_record as tree_record
    from traces.sources.files import read_recordings
    from traces.store.files import read_trace

    trace = read_trace(out / "trace.parquet")
    kept = {
        key: found for key, found in read_recordings(out).trees.items()
        if key in trees and found.layers >= trees[key].layers
    }  # fmt: skip

    def made(key: str, advance: Callable[..., None]) -> Any:
        grown = trees[key]
        return tree_record.record_trees(
            pair.target, trace, grown.drafter, grown.topk, grown.layers, advance=advance
        )

    wanted = {
        s.key: {"drafter": digest(trees[s.key].drafter), "topk": trees[s.key].topk,
                "model": str(s.model)}
        for s in sources
    }  # fmt: skip
    return _record(out, trace, wanted, kept, "trees", made, "trees of ")


def _record(
    out: Path, trace: Trace, wanted: Mapping[str, dict[str, Any]], kept: Mapping[str, Any],
    kind: str, made: Callable[[str, Callable[..., None]], Any], what: str = "",
) -> list[str]:  # fmt: skip
    """Record those of `wanted` that `kept` lacks, or holds with another provenance; their names.

    If only the folder of the drafter differs, the recording is kept, and its folder is noted in it.

    Parameters
    ----------
    wanted:
        By key, the provenance of each recording; ``model`` is the drafter's folder.
    kind:
        The field of `traces.sources.base.Recordings`.
    made:
        Makes the recording of a key; it calls its second argument after each request.
    """
    from traces.sources.base import Recordings
    from traces.sources.files import write_recordings
    from traces.sources.found import STAMP, stamp_of

    def write(key: str, found: Any, meta: Mapping[str, Any]) -> None:
        own: Any = {kind: {key: replace(found, meta={**found.meta, **meta})}}
        write_recordings(Recordings(**own), out)

    stamp, todo = {STAMP: stamp_of(trace)}, {}
    for key, provenance in wanted.items():
        found = kept.get(key)
        differ = {
            name for name, value in {**stamp, **provenance}.items()
            if found is None or found.meta.get(name) != value
        }  # fmt: skip
        if differ == {"model"}:
            write(key, found, {"model": provenance["model"]})
        elif differ:
            todo[key] = {**stamp, **provenance}
    say_recording([f"{what}{key}" for key in todo], trace, [f"{what}{key}" for key in wanted])
    with progress_bar() as progress:
        task = progress.add_task(
            f"recording {kind if what else 'drafters'}", total=len(todo) * len(trace.requests)
        )
        for key, provenance in todo.items():
            write(key, made(key, lambda *_: progress.advance(task)), provenance)
    return [*todo]


def measure_drafters(
    pair: Pair, out: Path, drafters: Mapping[str, FeatureDrafter], *, repeats: int,
    again: Collection[str],
) -> None:  # fmt: skip
    """Put cells of `drafters` into the latency table of `out`, at the target's batch sizes.

    Those that are there are kept, but of the names in `again`.
    """
    from profiler.sources.latency import measure_drafters as measured
    from traces.store.files import read_latency

    cells = read_latency(out / "latency.parquet").cells
    passes = cells[cells["phase"] == "forward"].groupby("model")["batch"].unique()
    batches = sorted(int(b) for b in passes["target"])
    lacking = {
        name: drafter for name, drafter in drafters.items()
        if name in again or not {*batches} <= {*passes.get(name, ())}
    }  # fmt: skip
    _measure(out, [*lacking], lambda longest: measured(
        timed_layers(pair, longest), lacking, repeats, batches=batches, longest=longest
    ))  # fmt: skip


def measure_trees(
    pair: Pair, out: Path, trees: Mapping[str, GrownTrees], *, repeats: int, again: Collection[str]
) -> None:
    """Put cells of `trees` into the latency table of `out`.

    Those that are there are kept, but of the names in `again`.
    """
    from profiler.sources.latency import measure_trees as measured
    from traces.store.files import read_latency

    table = read_latency(out / "latency.parquet")
    lacking = {
        name: grown for name, grown in trees.items()
        if name in again or not (table.has(name, "tree") and table.has("target", "tree"))
    }  # fmt: skip
    _measure(out, [*lacking], lambda longest: measured(
        timed_layers(pair, longest, lacking), lacking, repeats, longest=longest
    ))  # fmt: skip


def _measure(out: Path, names: Sequence[str], measured: Callable[[int], pd.DataFrame]) -> None:
    """Put the cells of `names` that `measured` makes for the longest request into the table."""
    from traces.store.files import read_latency, read_trace, write_latency

    if not names:
        return
    note(f"measuring the latencies of {', '.join(names)}")
    cells = measured(read_trace(out / "trace.parquet").longest)
    path = out / "latency.parquet"
    write_latency(with_sources(read_latency(path), cells), path)
