"""Many scenarios in one go: batch sizes or loads against policies, rows as they finish.

`predict_groups` predicts what `profiler.checks.spot_check` measures: a recording's own requests,
decoded in order in static batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.batch.base import Policy
from policies.from_file import digestible
from policies.lengths.basic import Autoregressive
from policies.rules.base import VerifyRule
from simulator.executors import Executor, Local
from simulator.serving.arrivals import ArrivalFile, Arrivals, AtRate, ClosedLoop, Job, arrivals_of
from simulator.serving.outcome.metrics import compared
from simulator.serving.outcome.report import Run, joined_runs, merged_rows
from simulator.serving.outcome.results import ResultsFile, restored
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.run import check_mode, simulate
from simulator.serving.scenario import FILLS, Scenario
from simulator.serving.scheduler import Limits
from traces.acceptance.trace import Trace
from traces.aliases import Say, silent
from traces.digits import counted
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

MANY = 20_000
"""Requests from which on replicas that know nothing of each other are run apart."""
USUAL = 1000
"""Requests of a run, if the user gives no number."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Served where no load is named and passes are taken to cost the same at every batch."""
A_PART = 100_000
"""Requests of a part, about: every part goes through the arrivals of all."""
RunsDone = Callable[[int, int, str], None]
"""Called with the runs finished, their total, and what was just finished."""


def _ignored(count: int) -> None:
    """Do nothing.  A named function, because worker processes import it."""


class ServingPart(NamedTuple):
    """One replication of one scenario under one policy, or some replicas of it."""

    scenario: int
    policy: str
    replication: int = 0
    only: tuple[int, ...] | None = None
    """Replicas; None: the whole fleet."""
    drawn: bool = False
    """True if the timeline is of this one."""


@dataclass(frozen=True, eq=False)
class ServingRunner:
    """Everything that the parts of a study of serving need."""

    trace: Trace
    latency: LatencyTable
    policies: Mapping[str, Policy]
    scenarios: Sequence[Scenario]
    rule: VerifyRule | None = None
    advance: Callable[[int], None] = _ignored
    """Called with the number of requests that have just left; cannot follow to another process."""
    timeline: Timeline | None = None

    def run(self, part: ServingPart) -> Run:
        """Return what `simulator.serving.run.simulate` returns, and raise what it raises."""
        return simulate(
            self.trace, self.latency, self.policies[part.policy], self.scenarios[part.scenario],
            name=part.policy, rule=self.rule, replication=part.replication, only=part.only,
            timeline=self.timeline if part.drawn else None, advance=self.advance,
        )  # fmt: skip

    def parts(self, scenario: int, policy: str, drawn: bool = False) -> list[ServingPart]:
        """Return the parts of every replication of a scenario under a policy, in order.

        They depend on the scenario alone, never on who runs them.
        """
        chosen = self.scenarios[scenario]
        shares = shares_of(chosen)
        return [
            ServingPart(scenario, policy, replication, only, drawn and replication == 0)
            for replication in range(chosen.replications) for only in shares
        ]  # fmt: skip

    def key(self) -> str | None:
        """Return a digest of all that the results depend on; None if that cannot be taken."""
        import joblib

        content: list[Any] = [
            dict(self.trace.columns), [asdict(r) for r in self.trace.requests],
            dict(self.trace.meta), self.trace.max_gamma, self.latency.cells.to_dict("list"),
            dict(self.latency.meta), digestible(self.policies), self.rule,
            # A file of arrivals holds its rows once anybody asked for the rate.
            [(s.rate, s) for s in self.scenarios],
        ]  # fmt: skip
        try:
            return str(joblib.hash(content))
        except Exception:  # a policy of one's own may hold anything
            return None


