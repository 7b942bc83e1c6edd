"""CSD's ablation on our pair: at our thresholds, and at thresholds calibrated on its prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core import DraftPolicy
from policies.registry import describe
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory, TokenPair
from simulator.papers.ours import MethodOutcome, Ours, Row, experiment, method_outcome
from simulator.published import CSD_ABLATION, CSD_GAINS, CSD_MAIN, CSD_PATTERNS
from simulator.summary import HARDLY_VERIFIES, accepted_mismatches, degenerate
from traces.acceptance.trace import Trace
from traces.errors import SignalError
from traces.replay.corrections import calibrated, rejected_gaps, rejected_pairs, split_requests
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.sources.methods import CSD_ABLATION as CSD_METHODS
from traces.sources.methods import CSD_WINDOW, Method, build

CSD_ROWS = {
    "csd-specdecode": "SpecDecode (baseline)", "csd-ocm": "SD + OCM only",
    "csd-scg": "SD + SCG only", "csd": "CSD (OCM + SCG)", "lossy-sd": "Lossy SD (global tau)",
}  # fmt: skip
IN_MAIN = {CSD_ROWS["csd"]: "CSD", CSD_ROWS["csd-specdecode"]: "SpecDecode"}
"""Columns of the main results, by row of the ablation."""
CALIBRATED = ("csd-ocm", "csd-scg", "csd")
"""The variants that have a threshold to calibrate."""
TRAINING_SHARE = 0.5
"""Prompts of each category that calibrate CSD's memory; the others are decoded."""
CSD_LAMBDA = 1
"""The paper's 6 belongs to 2 to 8 thousand calibration samples; ours are far fewer."""
MAIN = "Llama-3 MATH500 Speedup"
TABLE = CSD_ABLATION.name


def csd_rule(chosen: Method) -> str:
    """Return the rule of a CSD variant at our lambda."""
    learns = chosen.rule in ("csd", "csd-ocm")
    return f"{chosen.rule}:threshold={CSD_LAMBDA}" if learns else chosen.rule


def csd_rows(ours: Ours) -> list[Row]:
    """Return CSD's ablation on prompts that neither its memory nor its thresholds were fitted to.

    First at our lambda and the paper's tau, then the variants with a threshold again at those that
    `Rejections` calibrates on the other prompts, so that memory and gate both say no.
    """
    train, rest = split_requests(ours.trace, TRAINING_SHARE)
    if not rest:
        raise SignalError("one prompt a category leaves none to decode: record more prompts")
    window, _ = build(Method("", CSD_WINDOW, "exact", ""), ours.trace)
    training, shown = ours.trace.select(train), ours.trace.select(rest)
    memory = calibrated(training, window)
    fitted, seen = (Rejections.of(part, window) for part in (training, shown))
    lam, tau = fitted.median_lambda(), fitted.median_tau()
    said = f"memory of {len(memory)} pairs from {len(train)} other prompts, lambda"
    found, notes = {}, {}
    for name, chosen in CSD_METHODS.items():
        rule = csd_rule(chosen)
        found[name] = _outcome(ours, chosen, rule, shown, memory)
        notes[name] = f"{said} {CSD_LAMBDA}" if rule != chosen.rule else ""
    rows = _rows(found, CSD_ROWS, notes, found["csd-specdecode"])
    again, notes = {}, {}
    for name in CALIBRATED:
        chosen = CSD_METHODS[name]
        rule = {
            "csd-ocm": f"csd-ocm:threshold={lam}", "csd-scg": f"csd-scg:tau={tau:g}",
            "csd": f"csd:threshold={lam},tau={tau:g}",
        }[name]  # fmt: skip
        again[name] = _outcome(ours, chosen, rule, shown, memory)
        notes[name] = f"{rule}, from {len(train)} other prompts; "
    for name in notes:
        notes[name] += compared(again)
    labels = {name: f"{CSD_ROWS[name]}, calibrated" for name in CALIBRATED}
    rows += _rows(again, labels, notes, found["csd-specdecode"])
    rescues = replay(shown, window, Rescues(threshold=lam, tau=tau, memory=memory)).rule
    assert isinstance(rescues, Rescues)
    return [
        *rows, *threshold_rows(seen, memory, (CSD_LAMBDA, lam), tau),
        *pattern_rows(fitted + seen, fitted.top(), rescues.rescued),
    ]  # fmt: skip


