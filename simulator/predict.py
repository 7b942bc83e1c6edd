"""One prediction: policies, methods and other draft sources replayed over one recording, ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.batch.base import Policy
from policies.core import DraftPolicy
from policies.from_file import is_file
from policies.registry import lacks, parse_policy
from policies.rules.base import VerifyRule
from policies.rules.registry import parse_rule
from simulator.chosen import (
    Named,
    Policies,
    Text,
    check_file,
    is_unfitted,
    load_policies,
    load_rule,
    named,
)
from simulator.executors import results_of
from simulator.recording import Recording
from simulator.whatif.ranking import (
    TEXTBOOK,
    UNFITTED,
    Ranking,
    lossless,
    rank,
    ranked_rows,
    with_best_fixed,
    without_plain,
)
from traces.acceptance.trace import Trace
from traces.aliases import Count, Row, Say, silent
from traces.digits import counted
from traces.errors import DraftsimError, SignalError, TailError
from traces.latency.table import CELL_COLUMNS, LatencyTable
from traces.replay.calls import CALL_KINDS, DRAFTER, DRAFTER_TREE, ONE_PASS
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many
from traces.sources.base import Source
from traces.sources.found import find_recordings
from traces.sources.lookups.sources import LookupSource
from traces.sources.methods import METHODS, Method, method, method_of, resolved
from traces.sources.recording import Recordings
from traces.sources.registry import DRAFT_MODEL, SOURCES, SYSTEMS, parse_source
from traces.sources.replay import check_layers, replay_source
from traces.store.outputs import Quality, RealRun, find_run, quality

RECORD = "`draftsim profile sources --exit-layers`"
UNREPLAYED, UNTIMED = "that this recording cannot replay", "without measured passes"
OTHER_LAYERS = "that ran layers of another target"
"""Reasons for which a method is not listed."""


def load_source_policies(
    texts: Policies | None, source: Source, trace: Trace, recordings: Recordings,
    say: Say = silent,
) -> Named:  # fmt: skip
    """Return (name, policy) of each text, with maxima that `source` can be replayed with."""
    limit = source.longest(trace, recordings)
    return load_policies(texts, trace, signals=source.held(recordings), max_gamma=limit, say=say)


def split_systems(texts: Sequence[Text] | None) -> tuple[list[Text] | None, list[str]]:
    """Return the policies among `texts` (None: all of them) and the names of systems."""
    if not texts:
        return None, []
    systems = [str(t) for t in texts if isinstance(t, str) and t in SYSTEMS]
    return [t for t in texts if t not in systems], systems


def load_system(
    name: str, trace: Trace, recordings: Recordings, source: Source | None = None
) -> tuple[Source, tuple[str, DraftPolicy]]:
    """Return a system's source (or `source`, one of its kind) and its (name, policy)."""
    system = SYSTEMS[name]
    source = source or parse_source(system.source)
    [(_, policy)] = load_source_policies([system.policy], source, trace, recordings)
    return source, (name, policy)


def replay_system(name: str, trace: Trace, recordings: Recordings) -> list[RoundLog]:
    """Return a named system replayed, with each drafter of its kind that was recorded.

    Raises DraftsimError where its source was not recorded.
    """
    every = parse_source(SYSTEMS[name].source).with_each(recordings)
    found = [load_system(name, trace, recordings, own) for own in every]
    return [
        replay_source(trace, own, policy, recordings=recordings, name=name)
        for own, (_, policy) in found
    ]


def replay_systems(
    names: Iterable[str], trace: Trace, recordings: Recordings, latency: LatencyTable
) -> tuple[list[RoundLog], dict[str, str]]:
    """Return the named methods that can be replayed and priced, and what the others lack."""
    found: list[RoundLog] = []
    missing: dict[str, str] = {}
    for name in names:
        source = parse_source(SYSTEMS[name].source)
        try:
            if not all(latency.has(*call) for call in source.calls):
                # What could not be priced is not replayed; what it lacks first is said first.
                source.check(trace, recordings, trace.first)
                missing[name] = UNTIMED
                continue
            logs = replay_system(name, trace, recordings)
        except DraftsimError:
            missing[name] = UNREPLAYED
            continue
        try:
            for log in logs:
                check_layers(log, trace, latency)
        except DraftsimError:
            missing[name] = OTHER_LAYERS
            continue
        measured = [log for log in logs if is_measured(log, latency)]
        if len(measured) < len(logs):
            missing[name] = UNTIMED
        found += measured
    return found, missing


