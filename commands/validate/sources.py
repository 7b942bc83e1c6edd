"""Real runs with other draft sources, compared with their replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from commands.common.output import note
from commands.validate.flow import REMEDY, Given, RealRuns
from policies.registry import PLAIN
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy, Round
    from policies.rules.base import VerifyRule
    from profiler.checks import spot_check as checks
    from profiler.checks.spot_check import Measured, Opener
    from profiler.models.loading import Pair
    from profiler.sources.exits import Modules
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog
    from traces.sources.base import Source
    from traces.sources.recording import Recordings
    from traces.store.checkpoint import Checkpoint

SOURCE_ARMS = ("fixed:gamma=2", "fixed:gamma=4", "confidence:gamma=6", "gammatune")
"""Policies run with a source where none is named, as far as its tokens carry their signals."""


class SourcedPolicy(NamedTuple):
    """A policy with its source (None: the draft model), and the rounds replay says it has."""

    name: str
    policy: DraftPolicy
    source: Source | None
    log: RoundLog


class SourceRuns(RealRuns):
    """One request at a time, with a source of drafts and with named methods.

    The rows also have the column ``source``.
    """

    name = "measured-sources"
    remedy = REMEDY

    def __init__(self, given: Given, source: str | None) -> None:
        from traces.sources.found import find_recordings

        super().__init__(given)
        recordings = find_recordings(str(given.run), self.whole)
        self.arms = arms(self.whole, recordings, self.chosen, given.policy, source, self.latency)
        self.policies = {arm.name: arm.policy for arm in self.arms}
        self.logs = [arm.log for arm in self.arms]

    @property
    def conditions(self) -> dict[str, Any]:
        """Say what drafts in every run."""
        from traces.sources.registry import describe_source

        sources = [arm.source for arm in self.arms]
        return {"sources": [None if s is None else describe_source(s) for s in sources]}

    @property
    def modules(self) -> Modules | None:
        """The modules that drafts come from."""
        return self._modules

    def load(self) -> None:
        """Load the models, and what drafts; a source without a real decoder is refused."""
        from commands.profile.sources import load_drafters, modules_of

        super().load()
        drafters = load_drafters(self.pair, [arm.source for arm in self.arms])
        self._modules = {**modules_of(self.pair, self.info, self.given.run), **drafters}
        self._opened = _openers(self.pair, self._modules, self.whole, self.arms)

    def decode(self, kept: Checkpoint | None, advance: Callable[[], None]) -> Measured:
        """Decode with every run's source."""
        from profiler.checks import spot_check as checks

        opened, vocab_size = self._opened
        runs = checks.run_interleaved(
            self.pair, self.whole, [checks.Arm(a.name, a.policy) for a in self.arms], opened,
            vocab_size, requests=self.chosen, repeats=self.given.repeats, advance=advance,
            kept=kept,
        )  # fmt: skip
        # In the order of the arms, whichever ran first.
        order = {arm.name: n for n, arm in enumerate(self.arms)}
        times = runs.times.sort_values("policy", key=lambda c: c.map(order), kind="stable")
        return checks.Measured(
            times.reset_index(drop=True),
            {a.name: _log([ran.rounds for ran in runs.first[a.name]], a.log) for a in self.arms},
            {a.name: [ran.output for ran in runs.first[a.name]] for a in self.arms},
            {}, dict(runs.machine),
        )  # fmt: skip

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Compare rounds and texts, and name the source."""
        rows = super().compared(rows, measured, progress)
        return rows.assign(source=[log.source for log in self.logs])


def arms(
    trace: Trace, recordings: Recordings, chosen: Sequence[int],
    policy: Sequence[str] | None, source: str | None, latency: LatencyTable,
) -> list[SourcedPolicy]:  # fmt: skip
    """Return what to run: plain decoding, then every policy and named system asked for.

    Where a source has no policies named for it, these are `SOURCE_ARMS` and the one predicted
    fastest with `latency`.
    """
    from simulator.chosen import load_policies
    from simulator.predict import (
        load_source_policies,
        load_system,
        split_systems,
    )
    from simulator.recording import load_source
    from simulator.whatif.ranking import predicted_fastest, with_fastest
    from traces.replay.vectorised import replay_many
    from traces.sources.replay import replay_source

    texts, systems = split_systems(policy)
    drafting = load_source(source)
    if drafting is not None and systems:
        raise DraftsimError(f"{systems[0]!r} has a draft source of its own: drop --source")
    some = trace.select(list(chosen))
    plain = load_policies([PLAIN], trace)
    found = [SourcedPolicy(PLAIN, plain[0][1], None, next(replay_many(some, plain)))]
    runs: list[tuple[tuple[str, DraftPolicy], Source]] = []
    if drafting is not None:
        named = load_source_policies(texts or SOURCE_ARMS, drafting, trace, recordings, note)
        if not texts:
            named = [n for n in named if set(n[1].reads) <= drafting.held(recordings)]
            own = drafting.for_decoding(recordings)
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
        found += [
            SourcedPolicy(name, p, None, log)
            for (name, p), log in zip(with_model, logs, strict=True)
        ]
    for system in systems:
        own, arm = load_system(system, trace, recordings)
        runs.append((arm, own))
    for (name, policy_of), unset in runs:
        own = unset.for_decoding(recordings)
        log = replay_source(
            trace, own, policy_of, recordings=recordings, name=name, requests=chosen
        )
        found.append(SourcedPolicy(name, policy_of, own, log))
    return found


def _openers(
    pair: Pair, modules: Modules, trace: Trace, every: Sequence[SourcedPolicy]
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


def _log(rounds: Sequence[Sequence[Round]], like: RoundLog) -> RoundLog:
    from traces.replay.rounds import RoundLog

    return RoundLog(RoundLog.pack(rounds), like.requests, like.policy, first=like.first)