def compared(found: Mapping[str, MethodOutcome]) -> str:
    """Return the verdict of an ablation of memory and gate, in shares of the judged mismatches."""
    memory, gate, both = (accepted_mismatches(found[name].log) or 0.0 for name in CALIBRATED)
    text = f"the memory alone accepts {memory:.0%} of mismatches, the gate alone {gate:.0%}"
    each = both < min(memory, gate)
    return f"{text}, both {both:.0%}: {'each' if each else 'not each'} of them takes some away"


def _outcome(
    ours: Ours, chosen: Method, rule: str, shown: Trace, memory: OnlineCorrectionMemory
) -> MethodOutcome:
    resources = {"memory": memory} if chosen.rule in ("csd", "csd-ocm") else {}
    return method_outcome(ours, chosen._replace(rule=rule), shown, **resources)


def _rows(
    found: Mapping[str, MethodOutcome], labels: Mapping[str, str], notes: Mapping[str, str],
    base: MethodOutcome,
) -> list[Row]:  # fmt: skip
    marks = degenerate([one.log for one in found.values()])
    rows: list[Row] = []
    for (name, mine), mark in zip(found.items(), marks, strict=True):
        label = labels[name]
        main = IN_MAIN.get(label)
        stood, seen, rounds = accepted_mismatches(mine.log), mine.quality, mine.log.rounds
        values: dict[str, tuple[float | None, float | None]] = {
            "MATH500_AR": (None, 100 * float(rounds["accepted"].sum() / rounds["drafted"].sum())),
            "speedup": (CSD_MAIN.value(MAIN, main) if main else None, mine.speedup),
            "gain over SpecDecode, percent": (
                CSD_GAINS[MAIN] if main == "CSD" else None,
                None if mine is base else 100 * (mine.speedup / base.speedup - 1),
            ),
            "mismatches accepted, percent": (None, None if stood is None else 100 * stood),
            "token agreement": (None, seen.agreement if seen else None),
            "MATH500_Acc": (
                None,
                100 * seen.solved / seen.scored if seen and seen.scored else None,
            ),
        }
        parts = (mine.how, notes.get(name), seen.score if seen else "")
        note = "; ".join(part for part in parts if part)
        rows += [
            experiment(TABLE, label, column, value, note, paper, mark)
            for column, (paper, value) in values.items()
            if value is not None
        ]
    return rows


PAPER_LAMBDA, PAPER_TAU = 6, 0.01
TOP = 0.2
"""Share of the patterns that the paper calls the most frequent."""


@dataclass(frozen=True)
class Rejections:
    """Every rejection of a lossless run: its (draft, target) pair, and what the gate reads."""

    pairs: Sequence[TokenPair]
    gaps: npt.NDArray[np.float64]
    """z(draft) - z(target) in nats, at most 0; shape (rejections,)."""

    @classmethod
    def of(cls, trace: Trace, window: DraftPolicy) -> Rejections:
        """Return the rejections of `window` over `trace`; SignalError if the trace has none."""
        [log] = replay_many(trace, [(describe(window), window)])
        pairs = rejected_pairs(trace, log)
        if not pairs:
            raise SignalError("no draft was rejected: there is nothing to calibrate CSD on")
        return cls(pairs, rejected_gaps(trace, log))

    def __add__(self, other: Rejections) -> Rejections:
        return Rejections([*self.pairs, *other.pairs], np.concatenate([self.gaps, other.gaps]))

    def top(self) -> set[TokenPair]:
        """Return the most frequent `TOP` of the patterns, rounded up; of ties the first met."""
        counts = Counter(self.pairs)
        most = counts.most_common(math.ceil(TOP * len(counts)))
        return {pair for pair, _ in most}

    def held(self, lam: int, memory: OnlineCorrectionMemory | None = None) -> float:
        """Return the share of the rejections whose pair was counted more than `lam` times.

        In `memory`, or without one among these very rejections, each not counting itself.
        """
        own = Counter(self.pairs)
        counts = [own[p] - 1 if memory is None else memory.count(*p) for p in self.pairs]
        return float((np.array(counts) > lam).mean())

    def passed(self, tau: float) -> float:
        """Return the share of the rejections that the gate lets pass."""
        return float((self.gaps >= math.log(tau)).mean())

    def median_lambda(self) -> int:
        """Return the largest lambda, or 0, at which the memory still holds half of rejections."""
        lam = 0
        while self.held(lam + 1) >= 0.5:
            lam += 1
        return lam

    def median_tau(self) -> float:
        """Return the tau at which the gate lets half of the rejections pass."""
        return float(f"{math.exp(float(np.median(self.gaps))):.3g}")


