"""The papers' experiments with a draft model, repeated on our pair."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from policies.basic import Fixed
from policies.core import DraftPolicy
from policies.gammatune import GammaTune, GammaTunePlus
from policies.huggingface import Confidence, HFHeuristic
from simulator.papers.cmasd import at_tau
from simulator.papers.ours import Ours, Outcome, method_outcome
from simulator.papers.published import (
    CSD_ABLATION,
    CSD_MAIN,
    GAMMATUNE_2,
    SPECBOUND_5,
)
from simulator.papers.rows import EXPERIMENT, Row
from simulator.robustness import INITIAL_GAMMAS, robustness, speedup_by_gamma
from simulator.summary import prompt_speedups, speedup_distribution
from traces.corrections import calibrated, split_requests
from traces.errors import SignalError
from traces.methods import CMASD_ABLATION, CSD_WINDOW, FIXED_TAUS, MEAN_TAU, Method, build
from traces.methods import CSD_ABLATION as CSD_METHODS
from traces.rounds import RoundLog

CSD_ROWS = {
    "csd-specdecode": "SpecDecode (baseline)", "csd-ocm": "SD + OCM only",
    "csd-scg": "SD + SCG only", "csd": "CSD (OCM + SCG)", "lossy-sd": "Lossy SD (global tau)",
}  # fmt: skip
TRAINING_SHARE = 0.5
"""Prompts of each category that calibrate CSD's memory; the others are decoded."""
CSD_LAMBDA = 1
"""The paper's 6 belongs to 2 to 8 thousand calibration samples; ours are far fewer."""


def csd_rule(chosen: Method) -> str:
    """The rule of a CSD variant at our lambda."""
    learns = chosen.rule in ("csd", "csd-ocm")
    return f"{chosen.rule}:threshold={CSD_LAMBDA}" if learns else chosen.rule


REAL_RUNS: tuple[tuple[str, str, float | None], ...] = (
    *((m.policy, m.rule, None) for m in CMASD_ABLATION.values() if m.rule != "exact"),
    *(
        (m.policy, at_tau(m, tau).rule, None)
        for m in CMASD_ABLATION.values()
        if MEAN_TAU in m.rule
        for tau in FIXED_TAUS
    ),
    *((m.policy, csd_rule(m), TRAINING_SHARE) for m in CSD_METHODS.values() if m.rule != "exact"),
)
"""(policy, rule, share to calibrate on) of what is better decoded for real than replayed."""


def gammatune_families(max_gamma: int) -> dict[str, Callable[[int], DraftPolicy]]:
    """Table 2's methods as functions of the initial draft length."""
    return {
        "SpecDecode": Fixed,
        "HFHeuristic": lambda gamma: HFHeuristic(gamma=gamma, gamma_max=max_gamma),
        "AssistantThreshold": lambda gamma: Confidence(gamma=gamma),
        "GammaTune": lambda gamma: GammaTune(gamma=gamma, gamma_max=max_gamma),
        "GammaTune+": lambda gamma: GammaTunePlus(gamma=gamma, gamma_max=max_gamma),
    }


def gammatune_rows(ours: Ours) -> list[Row]:
    """GammaTune, Table 2: mean and sd over the initial draft lengths, ours as its average."""
    most = ours.trace.max_gamma or max(INITIAL_GAMMAS)
    gammas = [g for g in INITIAL_GAMMAS if g <= most]
    speedups = speedup_by_gamma(ours.trace, gammatune_families(most), ours.latency, gammas)
    frame = robustness(speedups, "SpecDecode").set_index("policy").astype(float)
    plain = speedups.groupby("policy")["speedup"].mean()
    rows = []
    for name in GAMMATUNE_2.cells:
        note = f"over {len(gammas)} initial gammas; {plain[name]:.2f}x plain decoding"
        for column, of_paper in (("mean", "average_mean"), ("sd", "average_sd")):
            rows.append(
                Row(
                    GAMMATUNE_2.name, name, of_paper, GAMMATUNE_2.value(name, of_paper),
                    dict(frame[column])[name], EXPERIMENT, note,
                )
            )  # fmt: skip
    return rows


def csd_rows(ours: Ours) -> list[Row]:
    """CSD's ablation on the prompts its memory was not calibrated on."""
    train, rest = split_requests(ours.trace, TRAINING_SHARE)
    if not rest:
        raise SignalError("one prompt a category leaves none to decode: record more prompts")
    window, _ = build(Method("", CSD_WINDOW, "exact", ""), ours.trace)
    memory = calibrated(ours.trace.select(train), window)
    held_out = ours.trace.select(rest)
    said = f"memory of {len(memory)} pairs from {len(train)} other prompts, lambda {CSD_LAMBDA}"
    found = {}
    for name, chosen in CSD_METHODS.items():
        rule = csd_rule(chosen)
        resources = {"memory": memory} if rule != chosen.rule else {}
        found[name] = method_outcome(ours, chosen._replace(rule=rule), held_out, **resources)
    base = found["csd-specdecode"].speedup
    rows = []
    for name, label in CSD_ROWS.items():
        mine = found[name]
        note = _note(mine, said if CSD_METHODS[name].rule in ("csd", "csd-ocm") else "")
        known = label in CSD_ABLATION.cells
        rate = CSD_ABLATION.value(label, "MATH500_AR") if known else None
        printed = {"csd": "CSD", "csd-specdecode": "SpecDecode"}.get(name)
        speed = CSD_MAIN.value("Llama-3 MATH500 Speedup", printed) if printed else None
        table = CSD_ABLATION.name
        rows += [
            Row(table, label, "MATH500_AR", rate, 100 * mine.acceptance_rate, EXPERIMENT, note),
            Row(table, label, "speedup", speed, mine.speedup, EXPERIMENT, note),
        ]
        if name != "csd-specdecode":
            gain = 100 * (mine.speedup / base - 1)
            given = 23.3 if name == "csd" else None
            rows.append(
                Row(table, label, "gain over SpecDecode, percent", given, gain, EXPERIMENT, note)
            )
        if mine.quality is not None:
            share = mine.quality.agreement
            rows.append(Row(table, label, "token agreement", None, share, EXPERIMENT, note))
    return rows


def distribution_rows(log: RoundLog, ours: Ours, note: str) -> list[Row]:
    """SpecBound, Table 5: prompts by speedup, in five equal ranges from fastest to slowest.

    The paper's own bounds are not known; shares compare in shape alone.
    """
    values = prompt_speedups(log, ours.latency)
    values = values[np.isfinite(values)]
    ends = float(values.min()), float(values.max())
    if not ends[0] < ends[1]:
        raise SignalError("all prompts have one speedup: there is nothing to distribute")
    frame = speedup_distribution(values, np.linspace(*ends, len(SPECBOUND_5.cells) + 1))
    below = float((values < 1).mean())
    rows = []
    for label, low, high, share in zip(
        SPECBOUND_5.cells, frame["low"], frame["high"], frame["share"], strict=True
    ):
        rows.append(
            Row(
                SPECBOUND_5.name, label, "percent", SPECBOUND_5.value(label, "percent"),
                100 * float(share), EXPERIMENT,
                f"{note}; {low:.2f}x to {high:.2f}x; {below:.0%} of prompts below 1x",
            )
        )  # fmt: skip
    return rows


def _note(found: Outcome, more: str = "") -> str:
    return "; ".join(part for part in (found.how, more) if part)
