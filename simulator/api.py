"""The four questions as functions: `predict`, `serve`, `plan` and `sweep`.

`import draftsim` exports them.  Each takes recordings and policies by name or as objects, and
returns a result with a ``table`` (a DataFrame), ``best`` and ``plot()``; ``notes`` say what the
command of the same question would print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from policies.lengths.basic import Autoregressive
from policies.registry import PLAIN, is_bound
from simulator.arguments import Acceptance, axis, checked, listed, told_acceptance
from simulator.chosen import Policies
from simulator.recording import load_recording
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.store import recordings
from traces.store.recordings import Defaulted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulator.serving.scenario import Mode

DEFAULT_TRACE = Defaulted(recordings.DEFAULT_TRACE)
"""The default recording: its type tells that the caller named none."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """The policies of one recording ranked by speedup, one request at a time.

    Attributes
    ----------
    table:
        A row for plain decoding and one for each policy: `simulator.summary.SUMMARY_COLUMNS`, then
        ``note``, ``outside`` (share of passes outside the measured cells), ``unpriced``,
        ``mismatches_accepted``, and ``gain`` over the policy in ``against``, with its interval.
    best:
        The fastest policy with the target's own output, ``autoregressive`` if none is faster; None
        if the table holds lower bounds.
    notes:
        Remarks on what the prediction leaves out or assumes.
    prefill:
        True if prefill is counted.
    """

    table: pd.DataFrame
    best: str | None
    notes: tuple[str, ...] = ()
    prefill: bool = False

    def plot(self) -> Figure:
        """Return each policy's speedup with its interval, in a panel per category if several."""
        from simulator.plots.look import labelled
        from simulator.plots.recording import COUNTED, plot_categories, plot_speedup

        overall = self.table
        if "category" in overall:
            if overall["category"].nunique() > 1:
                parts = overall[overall["category"].notna()]
                return labelled(plot_categories(parts), COUNTED * self.prefill)
            overall = overall[overall["category"].isna()]
        return labelled(plot_speedup(overall), COUNTED * self.prefill)


@dataclass(frozen=True, eq=False)
class Served:
    """Policies in simulated batches, or under load.

    Attributes
    ----------
    table:
        A row for each load and policy, with the columns of ``draftsim serve`` (docs/formats.md).
    best:
        For each concurrency the policy with the highest throughput; for each request rate the one
        with the lowest mean end-to-end latency; with ``slo``, for each load the one with the
        highest goodput.  ``autoregressive`` if none is better, None if nothing was served.
    notes:
        Remarks on what the simulation leaves out or assumes.
    """

    table: pd.DataFrame
    best: Mapping[float | None, str | None]
    notes: tuple[str, ...] = ()

    def plot(self) -> Figure:
        """Return latency against throughput, or against the request rate."""
        from simulator.plots.serving import plot_latency_load, plot_latency_throughput

        rows = _rows(self.table)
        by_rate = self.table["concurrency"].isna().all()
        return plot_latency_load(rows) if by_rate else plot_latency_throughput(rows)


@dataclass(frozen=True, eq=False)
class Plan:
    """The replicas that a load needs under each policy.

    Attributes
    ----------
    table:
        A row for each policy (`simulator.capacity.plan_rows`).
    best:
        The policy that needs the fewest replicas, the first of equals; None if no policy meets the
        targets.
    notes:
        Remarks on what the plan leaves out or assumes.
    """

    table: pd.DataFrame
    best: str | None
    notes: tuple[str, ...] = ()

    def plot(self) -> Figure:
        """Return replicas over request rates; DraftsimError without ``plan(..., curve=True)``."""
        from simulator.plots.serving import plot_replicas

        if not self.table["curve"].map(len).any():
            raise DraftsimError("the plan has no other loads to draw: plan(..., curve=True)")
        return plot_replicas(_rows(self.table))


@dataclass(frozen=True, eq=False)
class Study:
    """A grid of settings.

    Attributes
    ----------
    table:
        A row for each point and policy (`simulator.whatif.cells.COLUMNS`).
    best:
        A row for each point: its fastest policy (`simulator.whatif.breakeven.fastest`).
    notes:
        Remarks on what the sweep leaves out or assumes.
    """

    table: pd.DataFrame
    best: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def _fitting(self) -> pd.DataFrame:
        """The rows whose cache fits into memory."""
        return self.table[self.table["cache_fits"]]

    @property
    def thresholds(self) -> pd.DataFrame:
        """Break-even of each policy (`simulator.whatif.breakeven`)."""
        from simulator.whatif.breakeven import thresholds

        return thresholds(self._fitting)

    def plot(self) -> Figure:
        """Return the first map that the grid's axes allow, else the first figure.

        Raises DraftsimError if they allow none.
        """
        from simulator.plots.whatif import NOTHING, figures

        drawn = figures(self._fitting)
        if not drawn:
            raise DraftsimError(NOTHING)
        return drawn[min(drawn, key=lambda name: not name.startswith("map_"))]