def shares_of(scenario: Scenario) -> list[tuple[int, ...] | None]:
    """Return groups of replicas to run together; [None] if the whole fleet must run as one."""
    if not scenario.splits or scenario.count < MANY:
        return [None]
    count = min(max(math.ceil(scenario.count / A_PART), 4), scenario.replicas)
    ends = [i * scenario.replicas // count for i in range(count + 1)]
    return [tuple(range(a, b)) for a, b in pairwise(ends)]


def over_batches(base: Scenario, batches: Sequence[int]) -> list[Scenario]:
    """Return `base` at each batch size, with that many requests kept in every engine."""
    loop = base.arrivals if isinstance(base.arrivals, ClosedLoop) else ClosedLoop(1)
    return [
        replace(
            base, arrivals=replace(loop, concurrency=b * base.replicas),
            limits=replace(base.limits, max_batch=b),
        )
        for b in batches
    ]  # fmt: skip


def over_rates(base: Scenario, rates: Sequence[float]) -> list[Scenario]:
    """Return `base` at each offered load, in requests per second.

    A file's times are scaled to that mean rate; other arrivals change their own.

    Raises
    ------
    DraftsimError
        If the arrivals have no rate to change, as in a closed loop.
    """
    arrivals = base.arrivals
    if isinstance(arrivals, ArrivalFile):
        # Requests that all come at once have no rate of their own.
        own = base.rate or arrivals.rate_of(None)
        if own is None:
            raise DraftsimError(
                f"arrivals file {arrivals.path} spans no time: its rate cannot be scaled"
            )
        return [replace(base, arrivals=arrivals.scaled(rate / own)) for rate in rates]
    if isinstance(arrivals, AtRate):
        return [replace(base, arrivals=replace(arrivals, per_second=rate)) for rate in rates]
    raise DraftsimError("a closed loop has no rate to sweep: give open arrivals")


def over_loads(
    base: Scenario, latency: LatencyTable, *, concurrency: Sequence[int] | None = None,
    rate: Sequence[float] | None = None, arrivals: str | Path | None = None,
    process: str | None = None, scale: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None, say: Callable[[str], None] = lambda _: None,
) -> list[Scenario]:  # fmt: skip
    """Return `base` at each load that is named, by default at the batch sizes of `latency`.

    Parameters
    ----------
    base:
        Without a number of requests it gets the whole file, or else `USUAL`, and `FILLS` for each
        that runs at a time.
    concurrency:
        Batch sizes, each kept full.
    rate, arrivals:
        Requests per second, or a file of requests, at its own pace or at each `rate`.
    process:
        Gaps between arrivals at a rate (`arrivals_of`).
    scale:
        Factors that speed the file up.
    sizes:
        ``prompt`` and ``output`` tokens of every request, where they are not the recorded ones.
    say:
        Told which loads have fewer requests than the file, or too few to fill them.

    Raises DraftsimError if the loads contradict each other or the mode, or hold an impossible
    value.
    """
    if concurrency is not None and (rate is not None or arrivals is not None):
        raise DraftsimError(
            "batch sizes (--batch) keep the engine full: drop them, or --rate and --arrivals"
        )
    for name, given in (("concurrency", concurrency), ("rate", rate)):
        if given is not None and not len(given):
            raise DraftsimError(f"{name} is empty: give at least one number")
    if any(given is not None for given in (rate, arrivals, process, scale)):
        offered = arrivals_of(
            None if rate is None else 1.0, arrivals, process, scaled=scale is not None
        )
        if isinstance(offered, ArrivalFile):
            base = replace(base, arrivals=offered)
        else:
            base = replace(
                base, arrivals=replace(offered, **(sizes or {})), requests=base.requests or USUAL
            )
        if rate is not None:
            found = over_rates(base, rate)
        else:
            assert isinstance(offered, ArrivalFile)
            found = [replace(base, arrivals=offered.scaled(by)) for by in scale or (1.0,)]
    else:
        usual = BATCHES if latency.batch_free else latency.usual_batches
        batches = concurrency or ((1,) if base.one_stream else usual)
        if base.one_stream and list(batches) != [1]:
            raise DraftsimError(
                f"--mode {base.mode} serves one stream at a time: give --batch 1, --rate or "
                "--arrivals"
            )
        enough = max(USUAL, FILLS * max(batches) * base.replicas)
        loop = ClosedLoop(1, **(sizes or {}))
        base = replace(base, arrivals=loop, requests=base.requests or enough)
        found = over_batches(base, batches)
    for scenario in found:
        scenario.check_clock()  # before remarks on what is refused then
    for line in shortfalls(found):
        say(line)
    return found


def shortfalls(scenarios: Sequence[Scenario]) -> list[str]:
    """Return lines on loads whose requests are fewer than the file's, or too few to fill them."""
    said = []
    file, count = scenarios[0].arrivals, scenarios[0].count
    if isinstance(file, ArrivalFile) and count < (there := len(file.read.output)):
        said.append(f"{file.path}: the first {count:,} of {there:,} requests (--requests)")
    most = max(s.arrivals.concurrency or 1 for s in scenarios)
    if most > 1 and 2 * count < FILLS * most:
        never = "never fill" if count <= most else "are few to fill"
        said.append(
            f"{count:,} requests {never} {most:,} at a time: give --requests {FILLS * most} or more"
        )
    return said


def limits_met(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on rows with overload, with refused requests, and with pre-empted ones."""
    said = []
    loads: dict[str, set[float]] = {}
    for row in rows:
        if row["overloaded"]:
            loads.setdefault(row["policy"], set()).add(row["rate"])
    if loads:
        most = max(row["batch"] for row in rows if row["overloaded"])
        said.append(
            "overloaded, latencies grow with --requests: "
            + "; ".join(
                f"{policy} at {', '.join(f'{rate:.4g}' for rate in sorted(rates))}/s"
                for policy, rates in loads.items()
            )
            + f" (an engine runs at most {counted(most, 'request')} at a time: --max-batch)"
        )
    if rejected := sum(row["rejected"] for row in rows):
        said.append(
            f"{counted(rejected, 'request')} too large for the KV cache or the token budget: "
            "refused"
        )
    if preempted := sum(row["preemptions"] for row in rows):
        said.append(
            f"KV blocks ran out {counted(preempted, 'time')}: a request was pre-empted and "
            "computed again"
        )
    return said


def sweep(
    trace: Trace, latency: LatencyTable, policies: Mapping[str, Policy],
    scenarios: Sequence[Scenario], rule: VerifyRule | None = None, *,
    path: str | Path | None = None, meta: Mapping[str, Any] | None = None, finishes: bool = True,
    progress: RunsDone = silent, advance: Callable[[int], None] = lambda _: None,
    timeline: Timeline | None = None, rows: list[dict[str, Any]] | None = None,
    executor: Executor | None = None, say: Say = silent,
) -> list[dict[str, Any]]:  # fmt: skip
    """Serve every scenario under every policy; returns one row per pair.

    With `path`, each row is written as soon as it is finished, after a header with `meta`
    (see `ResultsFile`, also for `finishes`); rows that an unfinished file of the same question
    holds are not computed again.  `executor` runs the parts; None runs them here.  `advance` is
    called with the number of requests that have just left here, or of a part that ran elsewhere.
    `timeline` records the first scenario under the first policy that is not plain decoding,
    here.  Rows go to the list `rows` where one is given, so that an interrupted caller still
    has them.  `say` is told of damaged rows in the file.

    A row's ``speedup`` and ``latency_ratio`` compare it with no speculation in the same scenario
    (`compared_with`); both are NaN if no policy before it, nor itself, decodes plainly.

    Raises
    ------
    DraftsimError
        If a mode does not fit a policy, before anything is written; if a part fails, or parts were
        lost with their workers: the rows so far are kept.
    """
    for scenario in scenarios:
        for policy in policies.values():
            check_mode(trace, latency, policy, scenario, rule)
    rows = [] if rows is None else rows
    plain = {name for name, policy in policies.items() if type(policy) is Autoregressive}
    here = executor is None
    runner = ServingRunner(
        trace, latency, policies, scenarios, rule, advance if here else _ignored,
        timeline if here else None,
    )  # fmt: skip
    pairs = [(at, name) for at in range(len(scenarios)) for name in policies]
    # What is drawn is served again: the file of rows does not hold it.
    first = next((n for n, (_, name) in enumerate(pairs) if name not in plain), 0)
    drawn = {first} if timeline is not None else set()
    key = runner.key() if path is not None else None
    file = None
    if path is not None:
        file = ResultsFile(path, meta, key=key, say=say, finishes=finishes)
    with file or nullcontext():
        found = {n: restored(row) for n, row in (file.kept if file is not None else {}).items()}
        rows[:] = found.values()
        if rows:
            progress(len(rows), len(pairs), rows[-1]["policy"])
        missing = [n for n in range(len(pairs)) if n not in found or n in drawn]
        groups = [runner.parts(*pairs[n], n in drawn) for n in missing]
        for n, runs in zip(missing, _gathered(runner, groups, executor, advance), strict=True):
            at, name = pairs[n]
            row = merged_rows([run.row() for run in runs])
            before = [found[i] for i in range(at * len(policies), n) if i in found]
            rival = next((r for r in [*before, row] if r["policy"] in plain), None)
            row |= compared_with(rival, row)
            found[n] = row
            if file is not None and n not in file.kept:
                file.add(row, n)
            rows[:] = [found[i] for i in sorted(found)]
            progress(len(rows), len(pairs), name)
    return rows


def _gathered(
    runner: ServingRunner, groups: Sequence[Sequence[ServingPart]], executor: Executor | None,
    advance: Callable[[int], None],
) -> Iterator[list[Run]]:  # fmt: skip
    """Yield the runs of each group, a run a replication, in the order of the groups."""
    parts = [part for group in groups for part in group]
    owner = [i for i, group in enumerate(groups) for _ in group]
    found: list[dict[int, Run]] = [{} for _ in groups]
    at_group = 0
    for place, run in (executor or Local(1)).run(runner, parts):
        if executor is not None:
            advance(run.recorder.arrived)
        found[owner[place]][place] = run
        while at_group < len(groups) and len(found[at_group]) == len(groups[at_group]):
            by_replication: dict[int, list[Run]] = {}
            for part, at in zip(groups[at_group], sorted(found[at_group]), strict=True):
                by_replication.setdefault(part.replication, []).append(found[at_group][at])
            found[at_group].clear()
            at_group += 1
            yield [joined_runs(runs) for runs in by_replication.values()]


def compared_with(plain: Mapping[str, Any] | None, row: Mapping[str, Any]) -> dict[str, float]:
    """Return how a row compares with no speculation in the same scenario, `plain`.

    ``speedup`` is the ratio of output tokens per second, above 1 where the policy is faster.  Under
    arrivals that both keep up with it is about 1.  ``latency_ratio`` is the ratio of the mean
    end-to-end latencies, below 1 where the policy is faster.
    """
    nan = float("nan")
    if plain is None:
        return {"speedup": nan, "latency_ratio": nan}
    rate, latency_s = plain["throughput_tok_s"], plain["e2e_s"]["mean"]
    return {
        "speedup": float(row["throughput_tok_s"] / rate) if rate else nan,
        "latency_ratio": float(row["e2e_s"]["mean"] / latency_s) if latency_s else nan,
    }


def break_even_load(
    loads: npt.ArrayLike, policy_s: npt.ArrayLike, baseline_s: npt.ArrayLike
) -> float:
    """Return the load at which a policy's latency rises above plain decoding's.

    Linear between the swept loads (ascending); NaN if it is slower from the first load on, nowhere
    faster, or a latency is not known; infinity if it is faster up to the last.
    """
    x = np.asarray(loads, dtype=float)
    gap = np.asarray(policy_s, dtype=float) - np.asarray(baseline_s, dtype=float)
    if np.isnan(gap).any() or not (gap < 0).any() or gap[0] > 0:
        return float("nan")
    above = np.flatnonzero(gap > 0)
    if not len(above):
        return float("inf")
    i = int(above[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * -gap[i - 1] / (gap[i] - gap[i - 1]))


def against_measured(
    trace: Trace, latency: LatencyTable, policies: Mapping[str, Any],
    scenarios: Sequence[Scenario], rule: VerifyRule | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return predicted and measured statistics of a file's requests, a row for each of a policy.

    Empty if there is no file of measured requests at its own pace.  All requests count, those of
    the warm-up too.
    """
    found = []
    for scenario in scenarios:
        file = scenario.arrivals
        if not isinstance(file, ArrivalFile) or not file.read.measured or file.scale != 1:
            continue
        once = replace(scenario, warmup=0.0, replications=1)
        for name, policy in policies.items():
            run = simulate(trace, latency, policy, once, name=name, rule=rule)
            served = run.requests.sort_values("index")
            at = served["index"].to_numpy()
            theirs = {metric: values[at] for metric, values in file.read.measured.items()}
            ours = {metric: served[metric].to_numpy(float) for metric in theirs}
            # One token has no time per output token.
            several = served["tokens"].to_numpy() > 1
            for part in (ours, theirs):
                part["tpot_s"] = part["tpot_s"][several]
            found += [{"policy": name, **row} for row in compared(ours, theirs)]
    return found


class InOrder(Arrivals):
    """Every recorded request once, in the order of the trace, all there from the start."""

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Return zero for every request."""
        del rng
        return repeat(0.0)

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        """Yield one job per recorded request."""
        del rng
        for i, info in enumerate(trace.requests[:requests]):
            yield Job(0.0, i, max(info.prompt_length, 1), info.tokens, i)


def predict_groups(
    trace: Trace,
    latency: LatencyTable,
    policies: Mapping[str, Policy],
    batches: Sequence[int],
    *,
    passes: Literal["ragged", "padded"] = "padded",
) -> tuple[pd.DataFrame, dict[tuple[str, int], pd.DataFrame]]:
    """Predict the decode seconds of every group, and what each request goes through.

    A group is `batch` consecutive requests, decoded together until the slowest has ended.  Its
    seconds begin at the end of its prefill.

    Returns
    -------
    groups, requests:
        ``groups`` has a row per policy, batch and group with the columns policy, verify,
        batch, request (id of the group's first), predicted_s and rounds (iterations).
        ``requests``, by (policy, batch), has a row per request of the trace with rounds,
        drafted, accepted, draft_forwards and extrapolated passes in ``attrs``.

    Raises DraftsimError if mode and policy do not fit, or the latency table lacks a model that must
    run.
    """
    rows = []
    details = {}
    count = len(trace.requests)
    for batch in batches:
        scenario = Scenario(
            InOrder(), Limits(max_batch=batch, token_budget=1 << 30), count, "static",
            passes=passes, warmup=0.0,
        )  # fmt: skip
        for name, policy in policies.items():
            run = simulate(trace, latency, policy, scenario, name=name)
            frame = run.requests.sort_values("index", ignore_index=True)
            frame.attrs["extrapolated"] = run.row()["extrapolated"]
            details[name, batch] = frame
            for start in range(0, count, batch):
                group = frame.iloc[start : start + batch]
                seconds = float(group["finish_s"].max() - group["first_s"].min())
                first = trace.requests[start].id
                rounds = int(group["rounds"].max())
                rows.append((name, run.verify, batch, first, seconds, rounds))
    columns = ["policy", "verify", "batch", "request", "predicted_s", "rounds"]
    return pd.DataFrame(rows, columns=columns), details