def threshold_rows(
    seen: Rejections, memory: OnlineCorrectionMemory, lambdas: Sequence[int], tau: float
) -> list[Row]:
    """Return how often memory and gate accept on the rounds shown, not on those fitted.

    A threshold at which either never does, or nearly always, is marked.
    """
    low, mid, high = np.percentile(seen.gaps, [10, 50, 90])
    gate = f"log ratio at rejections: 10% below {low:.2f}, half below {mid:.2f}, 90% {high:.2f}"
    counts = sorted((n for _, n in memory.items()), reverse=True)
    held = f"the most frequent pair was counted {counts[0]} times, half of them "
    held += f"{float(np.median(counts)):g} or fewer"
    return [
        *(_row(f"gate at tau = {value:g}", "passed", seen.passed(value), gate)
          for value in dict.fromkeys((PAPER_TAU, tau))),
        *(_row(f"memory at lambda = {lam}", "held", seen.held(lam, memory), held)
          for lam in dict.fromkeys((PAPER_LAMBDA, *lambdas))),
    ]  # fmt: skip


def pattern_rows(
    whole: Rejections, frequent: set[TokenPair], rescued: Sequence[TokenPair]
) -> list[Row]:
    """Return the share of all rejections, and of rescues, that the most frequent patterns hold.

    ``frequent`` are those of the prompts that `rescued` is not from.
    """
    top = whole.top()
    share = 100 * float(np.mean([pair in top for pair in whole.pairs]))
    table, [column], [label] = CSD_PATTERNS.name, CSD_PATTERNS.columns, CSD_PATTERNS.cells
    note = f"{len(whole.pairs)} rejections of {len(set(whole.pairs))} patterns, over all prompts"
    first = experiment(table, label, column, share, note)
    column = "rescues, percent"
    if not rescued:
        never = "never fires on this pair"
        return [first, experiment(table, label, column, None, "nothing was rescued", mark=never)]
    share = 100 * float(np.mean([pair in frequent for pair in rescued]))
    note = f"{len(rescued)} rescues by the calibrated CSD; frequent on the other prompts"
    return [first, experiment(table, label, column, share, note)]


def _row(label: str, what: str, share: float, note: str) -> Row:
    mark = ""
    if share == 0:
        mark = "never fires on this pair"
    elif share > HARDLY_VERIFIES:
        mark = f"says yes to {share:.0%}: hardly a test on this pair"
    return experiment(TABLE, label, f"rejections {what}, percent", 100 * share, note, mark=mark)


class Rescues(CSD):
    """CSD that keeps the pairs it rescues in a run, in order."""

    def begin_run(self, vocab_size: int | None, temperature: float, top_p: float = 1.0) -> None:
        """Start with nothing rescued (CSD)."""
        super().begin_run(vocab_size, temperature, top_p)
        self.rescued: list[TokenPair] = []

    def accepts(self, token: Any, score: Any) -> bool:
        """Follow CSD."""
        stands = super().accepts(token, score)
        if stands and not score.match:
            self.rescued.append((token.token_id, score.token))
        return stands
