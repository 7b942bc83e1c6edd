"""SpecBound on our pair: the systems of its Table 1 and the reasons for their order; Tables 2, 3
and 5 and its figures, if early exits were recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd

from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from simulator.papers.ours import MethodOutcome, Ours, Row, experiment
from simulator.papers.quantities import SPECBOUND
from simulator.pricing import Priced
from simulator.published import SPECBOUND_1, SPECBOUND_2, SPECBOUND_3, SPECBOUND_5
from simulator.summary import degenerate, prompt_speedups, speedup_distribution
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError, TailError
from traces.replay.corrections import split_requests
from traces.replay.rounds import RoundLog
from traces.sources.early_exit import EarlyExit, StandInExit
from traces.sources.methods import METHODS
from traces.sources.recording import Recordings
from traces.sources.registry import SYSTEMS, describe_source, parse_source
from traces.sources.replay import replay_source

PAPERS_SYSTEMS = {
    "lookahead": "Lookahead", "medusa": "Medusa", "rest": "REST", "kangaroo": "Kangaroo",
    "space": "SPACE", "adadecode": "AdaDecode", "specbound": "SpecBound",
}  # fmt: skip
"""Our names of the table's systems, and its own: these have a column a prompt category."""
REFERENCE = "specdecode"
"""Speculative decoding with the draft model, for comparison: the table has none."""


def replayed(trace: Trace, recordings: Recordings, name: str) -> RoundLog:
    """Return a named system replayed; DraftsimError if its source was not recorded."""
    system = METHODS[name]
    policy = parse_policy(system.policy, max_gamma=trace.max_gamma)
    source = parse_source(system.source)
    return replay_source(trace, source, policy, recordings=recordings, name=name)


def system_rows(ours: Ours) -> list[Row]:
    """Return tokens a round and speedup of every system, by prompt category for the table's own.

    Table 1's tasks are the prompt categories of ours, so only its systems are named alike.  A
    system that was not recorded, or whose parts were not timed, has a row that says so.
    """
    rows, logs = [], {}
    # Figure 4 shows what SpecBound is without its parts.
    names = [REFERENCE, *(name for name in SYSTEMS if not name.startswith("specbound-no-"))]
    for name in names:
        try:
            logs[name] = replayed(ours.trace, ours.recordings, name)
        except DraftsimError as error:
            rows.append(experiment(SPECBOUND, _label(name), "SD", None, str(error)))
    for (name, log), mark in zip(logs.items(), degenerate(list(logs.values())), strict=True):
        chosen = METHODS[name]
        note = f"{chosen.source} under {chosen.policy}; replayed: {log.fidelity}"
        try:
            rows += _pair(SPECBOUND, _label(name), ours.ran(log, note), mark=mark)
        except DraftsimError as error:
            rate = float(log.rounds["emitted"].mean())
            rows.append(experiment(SPECBOUND, _label(name), "CR", rate, note, mark=mark))
            rows.append(experiment(SPECBOUND, _label(name), "SD", None, str(error)))
            continue
        if name in PAPERS_SYSTEMS:
            rows += _by_category(log, ours, name, note, mark)
    return rows


def _label(name: str) -> str:
    return f"our pair, {PAPERS_SYSTEMS.get(name, name)}"


def _by_category(log: RoundLog, ours: Ours, name: str, note: str, mark: str) -> list[Row]:
    prompts = pd.DataFrame({
        "category": [r.category for r in log.requests],
        "emitted": log.per_request(log.rounds["emitted"]),
        "rounds": log.per_request([1] * len(log)), "speedup": prompt_speedups(log, ours.latency),
    })  # fmt: skip
    rows = []
    for category, mine in prompts[prompts["rounds"] > 0].groupby("category", sort=False):
        rate = float(mine["emitted"].sum() / mine["rounds"].sum())
        label, mean = f"{_label(name)}, {category}", float(mine["speedup"].mean())
        rows += [
            experiment(SPECBOUND, label, "CR", rate, note, mark=mark),
            experiment(SPECBOUND, label, "SD (mean of prompts)", mean, note, mark=mark),
        ]
    return rows


MODEL = "Vicuna-7B"
"""The model whose lines hold most systems."""


