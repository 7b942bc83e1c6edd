"""Real runs with other draft sources, held against their replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.common.quiet import say_machine, with_machine
from traces.errors import DraftsimError

if TYPE_CHECKING:
    import pandas as pd

    from policies.core import DraftPolicy, Round
    from policies.rules.base import VerifyRule
    from profiler.checks import spot_check as checks
    from profiler.checks.spot_check import Opener
    from profiler.models.loading import Pair
    from profiler.sources.modules import Modules
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog
    from traces.sources.base import Recordings, Source

SOURCE_ARMS = ("fixed:gamma=2", "fixed:gamma=4", "confidence:gamma=6", "gammatune")
"""Policies run with a source where none is named, as far as its tokens carry their signals."""
PLAIN = "autoregressive"


class Arm(NamedTuple):
    """A policy with its source (None: the draft model), and the rounds replay says it has."""

    name: str
    policy: DraftPolicy
    source: Source | None
    log: RoundLog


def source_check(
    run: Path,
    policy: Sequence[str] | None,
    source: str | None,
    repeats: int = 3,
    limit: int | None = None,
    remeasure: bool = False,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """The rows of ``validate --source`` and of named systems, plain decoding first.

    `remeasure`: as in `commands.validate.spot_check.spot_check`.

    Besides the columns of `simulator.validation.compare`: ``source``, and those of
    `commands.validate.texts`.  A stopped check goes on as one of `spot_check` does.
    """
    import pandas as pd

    from commands.profile.drafters import load_drafters, load_trees
    from commands.profile.source_modules import modules_of
    from commands.validate.remeasure import Remeasured, seconds_of
    from commands.validate.spot_check import REMEDY, check_ids, spread_over_categories
    from commands.validate.texts import Texts
    from profiler.checks import spot_check as checks
    from profiler.checks.unfinished import check_options, unfinished
    from profiler.recording.run import read_run
    from simulator.pricing import price
    from simulator.validation import compare
    from traces.sources.found import find_recordings
    from traces.sources.registry import describe_source
    from traces.sources.starts.features import Eagle
    from traces.sources.starts.parallel import Parallel
    from traces.sources.starts.trees import Eagle2
    from traces.store.files import read_latency, read_trace
    from traces.store.measured import MeasuredRuns, write_measured

    info = read_run(run, trust_remote_code)
    trace, latency = read_trace(run / "trace.parquet"), read_latency(run / "latency.parquet")
    check_ids(trace)
    recordings = find_recordings(str(run), trace)
    chosen = range(len(trace.requests)) if limit is None else spread_over_categories(trace, limit)
    every = arms(trace, recordings, chosen, policy, source, latency)
    pair = info.load()
    drafters = load_drafters(
        pair, [a.source for a in every if isinstance(a.source, Eagle | Parallel)]
    )
    trees = load_trees(pair, [a.source for a in every if isinstance(a.source, Eagle2)])
    modules = replace(modules_of(pair, info, run), drafters=drafters, trees=trees)
    total = repeats * len(chosen) * len(every)
    shown = [arm.log for arm in every]
    expected = [price(log, latency) for log in shown]
    opened, vocab_size = _openers(pair, modules, trace, every)
    drafting = [None if a.source is None else describe_source(a.source) for a in every]
    work = check_options(pair, trace, shown, repeats, sources=drafting, remeasure=remeasure)
    with unfinished(run, work, total, note, together=len(every)) as kept:
        again = None
        if remeasure:
            some = trace.select(list(chosen))
            again = Remeasured(pair, total, repeats * seconds_of(expected), some, kept, modules)
        with progress_bar() as progress:
            task = progress.add_task("decoding for real", total=total)

            def advance() -> None:
                progress.advance(task)
                if again is not None:
                    again.advance()

            runs = checks.run_interleaved(
                pair, trace, [checks.Arm(a.name, a.policy) for a in every], opened, vocab_size,
                requests=chosen, repeats=repeats, advance=advance, kept=kept,
            )  # fmt: skip
        # In the order of the arms, whichever ran first.
        order = {arm.name: n for n, arm in enumerate(every)}
        times = runs.times.sort_values("policy", key=lambda c: c.map(order), kind="stable")
        times = times.reset_index(drop=True)
        texts = Texts(
            trace.select(list(chosen)),
            {a.name: [ran.output for ran in runs.first[a.name]] for a in every},
            str(pair.meta["dtype"]),
            [a.name for a in every if a.policy.learns_across_requests],
        )
        times = texts.times(times)
        if again is not None:
            rows = again.compare(shown, times, expected, run)
        else:
            rows = compare(expected, times)
        real = {a.name: _log([ran.rounds for ran in runs.first[a.name]], a.log) for a in every}
        rows = texts.compared(rows, real, {a.name: a.log for a in every})
        rows["source"] = [log.source for log in shown]
        say_machine(latency, runs.machine, None if remeasure else REMEDY)
        meta = {**pair.meta, "machine": dict(runs.machine)}
        write_measured(MeasuredRuns(times, meta), run / "measured-sources.parquet")
    return pd.DataFrame(with_machine(rows, latency, runs.machine))


def arms(
    trace: Trace, recordings: Recordings, chosen: Sequence[int],
    policy: Sequence[str] | None, source: str | None, latency: LatencyTable,
) -> list[Arm]:  # fmt: skip
    """Return what to run: plain decoding, then every policy and named system asked for.

    Where a source has no policies named for it, these are `SOURCE_ARMS` and the one predicted
    fastest with `latency`.
    """
    from simulator.chosen import load_policies
    from simulator.recording import load_source
    from simulator.systems import (
        load_source_policies,
        load_system,
        split_systems,
    )
    from simulator.whatif.ranking import predicted_fastest, with_fastest
    from traces.replay.vectorised import replay_many
    from traces.sources.replay import replay_source

    texts, systems = split_systems(policy)
    drafting = load_source(source)
    if drafting is not None and systems:
        raise DraftsimError(f"{systems[0]!r} has a draft source of its own: drop --source")
    some = trace.select(list(chosen))
    plain = load_policies([PLAIN], trace)
    found = [Arm(PLAIN, plain[0][1], None, next(replay_many(some, plain)))]
    runs: list[tuple[tuple[str, DraftPolicy], Source]] = []
    if drafting is not None:
        named = load_source_policies(texts or SOURCE_ARMS, drafting, trace, recordings, note)
        if not texts:
            named = [n for n in named if set(n[1].reads) <= drafting.held(recordings)]
            own = as_recorded(drafting, recordings)
            longest = drafting.longest(trace, recordings)
            every = load_policies(None, trace, signals=drafting.held(recordings), max_gamma=longest)
            best = predicted_fastest(
                latency, every, longest,
                lambda some: [
                    replay_source(trace, own, p, recordings=recordings, name=n, requests=chosen)
                    for n, p in some
                ],
            )  # fmt: skip
            named = with_fastest(named, best, note)
        runs += [(n, drafting) for n in named if n[0] != PLAIN]
    elif texts:
        with_model = [c for c in load_policies(texts, trace, say=note) if c[0] != PLAIN]
        logs = list(replay_many(some, with_model))
        found += [Arm(name, p, None, log) for (name, p), log in zip(with_model, logs, strict=True)]
    for system in systems:
        own, arm = load_system(system, trace, recordings)
        runs.append((arm, own))
    for (name, policy_of), unset in runs:
        own = as_recorded(unset, recordings)
        log = replay_source(
            trace, own, policy_of, recordings=recordings, name=name, requests=chosen
        )
        found.append(Arm(name, policy_of, own, log))
    return found


def _openers(
    pair: Pair, modules: Modules, trace: Trace, every: Sequence[Arm]
) -> tuple[Opener, int]:
    """Return a function that opens requests with every run's source, and the vocabulary size."""
    from profiler.checks.spot_check import DraftModel
    from profiler.sources.run import SourceRunner

    plain, real = DraftModel(pair, trace), SourceRunner(pair.target, trace, modules)
    sources = {arm.name: arm.source for arm in every}
    for source in sources.values():
        if source is not None:
            real.decoder(source, 0)  # one without a real decoder is refused before any run

    def opened(arm: checks.Arm, request: int, repeat: int, rule: VerifyRule | None) -> Any:
        source = sources[arm.name]
        if source is None:
            return plain(arm, request, repeat, rule)
        return real.decoder(source, request)

    return opened, plain.target.vocab_size


def as_recorded(source: Source, recordings: Recordings) -> Source:
    """`source` with what only its recording knows: skipped layers, a drafter's folder, a tree's
    shape."""
    from traces.sources.starts.features import OnFeatures
    from traces.sources.starts.parallel import Parallel
    from traces.sources.starts.sources import LayerSkip
    from traces.sources.starts.trees import Eagle2

    if isinstance(source, Eagle2):
        found = source.recording(recordings)
        source = source.grown(source.depth or found.layers, found.topk)
    if isinstance(source, Parallel) and source.acceptance is not None:
        return source
    if isinstance(source, Parallel) and source.k is None:
        source = source.with_masks(source.recording(recordings).offsets)
    if isinstance(source, OnFeatures) and not Path(source.model or "").is_dir():
        source = source.of(str(source.recording(recordings).meta["model"]))
    if isinstance(source, LayerSkip) and source.skip is None:
        return LayerSkip(recordings.starts[source.key].meta["skip"])
    return source


def _log(rounds: Sequence[Sequence[Round]], like: RoundLog) -> RoundLog:
    from traces.replay.rounds import RoundLog

    return RoundLog(RoundLog.pack(rounds), like.requests, like.policy, first=like.first)