@checked
def predict(
    trace: str | Trace = DEFAULT_TRACE,
    latency: str | LatencyTable | None = None,
    policies: Policies | None = None,
    *,
    acceptance: Acceptance | None = None,
    source: str | None = None,
    verify: str | None = None,
    against: str | None = None,
    by_category: bool = False,
    prefill: bool = False,
    resamples: int = 2000,
) -> Prediction:
    """Predict the speedup of each policy over decoding without speculation.

    Parameters
    ----------
    trace, latency:
        A recording's name, run folder or file, or an object.  By default the latencies are those
        recorded with the trace.
    policies:
        Names as on the command line, methods of the papers among them, or objects; by default
        every policy and method that the recording can be replayed with.  An object's row is named
        by its class and parameters.
    acceptance:
        Instead of a trace: acceptance by position, such as ``[0.76, 0.6, 0.43]`` or what
        ``--acceptance`` takes; `latency` says what passes cost.
    source:
        The drafter of a named recording, by default the one that the latencies were measured with;
        for `predict` any source.
    verify:
        A verification rule as text; by default lossless.
    against:
        The policy that gains are over; by default the best fixed draft length.
    by_category:
        True for a row for each prompt category as well.
    prefill:
        True to count prefill.
    resamples:
        Bootstrap resamples over prompts.

    Raises
    ------
    DraftsimError
        For a recording, policy or rule that does not exist or cannot be replayed.

    >>> found = predict("bundled", policies=["fixed:gamma=3", "gammatune"], resamples=100)
    >>> list(found.table["policy"])
    ['autoregressive', 'fixed:gamma=3', 'gammatune', 'fixed:gamma=2']
    """
    from simulator.predict import compare, split_asked
    from simulator.unmeasured import said_free, said_outside
    from simulator.whatif.ranking import winner

    notes: list[str] = []
    asked = split_asked(listed(policies))
    recording = load_recording(
        trace, latency, source, acceptance=told_acceptance(acceptance), one_stream=True,
        say=notes.append,
    )  # fmt: skip
    compared = compare(
        recording, recording.priced(), asked, recording.rule(verify), say=notes.append,
        alone=isinstance(trace, Trace),
    )  # fmt: skip
    rows = compared.rows(
        against=against, resamples=resamples, prefill=prefill, by_category=by_category
    )
    overall = [row for row in rows if row.get("category") is None]
    notes += said_outside(overall)
    notes += said_free({what for row in rows for what in row["unpriced"]} - {"judging"})
    first = winner(overall)
    best = None if first is None else str(overall[first]["policy"])
    if first is not None and overall[first]["speedup"] <= 1:
        best = PLAIN
    return Prediction(pd.DataFrame(rows), best, tuple(notes), prefill)