def order_rows(found: Sequence[Row]) -> list[Row]:
    """Return the rank by speedup of each system that both the paper and our pair have.

    ``found`` are rows of `system_rows`.  A speedup is tokens a round (CR) over what a round costs,
    in steps of plain decoding (CR / SD).  So the ratio of two speedups falls into the ratio of
    tokens and that of costs: a row's note gives both, and says which is further from 1.
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
        rows.append(experiment(SPECBOUND, f"order, {method}", "place", place, note, printed))
    return rows


class Setting(NamedTuple):
    """SpecBound's parameters."""

    tau: float = 0.5
    omega: float = 0.3
    depth: float = 0.5
    width: float = 6

    @property
    def text(self) -> str:
        """In words, every parameter named."""
        return f"tau={self.tau:g}, omega={self.omega:g}, depth={self.depth:g}, width={self.width:g}"

    def source(self, kind: type[EarlyExit] = EarlyExit) -> EarlyExit:
        """Return the source of drafts; the width is the length policy's."""
        return kind(tau=self.tau, omega=self.omega, depth=self.depth)


START = Setting()
FOLLOWED: dict[str, tuple[float, ...]] = {
    "tau": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "omega": (0.0, 0.1, 0.2, 0.3, 0.5, 1.0),
    "depth": (0.25, 0.5, 0.75, 1.0),
}
FOLLOWED_SOURCES = tuple(
    dict.fromkeys(
        describe_source(START._replace(**{name: value}).source())
        for name, values in FOLLOWED.items()
        for value in values
    )
)
"""The settings around `START` that a recording follows after wrong exits, as text."""
CHOICES: dict[str, tuple[float, ...]] = {
    **FOLLOWED, "tau": (0.05, 0.1, 0.2, *FOLLOWED["tau"]), "width": (1, 2, 4, 6, 8, 12, 24)
}  # fmt: skip
"""The values that the search and Figure 3 go through; the paper's own are lost in the text at hand.
A threshold of 0 has no meaning and is not among them.
"""


def choices_recorded(ours: Ours) -> dict[str, tuple[float, ...]]:
    """Return `CHOICES` as far as the recording has them."""
    if EarlyExit.name not in ours.recordings:
        return CHOICES
    return {**CHOICES, "omega": tuple(EarlyExit().recording(ours.recordings).omegas)}


@dataclass
class SettingReplays:
    """SpecBound's settings replayed on some of the requests, each once.

    A setting that drafts past what was recorded after a wrong exit is replayed with a stand-in
    there (`StandInExit`): its log is ``approximate``.
    """

    ours: Ours
    requests: Sequence[int]
    found: dict[Setting, MethodOutcome] = field(default_factory=dict)

    def run(self, setting: Setting) -> MethodOutcome:
        """Return rounds and speedup; raises what `traces.sources.replay.replay_source` raises."""
        if setting not in self.found:
            try:
                log = self._replay(setting, EarlyExit)
            except TailError:
                log = self._replay(setting, StandInExit)
            self.found[setting] = self.ours.ran(log)
        return self.found[setting]

    def _replay(self, setting: Setting, kind: type[EarlyExit]) -> RoundLog:
        return replay_source(
            self.ours.trace, setting.source(kind), Fixed(int(setting.width)), name=setting.text,
            recordings=self.ours.recordings, requests=self.requests,
        )  # fmt: skip


def search(replays: SettingReplays) -> Setting:
    """Return the setting that no change of one parameter makes faster on these requests.

    From `START` to better neighbours along one parameter after another, then over all values
    of each.  Raises what `traces.sources.replay.replay_source` raises.
    """
    best = START
    replays.run(best)  # whatever was not recorded is said of the start
    values = choices_recorded(replays.ours)
    while True:
        best = _climbed(best, replays, values)
        others = [best._replace(**{n: v}) for n in values for v in values[n]]
        top = max([best, *others], key=lambda setting: replays.run(setting).speedup)
        if top == best:
            return best
        best = top


def _climbed(
    best: Setting, replays: SettingReplays, values: dict[str, tuple[float, ...]]
) -> Setting:  # fmt: skip
    """Return the last of ever better neighbours along single parameters."""
    moved = True
    while moved:
        moved = False
        for name, ordered in values.items():
            at = ordered.index(getattr(best, name))
            for step in (-1, 1):
                while 0 <= at + step < len(ordered):
                    other = best._replace(**{name: ordered[at + step]})
                    if replays.run(other).speedup <= replays.run(best).speedup:
                        break
                    best, at, moved = other, at + step, True
    return best


