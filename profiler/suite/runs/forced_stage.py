"""Stage ``forced``: full speculative runs with verdicts dictated by a trace.

The models run for real and decide nothing, so what is tested is the cost model alone, on
real architectures with random weights.  Writes ``forced-trace.parquet``, the recording that
dictates, ``forced-measured.parquet``, a row per run, and ``forced.json``.  Every pair runs
alone before any runs in batches.  What the time does not hold, or holds only once, is named
and goes on in another run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pandas as pd
import torch

from profiler.checks.spot_check import Arm
from profiler.models.architectures import PairShape
from profiler.models.graphs import GraphRunner, Shape
from profiler.models.runner import Runner
from profiler.suite.environment import (
    Account,
    Ledger,
    NoTimeError,
    Workplace,
    clocks,
    earlier_units,
)
from profiler.suite.latency.pair import Grids
from profiler.suite.latency.passes import (
    COMPILED,
    EAGER,
    GRAPH,
    KERNELS,
    Timer,
    fill,
    forward_call,
    make_runner,
    run_group,
    run_single,
    span,
)
from profiler.suite.latency.stage import build_or_none, chosen_pairs, modes_here, unfinished
from profiler.suite.runs.arms import (
    COLUMNS,
    LEAST_REPEATS,
    arms_of,
    more_arms_of,
    repeats_of,
    sweeps,
)
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.files import write_trace
from traces.store.measured import MeasuredRuns, read_measured, write_measured

ORDER = (GRAPH, EAGER, COMPILED)
"""In which modes run."""


def forced_trace(quick: bool) -> Trace:
    """The dictating recording: easy and hard stretches, calibrated signals, full tails.

    Its requests are short and many: where time is short a second repeat says more than a
    longer run, and where it is not, another request does.
    """
    return synthetic_trace(
        Bursty(0.9, 0.4, 20.0, 10.0),
        requests=4 if quick else 16,
        tokens=8 if quick else 32,
        prompt_length=16 if quick else 128,
        max_gamma=8 if quick else 24,
        concentration=3.0,
        seed=6,
    )


class Unit(NamedTuple):
    """Runs that are interleaved: of one pair, in one mode, at one batch size."""

    pair: PairShape
    mode: str
    batch: int

    @property
    def name(self) -> str:
        """The name that its results are filed under."""
        return f"{self.pair.name}.{self.mode}.{self.batch}"

    @property
    def cost(self) -> float:
        """Its cost relative to others: layers are launched, or captured, one by one."""
        layers = self.pair.target.layers + 2 * (self.pair.draft.layers if self.pair.draft else 0)
        return layers * (2.0 if self.mode == EAGER else 1.5) * (1 + 0.3 * math.log2(self.batch))


def run_forced(
    place: Workplace, pairs: Sequence[str] | None = None, modes: Sequence[str] | None = None
) -> Account:
    """Run the pairs named (all with a draft by default) under every policy, in every mode.

    What pairs run before left in the folder stays.  Returns what was left undone.

    Raises
    ------
    DraftsimError
        For an unknown pair, for a folder of another device, or where nothing could be run.
    """
    chosen = [p for p in chosen_pairs(pairs, place.quick) if p.draft is not None]
    account = Account(place)
    how = sorted(modes_here(place, modes, account), key=ORDER.index)
    trace = forced_trace(place.quick)
    write_trace(trace, place.out / "forced-trace.parquet")
    # Single streams first: they answer the most, and a late stop then costs the least.
    turns = ((1,), (4,)) if place.quick else ((1,), (4, 16))
    every = [
        Unit(pair, mode, batch)
        for turn in turns for pair in chosen for batch in turn for mode in how
    ]  # fmt: skip
    asked = {unit.name for unit in every}
    ledger = Ledger(place, "forced", {}, _earlier(place, asked))
    before = clocks(place.device)
    todo = [unit for unit in every if unfinished(ledger.get(unit.name))]

    def attempt(unit: Unit, models: tuple[Any, Any]) -> None:
        gone = account.limits
        rest = sum(u.cost for u in todo[todo.index(unit) :] if u.pair.name not in gone)
        try:
            with span(unit.name):
                done = _unit(place, unit, models, trace, place.left * unit.cost / rest)
        except NoTimeError:
            account.late[unit.name] = "no time left"
        except torch.OutOfMemoryError:
            why = f"{unit.name}: out of memory: the smaller batches were run"
            account.limit(unit.name, why)
        except (DraftsimError, RuntimeError) as error:
            account.fail(unit.name, error)
        else:
            ledger.put(unit.name, done)
            if unfinished(done):
                account.late[unit.name] = "time for one repeat only"
            place.say(
                f"{unit.name}: {len(done['rows'])} runs, {done['repeats']} repeats of "
                f"{done['groups']} groups"
            )

    with account.closing(lambda: _write(place, ledger, account, before)):
        # The weights are built once for a pair's batch 1, and once for its batches.
        for (name, _), some in groupby(todo, key=lambda unit: (unit.pair.name, unit.batch == 1)):
            units = list(some)
            if place.left <= 0:
                account.late.update({unit.name: "no time left" for unit in units})
                continue
            built = name not in account.limits
            models = build_or_none(place, units[0].pair, account) if built else None
            if models is None:
                continue
            for unit in units:
                attempt(unit, models)
                place.release()
                _write(place, ledger, account, before)
            del models
            place.unsettle()
        if not account.failed and not asked & set(ledger.units):
            raise DraftsimError("nothing was run: " + "; ".join(account.notes))
    if account.late:
        place.say(f"left: {', '.join(account.late)}; --pairs gives one pair all the time")
    ledger.close(account)
    return account


def _earlier(place: Workplace, asked: Collection[str]) -> dict[str, dict[str, Any]]:
    """Units that the folder holds of pairs and modes that are not asked for."""

    def rows() -> dict[str, list[list[Any]]]:
        found: dict[str, list[list[Any]]] = {}
        times = read_measured(place.out / "forced-measured.parquet").times[list(COLUMNS)]
        for row in times.values.tolist():
            values = dict(zip(COLUMNS, row, strict=True))
            name = f"{values['pair']}.{values['mode']}.{values['batch']}"
            found.setdefault(name, []).append(row)
        return found

    return earlier_units(place, place.out / "forced.json", asked.__contains__, rows, "rows")


def _unit(
    place: Workplace, unit: Unit, models: tuple[Any, Any], trace: Trace, share: float
) -> dict[str, Any]:
    """All arms of a unit, interleaved, within a `share` of the time, seconds, if they can be."""
    begin = time.monotonic()
    batch, info = unit.batch, trace.requests[0]
    slots = info.prompt_length + info.max_new_tokens
    target, draft = (make_runner(unit.mode, model, slots, batch) for model in models)
    fill(target)
    fill(draft)
    state = clocks(place.device)
    anchors = _anchors(place, target, draft, batch)
    if batch == 1:
        prepare(
            target, draft, slots, trace.max_gamma or 1, place.check_time, info.prompt_length + 1
        )
    count = len(trace.requests) // batch * batch
    groups = [range(i, i + batch) for i in range(0, count, batch)]

    def once(arm: Arm, group: range) -> tuple[float, int]:
        if batch == 1:
            seconds, log = run_single(target, draft, trace, group[0], arm.policy)
            return seconds, len(log)
        seconds, many = run_group(target, draft, trace, group, arm.policy)
        return seconds, len(many)

    def run(arm: Arm, group: range) -> tuple[float, int]:
        # A run that met a shape for the first time captured it: the next one does not.
        captured = -1
        while captured != (now := sum(getattr(r, "captured", 0) for r in (target, draft))):
            captured, result = now, once(arm, group)
        return result

    arms, asked = arms_of(trace, place.quick), repeats_of(place.quick)
    rows = sweeps(
        [*arms, *more_arms_of(trace, place.quick)], groups, run,
        repeats=asked, needed=len(arms),
        left=lambda: begin + share - time.monotonic(), check_time=place.check_time,
    )  # fmt: skip
    repeats = len({repeat for _, repeat, *_ in rows})
    return {
        "rows": [
            [unit.pair.name, unit.mode, name, "exact", batch, True, repeat,
             trace.requests[group[0]].id, seconds, rounds]
            for name, repeat, group, seconds, rounds in rows
        ],
        "repeats": repeats,
        "groups": len({group for _, _, group, *_ in rows}),
        "unfinished": repeats < min(asked, LEAST_REPEATS),
        "anchors": anchors,
        "clocks": [state, clocks(place.device)],
    }  # fmt: skip


def prepare(
    target: Runner, draft: Runner, slots: int, max_gamma: int, check_time: Callable[[], None],
    shortest: int = 1,
) -> None:  # fmt: skip
    """Capture every shape that a single stream can need, before anything is timed.

    Passes see `shortest` tokens or more.  `check_time` is asked before every capture of the
    target's.
    """
    if not (isinstance(target, GraphRunner) and isinstance(draft, GraphRunner)):
        return
    stops = sorted({target.bucket(stop) for stop in range(shortest, slots + 1, target.granularity)})
    stops = sorted({*stops, target.bucket(slots)})
    for width in range(1, max_gamma + 2):
        check_time()
        target.prepare(Shape(1, width, stop, width) for stop in stops)
    draft.prepare(Shape(1, w, stop, 1) for w in (1, 2) for stop in stops)


def _anchors(place: Workplace, target: Runner, draft: Runner, batch: int) -> list[dict[str, Any]]:
    """A few cells again, so that a device slower or faster than in stage ``latency`` shows."""
    rows = []
    context = 16 if place.quick else 128
    timer = Timer(place.device, 3, Grids(place.quick).enough_s)
    for name, runner, width in (("target", target, 1), ("target", target, 5), ("draft", draft, 1)):
        run = forward_call(runner, batch, width, context, drafts=name == "draft")
        sample = timer.time(run)
        rows.append({"model": name, "batch": batch, "width": width, "context": context,
                     **sample._asdict()})  # fmt: skip
    return rows


def _write(place: Workplace, ledger: Ledger, account: Account, before: dict[str, str]) -> None:
    rows = [row for unit in ledger.units.values() for row in unit["rows"]]
    if rows:
        meta = {"kernels": KERNELS, **place.meta()}
        runs = MeasuredRuns(pd.DataFrame(rows, columns=list(COLUMNS)), meta)
        write_measured(runs, place.out / "forced-measured.parquet")
    ledger.write(account, before, "rows", KERNELS)
