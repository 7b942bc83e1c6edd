"""Real runs with other draft sources, held against their replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commands.common.inputs import load_policies, replay_all
from commands.common.quiet import say_machine, with_machine
from commands.common.sources import (
    load_source,
    load_source_policies,
    load_system,
    split_systems,
)
from traces.errors import DraftsimError

if TYPE_CHECKING:
    import pandas as pd

    from commands.validate.remeasure import Remeasured
    from policies.core import DraftPolicy, Round
    from profiler.machine.stopwatch import Timing
    from profiler.models.loading import Pair
    from profiler.sources.modules import Modules
    from traces.acceptance.trace import Trace
    from traces.machine import State
    from traces.replay.rounds import RoundLog
    from traces.sources.base import Recordings, Source

    Attempt = tuple[Timing, tuple[DraftPolicy, Any, list[Round]]]

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

    `remeasure`: as in `commands.validate.command.spot_check`.

    Besides the columns of `simulator.validation.compare`: ``source``, and
    ``outputs_differ``, the requests whose output is not the target's own.
    """
    import pandas as pd

    from commands.profile.drafters import load_drafters
    from commands.profile.source_modules import modules_of
    from commands.profile.trees import load_trees
    from commands.validate.remeasure import Remeasured, seconds_of
    from commands.validate.spot_check import REMEDY, spread_over_categories
    from profiler.checks.outputs import output_of
    from profiler.checks.spot_check import rounds_differ
    from profiler.recording.run import read_run
    from simulator.pricing import price
    from simulator.validation import compare
    from traces.sources.found import find_recordings
    from traces.sources.starts.features import Eagle
    from traces.sources.starts.tree_source import Eagle2
    from traces.store.files import read_latency, read_trace
    from traces.store.measured import MeasuredRuns, write_measured

    info = read_run(run, trust_remote_code)
    trace, latency = read_trace(run / "trace.parquet"), read_latency(run / "latency.parquet")
    recordings = find_recordings(str(run), trace)
    chosen = range(len(trace.requests)) if limit is None else spread_over_categories(trace, limit)
    every = arms(trace, recordings, chosen, policy, source)
    pair = info.load()
    drafters = load_drafters(pair, [a.source for a in every if isinstance(a.source, Eagle)])
    trees = load_trees(pair, [a.source for a in every if isinstance(a.source, Eagle2)])
    modules = replace(modules_of(pair, info, run), drafters=drafters, trees=trees)
    total = repeats * len(chosen) * len(every)
    shown = [arm.log for arm in every]
    expected = [price(log, latency) for log in shown]
    again = None
    if remeasure:
        some = trace.select(list(chosen))
        again = Remeasured(pair, total, repeats * seconds_of(expected), some, modules)
    start = _openers(pair, modules, trace, every)
    times, rounds, outputs, state = _run(pair, start, trace, every, chosen, repeats, again)
    if again is not None:
        rows = again.compare(shown, times, expected, run)
    else:
        rows = compare(expected, times)
    real = [_log(rounds[arm.name], log) for arm, log in zip(every, shown, strict=True)]
    rows["rounds_differ"] = [
        rounds_differ(mine, theirs) for mine, theirs in zip(real, shown, strict=True)
    ]
    rows["source"] = [log.source for log in shown]
    rows["outputs_differ"] = [
        sum(mine != output_of(trace, i) for mine, i in zip(outputs[a.name], chosen, strict=True))
        for a in every
    ]
    say_machine(latency, state, None if remeasure else REMEDY)
    meta = {**pair.meta, "machine": dict(state)}
    write_measured(MeasuredRuns(times, meta), run / "measured-sources.parquet")
    return pd.DataFrame(with_machine(rows, latency, state))


def arms(
    trace: Trace, recordings: Recordings, chosen: Sequence[int],
    policy: Sequence[str] | None, source: str | None,
) -> list[Arm]:  # fmt: skip
    """What to run: plain decoding, then every policy and named system asked for."""
    from traces.sources.replay import replay_source

    texts, systems = split_systems(policy)
    drafting = load_source(source)
    if drafting is not None and systems:
        raise DraftsimError(f"{systems[0]!r} has a draft source of its own: drop --source")
    some = trace.select(list(chosen))
    plain = load_policies([PLAIN], trace)
    found = [Arm(PLAIN, plain[0][1], None, replay_all(some, plain)[0])]
    runs: list[tuple[tuple[str, DraftPolicy], Source]] = []
    if drafting is not None:
        named = load_source_policies(texts or SOURCE_ARMS, drafting, trace, recordings)
        if not texts:
            named = [n for n in named if set(n[1].reads) <= drafting.held(recordings)]
        runs += [(n, drafting) for n in named if n[0] != PLAIN]
    elif texts:
        with_model = [c for c in load_policies(texts, trace) if c[0] != PLAIN]
        logs = replay_all(some, with_model)
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