FIGURE_3, FIGURE_4 = "SpecBound Figure 3", "SpecBound Figure 4"
FULL = "SpecBound at its optimum"
FITTED_SHARE = 0.5
"""Prompts of each category on which the optimum is searched; the others are shown."""
TABLE_2 = {
    "greedy decoding": GREEDY, "temperature sampling (T=0.3)": Sampling(0.3),
    "temperature sampling (T=1.0)": Sampling(1.0), "top-p sampling (p=0.9)": Sampling(1.0, 0.9),
}  # fmt: skip
"""Table 2's rows; the paper names no temperature with its top-p, which is then 1."""


def early_exit_rows(ours: Ours) -> list[Row]:
    """Return Tables 1, 3 and 5 and Figures 3 and 4; empty without a recording of early exits.

    As in the paper, what is not varied is at its optimum: `search` finds it on half of the
    prompts, and the rows are of the other half.
    """
    if EarlyExit.name not in ours.recordings:
        return []
    fit, shown = split_requests(ours.trace, FITTED_SHARE)
    if not shown:
        raise SignalError("one prompt a category leaves none to show: record more prompts")
    fitting, replays = SettingReplays(ours, fit), SettingReplays(ours, shown)
    best = search(fitting)
    said = f"{best.text}: the best of {len(fitting.found)} settings tried on {len(fit)} others"
    found = replays.run(best)
    gain = 100 * (found.speedup / replays.run(START).speedup - 1)
    note = f"{said}; {gain:+.1f}% over {START.text}"
    return [
        *_pair(SPECBOUND, f"our pair, {FULL}", found, note), *ablation_rows(best, replays, said),
        *sweep_rows(best, replays), *serving_rows(found, ours, said),
        *distribution_rows(found.log, ours, said),
    ]  # fmt: skip


def ablations(best: Setting, ours: Ours) -> dict[str, Setting]:
    """Return Figure 4's variants of a setting, each without a part; and one without a threshold."""
    return {
        "without annealing": best._replace(omega=0.0),
        "without the depth bound": best._replace(depth=1.0),
        "without the width bound": best._replace(width=int(max(choices_recorded(ours)["width"]))),
        "without a threshold (not in the figure)": best._replace(tau=0.0),
    }


def ablation_rows(best: Setting, replays: SettingReplays, said: str) -> list[Row]:
    """Return Figure 4 from the optimum: what each part is worth there.

    A part that the optimum does without is marked: its ablation is the full method again.
    """
    full = replays.run(best)
    rows = _pair(FIGURE_4, FULL, full, said)
    for label, setting in ablations(best, replays.ours).items():
        other = replays.run(setting)
        _, mark = degenerate([full.log, other.log])
        if setting == best:
            mark = f"the optimum itself is {label}"
        worth = 100 * (full.speedup / other.speedup - 1)
        verdict = "gives a speedup" if worth > 0 else "gives no speedup"
        note = f"{setting.text}; the part {verdict} here: {worth:+.1f}% with it"
        rows += _pair(FIGURE_4, label, other, setting.text if mark else note, mark)
    return rows


def sweep_rows(best: Setting, replays: SettingReplays) -> list[Row]:
    """Return Figure 3: tokens per round and speedup over each parameter in turn, from the optimum.

    The paper gives the figure's points as a drawing, so there is nothing published to hold
    them against but their shape.
    """
    rows: list[Row] = []
    for name, values in choices_recorded(replays.ours).items():
        found = [replays.run(best._replace(**{name: value})) for value in values]
        others = ", ".join(part for part in best.text.split(", ") if not part.startswith(name))
        marks = degenerate([one.log for one in found])
        for value, one, mark in zip(values, found, marks, strict=True):
            note = f"{others}: the optimum" if value == getattr(best, name) else others
            rows += _pair(FIGURE_3, f"{name}={value:g}", one, note, mark)
    return rows


def _pair(
    table: str, label: str, found: MethodOutcome, note: str = "", mark: str = ""
) -> list[Row]:  # fmt: skip
    note = f"{note}; {found.how}" if note else found.how
    values = {"CR": found.tokens_per_round, "SD": found.speedup}
    return [experiment(table, label, name, v, note, mark=mark) for name, v in values.items()]