@checked
def serve(
    trace: str | Trace = DEFAULT_TRACE,
    latency: str | LatencyTable | None = None,
    policies: Policies | None = None,
    *,
    concurrency: Sequence[int] | None = None,
    rate: Sequence[float] | None = None,
    arrivals: str | Path | None = None,
    mode: Mode = "continuous",
    requests: int | None = None,
    replications: int = 1,
    replicas: int = 1,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_gpu_blocks: int | None = None,
    slo: str | None = None,
    acceptance: Acceptance | None = None,
    source: str | None = None,
    verify: str | None = None,
    seed: int = 0,
) -> Served:
    """Serve requests in simulated time with continuous batching, under each policy.

    Parameters
    ----------
    trace, latency, policies, acceptance, source, verify:
        Those of `predict`; the default policies need no signal.
    concurrency:
        Requests kept running, one run for each number; by default the measured batch sizes.
    rate:
        Instead, request rates in requests/s, with Poisson arrivals.
    arrivals:
        Instead, a file of requests (`simulator.serving.arrivals.read_requests`), at its own pace or
        at each `rate`.
    mode:
        Batching, or what overlaps drafting and verification (`simulator.serving.Scenario`).
    requests:
        Requests of each run; by default all of `arrivals`, else 1000, and at least 10 for each that
        runs at a time.
    replications:
        Independent runs.
    replicas:
        Engines that share the requests.
    max_num_seqs:
        Requests that an engine runs at a time, for `rate` and `arrivals`; by default as measured.
    max_num_batched_tokens:
        Tokens of a step; by default the measured engine's.
    num_gpu_blocks:
        KV-cache blocks of 16 tokens; by default no limit.
    slo:
        Targets of goodput, as in ``"ttft=200ms,tpot=30ms"``.

    Raises
    ------
    DraftsimError
        If loads contradict each other, a value is impossible, or as in `predict`.
    """
    from simulator.loads import prepared
    from simulator.serving import ClosedLoop, Scenario, sweep
    from simulator.serving.scenario import engine_limits, parse_mode
    from simulator.serving.study import limits_met, over_loads
    from simulator.targets import Targets, parse_targets
    from simulator.tune.gains import best_within, goodputs, leaders
    from simulator.unmeasured import said_served

    notes: list[str] = []
    policies = listed(policies)
    recording = load_recording(
        trace, latency, source, acceptance=told_acceptance(acceptance),
        plain=_is_plain(policies), say=notes.append,
    )  # fmt: skip
    batching, interference = parse_mode(mode)
    limits = engine_limits(
        recording.latency, batching, rate is not None or arrivals is not None,
        max_batch=max_num_seqs, token_budget=max_num_batched_tokens, kv_blocks=num_gpu_blocks,
    )  # fmt: skip
    base = Scenario(
        ClosedLoop(1), limits, requests, batching, interference, seed=seed,
        replications=replications, replicas=replicas,
        targets=Targets() if slo is None else parse_targets(slo, share=False),
    )  # fmt: skip
    scenarios = over_loads(
        base, recording.latency, concurrency=axis("concurrency", concurrency, whole=True),
        rate=axis("rate", rate), arrivals=arrivals, say=notes.append,
    )  # fmt: skip
    study = prepared(recording, scenarios, policies, verify, say=notes.append)
    rows = sweep(*study)
    notes += [*limits_met(rows), *said_served(rows)]
    best = {
        one.load: None
        if not one.served or (one.policy and not one.ratio)
        else one.policy
        if one.policy and one.ratio > 1
        else PLAIN
        for one in leaders(rows)
    }
    if slo is not None:
        known = goodputs(rows)
        best = {
            load: one and (best_within(known[load]) if load in known else PLAIN)
            for load, one in best.items()
        }
    return Served(pd.DataFrame(rows), best, tuple(notes))


@checked
def plan(
    trace: str | Trace = DEFAULT_TRACE,
    latency: str | LatencyTable | None = None,
    policies: Policies | None = None,
    *,
    slo: str,
    rate: float | None = None,
    arrivals: str | Path | None = None,
    requests: int | None = None,
    replications: int = 5,
    max_replicas: int = 1024,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_gpu_blocks: int | None = None,
    gpus: int | None = None,
    price: float | None = None,
    acceptance: Acceptance | None = None,
    source: str | None = None,
    verify: str | None = None,
    curve: bool = False,
    seed: int = 0,
) -> Plan:
    """Return the fewest replicas that keep targets at a request rate, under each policy.

    Parameters
    ----------
    trace, latency, policies, acceptance, source, verify:
        Those of `serve`.
    max_num_seqs, max_num_batched_tokens, num_gpu_blocks:
        Those of `serve`.
    slo:
        Targets such as ``"ttft=200ms,tpot=30ms,p=0.95"``.
    rate, arrivals:
        Requests/s, or a file of requests as in `serve`, at its own rate or `rate`.
    requests:
        Requests of each run; by default as many as are needed to judge.
    replications:
        Independent runs.
    max_replicas:
        The most replicas to try.
    gpus:
        GPUs per replica; by default as many as share a model of `latency`.
    price:
        Price of a GPU in dollars per hour.
    curve:
        True to plan other loads as well, for `Plan.plot`.

    Raises
    ------
    DraftsimError
        For impossible values, or as in `predict`.
    """
    from simulator import capacity
    from simulator.executors import Local
    from simulator.loads import prepared
    from simulator.serving import Scenario
    from simulator.serving.arrivals import arrivals_of
    from simulator.serving.scenario import engine_limits
    from simulator.targets import parse_targets
    from simulator.unmeasured import said_served

    notes: list[str] = []
    policies = listed(policies)
    recording = load_recording(
        trace, latency, source, acceptance=told_acceptance(acceptance), chooses="a plan",
        plain=_is_plain(policies), say=notes.append,
    )  # fmt: skip
    limits = engine_limits(
        recording.latency, max_batch=max_num_seqs, token_budget=max_num_batched_tokens,
        kv_blocks=num_gpu_blocks,
    )  # fmt: skip
    base = Scenario(
        arrivals_of(rate, arrivals), limits, warmup=0.2, seed=seed, replications=replications,
        targets=parse_targets(slo),
    )  # fmt: skip
    study = prepared(recording, [base], policies, verify, say=notes.append)
    rows = capacity.plan(
        study.trace, study.latency, study.policies, base, rate, rule=study.rule,
        requests=requests, most=max_replicas, gpus=gpus, price=price, curve=curve,
        executor=Local(),
    )  # fmt: skip
    notes += said_served(rows)
    able = [row for row in rows if row["replicas"] is not None and not is_bound(row["policy"])]
    best = min(able, key=lambda row: row["replicas"])["policy"] if able else None
    return Plan(pd.DataFrame(rows), best, tuple(notes))