def in_listed_order(
    logs: Sequence[RoundLog], reasons: Mapping[str, str], say: Say
) -> list[RoundLog]:
    """Return the logs in the systems' order; `say` is told what is missing, and the reasons."""
    lacking = Counter(reasons.values())
    counts = [
        f"{counted(lacking[what], 'method')} {what}"
        for what in (OTHER_LAYERS, UNREPLAYED, UNTIMED) if lacking[what]
    ]  # fmt: skip
    if counts:
        say(
            f"not listed: {' and '.join(counts)}: {RECORD} records and times other sources, "
            "lookups among them; --policy NAME says what one of them lacks"
        )
    return sorted(logs, key=lambda log: list(SYSTEMS).index(log.policy))


def is_measured(log: RoundLog, latency: LatencyTable) -> bool:
    """Return True if the table has cells for all that the rounds ran."""
    if log.drafter != "draft" and not (latency.is_constant or latency.has(log.drafter, "forward")):
        return False
    ran = [] if log.recorded_calls is None else np.unique(log.recorded_calls["kind"]).tolist()
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
    """Return a constant table in which searching text costs nothing; any other as it is."""
    if not latency.is_constant:
        return latency
    free = pd.DataFrame(
        [
            (cls.name, "forward", 1, 1, 0, 0.0, 0.0, 1)
            for cls in SOURCES.values()
            if issubclass(cls, LookupSource) and not latency.has(cls.name, "forward")
        ],
        columns=list(CELL_COLUMNS),
    )
    return LatencyTable(pd.concat([latency.cells, free], ignore_index=True), latency.meta)


QUALITY = (
    "agreement", "relative_bleu", "scored", "solved", "solved_greedy", "tested", "passed",
    "passed_greedy",
)  # fmt: skip
"""Keys for the quality of decoded texts; None in rows without such texts."""


class AskedPolicies(NamedTuple):
    """Policies asked for, by how they are replayed."""

    policies: list[str | Policy] | None
    """Draft lengths with the recording's drafter, under one rule; None: every policy."""
    systems: list[str]
    """Methods with another draft source."""
    ruled: list[str]
    """Methods with the draft model and a lossy rule of their own."""

    @property
    def remembers(self) -> bool:
        """True if one of these rules has a memory."""
        rules = [chosen.rule for text in self.ruled if (chosen := method_of(text))]
        return any(rule.partition(":")[0] in ("csd", "csd-ocm") for rule in rules)

    def check_alone(self, option: str, what: str = "a verification") -> None:
        """Raise DraftsimError if a method has `what` of its own, and `option` gives another."""
        texts = [text for text in self.policies or () if isinstance(text, str)]
        if own := [*self.systems, *self.ruled, *filter(method_of, texts)]:
            raise DraftsimError(
                f"{own[0]!r} is a method, which has {what} of its own: drop --{option}"
            )


def split_asked(given: Policies | None) -> AskedPolicies:
    """Return what texts and objects name, each in its place.

    Raises DraftsimError for an unknown rule.
    """
    others, systems = split_systems(given)
    ruled = [text for text in others or () if isinstance(text, str) and _is_lossy(text)]
    return AskedPolicies(
        None if others is None else [one for one in others if one not in ruled], systems, ruled
    )


def _is_lossy(text: str) -> bool:
    chosen = method_of(text)
    return chosen is not None and not parse_rule(chosen.rule.partition(":")[0]).lossless


