"""The four questions as functions: `predict`, `serve`, `plan` and `sweep`.

`import draftsim` exports them.  Each takes recordings and policies by name or as objects, and
returns a result with a ``table`` (a DataFrame), ``best`` and ``plot()``; ``notes`` say what the
command of the same question would print.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import pandas as pd

from policies.lengths.basic import Autoregressive
from policies.registry import PLAIN, is_bound
from simulator.chosen import Policies, load_serving_policies, swept_policies
from simulator.recording import (
    GIVEN,
    Recording,
    check_carried,
    check_models,
    imputed,
    load_latency,
    load_recording,
    observed_trace,
    plain_trace,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.sources.found import own_source
from traces.sources.registry import DRAFT_MODEL
from traces.store import recordings
from traces.store.identity import ROLES, model_in
from traces.store.recordings import Defaulted, find_latency, find_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulator.serving.scenario import Mode

Acceptance = str | Sequence[float]
Question = TypeVar("Question", bound=Callable[..., Any])
KINDS: Mapping[str, tuple[str, Any]] = {
    "int": ("a whole number", Integral), "float": ("a number", Real), "str": ("a text", str),
    "bool": ("True or False", bool | np.bool_), "Path": ("a path", Path), "Mode": ("a text", str),
    "Trace": ("a Trace", Trace), "LatencyTable": ("a LatencyTable", LatencyTable),
    "None": ("None", type(None)),
}  # fmt: skip
"""Annotations of arguments that are checked: in words, and as types."""
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


def checked(question: Question) -> Question:
    """Return `question` such that an argument unlike its annotation is refused in one line.

    A path given for a name counts as its text.  Other annotations than those of `KINDS`, such as
    axes, are left to the question.
    """
    signature = inspect.signature(question)

    @wraps(question)
    def asked(*given: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            raise TypeError(f"{question.__name__}() {error}") from None
        for name, value in bound.arguments.items():
            expected = str(signature.parameters[name].annotation).split(" | ")
            if not set(expected) <= set(KINDS):
                continue
            kinds = tuple(KINDS[kind][1] for kind in expected)
            if isinstance(value, Path) and Path not in kinds and str in kinds:
                bound.arguments[name] = str(value)
            elif not isinstance(value, kinds) or (
                isinstance(value, bool) and "bool" not in expected
            ):
                words = " or ".join(dict.fromkeys(KINDS[kind][0] for kind in expected))
                raise DraftsimError(f"{name} is {value!r}, expected {words}")
        return question(*bound.args, **bound.kwargs)

    return cast("Question", asked)


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
    asked = split_asked(_listed(policies))
    recording = _recording(trace, latency, source, notes, acceptance, one_stream=True)
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
    from simulator.serving import ClosedLoop, Scenario, sweep
    from simulator.serving.scenario import engine_limits
    from simulator.serving.study import limits_met, over_loads, shortfalls
    from simulator.targets import Targets, parse_targets
    from simulator.tune.gains import best_within, goodputs, leaders
    from simulator.unmeasured import said_served

    notes: list[str] = []
    policies = _listed(policies)
    concurrency, rate = _axis("concurrency", concurrency, whole=True), _axis("rate", rate)
    recording = _recording(trace, latency, source, notes, acceptance, plain=_is_plain(policies))
    policies, rule = recording.alike(policies, verify, say=notes.append)
    measured = recording.latency
    closed = rate is None and arrivals is None
    limits = engine_limits(
        measured, mode, not closed, max_batch=max_num_seqs, token_budget=max_num_batched_tokens,
        kv_blocks=num_gpu_blocks,
    )  # fmt: skip
    base = Scenario(
        ClosedLoop(1), limits, requests, mode, seed=seed, replications=replications,
        replicas=replicas, targets=Targets() if slo is None else parse_targets(slo, share=False),
    )  # fmt: skip
    scenarios = over_loads(base, measured, concurrency=concurrency, rate=rate, arrivals=arrivals)
    notes += [*scenarios[0].arrivals.remarks, *shortfalls(scenarios)]
    largest = max(scenario.largest_batch for scenario in scenarios)
    measured.check_sizes("target", "forward", largest, 1)
    table = recording.in_graphs(None, largest).priced(largest)
    chosen = load_serving_policies(
        policies, recording.trace, table, mode, largest=largest, say=notes.append
    )
    rows = sweep(recording.trace, table, chosen, scenarios, rule=rule)
    notes += [*limits_met(rows), *said_served(rows)]
    best = {
        one.load: None if not one.served else one.policy if one.policy and one.ratio > 1 else PLAIN
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
    gpus: int = 1,
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
        GPUs per replica.
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
    from simulator.serving import Limits, Scenario
    from simulator.serving.arrivals import arrivals_of
    from simulator.targets import parse_targets
    from simulator.unmeasured import said_served

    targets = parse_targets(slo)
    notes: list[str] = []
    policies = _listed(policies)
    recording = _recording(
        trace, latency, source, notes, acceptance, "a plan", plain=_is_plain(policies)
    )
    policies, rule = recording.alike(policies, verify, say=notes.append)
    measured = recording.latency
    limits = Limits.of_engine(measured, max_num_seqs, max_num_batched_tokens, num_gpu_blocks)
    measured.check_sizes("target", "forward", limits.max_batch, 1)
    table = recording.in_graphs(None, limits.max_batch).priced(limits.max_batch)
    base = Scenario(
        arrivals_of(rate, arrivals), limits, warmup=0.2, seed=seed, replications=replications,
        targets=targets,
    )  # fmt: skip
    notes += base.arrivals.remarks
    chosen = load_serving_policies(
        policies, recording.trace, table, largest=limits.max_batch, say=notes.append
    )
    rows = capacity.plan(
        recording.trace, table, chosen, base, rate, rule=rule, requests=requests,
        most=max_replicas, gpus=gpus, price=price, curve=curve, executor=Local(),
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
    from simulator.unmeasured import free_hosts, said_free, said_outside
    from simulator.whatif.breakeven import fastest
    from simulator.whatif.cells import Prices, fitting
    from simulator.whatif.sweep import Sweep
    from traces.operators.devices import find_device

    notes: list[str] = []
    ratios, rates = _axis("c", c) or (), _axis("alpha", alpha) or ()
    lengths = _axis("gamma", gamma, whole=True) or ()
    sizes = _axis("concurrency", concurrency, whole=True) or ()
    contexts = _axis("context", context, whole=True, none=True)
    devices = _listed(gpus) or []
    by_ratio = bool(ratios) and latency is None and not devices
    recording = _recording(trace, latency, source, notes, acceptance, "a sweep", by_ratio=by_ratio)
    tables = recording.swept(ratios, max(sizes, default=1))
    if devices:
        check_carried(recording.source, recording.recordings)
    names = tuple(find_device(str(name)).name for name in devices)
    prices = Prices(ratios, tables, [None] if contexts is None else contexts, verify_ratio, names)
    chosen = swept_policies(_listed(policies), lengths, recording.trace, notes.append)
    study = Sweep(
        recording.trace, chosen, prices, rates, sizes, method=tilt, resamples=resamples, seed=seed
    )
    frame = study.run(Local(jobs))
    fit, large = fitting(frame, prices, recording.trace)
    notes += [*large, *said_outside(_rows(fit))]
    notes += said_free(free_hosts((at.table for at in prices.tables), chosen.values()))
    return Study(frame, fastest(fit), tuple(notes))


def _recording(
    trace: str | Trace, latency: str | LatencyTable | None, source: str | None, notes: list[str],
    acceptance: Acceptance | None = None, chooses: str | None = None, by_ratio: bool = False,
    one_stream: bool = False, plain: bool = False,
) -> Recording:  # fmt: skip
    """Return the recording that the arguments of `predict` describe; `notes` gets its remarks.

    If only plain decoding is asked for (`plain`) at named latencies, no recording is needed.
    """
    option = trace.option if isinstance(trace, Defaulted) else None
    made_up = acceptance is not None
    if acceptance is not None:
        if not isinstance(acceptance, str):
            acceptance = _axis("acceptance", acceptance) or ()
        named = "object" if isinstance(trace, Trace) else trace
        trace, outputs = observed_trace(
            acceptance, notes.append, named=None if option else named,
            source=source, costs=latency is not None or by_ratio,
        )  # fmt: skip
        option = None
    elif isinstance(trace, Trace):
        return _given(trace, latency, source, by_ratio, notes, chooses)
    elif plain and option and latency is not None:
        (trace, outputs), option, made_up = plain_trace(), None, True
    else:
        outputs = find_trace(trace)
    if isinstance(latency, LatencyTable):
        tables = {GIVEN: latency}
    elif by_ratio:
        tables = {}
    else:
        tables = {latency or trace: load_latency(latency, trace, notes.append)}
    return load_recording(
        trace, outputs, tables, source, given=latency is not None, option=option, chooses=chooses,
        one=not by_ratio, one_stream=one_stream and acceptance is None, observed=made_up,
        say=notes.append,
    )  # fmt: skip


def _given(
    trace: Trace, latency: str | LatencyTable | None, source: str | None, by_ratio: bool,
    notes: list[str], chooses: str | None,
) -> Recording:  # fmt: skip
    """Return a recording made of a trace and latencies that were given as objects.

    A note says so if the latencies are of other models.  Raises DraftsimError if they are of
    another drafter: no folder holds other drafts of the trace.
    """
    if source is not None:
        raise DraftsimError(
            "source chooses the drafter of a named recording: give the trace by its name, or one "
            "of traces.sources.find_drafted"
        )
    if latency is None and not by_ratio:
        raise DraftsimError("a trace alone says nothing of what passes cost: give latency as well")
    tables = {}
    if latency is not None:
        found = find_latency(latency) if isinstance(latency, str) else latency
        tables = {latency if isinstance(latency, str) else GIVEN: found}
        if trace.source == DRAFT_MODEL:
            own_source(found, trace, {})
        else:
            found.drafter(trace.drafter)
    models = {role: model_in(trace.meta, role) for role in ROLES}
    check_models("trace", models, tables, None, None, notes.append)
    trace = imputed("trace", trace, chooses, notes.append)
    return Recording("trace", trace, trace, tables, models, "", None, {})


def _is_plain(policies: Policies | None) -> bool:
    """Return True if there are policies, and none of them drafts."""
    # A subclass may draft.
    return bool(policies) and all(p == PLAIN or type(p) is Autoregressive for p in policies or ())


def _listed(given: Any) -> list[Any] | None:
    """Return the values of an argument in a list, those of numpy as Python's own; one alone counts.

    None stays None.
    """
    if given is None:
        return None
    given = given.tolist() if isinstance(given, np.ndarray) else given
    many = isinstance(given, Iterable) and not isinstance(given, str)
    return [v.item() if isinstance(v, np.generic) else v for v in (given if many else [given])]


def _axis(name: str, given: Any, whole: bool = False, none: bool = False) -> list[Any] | None:
    """Return the numbers of an axis (`_listed`); ``none``: None may be one of them.

    DraftsimError if one is no (`whole`) number.
    """
    values = _listed(given)
    for value in values or ():
        if value is None and none:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value % 1):
            raise DraftsimError(f"{name} holds {value!r}, expected {'whole ' * whole}numbers")
    if values is None or not whole:
        return values
    return [None if value is None else int(value) for value in values]


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
