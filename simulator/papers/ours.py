"""What our side of the comparison is made of: one recording, and runs under lossy rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.core import DraftPolicy
from policies.registry import describe
from policies.rule_registry import describe_rule
from policies.rules import VerifyRule
from simulator.pricing import autoregressive, price
from traces.latency import LatencyTable
from traces.outputs import Quality, RealRun, quality
from traces.replay import replay
from traces.rounds import RoundLog
from traces.sources.base import Recordings
from traces.trace import Trace

REAL, REPLAYED = "decoded for real under the rule", "replayed along the recorded text: approximate"
UNJUDGED = "judging time not included: these latencies were measured without it"


@dataclass(frozen=True, eq=False)
class Sampled:
    """Sampled outputs, and the early exits recorded along them."""

    trace: Trace
    recordings: Recordings


@dataclass(frozen=True, eq=False)
class Ours:
    """A recording of a pair, its latencies, and what else was recorded of it."""

    trace: Trace
    latency: LatencyTable
    runs: Sequence[RealRun] = ()
    """Real runs under lossy rules, preferred to a replay."""
    recordings: Recordings = field(default_factory=Recordings)
    """Early exits and the like."""
    sampled: Sequence[Sampled] = ()
    """The pair's recordings along sampled outputs, at most one of each `Sampling`."""
    profile: str = "draftsim profile"
    """The command that records the same pair on the same prompts, as far as is known."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """One method on our pair."""

    log: RoundLog
    latency: LatencyTable
    how: str
    """What the numbers are worth."""
    quality: Quality | None = None
    """Only of real runs: a replay has no text of its own."""

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per verification."""
        return float(self.log.rounds["emitted"].mean())

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted."""
        return float(self.log.rounds["accepted"].sum() / self.log.rounds["drafted"].sum())

    @property
    def speedup(self) -> float:
        """Seconds per token of plain decoding over its own."""
        plain = price(autoregressive(self.log), self.latency)
        return plain.total_s / price(self.log, self.latency).total_s

    @property
    def drafting_ms(self) -> float:
        """Milliseconds of draft passes per round."""
        return 1e3 * float(np.mean(price(self.log, self.latency).draft_s))


def outcome(
    ours: Ours, policy: DraftPolicy, rule: VerifyRule | None = None, trace: Trace | None = None
) -> Outcome:
    """A method's run: the real one where it was recorded on these requests, else a replay.

    ``trace`` is a part of ``ours.trace`` to run on; by default all of it.
    Raises what `traces.replay.replay` raises.
    """
    trace = ours.trace if trace is None else trace
    lossy = rule is not None and not rule.lossless
    if rule is not None and lossy:
        wanted = (describe(policy), describe_rule(rule), [r.id for r in trace.requests])
        for run in ours.runs:
            if (run.log.policy, run.log.verify, [r.id for r in run.log.requests]) == wanted:
                found = quality(run.outputs, ours.trace)
                return Outcome(run.log, ours.latency, _said(REAL, run.log, ours), found)
    log = replay(trace, policy, rule, name=describe(policy))
    how = REPLAYED if lossy else f"replayed: {log.fidelity}"
    return Outcome(log, ours.latency, _said(how, log, ours))


def _said(how: str, log: RoundLog, ours: Ours) -> str:
    return f"{how}; {UNJUDGED}" if price(log, ours.latency).left_out else how