@dataclass(frozen=True)
class Compared:
    """Policies of one recording replayed side by side."""

    trace: Trace
    ranking: Ranking
    more: list[RoundLog]
    """Logs listed next to the ranking: methods of the draft model, and those of other sources."""
    latency: LatencyTable
    """The table that prices all of them."""

    @property
    def logs(self) -> list[RoundLog]:
        """All logs; the best fixed length comes last if no one asked for it."""
        return sorted([*self.ranking.logs, *self.more], key=lambda log: log is self.ranking.added)

    def rows(self, **options: Any) -> list[Row]:
        """Return the rows of `simulator.whatif.ranking.ranked_rows`, with its options."""
        return ranked_rows(self.ranking, self.latency, self.trace, self.logs, **options)


def compare(
    recording: Recording, latency: LatencyTable, asked: AskedPolicies,
    rule: VerifyRule | None = None, memory: Path | None = None, *, lossy: bool = True,
    always: bool = False, alone: bool = False, say: Say = silent,
    progress: Count = silent,
) -> Compared:  # fmt: skip
    """Replay what is asked for, and rank it.

    With every policy, all named methods that can be replayed are listed too, unless a `rule` is
    asked for.

    Parameters
    ----------
    latency:
        The recording's table (`Recording.priced`).
    rule, memory:
        Verification of the policies, by default lossless, and the memory of methods that have one.
    lossy:
        True to list methods that change the text as well.
    always:
        True if passes of a draft model were asked for in every round (``--always-draft``), which
        other sources do not run: none of them is listed.
    alone:
        True if the recording has no name by which recordings of other sources could be found.
    say, progress:
        `say` is told what is left out and why, `progress` how many parts are done, and of how many.

    Raises
    ------
    DraftsimError
        If a method comes with a drafter or a rule that another was named for, if another source is
        named although a draft model `always` drafts, if something cannot be replayed, or as in
        `simulator.whatif.ranking.rank`.
    """
    if rule is not None:
        asked.check_alone("verify")
    if always and recording.stream is not None:
        raise DraftsimError(
            "--always-draft is for a draft model: drop it or --source "
            f"{recording.stream.name}, or price both with `draftsim serve`"
        )
    if always and asked.systems:
        raise DraftsimError(
            f"--always-draft is for a draft model: drop it, or {' and '.join(asked.systems)}"
        )
    free = with_free_lookups(latency)
    if recording.stream is not None:
        asked.check_alone("source", "a draft source")
        ranking = _ranked_stream(recording, free, asked.policies, rule, say)
        return Compared(recording.trace, ranking, [], free)
    if recording.observed and asked.systems:
        raise DraftsimError(
            f"{asked.systems[0]} drafts from texts, and --acceptance holds none: give --trace"
        )
    carried = isinstance(latency.meta.get("scaled"), Mapping)
    if carried and asked.systems:
        raise DraftsimError(
            f"{asked.systems[0]}: latencies carried over to another device have the passes of the "
            "target and the draft model alone: drop it, or --gpu and --weights"
        )
    outputs, trace, texts = recording.outputs, recording.trace, asked.policies

    def recordings() -> Recordings:
        return {} if alone else find_recordings(recording.name, outputs)

    def ranked(say: Say) -> Ranking:
        if texts is None or texts:
            return rank(trace, latency, texts, rule, say)
        if trace.is_lower_bound:
            return Ranking([])
        return with_best_fixed(
            Ranking([]), latency, trace.max_gamma, lambda some: list(replay_many(trace, some)),
            False,
        )  # fmt: skip

    def with_own_drafts(_: Say) -> list[RoundLog]:
        held = recordings() if asked.systems else {}
        return [log for one in asked.systems for log in replay_system(one, outputs, held)]

    every = rule is None and (texts is None or "all" in texts) and not recording.observed
    if every and not lossy:
        say(
            f"not listed: methods that verify by {', '.join(_lossy_rules())}, because these rules "
            "change the output: `draftsim simulate` lists those that this recording can replay"
        )
    if every and carried:
        say("other sources are left out: their passes are not carried over to another device")
        every = False
    if every and always:
        say("other sources are left out: they run no pass of --always-draft")
    parts: list[Callable[[Say], Any]] = []
    if every:
        lookups = [n for n in SYSTEMS if parse_source(SYSTEMS[n].source).recorded_as is None]
        recorded = [name for name in SYSTEMS if name not in lookups]
        parts = [] if always else [  # the longest first
            lambda _: replay_systems(lookups, outputs, {}, free),
            lambda _: replay_systems(recorded, outputs, recordings(), free),
        ]  # fmt: skip
        parts.append(lambda say: replay_methods(trace, say) if lossy else [])
    parts += [
        ranked, with_own_drafts,
        lambda say: replay_ruled(asked.ruled, trace, latency, memory, say),
    ]  # fmt: skip
    found = results_of(
        [partial(_heard, part) for part in parts], trace.tokens * len(SYSTEMS),
        [latency, free, *trace.requests], progress,
    )  # fmt: skip
    for _, said in found:
        for line in said:
            say(line)
    *listed, ranking, more, ruled = [result for result, _ in found]
    more += ruled
    if every:
        *sources, lossy_logs = listed
        more += lossy_logs
        known = {log.policy for log in more}
        replayed = [log for logs, _ in sources for log in logs]
        reasons = {name: why for _, missing in sources for name, why in missing.items()}
        systems = in_listed_order(replayed, reasons, say)
        more += [log for log in systems if log.policy not in known]
    return Compared(trace, ranking, told_apart(more), free)


