"""SpecBound's Table 1 on our pair: every system that draftsim knows and whose drafts are there, and
why the paper and our pair put them in another order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.registry import parse_policy
from simulator.degenerate import degenerate
from simulator.papers.ours import Ours, Sampled
from simulator.papers.quantities import SPECBOUND
from simulator.papers.rows import EXPERIMENT, Row
from simulator.published import SPECBOUND_1
from simulator.summary import prompt_speedups
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many
from traces.sources.methods import METHODS, build
from traces.sources.registry import SYSTEMS, parse_source
from traces.sources.replay import replay_source

PAPERS_SYSTEMS = {
    "lookahead": "Lookahead", "medusa": "Medusa", "rest": "REST", "kangaroo": "Kangaroo",
    "space": "SPACE", "adadecode": "AdaDecode", "specbound": "SpecBound",
}  # fmt: skip
"""Our names of the table's systems, and its own: these have a column a prompt category."""
ABLATIONS = ("specbound-no-annealing", "specbound-no-depth-bound", "specbound-no-width-bound")
"""Systems that are variants of one, shown by Figure 4."""
REFERENCE = "specdecode"
"""Speculative decoding with the draft model, for comparison: the table has none."""


def replayed(ours: Ours | Sampled, name: str) -> RoundLog:
    """Return a named system replayed; DraftsimError if its source was not recorded."""
    if name == REFERENCE:
        policy, _ = build(METHODS[name], ours.trace)
        [log] = replay_many(ours.trace, [(name, policy)])
        return log
    system = SYSTEMS[name]
    policy = parse_policy(system.policy, max_gamma=ours.trace.max_gamma)
    source = parse_source(system.source)
    return replay_source(ours.trace, source, policy, recordings=ours.recordings, name=name)


def system_rows(ours: Ours) -> list[Row]:
    """Return tokens a round and speedup of every system, by prompt category for the table's own.

    Table 1's tasks are the prompt categories of ours, so only its systems are named alike.  A
    system that was not recorded, or whose parts were not timed, has a row that says so.
    """
    rows, logs = [], {}
    names = [REFERENCE, *(name for name in SYSTEMS if name not in ABLATIONS)]
    for name in names:
        try:
            logs[name] = replayed(ours, name)
        except DraftsimError as error:
            rows.append(Row(SPECBOUND, _label(name), "SD", None, None, EXPERIMENT, str(error)))
    for (name, log), mark in zip(logs.items(), degenerate(list(logs.values())), strict=True):
        chosen = METHODS[name]
        note = f"{chosen.source} under {chosen.policy}; replayed: {log.fidelity}"
        rate = float(log.rounds["emitted"].mean())
        rows.append(Row(SPECBOUND, _label(name), "CR", None, rate, EXPERIMENT, note, mark))
        try:
            speed = ours.speedup(log)
        except DraftsimError as error:
            rows.append(Row(SPECBOUND, _label(name), "SD", None, None, EXPERIMENT, str(error)))
            continue
        rows.append(Row(SPECBOUND, _label(name), "SD", None, speed, EXPERIMENT, note, mark))
        if name in PAPERS_SYSTEMS:
            rows += _by_category(log, ours, name, note, mark)
    return rows


def _label(name: str) -> str:
    return f"our pair, {PAPERS_SYSTEMS.get(name, name)}"


def _by_category(log: RoundLog, ours: Ours, name: str, note: str, mark: str) -> list[Row]:
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
        label = f"{_label(name)}, {category}"
        mean = float(speedups[mine].mean())
        rows += [
            Row(SPECBOUND, label, "CR", None, rate, EXPERIMENT, note, mark),
            Row(
                SPECBOUND, label, "SD (mean of prompts)", None, mean, EXPERIMENT, note, mark
            ),
        ]  # fmt: skip
    return rows


MODEL = "Vicuna-7B"
"""The model whose lines hold most systems."""


def order_rows(found: Sequence[Row]) -> list[Row]:
    """Return each system's rank by speedup among those that both the paper and our pair have.

    Parameters
    ----------
    found:
        Rows of `simulator.papers.systems.system_rows`.

    A speedup is tokens a round (CR) over what a round costs, in steps of plain decoding (CR / SD).
    So the ratio of two speedups falls into the ratio of tokens and that of costs: a row's note
    gives both, and says which is further from 1.
    """
    ours: dict[str, dict[str, float]] = {}
    for row in found:
        if row.row.startswith("our pair, ") and row.ours is not None:
            ours.setdefault(row.row.removeprefix("our pair, "), {})[row.column] = row.ours
    theirs = {method: line for (model, method), line in SPECBOUND_1.items() if model == MODEL}
    both = [method for method in theirs if {"CR", "SD"} <= {*ours.get(method, ())}]
    by_theirs = sorted(both, key=lambda method: -theirs[method].overall)
    by_ours = sorted(both, key=lambda method: -ours[method]["SD"])
    rows = []
    for method in by_theirs:
        line, own = theirs[method], ours[method]
        rate = sum(line.compression) / len(line.compression)
        tokens, whole = own["CR"] / rate, own["SD"] / line.overall
        rounds = whole / tokens
        worse = "tokens" if abs(math.log(tokens)) > abs(math.log(rounds)) else "what a round costs"
        note = (
            f"{whole:.2f} of {MODEL}'s speedup: {tokens:.2f} by tokens a round ({own['CR']:.2f} "
            f"for {rate:.2f}), {rounds:.2f} by what a round costs ({own['CR'] / own['SD']:.2f} "
            f"steps for {rate / line.overall:.2f}); above all by {worse}"
        )
        place, printed = by_ours.index(method) + 1, by_theirs.index(method) + 1
        rows.append(
            Row(SPECBOUND, f"order, {method}", "place", printed, place, EXPERIMENT, note)
        )  # fmt: skip
    return rows
