"""Draft sources and the named systems built on them: policies, replays, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.rules.base import VerifyRule
from simulator.chosen import Named, Say, load_policies, silent
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.replay.calls import CALL_KINDS, DRAFTER, DRAFTER_TREE, ONE_PASS
from traces.replay.rounds import RoundLog
from traces.sources.base import Source
from traces.sources.recording import Recordings
from traces.sources.registry import SOURCES, SYSTEMS, parse_source
from traces.sources.replay import check_layers, replay_source

Text = TypeVar("Text")

RECORD = "`draftsim profile --exit-layers`"
UNTIMED = "measures their latencies"
"""Ends what is said of a system whose passes have no cells."""
OTHER_LAYERS = "its rounds ran layers of another target"
FEW = 3
"""Systems that are still named one by one where they are missing."""


def load_source_policies(
    texts: Sequence[str | DraftPolicy | BatchPolicy] | None, source: Source, trace: Trace,
    recordings: Recordings, say: Say = silent,
) -> Named:  # fmt: skip
    """Return (name, policy) of each text, with maxima that `source` can be replayed with."""
    limit = source.longest(trace, recordings)
    return load_policies(texts, trace, signals=source.held(recordings), max_gamma=limit, say=say)


def replay_with(
    trace: Trace, source: Source, policies: Sequence[tuple[str, DraftPolicy]],
    recordings: Recordings, rule: VerifyRule | None = None,
) -> list[RoundLog]:  # fmt: skip
    """Replay every policy over the trace with `source` drafting."""
    return [
        replay_source(trace, source, policy, rule, recordings=recordings, name=name)
        for name, policy in policies
    ]


def split_systems(texts: Sequence[Text] | None) -> tuple[list[Text] | None, list[str]]:
    """Return the policies among `texts` (None: all of them) and the names of systems."""
    if not texts:
        return None, []
    systems = [str(t) for t in texts if isinstance(t, str) and t in SYSTEMS]
    return [t for t in texts if t not in systems], systems


def load_system(
    name: str, trace: Trace, recordings: Recordings, source: Source | None = None,
    say: Say = silent,
) -> tuple[Source, tuple[str, DraftPolicy]]:  # fmt: skip
    """Return a system's source (or `source`, one of its kind) and its (name, policy)."""
    system = SYSTEMS[name]
    source = source or parse_source(system.source)
    [(_, policy)] = load_source_policies([system.policy], source, trace, recordings, say)
    return source, (name, policy)


def replay_system(name: str, trace: Trace, recordings: Recordings) -> list[RoundLog]:
    """A named system replayed, with each drafter of its kind that was recorded.

    Raises DraftsimError where its source was not recorded.
    """
    every = parse_source(SYSTEMS[name].source).with_each(recordings)
    found = [load_system(name, trace, recordings, own) for own in every]
    return [replay_with(trace, own, [policy], recordings)[0] for own, policy in found]


class Listed(NamedTuple):
    """Named systems replayed, and what the others lack, by name."""

    logs: list[RoundLog]
    missing: dict[str, str]


def replay_systems(
    names: Iterable[str], trace: Trace, recordings: Recordings, latency: LatencyTable
) -> Listed:
    """Return the named systems that can be replayed and priced."""
    found = Listed([], {})
    for name in names:
        source = parse_source(SYSTEMS[name].source)
        by = source.record
        try:
            if not all(latency.has(*call) for call in source.calls):
                # What could not be priced is not replayed; what it lacks first is said first.
                source.open(trace, recordings, trace.first)(0)
                found.missing[name] = f"{by} {UNTIMED}"
                continue
            logs = replay_system(name, trace, recordings)
        except DraftsimError as error:
            text = str(error)
            found.missing[name] = f"{by} records them" if by in text else text
            continue
        try:
            for log in logs:
                check_layers(log, trace, latency)
        except DraftsimError:
            found.missing[name] = OTHER_LAYERS
            continue
        if not all(is_measured(log, latency) for log in logs):
            found.missing[name] = f"{by} {UNTIMED}"
        found.logs.extend(log for log in logs if is_measured(log, latency))
    return found


def in_listed_order(parts: Sequence[Listed], say: Say = silent) -> list[RoundLog]:
    """Return the logs of all parts in the systems' order; `say` is told what is missing."""
    reasons = {name: why for part in parts for name, why in part.missing.items()}
    missing = [name for name in SYSTEMS if name in reasons]
    untimed = [name for name in missing if reasons[name].endswith(UNTIMED)]
    layers = [name for name in missing if reasons[name] == OTHER_LAYERS]
    if 0 < len(missing) <= FEW:
        say(f"not listed: {'; '.join(f'{name} ({reasons[name]})' for name in missing)}")
    elif missing:
        absent = [name for name in missing if name not in (*untimed, *layers)]
        counts = [
            f"{len(names)} method{'s' * (len(names) > 1)} {what}" for names, what in (
                (layers, "that ran layers of another target"),
                (absent, "without recorded drafts"), (untimed, "without measured passes"),
            ) if names
        ]  # fmt: skip
        say(
            f"not listed: {' and '.join(counts)}: {RECORD} records and times other sources, "
            "lookups among them; --policy NAME says what one of them lacks"
        )
    logs = [log for part in parts for log in part.logs]
    return sorted(logs, key=lambda log: list(SYSTEMS).index(log.policy))


def is_measured(log: RoundLog, latency: LatencyTable) -> bool:
    """Return True if the table has cells for all that the rounds ran."""

    if log.drafter != "draft" and not (latency.is_constant or latency.has(log.drafter, "forward")):
        return False
    ran = [] if log.calls is None else np.unique(log.calls["kind"]).tolist()
    kinds = {CALL_KINDS[kind] for kind in ran if kind not in (DRAFTER, DRAFTER_TREE, ONE_PASS)}
    if DRAFTER_TREE in ran:
        kinds.add((log.drafter, "tree"))
    if latency.is_constant:
        kinds = {kind for kind in kinds if kind[1] != "tree"}  # passes like any other
    # The cells of a pass taken apart by hooks leave out half of what a layer by itself costs;
    # a pass costs much the same whatever preceded it.
    named = {("target", "layer"): ("exit", "layer"), ("target", "pass"): ("target", "forward")}
    if "composed" in latency.meta:  # of operators, which are a layer's own
        named |= {("target", "layer"): ("target", "layer"), ("exit", "head"): ("target", "head")}
    wanted = {named.get(kind) or kind for kind in kinds}
    return all(latency.has(*kind) for kind in wanted)


def with_free_lookups(latency: LatencyTable) -> LatencyTable:
    """A constant table in which searching text costs nothing; any other as it is."""

    if not latency.is_constant:
        return latency
    free = pd.DataFrame(
        [
            (cls.name, "forward", 1, 1, 0, 0.0, 0.0, 1)
            for cls in SOURCES.values()
            if cls.recorded_as is None and not latency.has(cls.name, "forward")
        ],
        columns=list(CELL_COLUMNS),
    )
    return LatencyTable(pd.concat([latency.cells, free], ignore_index=True), latency.meta)
