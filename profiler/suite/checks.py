"""Policies that the suite runs, and a recorded pair decoded under them against replay.

Each drafter on the target's features makes a pair with the target: a recording of its own, with
what it drafts from every start instead of the draft model's drafts
(`traces.sources.as_draft`), its passes in the target's table, and real runs next to plain
ones.  Code that reads a pair's recording reads these, too.  They are launched kernel by kernel: no
engine's drafter is, so their c is the eager one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from policies.core import own_copy
from policies.registry import parse_policy
from profiler.checks.differences import explain, rounds_differ
from profiler.checks.spot_check import PlannedPolicy, run_requests
from profiler.features.checkpoint import read_drafter
from profiler.features.drafters import FeatureDrafter
from profiler.models.loading import Pair
from profiler.models.stack import LayerRunner
from profiler.recording.run import model_path
from profiler.sources.latency import measure_drafters
from profiler.sources.run import SourceRunner, record_sources
from profiler.sources.start_record import RecordOptions
from profiler.suite import EAGER, GRAPH
from profiler.suite.environment import Workplace, write_within
from profiler.suite.pair import rows_of_cells, runner_of_mode
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable, as_cells
from traces.replay.run import replay
from traces.sources.as_draft import drafted_trace, with_drafter
from traces.sources.starts.parallel import Eagle as EagleSource
from traces.store.engine_runs import MEASURED_COLUMNS
from traces.store.files import read_trace

NAME = "trained-12+3"
"""Name of the pair that the suite trains."""
TRAINED_MODES = (EAGER, GRAPH)
"""Modes of real decoding: it tests verdicts, which compiled passes do not change."""

POLICIES = (
    "autoregressive", "fixed:gamma=4", "fixed:gamma=2", "fixed:gamma=8", "confidence",
    "hf-heuristic", "gammatune", "gammatune-plus", "cm-asd", "svip", "adaedl",
    "draft-and-verify", "oracle",
)  # fmt: skip
"""Plain decoding, fixed lengths as control, and the policies of the papers."""
MORE_POLICIES = (
    "specdec-pp", "disco", "rate-optimal", "ucb", "exp3", "bild",
    "confidence:roc_update=in_call", "hf-heuristic:full_accept_means=budget",
)  # fmt: skip
"""The other policies that decide for one sequence at a time, run if there is time for all.

Those for whole batches (`policies.batch.base.BatchPolicy`) are not among them: they choose one
length for all sequences of an engine, from its own costs, and are compared in served batches.
"""
QUICK_POLICIES = ("autoregressive", "fixed:gamma=3", "svip")
MORE_QUICK_POLICIES = ("ucb",)
"""The same in miniatures."""
DRAFTER_POLICIES = (
    "autoregressive", "fixed:gamma=4", "fixed:gamma=2", "fixed:gamma=8", "confidence",
    "hf-heuristic", "gammatune", "svip",
)  # fmt: skip
"""Policies that run with a drafter on the target's features."""
REPEATS = 3
"""Runs of a policy; miniatures, whose times are not used, have one."""
COLUMNS = ("pair", "mode", *MEASURED_COLUMNS)
"""Columns of the suite's measured runs."""

Drafters = Mapping[str, FeatureDrafter]
"""Drafters by the name of their folder."""


