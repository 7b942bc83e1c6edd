"""The one flow of checks that decode for real: read, choose, predict, run, compare, keep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import pandas as pd
import typer

from commands.common import options
from commands.common.output import JsonOption, OutOption, note, remark, say_undrawn
from commands.common.progress import progress_bar, working
from commands.common.quiet import AGAIN, say_machine, with_machine
from commands.profile.sources import timed_layers, with_sources
from policies.registry import PLAIN
from policies.rules.base import VerifyRule
from profiler.prompts import chosen_of
from profiler.recording.run import read_info
from simulator.chosen import one_rule
from simulator.predict import split_systems
from simulator.pricing import price
from simulator.validation import compare
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.sources.base import Source
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import MeasuredRuns, write_measured
from traces.store.files import CHECKED, read_latency, read_trace, write_latency

if TYPE_CHECKING:
    from profiler.checks.spot_check import Measured, PlannedPolicy
    from profiler.models.loading import Pair
    from profiler.sources.exits import Modules
    from profiler.sources.run import SourceRunner

REMEDY = "predict from latencies measured between the runs, with --remeasure"
SWEEPS, FEWEST = 15, 3
"""Latency sweeps spread over the real runs, where they are cheap, and where one takes minutes."""


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The options of every check that runs something."""

    run: Annotated[Path, typer.Option(metavar="RUN", help="Run folder of `draftsim profile`.")]
    policy: Annotated[
        list[str] | None, options.policy_option("a few, and those that are predicted fastest")
    ] = None
    repeats: Annotated[int, typer.Option(min=1, help="Real runs of every policy and prompt.")] = 3
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None
    out: OutOption = None
    json: JsonOption = None


@dataclass(frozen=True, kw_only=True)
class CheckedPair(CheckedRun):
    """The options of every check that decodes with the pair of a run folder."""

    trust_remote_code: options.TrustOption = False

    def methods(self, verify: str | None = None) -> tuple[Sequence[str] | None, str | None, bool]:
        """Return the policies, their rule, and True if some have a draft source of their own."""
        policies, rule = one_rule(self.policy, verify, remark)
        return policies, rule, bool(split_systems(policies)[1])


