"""Draft sources of a pair: modules loaded or trained, drafts recorded, passes timed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.output import note
from commands.common.progress import progress_bar
from policies.registry import parse_policy
from profiler.prompts import read_prompts
from profiler.recording.run import RunInfo, model_path, shipped_heads
from simulator.papers.specbound import FOLLOWED_SOURCES, START
from simulator.recording import load_source
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.sources.base import Source, prompt_tokens
from traces.sources.early_exit import EarlyExit
from traces.sources.found import STAMP, read_recordings, stamp_of, write_recordings
from traces.sources.registry import SOURCES, SYSTEMS, parse_source
from traces.sources.starts.parallel import OnFeatures
from traces.sources.starts.sources import LayerSkip
from traces.store.files import read_latency, read_trace, write_latency

if TYPE_CHECKING:
    from profiler.models.loading import Pair
    from profiler.models.stack import LayerRunner
    from profiler.sources.exits import Modules
    from profiler.sources.start_record import RecordOptions

HEADS = "exit_heads"
"""Folder of the trained modules inside a run folder."""


def check_layers_timed(pair: Pair, exits: bool) -> None:
    """Raise DraftsimError if the target cannot run layer by layer, or has no layer for `exits`."""
    from profiler.models.stack import LayerRunner
    from profiler.train.heads import default_exit_layers

    layers = LayerRunner(pair.target, 8).layers
    if exits:
        default_exit_layers(layers)


def check_heads_text(out: Path, text: Path, force: bool) -> None:
    """Raise DraftsimError if `text` cannot be read, or the folder has all heads already.

    With `force` its heads are removed before any is trained.
    """
    read_prompts(text)
    if not force and not _absent(out / HEADS):
        raise DraftsimError(
            f"--heads-text: {out / HEADS} has all heads: leave --heads-text out to keep them, "
            "remove that folder to train them again, or name another --out"
        )


def split_drafters(texts: Sequence[str], temperature: float) -> tuple[list[OnFeatures], list[str]]:
    """Return the drafters on features among sources given as text, and the others.

    A folder is named in full from here on, so that the run can be used from anywhere.

    Raises DraftsimError if one names no folder, two are called alike, one is not recorded along
    outputs of this ``temperature``, or no recording depends on the parameters of one of the others.
    """
    found: list[OnFeatures] = []
    others = []
    for text in texts:
        source = load_source(text)
        if not isinstance(source, OnFeatures):
            others.append(text)
            if source is None or source.name not in (EarlyExit.name, LayerSkip.name):
                raise DraftsimError(
                    f"--source {text} has nothing to set in a recording: name early-exit or "
                    "layer-skip with its parameters"
                )
            continue
        if source.model is None:
            raise DraftsimError(
                f"--source {text} names no drafter: give its folder, {source.name}:model=DIR"
            )
        if Path(source.model).is_dir():
            source = replace(source, model=os.path.abspath(source.model))
        if any(source.key == other.key for other in found):
            raise DraftsimError(
                f"two drafters are called {Path(str(source.model)).name}, by which tables tell "
                "them apart: rename a folder"
            )
        if temperature > 0 and not source.sampled:
            raise DraftsimError(
                f"drafts of --source {source.name} are recorded along greedy output alone: drop "
                "--temperature, or record them by a command of their own"
            )
        found.append(source)
    return found, others


def load_drafters(pair: Pair, sources: Iterable[Source | None]) -> dict[str, Any]:
    """Return the modules of drafters on features that `sources` name, by their recording's name.

    Raises DraftsimError where the drafter and its source differ in kind: one of them drafts all
    tokens in one pass, the other token by token.
    """
    from profiler.features.checkpoint import read_drafter
    from profiler.sources.run import REAL

    found = {}
    for source in sources:
        if source is not None and source.model is not None:
            drafter = read_drafter(model_path(source.model, "draft"), pair.target)
            found[source.key] = REAL[source.name].loaded(drafter, source)
    return found


def profile_sources(
    pair: Pair, info: RunInfo, out: Path, *, exits: bool, drafters: Sequence[OnFeatures] = (),
    sources: Sequence[str] = (), text: Path | None = None, repeats: int = 15,
) -> None:  # fmt: skip
    """Record draft sources along the traces in `out`, and measure what their parts cost.

    Recordings of these traces and weights that the folder holds are kept, even if the weights were
    moved; other drafters in it stay as they are.

    ``drafters`` are on the target's features.  With ``exits`` all other sources are recorded, too;
    ``sources`` are then further early-exit settings, and the layers of layer skip, and heads are
    trained on `text` where the target has none.
    """
    keys: dict[str, dict[str, str]] = {}
    modules: dict[str, Any] = {}
    if exits:
        modules = modules_of(pair, info, out, read_trace(out / "trace.parquet"), text)
        keys = {key: {} for key in (*modules, "layer-skip")}
    modules |= load_drafters(pair, drafters)
    keys |= {source.key: {"model": str(source.model)} for source in drafters}
    drawn = record(pair, out, modules, keys, sources, sampled=True)
    recorded = record(pair, out, modules, keys, sources)
    again = {source.key for source in drafters}.intersection(recorded)
    measure(pair, out, modules, repeats=repeats, again=again, layers=exits)
    note(f"recorded {', '.join(recorded) or 'nothing new'} into {out}")
    if drawn:
        note(f"recorded {', '.join(drawn)} along sampled outputs into {out}")


def wanted(trace: Trace, sources: Sequence[str]) -> RecordOptions:
    """Return early-exit settings to follow after wrong exits, and the layers to skip.

    The settings are those of the named methods and of `sources`; along greedy outputs also those
    of SpecBound's Figure 3.
    """
    from profiler.sources.run import REAL
    from profiler.sources.start_record import RecordOptions

    most, how = trace.max_gamma or 24, RecordOptions()
    asked = []
    for system in SYSTEMS.values():
        policy = parse_policy(system.policy, max_gamma=most)
        asked.append((system.source, int(getattr(policy, "gamma", most))))
    asked += [(text, most) for text in sources]
    if trace.sampling.greedy:
        asked += [(text, int(START.width)) for text in FOLLOWED_SOURCES]
    for text, gamma in asked:
        source = parse_source(text)
        if (real := REAL.get(source.name)) is not None:
            how = real.asked(how, source, gamma)
    return how


def record(
    pair: Pair, out: Path, modules: Modules, keys: Mapping[str, Mapping[str, str]],
    sources: Sequence[str] = (), *, sampled: bool = False,
) -> list[str]:  # fmt: skip
    """Record those of `keys` that `out` lacks along one trace; return the names of these.

    ``keys`` are names of recordings, with what else their provenance says (``model``, a drafter's
    folder); ``sources`` are as in `wanted`.  A recording of which only the drafter's folder differs
    is kept, with that folder noted.  `sampled`: along the sampled outputs, if there are any.
    """
    from profiler.sources.run import real_of, record_sources

    path = out / ("sampled.parquet" if sampled else "trace.parquet")
    keys = {key: also for key, also in keys.items() if real_of(key).recorded_sampled or not sampled}
    if not keys or not path.is_file():
        return []
    trace, held = read_trace(path), read_recordings(out, sampled=sampled)
    how = replace(
        wanted(trace, sources), seed=int((trace.meta.get("sampling") or {}).get("seed", 0))
    )
    stamp, todo = {STAMP: stamp_of(trace)}, {}
    for key, also in keys.items():
        real, module, found = real_of(key), modules.get(key), held.get(key)
        provenance = {**stamp, **real.provenance(module, modules), **also}
        if found is not None and found.meta.get(STAMP) == stamp[STAMP]:
            how = real.extended(how, found)
        differ = {n for n, v in provenance.items() if found is None or found.meta.get(n) != v}
        if differ == {"model"} and real.fits(found, module, how):
            assert found is not None
            again = replace(found, meta={**found.meta, "model": provenance["model"]})
            write_recordings({key: again}, out)
        elif differ or not real.fits(found, module, how):
            todo[key] = provenance
    if todo:
        kept = [name for name in keys if name not in todo]
        outputs = "" if trace.sampling.greedy else " sampled outputs of"
        note(
            f"recording {', '.join(todo)} along{outputs} {counted(len(trace.requests), 'prompt')}"
            + (f"; kept: {', '.join(kept)}" if kept else "")
        )
    with progress_bar() as progress:
        task = progress.add_task("recording sources", total=len(todo) * len(trace.requests))
        for key, provenance in todo.items():
            made = record_sources(
                pair.target, trace, modules, how, only=[key],
                advance=lambda _: progress.advance(task),
            )[key]  # fmt: skip
            own = replace(made, meta={**made.meta, **provenance})
            write_recordings({key: own}, out)
    return [*todo]


def measure(
    pair: Pair, out: Path, modules: Modules, *, repeats: int, again: Collection[str], layers: bool
) -> None:
    """Put the cells of `modules` into the latency table of `out`, but those that are there.

    Those of the names in `again` are measured in any case; ``exit`` names those of all layers and
    trained modules.  Chains of drafters are timed at the target's batch sizes.  With `layers`
    single layers and lookups are timed with what was trained.
    """
    from profiler.features.drafters import FeatureDrafter
    from profiler.sources.latency import measure_drafters
    from profiler.sources.run import measure_sources, real_of
    from profiler.sources.start_record import GrownTrees

    path, trace = out / "latency.parquet", read_trace(out / "trace.parquet")
    table = read_latency(path)
    passes = table.cells[table.cells["phase"] == "forward"].groupby("model")["batch"].unique()
    batches = sorted(int(b) for b in passes["target"])
    drafters = {n: m for n, m in modules.items() if isinstance(m, FeatureDrafter | GrownTrees)}
    trained = {n: m for n, m in modules.items() if n not in drafters}

    def is_there(name: str) -> bool:
        if isinstance(modules[name], GrownTrees):
            return table.has(name, "tree") and table.has("target", "tree")
        return {*batches} <= {*passes.get(name, ())}

    cells = [("exit", "layer"), *(cell for name in trained for cell in real_of(name).cells)]
    if layers and ("exit" in again or not all(table.has(*cell) for cell in cells)):
        note("measuring the latencies of single layers, heads and lookups")
        runner = timed_layers(pair, trace.longest)
        table = with_sources(table, measure_sources(runner, trained, trace, repeats=repeats))
        write_latency(table, path)
    if todo := {n: m for n, m in drafters.items() if n in again or not is_there(n)}:
        note(f"measuring the latencies of {', '.join(todo)}")
        runner, longest = timed_layers(pair, trace.longest, todo), trace.longest
        found = measure_drafters(runner, todo, repeats, batches=batches, longest=longest)
        write_latency(with_sources(table, found), path)


def remeasure(pair: Pair, info: RunInfo, out: Path, *, repeats: int) -> None:
    """Measure the sources of a run folder again; its recordings are kept."""
    recordings = read_recordings(out)
    kinds = {key: SOURCES.get(key.partition(".")[0], Source) for key in recordings}
    modules = load_drafters(pair, [
        kind(str(recordings[key].meta["model"])).for_decoding(recordings)
        for key, kind in kinds.items() if issubclass(kind, OnFeatures)
    ])  # fmt: skip
    if exits := len(recordings) > len(modules):
        modules |= modules_of(pair, info, out)
    measure(pair, out, modules, repeats=repeats, again=[*modules, "exit"], layers=exits)


def modules_of(
    pair: Pair, info: RunInfo, out: Path, trace: Trace | None = None, text: Path | None = None
) -> dict[str, Any]:
    """Return the target's trained modules: the run's own, those the project has, or trained now.

    Without ``trace`` nothing is trained.
    """
    from profiler.features.heads import FILES
    from profiler.sources.run import load_modules

    own = out / HEADS
    absent = _absent(own)
    shipped = shipped_heads(info.target)
    if len(absent) == len(FILES) and shipped is not None and text is None:
        return load_modules(shipped, pair.target)
    if absent and trace is not None:
        _train(pair, own, absent, trace, text)
    return load_modules(own, pair.target)


def _absent(own: Path) -> list[str]:
    """Return the names of the modules that the folder lacks."""
    from profiler.features.heads import FILES

    return [name for name, file in FILES.items() if not (own / file).is_file()]


def _train(pair: Pair, own: Path, absent: Sequence[str], trace: Trace, text: Path | None) -> None:
    """Train the absent modules into `own`, each file whole or not at all."""
    from profiler.features.heads import FILES
    from profiler.models.runner import context_of
    from profiler.models.stack import LayerRunner
    from profiler.train.heads import own_text, train_all

    if text is not None:
        encoded = [pair.encode(p.text).tolist() for p in read_prompts(text)]
    else:
        note(
            "no heads for this target: training them on the recorded prompts, on which they look "
            "better than on others; give other texts with --heads-text"
        )
        encoded = [prompt_tokens(trace, i) for i in range(len(trace.requests))]
    own.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, tempfile.TemporaryDirectory(dir=own) as made:
        task = progress.add_task("training heads", total=len(absent) + 1)
        samples = own_text(pair.target, encoded)
        progress.advance(task)
        runner = LayerRunner(pair.target, min(512, context_of(pair.target)))
        for name in absent:
            train_all(runner, samples, Path(made), [name])
            (Path(made) / FILES[name]).replace(own / FILES[name])
            progress.advance(task)


def timed_layers(pair: Pair, longest: int, modules: Modules | None = None) -> LayerRunner:
    """Return a runner with room for timing sources, and requests of `longest` tokens.

    ``modules``: those whose trees are timed are among them.
    """
    from profiler.latency.table import reaching
    from profiler.models.runner import context_of
    from profiler.models.stack import LayerRunner
    from profiler.sources.latency import CONTEXTS, widest_pass

    slots = max(reaching(CONTEXTS, longest)) + widest_pass(modules or {})
    return LayerRunner(pair.target, min(context_of(pair.target), slots))


def with_sources(table: LatencyTable, found: pd.DataFrame) -> LatencyTable:
    """Return `table` with the cells of sources in place of its own of the same parts."""
    # The same part timed in two ways does not belong into one grid.
    ours = set(zip(found["model"], found["phase"], strict=True))
    keep = [key not in ours for key in zip(table.cells["model"], table.cells["phase"], strict=True)]
    return LatencyTable(pd.concat([table.cells[keep], found], ignore_index=True), table.meta)
