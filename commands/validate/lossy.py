"""Lossy rules against real decoding: cost, the bias of on-path replay, and quality."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.output import note, say_memory
from commands.common.progress import progress_bar
from commands.common.quiet import AGAIN, say_machine, with_machine
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

LOSSY_ARMS = ("fixed:gamma=4", "fixed:gamma=8", "confidence", "gammatune", "cm-asd")
"""Policies run under a lossy rule where none is named, with the one predicted fastest."""


def lossy_check(
    run: Path,
    policy: list[str] | None,
    verify: str,
    memory: Path | None,
    sampled: bool = False,
    repeats: int = 3,
    limit: int | None = None,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Return the rows of ``validate --verify``, plain decoding first.

    Besides the columns of `simulator.validation.compare`, whose predicted seconds price
    the rounds really decoded: ``accepted_per_round`` of the real run and
    ``replay_accepted_per_round`` of the replay along the recorded text, ``bias`` (the
    second over the first, less 1) and ``speedup_bias`` (the same of the predicted
    speedups), and the fields of `traces.store.outputs.Quality`.
    """
    from commands.validate.spot_check import as_recorded, check_ids, spread_over_categories
    from profiler.checks.differences import real_run
    from profiler.checks.score import answers_to
    from profiler.checks.spot_check import Arm, rounds_differ, run_arms
    from profiler.recording.run import read_run
    from simulator.chosen import load_policies, load_rule
    from simulator.pricing import price
    from simulator.validation import compare
    from simulator.whatif.ranking import predicted_fastest, with_fastest
    from traces.replay.vectorised import replay_many
    from traces.store.files import read_latency, read_trace
    from traces.store.measured import MeasuredRuns, write_measured
    from traces.store.outputs import quality

    info = read_run(run, trust_remote_code)
    greedy = read_trace(run / "trace.parquet")
    trace = read_trace(run / "sampled.parquet") if sampled else greedy
    latency = read_latency(run / "latency.parquet")
    check_ids(greedy)
    if limit is not None:
        trace = trace.select(spread_over_categories(trace, limit))
    rule = load_rule(verify, memory)
    if rule is None or rule.lossless:
        raise DraftsimError(f"--verify {verify} is lossless: leave it out, its replay is exact")
    chosen = [
        c
        for c in load_policies(policy or as_recorded(LOSSY_ARMS, trace), trace, say=note)
        if c[0] != PLAIN
    ]
    if not policy:
        every = load_policies(None, trace)
        best = predicted_fastest(
            latency, every, trace.max_gamma, lambda some: list(replay_many(trace, some, rule=rule))
        )
        chosen = with_fastest(chosen, best, note)
    [(_, plain)] = load_policies([PLAIN], trace)
    arms = [Arm(PLAIN, plain), *(Arm(name, p, rule) for name, p in chosen)]
    replayed = list(replay_many(trace, chosen, rule=rule))
    for log in replayed:
        price(log, latency)  # a table that cannot price it is refused before any work
    pair = info.load()
    with progress_bar() as progress:
        task = progress.add_task(
            "decoding for real", total=repeats * len(trace.requests) * len(arms)
        )
        measured = run_arms(
            pair, trace, arms, repeats=repeats, advance=lambda: progress.advance(task)
        )
    logs = [measured.logs[arm.label] for arm in arms]
    rows = compare([price(log, latency) for log in logs], measured.times)
    rows = with_machine(rows, latency, measured.machine)
    say_machine(latency, measured.machine, AGAIN)
    meta = {**pair.meta, "machine": measured.machine}
    write_measured(MeasuredRuns(measured.times, meta), run / "measured-lossy.parquet")
    extra: list[dict[str, Any]] = [{}]
    answers = answers_to(greedy)
    for arm, theirs in zip(arms[1:], replayed, strict=True):
        real = real_run(pair, greedy, arm, measured, {"run": run.name}, answers)
        mine = real.log
        extra.append(
            {
                "rounds_differ": rounds_differ(mine, theirs),
                "accepted_per_round": accepted_per_round(mine),
                "replay_accepted_per_round": accepted_per_round(theirs),
                "bias": accepted_per_round(theirs) / accepted_per_round(mine) - 1,
                "speedup_bias": speedup(theirs, latency) / speedup(mine, latency) - 1,
                **asdict(quality(real.outputs, greedy)),
            }
        )
    say_memory(logs)
    joined = pd.concat([rows, pd.DataFrame(extra).drop(columns="rounds_differ")], axis=1)
    joined["rounds_differ"] = [0, *(e["rounds_differ"] for e in extra[1:])]
    return joined


PLAIN = "autoregressive"


def accepted_per_round(log: RoundLog) -> float:
    """Return the mean accepted tokens of a round."""
    return float(log.rounds["accepted"].mean())


def speedup(log: RoundLog, latency: LatencyTable) -> float:
    """Return predicted seconds per token of plain decoding over those of `log`."""
    from simulator.pricing import autoregressive, price

    return float(price(autoregressive(log), latency).total_s / price(log, latency).total_s)
