"""Stage ``forced``: full speculative runs with verdicts dictated by a trace.

The models run for real and decide nothing, so what is tested is the cost model alone, on
real architectures with random weights.  Writes ``forced-trace.parquet``, the recording that
dictates, ``forced-measured.parquet``, a row per run, and ``forced.json``.  What the time does
not hold goes on in another run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

from profiler.architectures import PairShape
from profiler.graphs import GraphRunner, Shape
from profiler.runner import Runner
from profiler.spotcheck import Arm
from profiler.suite.arms import COLUMNS, arms_of, sweeps
from profiler.suite.environment import Ledger, NoTimeError, Workplace, clocks, write_results
from profiler.suite.latency_stage import build_or_none, chosen_pairs
from profiler.suite.passes import EAGER, GRAPH, Timer, fill, forward_call, make_runner
from profiler.suite.rounds import run_group, run_single
from traces.errors import DraftsimError
from traces.files import write_trace
from traces.measured import MeasuredRuns, write_measured
from traces.synthetic import Bursty, synthetic_trace
from traces.trace import Trace

REPEATS = 3


def forced_trace(quick: bool) -> Trace:
    """The dictating recording: easy and hard stretches, calibrated signals, full tails."""
    return synthetic_trace(
        Bursty(0.9, 0.4, 20.0, 10.0),
        requests=4 if quick else 16,
        tokens=12 if quick else 64,
        prompt_length=16 if quick else 128,
        max_gamma=24,
        concentration=3.0,
        seed=6,
    )


def run_forced(place: Workplace, pairs: Sequence[str] | None = None) -> None:
    """Run the pairs named (all with a draft by default) under every policy, both modes.

    Raises DraftsimError for an unknown pair, or where nothing at all could be run.
    """
    chosen = [p for p in chosen_pairs(pairs, place.quick) if p.draft is not None]
    trace = forced_trace(place.quick)
    write_trace(trace, place.out / "forced-trace.parquet")
    batches = (1, 4) if place.quick else (1, 4, 16)
    # Single streams first: they answer the most, and a late stop then costs the least.
    order = [(mode, batch) for batch in batches for mode in (GRAPH, EAGER)]
    ledger = Ledger(place, "forced", {"pairs": [p.name for p in chosen], "batches": batches})
    left_out: list[str] = []
    late: list[str] = []
    before = clocks(place.device)
    for i, pair in enumerate(chosen):
        units = [(f"{pair.name}.{mode}.{batch}", mode, batch) for mode, batch in order]
        missing = [unit for unit in units if ledger.get(unit[0]) is None]
        if not missing:
            continue
        if (why := place.lacks_memory(pair)) is not None:
            left_out.append(why)
            place.say(why)
            continue
        end = time.monotonic() + place.left / (len(chosen) - i)
        if place.left <= 0:
            late += [name for name, *_ in missing]
            continue
        models = build_or_none(place, pair, left_out)
        if models is None:
            continue
        for k, (name, mode, batch) in enumerate(missing):
            share = (end - time.monotonic()) / (len(missing) - k)
            if share < 1 and not place.quick:
                late.append(name)
                continue
            try:
                ledger.put(name, _unit(place, pair, models, trace, mode, batch, share))
                place.say(f"{name}: {len(ledger.units[name]['rows'])} runs")
            except NoTimeError:
                late.append(name)
            except torch.OutOfMemoryError:
                left_out.append(f"{name}: out of memory: the smaller batches were run")
            except RuntimeError as error:
                left_out.append(f"{name}: {str(error).splitlines()[0]}")
            place.release()
            _write(place, ledger, left_out, before)
        del models
        place.release()
    left_out += [f"{name}: no time left" for name in late]
    if not ledger.units:
        raise DraftsimError("nothing was run: " + "; ".join(left_out))
    _write(place, ledger, left_out, before)
    ledger.close(late)


def _unit(
    place: Workplace, pair: PairShape, models: tuple[Any, Any], trace: Trace, mode: str,
    batch: int, share: float,
) -> dict[str, Any]:  # fmt: skip
    """All arms of one pair, mode and batch, interleaved."""
    begin = time.monotonic()
    info = trace.requests[0]
    slots = info.prompt_length + info.max_new_tokens
    target, draft = (make_runner(mode, model, slots, batch) for model in models)
    fill(target)
    fill(draft)
    state = clocks(place.device)
    anchors = _anchors(place, target, draft, batch)
    if batch == 1:
        prepare(target, draft, slots, trace.max_gamma or 1, place.check_time)
    # One group of a batch, or a few requests one by one.
    groups = [range(i, i + batch) for i in range(0, 2 * batch if batch == 1 else batch, batch)]

    def run(arm: Arm, group: range) -> tuple[float, int]:
        if batch == 1:
            seconds, log = run_single(target, draft, trace, group[0], arm.policy)
            return seconds, len(log)
        seconds, many = run_group(target, draft, trace, group, arm.policy)
        return seconds, len(many)

    rows = sweeps(
        arms_of(trace, place.quick), groups, run, repeats=2 if place.quick else REPEATS,
        left=lambda: begin + share - time.monotonic(), check_time=place.check_time,
        warm=1 if batch == 1 else None,
    )  # fmt: skip
    return {
        "rows": [
            [pair.name, mode, name, "exact", batch, True, repeat, trace.requests[group[0]].id,
             seconds, rounds]
            for name, repeat, group, seconds, rounds in rows
        ],
        "anchors": anchors,
        "clocks": [state, clocks(place.device)],
    }  # fmt: skip


def prepare(
    target: Runner, draft: Runner, slots: int, max_gamma: int, check_time: Callable[[], None]
) -> None:
    """Capture every shape that a single stream can need, before anything is timed.

    `check_time` is asked before every capture of the target's.
    """
    if not (isinstance(target, GraphRunner) and isinstance(draft, GraphRunner)):
        return
    stops = sorted({target.bucket(stop) for stop in range(1, slots + 1, target.granularity)})
    stops = sorted({*stops, target.bucket(slots)})
    for width in range(1, max_gamma + 2):
        check_time()
        target.prepare(Shape(1, width, stop, width) for stop in stops)
    draft.prepare(Shape(1, w, stop, 1) for w in (1, 2) for stop in stops)


def _anchors(place: Workplace, target: Runner, draft: Runner, batch: int) -> list[dict[str, Any]]:
    """A few cells again, so that a device slower or faster than in stage ``latency`` shows."""
    rows = []
    context = 16 if place.quick else 128
    timer = Timer(place.device, repeats=3)
    for name, runner, width in (("target", target, 1), ("target", target, 5), ("draft", draft, 1)):
        run = forward_call(runner, batch, width, context, drafts=name == "draft")
        sample = timer.time(run)
        rows.append({"model": name, "batch": batch, "width": width, "context": context,
                     **sample._asdict()})  # fmt: skip
    return rows


def _write(
    place: Workplace, ledger: Ledger, left_out: Sequence[str], before: dict[str, str]
) -> None:
    rows = [row for unit in ledger.units.values() for row in unit["rows"]]
    if rows:
        runs = MeasuredRuns(pd.DataFrame(rows, columns=list(COLUMNS)), place.meta())
        write_measured(runs, place.out / "forced-measured.parquet")
    units = {
        name: {k: v for k, v in unit.items() if k != "rows"} for name, unit in ledger.units.items()
    }
    write_results(
        place.out / "forced.json",
        {
            "stage": "forced", "meta": place.meta(), "left_out": list(left_out),
            "clocks": [before, clocks(place.device)], "units": units,
        },
    )  # fmt: skip