def _run(
    pair: Pair, start: Mapping[str, Callable[[int], Any]], trace: Trace, every: Sequence[Arm],
    chosen: Sequence[int], repeats: int, again: Remeasured | None,
) -> tuple[
    pd.DataFrame, dict[str, list[list[Round]]], dict[str, list[list[int]]], State
]:  # fmt: skip
    """Times of all runs, the rounds and outputs of the first repeat, by arm, and the machine."""
    import pandas as pd

    from policies.core import speculate
    from profiler.machine.repeats import Repeats, sweeps
    from profiler.machine.state import Machine
    from profiler.machine.stopwatch import timed
    from profiler.profile import progress_bar
    from traces.replay.run import own_policy
    from traces.store.measured import MEASURED_COLUMNS, OFF_COLUMNS

    rows: list[tuple[Any, ...]] = []
    rounds: dict[str, list[list[Round]]] = {arm.name: [] for arm in every}
    outputs: dict[str, list[list[int]]] = {arm.name: [] for arm in every}
    machine, counted = Machine(pair.target, pair.device), {a.name: Repeats() for a in every}
    with progress_bar() as progress:
        task = progress.add_task("decoding for real", total=repeats * len(chosen))
        for repeat in sweeps(repeats):  # what warms up does so on one request
            shared = {arm.name: own_policy(trace, arm.policy) for arm in every}
            for n, i in enumerate(chosen if repeat >= 0 else chosen[:1]):
                if repeat >= 0:
                    machine.pulse()
                for k in range(len(every)):
                    arm = every[(k + n + repeat) % len(every)]

                    learnt = shared[arm.name]

                    def attempt(i: int = i, name: str = arm.name, learnt: Any = learnt) -> Attempt:
                        # Made again, a run begins with what was learnt before it.
                        learner = deepcopy(learnt)
                        decoder = start[name](i)
                        with timed(pair.device) as span:
                            log = list(speculate(decoder, learner.fresh()))
                        return span.timing, (learner, decoder, log)

                    own = counted[arm.name] if repeat >= 0 else Repeats(0)
                    before = own.repeated
                    taken, (shared[arm.name], decoder, log) = own.best(attempt)
                    if repeat < 0:
                        continue
                    request = trace.requests[i].id
                    rows.append(
                        (arm.name, "exact", 1, False, repeat, request, taken.wall_s, len(log),
                         taken.off_s, own.repeated - before)
                    )  # fmt: skip
                    if repeat == 0:
                        rounds[arm.name].append(log)
                        outputs[arm.name].append(decoder.output)
                    if again is not None:
                        again.advance()
                if repeat >= 0:
                    progress.advance(task)
    # In the order of the arms, whichever ran first.
    frame = pd.DataFrame(rows, columns=[*MEASURED_COLUMNS, *OFF_COLUMNS])
    order = {arm.name: n for n, arm in enumerate(every)}
    frame = frame.sort_values("policy", key=lambda c: c.map(order), kind="stable")
    state = machine.state(list(counted.values()))
    return frame.reset_index(drop=True), rounds, outputs, state


def _openers(
    pair: Pair, modules: Modules, trace: Trace, every: Sequence[Arm]
) -> dict[str, Callable[[int], Any]]:
    """By arm, a function from a request to a decoder behind its prefill."""
    import torch

    from profiler.decoding.single import ModelDecoder
    from profiler.models.runner import Runner
    from profiler.sources.run import SourceRunner

    slots = trace.longest
    target, draft = Runner(pair.target, slots), Runner(pair.draft, slots)
    real = SourceRunner(pair.target, trace, modules)
    starts = trace.request_starts

    def draft_model(request: int) -> Any:
        info = trace.requests[request]
        known = trace.run_lengths[starts[request] : starts[request + 1]].tolist()
        prompt = torch.tensor(info.prompt_ids, device=pair.device)
        return ModelDecoder(
            target, draft, prompt, info.max_new_tokens, pair.eos, first=trace.first,
            run_lengths=known,
        )  # fmt: skip

    def of(source: Source) -> Callable[[int], Any]:
        real.decoder(source, 0)  # a source without a real decoder is refused before any run
        return lambda request: real.decoder(source, request)

    return {arm.name: draft_model if arm.source is None else of(arm.source) for arm in every}


def as_recorded(source: Source, recordings: Recordings) -> Source:
    """`source` with what only its recording knows: skipped layers, a drafter's folder, a tree's
    shape."""
    from traces.sources.starts.features import OnFeatures
    from traces.sources.starts.sources import LayerSkip
    from traces.sources.starts.tree_source import Eagle2

    if isinstance(source, Eagle2):
        found = source.recording(recordings)
        source = source.grown(source.depth or found.layers, found.topk)
    if isinstance(source, OnFeatures) and not Path(source.model or "").is_dir():
        source = source.of(str(source.recording(recordings).meta["model"]))
    if isinstance(source, LayerSkip) and source.skip is None:
        return LayerSkip(recordings.starts[source.key].meta["skip"])
    return source


def _log(rounds: Sequence[Sequence[Round]], like: RoundLog) -> RoundLog:
    from traces.replay.rounds import RoundLog

    return RoundLog(RoundLog.pack(rounds), like.requests, like.policy, first=like.first)
