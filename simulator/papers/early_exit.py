"""SpecBound's experiments on our pair, where early exits of the target were recorded."""

from __future__ import annotations

from policies.registry import parse_policy
from simulator.papers.experiments import distribution_rows
from simulator.papers.ours import Ours
from simulator.papers.rows import EXPERIMENT, Row
from simulator.pricing import autoregressive, price
from simulator.summary import prompt_speedups
from traces.errors import DraftsimError
from traces.rounds import RoundLog
from traces.sources.registry import SYSTEMS, parse_source
from traces.sources.replay import replay_source

TABLE = "SpecBound Table 1"
VARIANTS = {
    "specbound": "SpecBound", "specbound-no-annealing": "without annealing",
    "specbound-no-depth-bound": "without the depth bound",
    "specbound-no-width-bound": "without the width bound",
}  # fmt: skip
"""The variants of its Figure 4."""


def system_log(ours: Ours, name: str) -> RoundLog:
    """A named system replayed; DraftsimError where its source was not recorded."""
    system = SYSTEMS[name]
    policy = parse_policy(system.policy, max_gamma=ours.trace.max_gamma)
    source = parse_source(system.source)
    return replay_source(ours.trace, source, policy, recordings=ours.recordings, name=name)


def early_exit_rows(ours: Ours) -> list[Row]:
    """Tables 1 and 5 and Figure 4 on our pair; empty without a recording of early exits.

    Table 1's tasks are the prompt categories of ours, so only its rows are named alike.
    """
    if ours.recordings.exits is None:
        return []
    rows: list[Row] = []
    for name, label in VARIANTS.items():
        table = TABLE if name == "specbound" else "SpecBound Figure 4"
        try:
            log = system_log(ours, name)
            speed = (
                price(autoregressive(log), ours.latency).total_s / price(log, ours.latency).total_s
            )
        except DraftsimError as error:
            rows.append(Row(table, f"our pair, {label}", "SD", None, None, EXPERIMENT, str(error)))
            continue
        rate = float(log.rounds["emitted"].mean())
        note = f"{SYSTEMS[name].source}; replayed: {log.fidelity}"
        rows += [
            Row(table, f"our pair, {label}", "CR", None, rate, EXPERIMENT, note),
            Row(table, f"our pair, {label}", "SD", None, speed, EXPERIMENT, note),
        ]
        if name == "specbound":
            rows += _by_category(log, ours, note)
            rows += distribution_rows(log, ours, "SpecBound")
    return rows


def _by_category(log: RoundLog, ours: Ours, note: str) -> list[Row]:
    speedups = prompt_speedups(log, ours.latency)
    emitted = log.per_request(log.rounds["emitted"])
    rounds = log.per_request([1] * len(log))
    names = [r.category for r in log.requests]
    rows = []
    for category in dict.fromkeys(names):
        mine = [i for i, n in enumerate(names) if n == category and rounds[i]]
        if not mine:
            continue
        rate = float(emitted[mine].sum() / rounds[mine].sum())
        mean = float(speedups[mine].mean())
        label = f"our pair, SpecBound, {category}"
        rows += [
            Row(TABLE, label, "CR", None, rate, EXPERIMENT, note),
            Row(TABLE, label, "SD (mean of prompts)", None, mean, EXPERIMENT, note),
        ]
    return rows