class RealRuns:
    """A check: policies that are decoded for real, and what is predicted of them.

    The constructor reads the run folder and refuses what cannot be run, before a model is loaded.
    A kind chooses the policies there, and its methods decode and compare.  `rows` goes through it
    all.  ``sampled`` runs decode the sampled trace, ``forced`` ones take drafts and verdicts from
    the trace.
    """

    name: ClassVar[str]
    """Beginning of the name of the run folder's file of measured times."""
    remedy: ClassVar[str] = AGAIN
    """Advice where the machine was another one during the runs than during the profile."""
    draft_model: ClassVar[bool] = False
    """True if a pair's draft model drafts in every run."""

    pair: Pair
    policies: dict[str, Any]
    """Policies to decode, by name; plain decoding is among them."""
    logs: list[RoundLog]
    """The replays of these policies."""
    conditions: Mapping[str, Any]
    """Further conditions under which the runs of a stopped check belong to this one."""
    rule: VerifyRule | None = None
    """The lossy rule that verifies all drafts."""
    as_decoded = False
    """True if the rounds really decoded are priced, not the replayed ones: the texts are others."""
    modules: Modules | None = None
    """Trained modules whose cells are measured again, too."""
    sources: Mapping[str, Source | None] = {}
    """By policy the source that drafts under it; None, or no entry: the draft model."""
    drafters: SourceRunner | None = None
    """Makes the decoders of these sources."""

    def __init__(self, given: CheckedPair, sampled: bool = False, forced: bool = False) -> None:
        self.given, self.forced = given, forced
        # `draftsim report` reads the times of greedy runs: no others may replace them.
        self.file = f"{self.name}{'-sampled' * sampled}{'-forced' * forced}.parquet"
        self.info = read_info(given.run, given.trust_remote_code)
        self.whole = read_trace(given.run / ("sampled.parquet" if sampled else "trace.parquet"))
        self.latency = read_latency(given.run / "latency.parquet")
        times = Counter(request.id for request in self.whole.requests)
        if again := [name for name, count in times.items() if count > 1]:
            raise DraftsimError(
                f"the trace has {len(again)} ids more than once, as {again[0]!r}, and measured "
                "times are filed by them: record prompts with ids of their own"
            )
        self.chosen: Sequence[int] = range(len(self.whole.requests))
        self.trace = self.whole
        if given.limit is not None:
            every = self.whole.requests
            ids = {r.id for r in chosen_of(every, "the recording", given.limit, ())}
            self.chosen = [i for i, request in enumerate(every) if request.id in ids]
            self.trace = self.whole.select(self.chosen)
        # Sampled texts are drawn again, and may be longer.
        if not sampled and all(r.tokens <= self.trace.first for r in self.trace.requests):
            raise DraftsimError(
                f"the outputs of {given.run} are too short for a round: there is nothing to "
                "predict; record longer ones"
            )

    @property
    def total(self) -> int:
        """Runs of a policy over a request that are counted as progress."""
        return self.given.repeats * len(self.chosen) * len(self.policies)

    def load(self) -> None:
        """Load the models."""
        self.pair = self.info.load()

    @property
    def planned(self) -> list[PlannedPolicy]:
        """The policies with their rule, which plain decoding needs none of, and their source."""
        from profiler.checks.spot_check import PlannedPolicy

        return [
            PlannedPolicy(n, own, None if n == PLAIN else self.rule, self.sources.get(n))
            for n, own in self.policies.items()
        ]

    def decode(self, kept: Checkpoint, advance: Callable[[], None]) -> Measured:
        """Decode for real, one request at a time; `kept` holds the runs of an earlier call."""
        from profiler.checks.spot_check import run_requests

        return run_requests(
            self.pair, self.whole, self.planned, requests=self.chosen, forced=self.forced,
            repeats=self.given.repeats, advance=advance, kept=kept, drafters=self.drafters,
        )  # fmt: skip

    def outputs(self, measured: Measured) -> dict[str, list[list[int]]]:
        """Return the texts that are compared with the recorded ones, by policy."""
        return dict(measured.outputs)

    def times(self, measured: Measured) -> pd.DataFrame:
        """Return the measured times that are compared: those of texts that did not diverge."""
        from profiler.checks.differences import Texts

        learners = [n for n, p in self.policies.items() if p.learns_across_requests]
        self.texts = Texts(
            self.trace, self.outputs(measured), str(self.pair.meta["dtype"]), learners
        )
        times = self.texts.times(measured.times)
        # The first request that is left may have been run in another order.
        order = {name: n for n, name in enumerate(self.policies)}
        return times.sort_values(
            "policy", key=lambda names: names.map(order), kind="stable", ignore_index=True
        )

    def predicted(self, measured: Measured, latency: LatencyTable) -> Any:
        """Return the predictions that times are compared with."""
        logs = [measured.logs[p.label] for p in self.planned] if self.as_decoded else self.logs
        return [price(log, latency) for log in logs]

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Return `rows` with what their rounds and texts did."""
        del progress
        replayed = {log.policy: log for log in self.logs}
        return self.texts.compared(rows, measured.logs, replayed, self.draft_model)

    def rows(self, remeasure: bool = False) -> pd.DataFrame:
        """Run, predict and compare; the measured times are kept in the run folder.

        The columns are those of `simulator.validation.compare`, and what the kind adds.  With
        `remeasure` the rows are predicted from latencies measured again, between the real runs
        (`Remeasured`).
        """
        from profiler.checks.interleaved import check_options, unfinished

        run = self.given.run
        # A table that cannot price them is refused before any run.
        self.expected = [price(log, self.latency) for log in self.logs]
        self.load()
        work = check_options(
            self.pair, self.trace, self.logs, self.given.repeats, remeasure=remeasure,
            **self.conditions,
        )  # fmt: skip
        with unfinished(run, work, self.total, note, len(self.policies)) as kept:
            again = None
            if remeasure:
                once_s = sum(p.total_s + float(p.prefill_s.sum()) for p in self.expected)
                again = Remeasured(self, self.given.repeats * once_s, kept)
            with progress_bar() as progress:
                task = progress.add_task("decoding for real", total=self.total)

                def advance() -> None:
                    progress.advance(task)
                    if again is not None:
                        again.advance()

                measured = self.decode(kept, advance)
                times = self.times(measured)
                if again is not None:
                    task = progress.add_task("measuring the host's work", total=None)
                    rows = again.compare(partial(self.predicted, measured), times)
                    progress.update(task, total=1, completed=1)
                else:
                    rows = compare(self.predicted(measured, self.latency), times)
                rows = with_machine(rows, self.latency, measured.machine)
                rows = self.compared(rows, measured, progress)
            say_machine(self.latency, measured.machine, None if remeasure else self.remedy)
            if self.as_decoded and not self.trace.sampling.greedy:
                remark(
                    "every policy draws texts of its own, so the seconds of two rows are of texts "
                    "of different lengths: compare their errors"
                )
            if not remeasure:
                say_undrawn(self.latency, self.trace.sampling)
            meta = {**self.pair.meta, "machine": dict(measured.machine)}
            write_measured(MeasuredRuns(times, meta), run / self.file)
        return rows


class Remeasured:
    """Sweeps over the latencies of a pair: the first at once, the others block by block.

    Those come between the real runs of `check`, as many as are to be had for half of the
    `expected_s` that these take.  Whole sweeps are `kept` with the real runs, so that a stopped
    check goes on with both.
    """

    def __init__(self, check: RealRuns, expected_s: float, kept: Checkpoint) -> None:
        from profiler.latency.table import Grid, sizes_of
        from profiler.profile import LatencyProfile
        from profiler.sources.run import SourceLatency

        self._latency, self._run = check.latency, check.given.run
        self._greedy = check.trace.sampling.greedy
        pair, trace, modules = check.pair, check.trace, check.modules
        passes = kept.within("passes")
        grid = Grid() if trace.max_gamma is None else Grid().drafting(trace.max_gamma)
        grid = grid.beginning(min(r.prompt_length for r in trace.requests))
        grid = grid.covering(*sizes_of(trace.requests))
        if modules is None:  # only the draft model drafts
            grid = grid.narrow()
        self._profile = LatencyProfile(pair, grid, passes)
        self._sources = None
        if modules is not None:
            layers = timed_layers(pair, trace.longest, modules)
            own = kept.within("sources")
            self._sources = SourceLatency(layers, modules, trace, checkpoint=own)
        self._total, self._done = check.total, 0
        if (planned := passes.get("planned")) is None:
            began = time.perf_counter()
            blocks, what = len(self._profile.sweeps.blocks), "measuring latencies before the runs"
            with working(what) as say:
                for done in range(1, blocks + 1):
                    self._sweep_until(done / blocks)
                    say(what, done, blocks)
            fit = int(0.5 * expected_s / (time.perf_counter() - began))
            planned = {"sweeps": np.array(min(max(fit, FEWEST), SWEEPS))}
            passes.put("planned", planned)
        self._sweeps = int(planned["sweeps"])

    def advance(self) -> None:
        """Note that a step of real work is done; perhaps some blocks of a sweep are due.

        Sweeps are cut into their blocks, so that passes are timed at as many moments as runs are:
        where the machine is slow for seconds, whole sweeps would miss it.
        """
        self._done += 1
        self._sweep_until(self._sweeps * self._done / self._total)

    def _sweep_until(self, share: float) -> None:
        """Time the next blocks until `share` sweeps are done; a part of one counts."""
        while self._profile.sweeps.steps < int(share * len(self._profile.sweeps.blocks)):
            self._profile.step()
        if self._sources is not None:
            self._sources.advance(share)

    def compare(
        self, predicted: Callable[[LatencyTable], Any], times: pd.DataFrame
    ) -> pd.DataFrame:
        """Return the rows of `simulator.validation.compare` from these latencies.

        They are kept in the run folder.  ``profile_error`` and ``profile_speedup_error`` are the
        errors with its other latencies.
        """
        lossless = self._sources is None and self._greedy
        now = self._profile.table(passes_alone=lossless)
        if self._sources is not None:
            now = with_sources(now, self._sources.cells())
        rows = compare(predicted(now), times)
        write_latency(now, self._run / CHECKED)
        before = compare(predicted(self._latency), times)
        return rows.assign(
            profile_error=before["error"], profile_speedup_error=before["speedup_error"]
        )


def as_recorded(texts: Sequence[str], trace: Trace) -> list[str]:
    """Return those of the default `texts` whose fixed length the trace was recorded for."""
    longest = trace.max_gamma or 0
    fixed = {text: text.removeprefix("fixed:gamma=") for text in texts}
    beyond = [t for t, gamma in fixed.items() if gamma.isdigit() and int(gamma) > longest]
    if beyond:
        note(
            f"left out: {', '.join(beyond)}; drafts of up to {counted(longest, 'token')} were "
            "recorded"
        )
    return [text for text in texts if text not in beyond]
