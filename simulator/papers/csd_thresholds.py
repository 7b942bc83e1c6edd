"""What CSD's memory and gate meet on our pair, and thresholds at which both of them bind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core import DraftPolicy
from policies.registry import describe
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory, Pair
from simulator.degenerate import HARDLY_VERIFIES
from simulator.papers.rows import EXPERIMENT, Row
from simulator.published import CSD_PATTERNS
from traces.acceptance.trace import Trace
from traces.errors import SignalError
from traces.replay.corrections import rejected_gaps, rejected_pairs
from traces.replay.lanes import replay_many

PAPER_LAMBDA, PAPER_TAU = 6, 0.01
TOP = 0.2
"""Share of the patterns that the paper calls the most frequent."""


@dataclass(frozen=True)
class Rejections:
    """Every rejection of a lossless run: its (draft, target) pair, and what the gate reads."""

    pairs: Sequence[Pair]
    gaps: npt.NDArray[np.float64]
    """z(draft) - z(target) in nats, at most 0; shape (rejections,)."""

    @classmethod
    def of(cls, trace: Trace, window: DraftPolicy) -> Rejections:
        """Those of `window` over `trace`; SignalError if the trace cannot tell, or has none."""
        [log] = replay_many(trace, [(describe(window), window)])
        pairs = rejected_pairs(trace, log)
        if not pairs:
            raise SignalError("no draft was rejected: there is nothing to calibrate CSD on")
        return cls(pairs, rejected_gaps(trace, log))

    def __add__(self, other: Rejections) -> Rejections:
        return Rejections([*self.pairs, *other.pairs], np.concatenate([self.gaps, other.gaps]))

    def top(self) -> set[Pair]:
        """The most frequent `TOP` of the patterns, rounded up; ties as they were met first."""
        counts = Counter(self.pairs)
        most = counts.most_common(math.ceil(TOP * len(counts)))
        return {pair for pair, _ in most}

    def held(self, lam: int, memory: OnlineCorrectionMemory | None = None) -> float:
        """Share of the rejections whose pair was counted more than `lam` times.

        In `memory`, or without one among these very rejections, each not counting itself.
        """
        own = Counter(self.pairs)
        counts = [own[p] - 1 if memory is None else memory.count(*p) for p in self.pairs]
        return float((np.array(counts) > lam).mean())

    def passed(self, tau: float) -> float:
        """Share of the rejections that the gate lets pass."""
        return float((self.gaps >= math.log(tau)).mean())

    def median_lambda(self) -> int:
        """The largest lambda at which the memory still holds half of the rejections, or 0."""
        lam = 0
        while self.held(lam + 1) >= 0.5:
            lam += 1
        return lam

    def median_tau(self) -> float:
        """The tau at which the gate lets half of the rejections pass."""
        return float(f"{math.exp(float(np.median(self.gaps))):.3g}")


def threshold_rows(
    table: str, seen: Rejections, memory: OnlineCorrectionMemory, lambdas: Sequence[int], tau: float
) -> list[Row]:
    """How often memory and gate say yes where the rounds were shown, not where they were fitted.

    A threshold at which either never does, or nearly always, is marked.
    """
    low, mid, high = np.percentile(seen.gaps, [10, 50, 90])
    gate = f"log ratio at rejections: 10 % below {low:.2f}, half below {mid:.2f}, 90 % {high:.2f}"
    counts = sorted((n for _, n in memory.items()), reverse=True)
    held = f"the most frequent pair was counted {counts[0]} times, half of them {_median(counts)}"
    rows = []
    for value in dict.fromkeys((PAPER_TAU, tau)):
        share = seen.passed(value)
        rows.append(_row(table, f"gate at tau = {value:g}", "passed", share, gate))
    for lam in dict.fromkeys((PAPER_LAMBDA, *lambdas)):
        share = seen.held(lam, memory)
        rows.append(_row(table, f"memory at lambda = {lam}", "held", share, held))
    return rows


def pattern_rows(whole: Rejections, frequent: set[Pair], rescued: Sequence[Pair]) -> list[Row]:
    """Share of all rejections, and of rescues, that the most frequent patterns hold.

    ``frequent`` are those of the prompts that `rescued` is not from.
    """
    top = whole.top()
    share = float(np.mean([pair in top for pair in whole.pairs]))
    patterns = len(set(whole.pairs))
    column, label = CSD_PATTERNS.columns[0], next(iter(CSD_PATTERNS.cells))
    note = f"{len(whole.pairs)} rejections of {patterns} patterns, over all prompts"
    rows = [
        Row(
            CSD_PATTERNS.name, label, column, CSD_PATTERNS.value(label, column), 100 * share,
            EXPERIMENT, note,
        )
    ]  # fmt: skip
    column = "rescues, percent"
    if not rescued:
        none = Row(CSD_PATTERNS.name, label, column, None, None, EXPERIMENT, "nothing was rescued")
        return [*rows, none._replace(mark="never fires on this pair")]
    share = float(np.mean([pair in frequent for pair in rescued]))
    note = f"{len(rescued)} rescues by the calibrated CSD; frequent on the other prompts"
    return [*rows, Row(CSD_PATTERNS.name, label, column, None, 100 * share, EXPERIMENT, note)]


def _row(table: str, label: str, what: str, share: float, note: str) -> Row:
    mark = ""
    if share == 0:
        mark = "never fires on this pair"
    elif share > HARDLY_VERIFIES:
        mark = f"says yes to {share:.0%}: hardly a test on this pair"
    column = f"rejections {what}, percent"
    return Row(table, label, column, None, 100 * share, EXPERIMENT, note, mark)


def _median(counts: Sequence[int]) -> str:
    return f"{float(np.median(counts)):g} or fewer"


class Rescues(CSD):
    """CSD that keeps the pairs it rescues in a run, in order."""

    def begin_run(self, vocab_size: int | None, temperature: float, top_p: float = 1.0) -> None:
        """As of CSD; nothing is rescued yet."""
        super().begin_run(vocab_size, temperature, top_p)
        self.rescued: list[Pair] = []

    def accepts(self, token: Any, score: Any) -> bool:
        """As of CSD."""
        stands = super().accepts(token, score)
        if stands and not score.match:
            self.rescued.append((token.token_id, score.token))
        return stands