def told_apart(logs: Sequence[RoundLog]) -> list[RoundLog]:
    """Return the logs, with the drafter in the names that several drafters share."""
    names = Counter((log.policy, log.verify) for log in logs)
    return [
        replace(log, policy=f"{log.policy} ({log.source})")
        if names[log.policy, log.verify] > 1 else log
        for log in logs
    ]  # fmt: skip


def _heard(part: Callable[[Say], Any]) -> tuple[Any, list[str]]:
    """Return a part's result and what it said: it may run in a process of its own."""
    said: list[str] = []
    return part(said.append), said


def _ranked_stream(
    recording: Recording, latency: LatencyTable, texts: Policies | None,
    rule: VerifyRule | None, say: Say,
) -> Ranking:  # fmt: skip
    """Rank the policies of `texts` with the source `Recording.stream` drafting."""
    trace, source, held = recording.trace, recording.stream, recording.recordings
    assert source is not None

    def replayed(some: Named) -> list[RoundLog]:
        return [
            replay_source(trace, source, policy, rule, recordings=held, name=name)
            for name, policy in some
        ]

    chosen = without_plain(named(load_source_policies(texts, source, trace, held, say)))
    # The rule is fitted to a draft model's passes, which another source does not make.
    notes = {name: UNFITTED for name, policy in chosen if is_unfitted(policy)}
    # Nor do costs by draft length tell what its passes cost.
    notes |= {name: TEXTBOOK for name, policy in chosen if lacks(policy, "cost")}
    every = not texts or "all" in texts
    longest = source.longest(trace, held)
    return with_best_fixed(Ranking(replayed(chosen), notes), latency, longest, replayed, every)


def load_method(
    name: str, trace: Trace, memory: Path | None = None, say: Say = silent,
    latency: LatencyTable | None = None,
) -> tuple[str, DraftPolicy, VerifyRule | None]:  # fmt: skip
    """Return the policy's text, the policy and the rule of a method with a draft model.

    The policy weighs the costs of `latency`, if it is given (`simulator.chosen.informed`).
    ``name`` is in `traces.sources.methods.METHODS`, or ``POLICY+RULE``.
    """
    chosen = method_of(name) or method(name)
    if not chosen.by_model:
        raise DraftsimError(
            f"method {name!r} drafts with {chosen.source}, whose replay is exact: see `simulate`"
        )
    chosen = resolved(chosen, trace)
    [(text, policy)] = load_policies([chosen.policy], trace, say=say, latency=latency)
    learns = chosen.rule.partition(":")[0] in ("csd", "csd-ocm")
    return text, policy, load_rule(chosen.rule, memory if learns else None)


