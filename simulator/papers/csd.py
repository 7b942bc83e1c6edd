"""CSD's ablation on our pair: at our thresholds, and at thresholds calibrated on its prompts."""

from __future__ import annotations

from collections.abc import Mapping

from policies.core import DraftPolicy
from policies.rules.memory import OnlineCorrectionMemory
from simulator.degenerate import accepted_mismatches, degenerate
from simulator.papers.csd_thresholds import Rejections, Rescues, pattern_rows, threshold_rows
from simulator.papers.ours import Ours, Outcome, method_outcome
from simulator.papers.rows import EXPERIMENT, Row
from simulator.published import CSD_ABLATION, CSD_GAINS, CSD_MAIN
from traces.acceptance.trace import Trace
from traces.errors import SignalError
from traces.replay.corrections import calibrated, split_requests
from traces.replay.run import replay
from traces.sources.methods import CSD_ABLATION as CSD_METHODS
from traces.sources.methods import CSD_WINDOW, Method, build

CSD_ROWS = {
    "csd-specdecode": "SpecDecode (baseline)", "csd-ocm": "SD + OCM only",
    "csd-scg": "SD + SCG only", "csd": "CSD (OCM + SCG)", "lossy-sd": "Lossy SD (global tau)",
}  # fmt: skip
CALIBRATED = ("csd-ocm", "csd-scg", "csd")
"""The arms that have a threshold to calibrate."""
TRAINING_SHARE = 0.5
"""Prompts of each category that calibrate CSD's memory; the others are decoded."""
CSD_LAMBDA = 1
"""The paper's 6 belongs to 2 to 8 thousand calibration samples; ours are far fewer."""
MAIN = "Llama-3 MATH500 Speedup"
TABLE = CSD_ABLATION.name


def csd_rule(chosen: Method) -> str:
    """The rule of a CSD variant at our lambda."""
    learns = chosen.rule in ("csd", "csd-ocm")
    return f"{chosen.rule}:threshold={CSD_LAMBDA}" if learns else chosen.rule


def csd_window(trace: Trace) -> DraftPolicy:
    """The length policy of all of CSD's arms."""
    return build(Method("", CSD_WINDOW, "exact", ""), trace)[0]


def csd_rows(ours: Ours) -> list[Row]:
    """CSD's ablation on the prompts that neither its memory nor its thresholds were fitted to.

    First at our lambda and the paper's tau, then the arms with a threshold again at those that
    `Rejections` calibrates on the other prompts, so that memory and gate both say no.
    """
    train, rest = split_requests(ours.trace, TRAINING_SHARE)
    if not rest:
        raise SignalError("one prompt a category leaves none to decode: record more prompts")
    window = csd_window(ours.trace)
    training, shown = ours.trace.select(train), ours.trace.select(rest)
    memory = calibrated(training, window)
    fitted, seen = (Rejections.of(part, window) for part in (training, shown))
    lam, tau = fitted.median_lambda(), fitted.median_tau()
    said = f"memory of {len(memory)} pairs from {len(train)} other prompts, lambda"
    arms, notes = {}, {}
    for name, chosen in CSD_METHODS.items():
        rule = csd_rule(chosen)
        arms[name] = _outcome(ours, chosen, rule, shown, memory)
        notes[name] = f"{said} {CSD_LAMBDA}" if rule != chosen.rule else ""
    rows = _rows(arms, CSD_ROWS, notes, arms["csd-specdecode"], published=True)
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
    rows += _rows(again, labels, notes, arms["csd-specdecode"], published=False)
    rescues = replay(shown, window, Rescues(threshold=lam, tau=tau, memory=memory)).rule
    assert isinstance(rescues, Rescues)
    return [
        *rows, *threshold_rows(TABLE, seen, memory, (CSD_LAMBDA, lam), tau),
        *pattern_rows(fitted + seen, fitted.top(), rescues.rescued),
    ]  # fmt: skip


def compared(arms: Mapping[str, Outcome]) -> str:
    """What an ablation of memory and gate says, in shares of the judged mismatches."""
    memory, gate, both = (accepted_mismatches(arms[name].log) or 0.0 for name in CALIBRATED)
    text = f"the memory alone lets {memory:.0%} of mismatches stand, the gate alone {gate:.0%}"
    each = both < min(memory, gate)
    return f"{text}, both {both:.0%}: {'each' if each else 'not each'} of them takes some away"


def accuracy(found: Outcome) -> float | None:
    """Percent of the prompts with a number for an answer that a real run solved."""
    seen = found.quality
    return 100 * seen.solved / seen.scored if seen and seen.scored else None


def _outcome(
    ours: Ours, chosen: Method, rule: str, shown: Trace, memory: OnlineCorrectionMemory
) -> Outcome:
    resources = {"memory": memory} if chosen.rule in ("csd", "csd-ocm") else {}
    return method_outcome(ours, chosen._replace(rule=rule), shown, **resources)


def _rows(
    arms: Mapping[str, Outcome], labels: Mapping[str, str], notes: Mapping[str, str],
    base: Outcome, published: bool,
) -> list[Row]:  # fmt: skip
    marks = degenerate([arm.log for arm in arms.values()])
    rows: list[Row] = []
    for (name, mine), mark in zip(arms.items(), marks, strict=True):
        label = labels[name]
        known = published and label in CSD_ABLATION.cells
        main = {"csd": "CSD", "csd-specdecode": "SpecDecode"}.get(name) if published else None
        stood = accepted_mismatches(mine.log)
        values: dict[str, tuple[float | None, float | None]] = {
            "MATH500_AR": (
                CSD_ABLATION.value(label, "MATH500_AR") if known else None,
                100 * mine.acceptance_rate,
            ),
            "speedup": (CSD_MAIN.value(MAIN, main) if main else None, mine.speedup),
            "gain over SpecDecode, percent": (
                CSD_GAINS[MAIN] if main == "CSD" else None,
                None if mine is base else 100 * (mine.speedup / base.speedup - 1),
            ),
            "mismatches let stand, percent": (None, None if stood is None else 100 * stood),
            "token agreement": (None, mine.quality.agreement if mine.quality else None),
            "MATH500_Acc": (
                CSD_ABLATION.value(label, "MATH500_Acc") if known else None,
                accuracy(mine),
            ),
        }
        score = mine.quality.score if mine.quality else ""
        note = "; ".join(part for part in (mine.how, notes.get(name), score) if part)
        rows += [
            Row(TABLE, label, column, paper, value, EXPERIMENT, note, mark)
            for column, (paper, value) in values.items()
            if value is not None
        ]
    return rows