@checked
def sweep(
    trace: str | Trace = DEFAULT_TRACE,
    latency: str | LatencyTable | None = None,
    policies: Sequence[str] | None = None,
    *,
    c: Sequence[float] = (),
    alpha: Sequence[float] = (),
    gamma: Sequence[int] = (),
    concurrency: Sequence[int] = (1,),
    context: Sequence[int | None] | None = None,
    gpus: Sequence[str] = (),
    verify_ratio: float = 1.0,
    tilt: str = "coupled",
    acceptance: Acceptance | None = None,
    source: str | None = None,
    resamples: int = 200,
    seed: int = 0,
    jobs: int | None = None,
) -> Study:
    """Ask what if: any grid over cost ratio, acceptance, policies, concurrency, context, GPU.

    Parameters
    ----------
    trace, latency, acceptance, source:
        Those of `predict`; with `c` and no `latency`, cost ratios alone are priced.
    policies:
        Names; ``{1..12}`` or ``{0.3,0.5}`` in a name gives one policy per value.  By default the
        fixed lengths up to 12 and the oracle.
    c:
        Time of a draft pass over that of a target pass.
    verify_ratio:
        With `c`: time of a verification over that of a target pass.
    alpha:
        Acceptance rates.
    tilt:
        How the recording is changed to `alpha`: coupled, redraw or iid.
    gamma:
        Draft lengths for every policy that has one.
    concurrency:
        Sequences decoded together.
    context:
        Prompt tokens to price at; None, also as one of them: as recorded.
    gpus:
        Names of GPUs that the latencies are extrapolated to.
    resamples:
        Bootstrap resamples over prompts.
    seed:
        Seed of everything drawn.
    jobs:
        Number of processes.

    Raises
    ------
    DraftsimError
        For an empty or impossible axis, or as in `predict`.
    """
    from simulator.executors import Local
    from simulator.whatif.breakeven import fastest
    from simulator.whatif.grid import Axes, answer, grid_sweep

    notes: list[str] = []
    contexts = axis("context", context, whole=True, none=True)
    axes = Axes(
        axis("c", c) or (), axis("alpha", alpha) or (), axis("gamma", gamma, whole=True) or (),
        axis("concurrency", concurrency, whole=True) or (),
        [None] if contexts is None else contexts, listed(gpus) or (),
        verify_ratio=verify_ratio, tilt=tilt,
    )  # fmt: skip
    recording = load_recording(
        trace, latency, source, acceptance=told_acceptance(acceptance), chooses="a sweep",
        by_ratio=axes.by_ratio and latency is None, one=False, say=notes.append,
    )  # fmt: skip
    study = grid_sweep(
        recording, listed(policies), axes, resamples=resamples, seed=seed, say=notes.append
    )
    table = study.run(Local(jobs))
    found = answer(study, table)
    notes += [*found.first, *found.outside, *found.notes]
    return Study(table, fastest(found.rows), tuple(notes))


def _is_plain(policies: Policies | None) -> bool:
    """Return True if there are policies, and none of them drafts."""
    # A subclass may draft.
    return bool(policies) and all(p == PLAIN or type(p) is Autoregressive for p in policies or ())


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
