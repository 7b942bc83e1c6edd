"""Real runs with other draft sources, compared with their replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.output import note
from commands.validate.flow import REMEDY, Given, RealRuns
from policies.registry import PLAIN
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from policies.rules.base import VerifyRule
    from profiler.checks.spot_check import Arm, Measured
    from traces.sources.base import Source
    from traces.sources.recording import Recordings
    from traces.store.checkpoint import Checkpoint

SOURCE_ARMS = ("fixed:gamma=2", "fixed:gamma=4", "confidence:gamma=6", "gammatune")
"""Policies run with a source where none is named, as far as its tokens carry their signals."""


class SourceRuns(RealRuns):
    """One request at a time, with a source of drafts and with named methods.

    The rows also have the column ``source``.
    """

    name = "measured-sources"
    remedy = REMEDY

    def __init__(self, given: Given, source: str | None) -> None:
        from traces.replay.vectorised import replay_many
        from traces.sources.found import find_recordings
        from traces.sources.registry import describe_source
        from traces.sources.replay import replay_source

        super().__init__(given)
        recordings = find_recordings(str(given.run), self.whole)
        self.policies, self.logs = {}, []
        self.sources: dict[str, Source | None] = {}
        """The source that drafts under each policy; None: the draft model."""
        for (name, policy), drafting in self._asked(recordings, source):
            if name in self.policies:
                continue
            own = None if drafting is None else drafting.for_decoding(recordings)
            self.policies[name], self.sources[name] = policy, own
            self.logs.append(
                next(replay_many(self.trace, [(name, policy)])) if own is None
                else replay_source(
                    self.whole, own, policy, recordings=recordings, name=name, requests=self.chosen
                )
            )  # fmt: skip
        sources = [None if s is None else describe_source(s) for s in self.sources.values()]
        self.conditions = {"sources": sources}

    def _asked(
        self, recordings: Recordings, source: str | None
    ) -> Iterator[tuple[tuple[str, DraftPolicy], Source | None]]:
        """Yield each policy with its source: plain decoding, then the policies and systems named.

        Where a source has no policies named for it, these are `SOURCE_ARMS` and the one predicted
        fastest.
        """
        from simulator.chosen import load_policies
        from simulator.predict import load_source_policies, load_system, split_systems
        from simulator.recording import load_source
        from simulator.whatif.ranking import predicted_fastest, with_fastest
        from traces.sources.replay import replay_source

        trace = self.whole
        texts, systems = split_systems(self.given.policy)
        drafting = load_source(source)
        if drafting is not None and systems:
            raise DraftsimError(f"{systems[0]!r} has a draft source of its own: drop --source")
        yield from ((plain, None) for plain in load_policies([PLAIN], trace))
        if drafting is not None:
            named = load_source_policies(texts or SOURCE_ARMS, drafting, trace, recordings, note)
            if not texts:
                held = drafting.held(recordings)
                named = [n for n in named if set(n[1].reads) <= held]
                own = drafting.for_decoding(recordings)
                longest = drafting.longest(trace, recordings)
                best = predicted_fastest(
                    self.latency, load_policies(None, trace, signals=held, max_gamma=longest),
                    longest,
                    lambda some: [
                        replay_source(
                            trace, own, p, recordings=recordings, name=n, requests=self.chosen
                        )
                        for n, p in some
                    ],
                )  # fmt: skip
                named = with_fastest(named, best, note)
            yield from ((n, drafting) for n in named if n[0] != PLAIN)
        elif texts:
            with_model = load_policies(texts, trace, say=note)
            yield from ((c, None) for c in with_model if c[0] != PLAIN)
        for system in systems:
            own, arm = load_system(system, trace, recordings)
            yield arm, own

    def load(self) -> None:
        """Load the models, and what drafts; a source without a real decoder is refused."""
        from commands.profile.sources import load_drafters, modules_of
        from profiler.checks.spot_check import DraftModel
        from profiler.sources.run import SourceRunner

        super().load()
        drafters = load_drafters(self.pair, self.sources.values())
        self.modules = {**modules_of(self.pair, self.info, self.given.run), **drafters}
        own = DraftModel(self.pair, self.whole)
        real = SourceRunner(self.pair.target, self.whole, self.modules)
        for source in self.sources.values():
            if source is not None:
                real.decoder(source, 0)  # one without a real decoder is refused before any run

        def opened(arm: Arm, request: int, repeat: int, rule: VerifyRule | None) -> Any:
            source = self.sources[arm.name]
            if source is None:
                return own(arm, request, repeat, rule)
            return real.decoder(source, request)

        self._openers: dict[str, Any] = {"model": own, "opened": opened}

    def decode(self, kept: Checkpoint, advance: Callable[[], None]) -> Measured:
        """Decode with the draft model, or with the source that drafts."""
        from profiler.checks.spot_check import Arm, run_arms

        return run_arms(
            self.pair, self.whole, [Arm(*own) for own in self.policies.items()],
            requests=self.chosen, repeats=self.given.repeats, advance=advance, kept=kept,
            **self._openers,
        )  # fmt: skip

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Compare rounds and texts, and name the source."""
        rows = super().compared(rows, measured, progress)
        return rows.assign(source=rows["policy"].map({log.policy: log.source for log in self.logs}))