def replay_ruled(
    names: Iterable[str], trace: Trace, latency: LatencyTable, memory: Path | None = None,
    say: Say = silent,
) -> list[RoundLog]:  # fmt: skip
    """Return the logs of methods with the draft model, called what they were asked for by.

    The costs of `latency` are those that their policies weigh.  Raises DraftsimError if classes of
    two files have one name.
    """
    logs: list[RoundLog] = []
    held: dict[str, Policy] = {}
    for name in names:
        text, policy, rule = load_method(name, trace, memory, say, latency)
        called = name
        if is_file(name) and (chosen := method_of(name)) is not None:
            check_file(name, text, policy, held)
            held[text] = policy
            called = f"{text}+{chosen.rule}"  # without the folder
        logs += replay_many(trace, [(called, policy)], rule=rule)
    return logs


def _lossy_rules() -> list[str]:
    """Return the rules of the methods that `replay_methods` replays."""
    return list(
        dict.fromkeys(chosen.rule.partition(":")[0] for chosen in _lossy_methods().values())
    )


def _lossy_methods() -> dict[str, Method]:
    """Return the papers' methods with a draft model that change the output, by name."""
    return {
        name: chosen for name, chosen in METHODS.items()
        if chosen.source == DRAFT_MODEL and chosen.rule != "exact"
    }  # fmt: skip


def replay_methods(trace: Trace, say: Say = silent) -> list[RoundLog]:
    """Return the papers' lossy methods with a draft model, as far as the trace can tell of them.

    `say` is told those whose drafts are longer than the recorded ones.
    """
    logs: dict[tuple[str, str], RoundLog] = {}
    longer = []
    for name in _lossy_methods():
        try:
            text, policy, rule = load_method(name, trace, say=say)
            [log] = replay_many(trace, named([(text, policy)]), rule=rule)
        except SignalError:
            continue
        except TailError:
            longer.append(name)
            continue
        logs.setdefault((log.policy, log.verify), log)
    if longer:
        say(
            f"not listed: {', '.join(longer)}, whose drafts are longer than the recorded "
            f"{counted(trace.max_gamma or 0, 'token')}"
        )
    return list(logs.values())


def with_quality(
    rows: Sequence[Mapping[str, Any]], runs: Sequence[RealRun], trace: Trace
) -> list[Row]:
    """Return the rows with the quality of texts really decoded under the same policy and rule.

    The row of a category is of its prompts alone.
    """
    category = {request.id: request.category for request in trace.requests}
    found = []
    for row in rows:
        seen: Quality | None = None
        if not lossless(row["verify"]) and runs:
            try:
                chosen = method_of(row["policy"])
                policy = row["policy"] if chosen is None else chosen.policy
                names = parse_policy(policy), parse_rule(row["verify"])
            except (ValueError, DraftsimError):
                names = None  # a system's name, or a policy of the user's own
            run = None if names is None else find_run(runs, *names, trace)
            if run is not None:
                kind = row.get("category")
                of_row = [o for o in run.outputs if kind in (None, category[o.id])]
                seen = quality(of_row, trace)
        found.append({**row, **{name: seen and getattr(seen, name) for name in QUALITY}})
    return found


def decoded_part(trace: Trace, log: RoundLog) -> Trace:
    """Return the requests of `trace` that `log` decoded, in its order; all if one is missing."""
    places = {request.id: i for i, request in enumerate(trace.requests)}
    if any(request.id not in places for request in log.requests):
        return trace
    return trace.select([places[request.id] for request in log.requests])


def same_requests(logs: Sequence[RoundLog]) -> list[list[RoundLog]]:
    """Return the logs grouped by the requests they decoded: only those can be compared."""
    groups: dict[tuple[str, ...], list[RoundLog]] = {}
    for log in logs:
        groups.setdefault(tuple(r.id for r in log.requests), []).append(log)
    return list(groups.values())
