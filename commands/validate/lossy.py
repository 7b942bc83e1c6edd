"""Lossy rules against real decoding: cost, the bias of on-path replay, and quality."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.output import note, say_memory, say_unjudged
from commands.validate.flow import Given, RealRuns, as_recorded
from policies.registry import PLAIN
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.checks.spot_check import Measured
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog
    from traces.store.checkpoint import Checkpoint

LOSSY_ARMS = ("fixed:gamma=4", "fixed:gamma=8", "confidence", "gammatune", "cm-asd")
"""Policies run under a lossy rule where none is named, with the one predicted fastest."""


class LossyRuns(RealRuns):
    """One request at a time under a lossy rule, plain decoding first.

    The predicted seconds price the rounds really decoded.  The rows also have
    ``accepted_per_round`` of the real run and ``replay_accepted_per_round`` of the replay along
    the recorded text, ``bias`` (the second over the first, less 1) and ``speedup_bias`` (the same
    of the predicted speedups), and the fields of `traces.store.outputs.Quality`.
    """

    name = "measured-lossy"

    def __init__(
        self, given: Given, verify: str, memory: Path | None, sampled: bool = False
    ) -> None:
        from profiler.checks.spot_check import Arm
        from profiler.checks.unfinished import rule_conditions
        from simulator.chosen import load_policies, load_rule
        from simulator.whatif.ranking import predicted_fastest, with_fastest
        from traces.replay.vectorised import replay_many
        from traces.store.files import read_trace

        super().__init__(given, sampled)
        trace, policy = self.trace, given.policy
        self.greedy = read_trace(given.run / "trace.parquet") if sampled else self.whole
        rule = load_rule(verify, memory)
        if rule is None or rule.lossless:
            raise DraftsimError(f"--verify {verify} is lossless: leave it out, its replay is exact")
        texts = policy or as_recorded(LOSSY_ARMS, trace)
        chosen = [c for c in load_policies(texts, trace, say=note) if c[0] != PLAIN]
        if not policy:
            best = predicted_fastest(
                self.latency, load_policies(None, trace), trace.max_gamma,
                lambda some: list(replay_many(trace, some, rule=rule)),
            )  # fmt: skip
            chosen = with_fastest(chosen, best, note)
        [(_, plain)] = load_policies([PLAIN], trace)
        self.arms = [Arm(PLAIN, plain), *(Arm(name, p, rule) for name, p in chosen)]
        self.policies = {arm.name: arm.policy for arm in self.arms}
        self.logs = list(replay_many(trace, chosen, rule=rule))
        self.conditions = rule_conditions(rule)

    def decode(self, kept: Checkpoint, advance: Callable[[], None]) -> Measured:
        """Decode with both models."""
        from profiler.checks.spot_check import run_arms

        return run_arms(
            self.pair, self.trace, self.arms, repeats=self.given.repeats, advance=advance, kept=kept
        )

    def times(self, measured: Measured) -> pd.DataFrame:
        """Return all times: these texts are not those of the recording."""
        return measured.times

    def predicted(self, measured: Measured) -> Any:
        """Price the rounds really decoded."""
        from simulator.pricing import price

        return [price(measured.logs[arm.label], self.latency) for arm in self.arms]

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Add the error of the replay, and the quality of the outputs."""
        from profiler.checks.differences import rounds_differ
        from profiler.checks.score import answers_to
        from profiler.checks.spot_check import real_run
        from traces.store.outputs import quality

        del progress
        extra: list[dict[str, Any]] = [{}]
        differ, answers = [0], answers_to(self.greedy)
        for arm, theirs in zip(self.arms[1:], self.logs, strict=True):
            name = {"run": self.given.run.name}
            real = real_run(self.pair, self.greedy, arm, measured, name, answers)
            mine = real.log
            differ.append(rounds_differ(mine, theirs))
            own, replayed = (float(log.rounds["accepted"].mean()) for log in (mine, theirs))
            extra.append(
                {
                    "accepted_per_round": own,
                    "replay_accepted_per_round": replayed,
                    "bias": replayed / own - 1 if own else math.nan,
                    "speedup_bias": speedup(theirs, self.latency) / speedup(mine, self.latency) - 1,
                    **asdict(quality(real.outputs, self.greedy)),
                }
            )
        say_memory([measured.logs[arm.label] for arm in self.arms])
        say_unjudged(self.latency)
        return pd.concat([rows, pd.DataFrame(extra)], axis=1).assign(rounds_differ=differ)


def speedup(log: RoundLog, latency: LatencyTable) -> float:
    """Return predicted seconds per token of plain decoding over those of `log`."""
    from simulator.pricing import autoregressive, price

    return float(price(autoregressive(log), latency).total_s / price(log, latency).total_s)