def sampling_rows(ours: Ours) -> list[Row]:
    """Return the table 2: our prompts as a whole; the categories are Table 1's rows.

    The sampled recordings follow `SYSTEMS` alone: SpecBound is at its setting there, and not at
    the optimum of the other tables.  Empty without a recording of early exits.
    """
    if EarlyExit.name not in ours.recordings:
        return []
    return [
        experiment(SPECBOUND_2.name, row, "Overall", *_sampled(ours, sampling))
        for row, sampling in TABLE_2.items()
    ]


def _sampled(ours: Ours, sampling: Sampling) -> tuple[float | None, str]:
    """Return SpecBound's speedup along outputs sampled so, and what to say of it."""
    own = ours.trace, ours.recordings
    held = {one[0].sampling: one for one in (*reversed(ours.sampled), own)}
    if sampling not in held:
        return None, (
            f"no early exits were recorded along outputs sampled at {sampling.label}: `draftsim "
            f"profile sources --exit-layers {sampling.options}` of the same pair and prompts "
            "records them, and --sampled RUN names the run"
        )
    try:
        log = replayed(*held[sampling], "specbound")
    except DraftsimError as error:
        return None, str(error)
    found = ours.ran(log)
    note = f"{SYSTEMS['specbound'].source}; {found.how}; CR {found.tokens_per_round:.2f}"
    return found.speedup, note


def distribution_rows(log: RoundLog, ours: Ours, note: str) -> list[Row]:
    """Return SpecBound's Table 5: prompts by speedup, in five equal ranges from fastest to slowest.

    The paper's own bounds are not known; shares compare in shape alone.
    """
    values = prompt_speedups(log, ours.latency)
    values = values[np.isfinite(values)]
    ends = float(values.min()), float(values.max())
    if not ends[0] < ends[1]:
        said = "all prompts have one speedup: there is nothing to distribute"
        return [experiment(SPECBOUND_5.name, "our pair", "percent", None, said)]
    frame = speedup_distribution(values, np.linspace(*ends, len(SPECBOUND_5.cells) + 1))
    below = float((values < 1).mean())
    ranges = zip(SPECBOUND_5.cells, frame["low"], frame["high"], frame["share"], strict=True)
    return [
        experiment(
            SPECBOUND_5.name, label, "percent", 100 * float(share),
            f"{low:.2f}x to {high:.2f}x; {below:.0%} of prompts below 1x; {note}",
        )
        for label, low, high, share in ranges
    ]  # fmt: skip


TTFT, PER_TOKEN, THROUGHPUT, END_TO_END = SPECBOUND_3.cells


def serving_rows(found: MethodOutcome, ours: Ours, note: str) -> list[Row]:
    """Return both columns of Table 3 from the prices of plain decoding and of SpecBound's rounds.

    Per-token latency is decoding's seconds over its tokens, throughput all tokens over all
    seconds, prompts included: the paper's three speedups differ for such reasons.
    """
    prompts = ours.latency.has("target", "prefill")
    rows = []
    columns = [_column(run, prompts) for run in (ours.plain(found.log), found.priced)]
    for name in SPECBOUND_3.cells:
        said = note
        if not prompts:
            said = f"prompts not included: these latencies hold no prefill; {note}"
        elif name == TTFT:
            said = f"the prompt is read alike: no draft model reads it; {note}"
        values = [column[name] for column in columns]
        for label, value in zip(SPECBOUND_3.columns, values, strict=False):
            rows.append(experiment(SPECBOUND_3.name, name, label, value, said))
        before, after = values
        if before and after:
            gain = after / before if name == THROUGHPUT else before / after
            rows.append(experiment(SPECBOUND_3.name, name, "improvement (our pair)", gain, said))
    return rows


def _column(run: Priced, prompts: bool) -> dict[str, float | None]:
    log = run.log
    emitted = float(log.rounds["emitted"].sum())
    # The prompt's pass emits the tokens that no round did.
    tokens = emitted + (log.first * len(log.requests) if prompts else 0)
    return {
        TTFT: 1e3 * float(run.prefill_s.mean()) if prompts else None,
        PER_TOKEN: 1e3 * run.total_s / emitted,
        THROUGHPUT: tokens / float(run.wall_s.sum()),
        END_TO_END: float(run.wall_s.mean()),
    }
