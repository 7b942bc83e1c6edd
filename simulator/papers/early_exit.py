"""SpecBound's experiments on our pair, where early exits of the target were recorded."""

from __future__ import annotations

from policies.basic import Fixed
from policies.registry import parse_policy
from simulator.papers.experiments import distribution_rows
from simulator.papers.ours import Ours, Sampled
from simulator.papers.published import SPECBOUND_2
from simulator.papers.rows import EXPERIMENT, Row
from simulator.pricing import autoregressive, price
from simulator.summary import prompt_speedups
from traces.errors import DraftsimError
from traces.latency import LatencyTable
from traces.rounds import RoundLog
from traces.sampling import GREEDY, Sampling
from traces.sources.registry import SYSTEMS, parse_source
from traces.sources.replay import replay_source

TABLE = "SpecBound Table 1"
VARIANTS = {
    "specbound": "SpecBound", "specbound-no-annealing": "without annealing",
    "specbound-no-depth-bound": "without the depth bound",
    "specbound-no-width-bound": "without the width bound",
}  # fmt: skip
"""The variants of its Figure 4."""
FIGURE_3_GAMMA = 6
"""Width bound of the sweeps of its other parameters."""
FIGURE_3: dict[str, tuple[float, ...]] = {
    "tau": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "omega": (0.0, 0.1, 0.2, 0.3, 0.5, 1.0),
    "depth": (0.25, 0.5, 0.75, 1.0),
    "width": (1, 2, 4, 6, 8, 12, 24),
}
"""The values swept, one parameter at a time around `SYSTEMS`' specbound."""
DEFAULTS = {"tau": 0.5, "omega": 0.3, "depth": 0.5}


def figure_3_source(parameter: str, value: float) -> str:
    """The source of one point of the sweep, as text."""
    setting = {**DEFAULTS, **({parameter: value} if parameter in DEFAULTS else {})}
    return "early-exit:" + ",".join(f"{name}={v:g}" for name, v in setting.items())


FIGURE_3_SOURCES = tuple(
    dict.fromkeys(figure_3_source(name, v) for name, values in FIGURE_3.items() for v in values)
)
"""What a recording must have followed for the sweeps."""
TABLE_2 = {
    "greedy decoding": GREEDY, "temperature sampling (T=0.3)": Sampling(0.3),
    "temperature sampling (T=1.0)": Sampling(1.0), "top-p sampling (p=0.9)": Sampling(1.0, 0.9),
}  # fmt: skip
"""Table 2's rows; the paper names no temperature beside its top-p, which is then 1."""


def system_log(ours: Ours | Sampled, name: str) -> RoundLog:
    """A named system replayed; DraftsimError where its source was not recorded."""
    system = SYSTEMS[name]
    policy = parse_policy(system.policy, max_gamma=ours.trace.max_gamma)
    source = parse_source(system.source)
    return replay_source(ours.trace, source, policy, recordings=ours.recordings, name=name)


def speedup(log: RoundLog, latency: LatencyTable) -> float:
    """Seconds of plain decoding over those of `log`."""
    return float(price(autoregressive(log), latency).total_s / price(log, latency).total_s)


def early_exit_rows(ours: Ours) -> list[Row]:
    """Tables 1, 2 and 5 and Figures 3 and 4 on our pair; empty without a recording of early exits.

    Table 1's tasks are the prompt categories of ours, so only its rows are named alike.
    """
    if ours.recordings.exits is None:
        return []
    rows: list[Row] = []
    for name, label in VARIANTS.items():
        table = TABLE if name == "specbound" else "SpecBound Figure 4"
        try:
            log = system_log(ours, name)
            speed = speedup(log, ours.latency)
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
            rows += sampling_rows(ours, speed, note)
    return rows + sweep_rows(ours)


def sampling_rows(ours: Ours, greedy: float, note: str) -> list[Row]:
    """Table 2: our prompts as a whole; the categories are Table 1's rows.

    ``greedy``: SpecBound's speedup along greedy output, and what to say of it.
    """
    rows = []
    for row, sampling in TABLE_2.items():
        own = (greedy, note) if sampling.greedy else _sampled(ours, sampling)
        published = SPECBOUND_2.value(row, "Overall")
        rows.append(Row(SPECBOUND_2.name, row, "Overall", published, own[0], EXPERIMENT, own[1]))
    return rows


def _sampled(ours: Ours, sampling: Sampling) -> tuple[float | None, str]:
    """SpecBound's speedup along outputs sampled so, and what to say of it."""
    found = [s for s in ours.sampled if s.trace.sampling == sampling]
    if not found:
        return None, (
            f"no early exits were recorded along outputs sampled at {sampling.label}: "
            f"`{ours.profile} --exit-layers {sampling.options}` records them, and --sampled RUN "
            "names them"
        )
    try:
        log = system_log(found[0], "specbound")
        value = speedup(log, ours.latency)
    except DraftsimError as error:
        return None, str(error)
    rate = float(log.rounds["emitted"].mean())
    return value, f"{SYSTEMS['specbound'].source}; replayed: {log.fidelity}; CR {rate:.2f}"


def sweep_rows(ours: Ours) -> list[Row]:
    """Figure 3: tokens per round and speedup over each parameter of SpecBound in turn.

    The paper gives the figure's points as a drawing, so there is nothing published to hold
    them against but their shape.
    """
    rows: list[Row] = []
    table = "SpecBound Figure 3"
    most = ours.trace.max_gamma or 24
    for parameter, values in FIGURE_3.items():
        for value in values:
            gamma = int(value) if parameter == "width" else FIGURE_3_GAMMA
            if gamma > most:
                continue
            text, label = figure_3_source(parameter, value), f"{parameter}={value:g}"
            try:
                log = replay_source(
                    ours.trace, parse_source(text), Fixed(gamma), recordings=ours.recordings
                )
                speed = speedup(log, ours.latency)
            except DraftsimError as error:
                rows.append(Row(table, label, "SD", None, None, EXPERIMENT, str(error)))
                continue
            note = f"{text} at width {gamma}"
            rate = float(log.rounds["emitted"].mean())
            rows += [
                Row(table, label, "CR", None, rate, EXPERIMENT, note),
                Row(table, label, "SD", None, speed, EXPERIMENT, note),
            ]
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
