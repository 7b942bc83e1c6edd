"""CM-ASD's ablation on our pair: its Table III, and Table V's relative BLEU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.papers.ours import (
    REPLAYED,
    MethodOutcome,
    Ours,
    Row,
    experiment,
    method_outcome,
    quality_note,
)
from simulator.published import CMASD_3, CMASD_5
from simulator.serving import ClosedLoop, Limits, Scenario, over_batches, simulate
from simulator.serving.scenario import FILLS
from simulator.summary import degenerate
from traces.errors import DraftsimError
from traces.sources import methods

CMASD_ROWS = dict(zip(methods.CMASD_ABLATION, CMASD_3.cells, strict=True))
"""Our names of CM-ASD's variants, and the table's."""
FULL = "cm-asd"
WINDOWS = {"cm-asd-fixed-threshold": FULL, "cm-asd-no-confidence": "cm-asd-fixed-window"}
"""Variants of a fixed threshold, and those with the same window and the adaptive one."""


def at_tau(chosen: methods.Method, tau: float) -> methods.Method:
    """Return a variant of fixed threshold at another one than the equal mean."""
    return chosen._replace(rule=chosen.rule.replace(methods.MEAN_TAU, f"{tau:g}"))


def cmasd_rows(ours: Ours) -> list[Row]:
    """Return CM-ASD's Table III on our pair, with Table V's relative BLEU where it was recorded.

    Where the threshold is fixed, its row is at the mean of the adaptive one, and `FIXED_TAUS`
    give two more: how an ablation ends follows from the threshold that it is given.
    """
    found = {name: method_outcome(ours, chosen) for name, chosen in methods.CMASD_ABLATION.items()}

    def compared(rival: str, fixed: MethodOutcome) -> str:
        # A replay is held against a replay: along the recorded text both err alike.
        adaptive = found[rival]
        if fixed.quality is None and adaptive.quality is not None:
            adaptive = method_outcome(replace(ours, runs=()), methods.CMASD_ABLATION[rival])
        return comparison(adaptive, fixed)

    shown: list[tuple[MethodOutcome, str, str, str]] = []
    for name, label in CMASD_ROWS.items():
        if name not in WINDOWS:
            shown.append((found[name], name, label, ""))
            continue
        chosen, rival = methods.CMASD_ABLATION[name], WINDOWS[name]
        tau = methods.resolved(chosen, ours.trace).rule.rpartition("=")[2]
        said = f"tau = {tau}, the mean of tau_t; {compared(rival, found[name])}"
        shown.append((found[name], name, label, said))
        for value, why in methods.FIXED_TAUS.items():
            at = method_outcome(ours, at_tau(chosen, value))
            said = f"tau = {value:g}, {why}; {compared(rival, at)}"
            shown.append((at, name, f"{label}, tau = {value:g}", said))
    marks = degenerate([outcome.log for outcome, *_ in shown])
    return [
        row._replace(mark=mark)
        for one, mark in zip(shown, marks, strict=True)
        for row in _rows(*one)
    ]


def comparison(adaptive: MethodOutcome, fixed: MethodOutcome) -> str:
    """Return the verdict of an ablation of the adaptive threshold: tokens against agreement."""
    ours, theirs = adaptive.accepted_per_round, fixed.accepted_per_round
    more = "accepts as much"
    if round(ours, 2) != round(theirs, 2):
        more = f"accepts {'more' if theirs > ours else 'less'}"
    text = f"a fixed threshold {more}: {theirs:.2f} against {ours:.2f} drafts a round"
    if adaptive.quality is not None and fixed.quality is not None:
        mine, other = adaptive.quality.agreement, fixed.quality.agreement
        text = f"{text}, {other:.0%} against {mine:.0%} of tokens as greedy"
        mine, other = -mine, -other
    else:
        mine, other = adaptive.mismatched_share, fixed.mismatched_share
        text = f"{text}, of them {other:.0%} against {mine:.0%} not the target's choice"
    gains, loses = theirs >= ours and other <= mine, theirs <= ours and other >= mine
    if gains or loses:
        return f"{text}: the {'fixed' if gains else 'adaptive'} one is not worse in either"
    return f"{text}: neither is better in both"


def _rows(found: MethodOutcome, name: str, label: str, said: str) -> list[Row]:
    drafted = found.log.source != "none" and bool(found.log.rounds["drafted"].any())
    values: dict[str, tuple[float | None, str]] = {
        "Tok": (1.0, "plain decoding drafts nothing: the table's 1 is the token that every step "
                "emits"),
        "Speed": (found.speedup, "speed over greedy decoding without speculation, not beam 5"),
        "td_ms": (None, ""),
        "emitted per round": (found.tokens_per_round, ""),
    }  # fmt: skip
    if drafted:
        counts = "Tok counts accepted drafts, without the token that the target adds to them"
        values["Tok"] = found.accepted_per_round, _join(said, counts)
        values["td_ms"] = 1e3 * float(np.mean(found.priced.draft_s)), ""
        values["rollback rate"] = (
            found.rollback_rate, "share of rounds of which drafts were thrown away; the paper's "
            "text alone speaks of it",
        )  # fmt: skip
    rows = [
        experiment(CMASD_3.name, label, column, value, _join(found.how, more))
        for column, (value, more) in values.items()
    ]
    rows = [row for row in rows if row.ours is not None or row.published is not None]
    if drafted and found.quality is not None:
        label = "CM-ASD" if name == FULL else label
        note = _join(found.how, quality_note(found.quality), said)
        bleu = found.quality.relative_bleu
        rows.append(experiment(CMASD_5.name, label, "relative BLEU", bleu, note))
    return rows


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


FIGURE_2 = "CM-ASD Figure 2"
SERVED = {
    "plain decoding": methods.CMASD_ABLATION["transformer-base"],
    "fixed window": methods.METHODS["specdecode"], "GammaTune": methods.METHODS["gammatune"],
    "CM-ASD": methods.METHODS["cm-asd"],
}  # fmt: skip
"""Policies that are served: the figure's own points are a drawing."""
LARGEST = 32
"""Batches above are those of engines with another bound than the figure's."""


def batch_rows(ours: Ours) -> list[Row]:
    """Return tokens per second and milliseconds a token, with as many requests kept in the engine.

    At the batch sizes that the latencies know; DraftsimError if that is one.
    """
    if not ours.latency.knows_batches:
        raise DraftsimError(
            "these latencies know one batch size, and the figure is over several: measure them "
            "(`draftsim profile --batch 1,4,16`)"
        )
    cells = ours.latency.cells
    mine = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]
    batches = sorted({int(b) for b in mine["batch"] if b <= LARGEST})
    rows: list[Row] = []
    for name, chosen in SERVED.items():
        policy, rule = methods.build(chosen, ours.trace)
        how = "exact replay" if rule.lossless else REPLAYED
        for batch in batches:
            requests = max(len(ours.trace.requests), FILLS * batch)
            base = Scenario(ClosedLoop(batch), Limits(max_batch=batch), requests=requests)
            [scenario] = over_batches(base, [batch])
            row = simulate(ours.trace, ours.latency, policy, scenario, rule=rule).row()
            note = f"closed loop of {requests} requests, continuous batching; {how}"
            values = {
                "tokens/s": float(row["throughput_tok_s"]),
                "ms a token": 1e3 * float(row["tpot_s"]["mean"]),
            }
            rows += [
                experiment(FIGURE_2, f"{name}, batch {batch}", column, value, note)
                for column, value in values.items()
            ]
    return rows