class Checks:
    """Real decoding of some recorded requests under every policy."""

    def __init__(self, place: Workplace, pair: Pair, trace: Trace, name: str = NAME) -> None:
        self.place, self.pair, self.name = place, pair, name
        # The first requests are of every category in turn.
        self.trace = trace.select(range(min(2 if place.quick else 7, len(trace.requests))))

    def run(self, mode: str, seconds: float, requests: int) -> dict[str, Any]:
        """Run every policy on the first `requests`, interleaved; see `compared`."""
        trace = self.trace.select(range(min(requests, len(self.trace.requests))))
        planned = planned_policies(trace, QUICK_POLICIES if self.place.quick else POLICIES)
        return self.compared(self.name, mode, planned, trace, seconds)

    def compared(
        self, name: str, mode: str, planned: Sequence[PlannedPolicy], recorded: Trace,
        seconds: float, drafted: Trace | None = None,
        drafters: SourceRunner | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Run `planned` on as many requests of `recorded` as `seconds` hold; compare with replay.

        ``name``: the pair's name in the rows.  If another source than the draft model drafts,
        ``drafted`` has the same requests with its drafts (`traces.sources.as_draft`), and
        ``drafters`` makes its decoders.

        Returns the measured ``times``, rows of `COLUMNS`, and the results of the comparison,
        ``checked``.

        Raises NoTimeError if there is no time to run every policy once.
        """
        place, until = self.place, time.monotonic() + seconds
        runs = run_requests(
            self.pair, recorded, planned, repeats=1 if place.quick else REPEATS,
            advance=place.check_time, in_time=lambda: time.monotonic() < until,
            runner=partial(runner_of_mode, mode), drafters=drafters,
        )  # fmt: skip
        # As many requests as the time held.
        some = range(len(runs.outputs[planned[0].label]))
        recorded = recorded.select(some)
        replayed = recorded if drafted is None else drafted.select(some)
        differ, causes = {}, []
        for run in planned:
            real = runs.logs[run.label]
            expected = replay(replayed, run.policy, name=run.name)
            differ[run.name] = [rounds_differ(real, expected), len(expected)]
            outputs = runs.outputs[run.label]
            causes += explain(real, expected, outputs, recorded, place.dtype, replayed)
        counts = {c: sum(d["cause"] == c for d in causes) for c in {d["cause"] for d in causes}}
        place.say(f"{name}, {mode}: {len(runs.times)} runs, differences {counts or 'none'}")
        checked = {"rounds_differ_of": differ, "causes": counts, "first_differences": causes}
        return {"times": run_rows(runs.times, name, mode), "checked": checked}


def planned_policies(trace: Trace, names: Sequence[str]) -> list[PlannedPolicy]:
    """Return a run per policy, its maximum lowered to what the trace holds."""
    made = {name: parse_policy(name, max_gamma=trace.max_gamma) for name in names}
    # The vocabulary is the recorded pair's: what is run here is what a replay predicts.
    return [
        PlannedPolicy(name, own_copy(policy, trace.vocab_size)) for name, policy in made.items()
    ]


def run_rows(times: pd.DataFrame, pair: str, mode: str) -> list[list[Any]]:
    """Return measured runs of a pair in a mode as rows of `COLUMNS`."""
    named = times.assign(pair=pair, mode=mode)[list(COLUMNS)]
    rows: list[list[Any]] = named.astype(object).to_numpy().tolist()
    return rows


def given_drafters(folders: Sequence[str], target: Any) -> Drafters:
    """Read the drafters in `folders`; DraftsimError if one is damaged, unusable or ambiguous."""
    found: dict[str, FeatureDrafter] = {}
    for text in folders:
        path = Path(model_path(text, "draft"))
        if path.name in found:
            raise DraftsimError(f"--drafters: two are called {path.name}: rename a folder")
        found[path.name] = read_drafter(path, target)
        if found[path.name].modules_in_turn > 1:
            raise DraftsimError(
                f"--drafters {text}: its modules run in turn, which no trace of a pair holds: "
                "record it with `draftsim profile sources --source`"
            )
    return found


class DrafterPair:
    """A target with a drafter on its features.

    ``name`` is the drafter's, ``base`` that of the target's pair.
    """

    def __init__(
        self, place: Workplace, pair: Pair, drafter: FeatureDrafter, name: str, base: str
    ) -> None:
        self.place, self.pair = place, pair
        self.source = EagleSource(name)
        self.pair_name = f"{base}+{name}"
        self.path = place.work / "trained-files" / f"trained-trace-{name}.parquet"
        self._modules = {self.source.key: drafter}

    def measure(
        self, trace: Trace, cells: Sequence[Sequence[Any]], seconds: float
    ) -> dict[str, Any]:
        """Record what it drafts along `trace`, and time its passes.

        As many requests as `seconds` hold, one at least, go into the file at `path`.  ``cells`` are
        the target's, which `with_own` will combine with those returned.

        Raises DraftsimError if there are none.
        """
        if not cells:
            raise DraftsimError("the latencies that it needs were not measured")
        begin = time.monotonic()
        made = self._recorded(trace.select([0]))
        each_s = time.monotonic() - begin
        if (count := int(min(len(trace.requests), seconds / each_s))) > 1:
            made = self._recorded(trace.select(range(count)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = write_within(made, self.path)
        self.place.say(f"{self.pair_name}: recorded {kept} of {len(trace.requests)} prompts")
        return {"trace": self.path.name, "requests": kept, "cells": self._timed()}

    def _recorded(self, trace: Trace) -> Trace:
        self.place.check_time()
        how, only = RecordOptions(offsets=8), [self.source.key]
        found = record_sources(self.pair.target, trace, self._modules, how, only=only)
        return drafted_trace(trace, self.source, found)

    def _timed(self) -> list[list[Any]]:
        place = self.place
        widths, contexts = ((1, 2), (16, 48)) if place.quick else ((1, 2, 3, 5, 9), (64, 384))
        repeats = 1 if place.quick else 5
        limit = int(self.pair.target.config.get_text_config().max_position_embeddings)
        target = LayerRunner(self.pair.target, min(limit, max(contexts) + max(widths)))
        place.check_time()
        return rows_of_cells(measure_drafters(target, self._modules, repeats, widths, contexts))

    def with_own(
        self, cells: Sequence[Sequence[Any]], own: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """Return the target's cells, launched kernel by kernel, with the drafter's `own`.

        The draft model's are left out.
        """
        table = LatencyTable(as_cells([*cells, *own]))
        return rows_of_cells(with_drafter(table, self.source.key).cells)

    def run(self, checks: Checks, seconds: float) -> dict[str, Any]:
        """Run policies with it on the requests of `checks`, interleaved, and compare the rounds."""
        drafted = read_trace(self.path)
        count = min(len(drafted.requests), len(checks.trace.requests))
        trace = checks.trace.select(range(count))
        names = QUICK_POLICIES if self.place.quick else DRAFTER_POLICIES
        runner = SourceRunner(self.pair.target, trace, self._modules)

        plain, *others = planned_policies(drafted, names)  # the first drafts nothing
        planned = [plain, *(replace(own, source=self.source) for own in others)]
        some = drafted.select(range(count))
        return checks.compared(self.pair_name, EAGER, planned, trace, seconds, some, runner)
