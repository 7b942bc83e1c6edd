"""The rounds that ``draftsim simulate`` prices in addition to plain replays: sources, methods,
files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commands.common.drafted import load_recording
from commands.common.inputs import load_method, replay_all
from commands.common.output import note
from commands.common.progress import working
from commands.common.sources import (
    Listed,
    in_listed_order,
    load_source_policies,
    longest_draft,
    replay_system,
    replay_systems,
    replay_with,
    split_systems,
    with_free_lookups,
)
from traces.errors import DraftsimError, SignalError, TailError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from policies.rules.base import VerifyRule
    from simulator.recording import Recording
    from simulator.whatif.ranking import Ranking
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog
    from traces.sources.base import Recordings, Source


def rank_source(
    trace: Trace, latency: LatencyTable, texts: Sequence[str] | None, source: Source,
    recordings: Recordings, rule: VerifyRule | None = None,
) -> Ranking:  # fmt: skip
    """The policies of `texts` with `source` drafting, to be ranked."""
    from simulator.chosen import named
    from simulator.whatif.ranking import (
        UNFITTED,
        Ranking,
        is_unfitted,
        with_best_fixed,
        without_plain,
    )

    def replayed(some: list[tuple[str, DraftPolicy]]) -> list[RoundLog]:
        return replay_with(trace, source, some, recordings, rule)

    chosen = without_plain(named(load_source_policies(texts, source, trace, recordings)))
    # The rule is fitted to a draft model's passes, which another source does not make.
    notes = {name: UNFITTED for name, policy in chosen if is_unfitted(policy)}
    every = not texts or "all" in texts
    longest = longest_draft(source, trace, recordings)
    with working(f"replaying {len(chosen)} policies", alone=True):
        ranking = Ranking(replayed(chosen), notes)
    return with_best_fixed(ranking, latency, longest, replayed, every)


class Asked(NamedTuple):
    """The policies that ``--policy`` names, by how they are replayed."""

    policies: list[str] | None
    """Draft lengths with the draft model, under the rule of the command; None: every policy."""
    systems: list[str]
    """Methods with another draft source."""
    ruled: list[str]
    """Methods with the draft model and a lossy rule of their own."""

    @property
    def remembers(self) -> bool:
        """True if one of these rules has a memory."""
        from traces.sources.methods import method_of

        rules = [chosen.rule for text in self.ruled if (chosen := method_of(text))]
        return any(rule.partition(":")[0] in ("csd", "csd-ocm") for rule in rules)


def split_asked(texts: Sequence[str] | None) -> Asked:
    """Return what `texts` name, each in its place.  Raises DraftsimError for an unknown rule."""
    from policies.rules.registry import parse_rule
    from traces.sources.methods import method_of

    others, systems = split_systems(texts)
    ruled = []
    for text in others or ():
        chosen = method_of(text)
        if chosen is not None and not parse_rule(chosen.rule.partition(":")[0]).lossless:
            ruled.append(text)
    if others is not None:
        others = [text for text in others if text not in ruled]
    return Asked(others, systems, ruled)


def replay_side_by_side(
    recording: Recording, latency: LatencyTable, asked: Asked, rule: VerifyRule | None = None,
    memory: Path | None = None, lossy: bool = True,
) -> tuple[Ranking, list[RoundLog]]:  # fmt: skip
    """Return the policies to be ranked, and what is listed next to them.

    Listed are the methods that were asked for, and with every policy all named methods that can be
    replayed, unless a `rule` is asked for; those that change the text only if ``lossy``.
    ``memory`` is for rules that have one.
    """
    from simulator.forks import results_of
    from simulator.whatif.ranking import Ranking, rank, with_best_fixed
    from traces.sources.base import Recordings
    from traces.sources.found import find_recordings
    from traces.sources.registry import SYSTEMS

    name, outputs, trace = recording.name, recording.outputs, recording.trace
    free, texts = with_free_lookups(latency), asked.policies

    def ranked() -> Ranking:
        if texts is None or texts:
            return rank(trace, latency, texts, rule, note)
        if trace.is_lower_bound:
            return Ranking([])
        return with_best_fixed(
            Ranking([]), latency, trace.max_gamma, lambda some: replay_all(trace, some), False
        )

    def with_own_drafts() -> list[RoundLog]:
        recordings = find_recordings(name, outputs) if asked.systems else Recordings()
        return [log for one in asked.systems for log in replay_system(one, outputs, recordings)]

    def with_own_rules() -> list[RoundLog]:
        return [replay_method(one, trace, memory) for one in asked.ruled]

    parts: list[Callable[[], Any]] = [ranked, with_own_drafts, with_own_rules]
    if recording.observed and asked.systems:
        raise DraftsimError(
            f"{asked.systems[0]} drafts from texts, and --acceptance holds none: give a --trace"
        )
    every = rule is None and (texts is None or "all" in texts) and not recording.observed
    if every:
        # The longest first.
        methods = partial(replay_methods, trace) if lossy else list
        parts = [*_listed(name, outputs, free), methods, *parts]
    same = [latency, free, *trace.requests]
    with working("replaying policies", alone=True) as say:
        told = partial(say, "replaying policies")
        *found, ranking, more, ruled = results_of(parts, trace.tokens * len(SYSTEMS), same, told)
    more += ruled
    if every:
        *listed, of_methods = found
        more += of_methods
        known = {log.policy for log in more}
        more += [log for log in in_listed_order(listed) if log.policy not in known]
    return ranking, more


def _listed(name: str, trace: Trace, latency: LatencyTable) -> list[Callable[[], Listed]]:
    """Return two functions that together replay every named system.

    One reads the recordings made along `name`; the other looks drafts up in the trace itself.
    """
    from traces.sources.base import Recordings
    from traces.sources.found import find_recordings
    from traces.sources.lookups.sources import LookupSource
    from traces.sources.registry import SYSTEMS, parse_source

    looked_up = [
        system for system, parts in SYSTEMS.items()
        if isinstance(parse_source(parts.source), LookupSource)
    ]  # fmt: skip
    others = [system for system in SYSTEMS if system not in looked_up]

    def recorded() -> Listed:
        return replay_systems(others, trace, find_recordings(name, trace), latency)

    return [partial(replay_systems, looked_up, trace, Recordings(), latency), recorded]


def replay_method(name: str, trace: Trace, memory: Path | None = None) -> RoundLog:
    """Return the log of a method with the draft model, called what it was asked for by."""
    from policies.from_file import is_file
    from traces.sources.methods import method_of

    text, policy, rule = load_method(name, trace, memory)
    if is_file(name) and (chosen := method_of(name)) is not None:
        name = f"{text}+{chosen.rule}"  # without the folder
    [log] = replay_all(trace, [(name, policy)], rule=rule)
    return log


def replay_methods(trace: Trace) -> list[RoundLog]:
    """Return the papers' lossy methods with a draft model, as far as the trace can tell of them.

    A note names those whose drafts are longer than the recorded ones.
    """
    from simulator.chosen import named
    from traces.sources.methods import METHODS
    from traces.sources.registry import DRAFT_MODEL

    logs: dict[tuple[str, str], RoundLog] = {}
    longer = []
    for name, chosen in METHODS.items():
        if chosen.source != DRAFT_MODEL or chosen.rule == "exact":
            continue
        try:
            text, policy, rule = load_method(name, trace)
            [log] = replay_all(trace, named([(text, policy)]), rule=rule)
        except SignalError:
            continue
        except TailError:
            longer.append(name)
            continue
        logs.setdefault((log.policy, log.verify), log)
    if longer:
        note(
            f"not listed: {', '.join(longer)}, whose drafts are longer than the recorded "
            f"{trace.max_gamma} tokens"
        )
    return list(logs.values())


def recorded_rounds(
    path: Path, latency: str | None, trace: str
) -> tuple[list[RoundLog], LatencyTable, Trace]:
    """The recorded round logs at `path`, their run folder's latencies by default, and its trace.

    Where they lie in no run folder, `trace` names the trace.
    """
    from traces.store.files import read_rounds
    from traces.store.identity import check_folder
    from traces.store.outputs import find_runs
    from traces.store.recordings import SAMPLED

    files = find_runs(path)
    if not files:
        raise DraftsimError(
            f"{path} holds no recorded rounds: record some with `draftsim profile --verify`"
        )
    own = next((f for f in (path, path.parent, path.parent.parent) if _has_latency(f)), None)
    if own is not None:
        check_folder(own, files)
    if own is not None and any((own / name).is_file() for name in ("trace.parquet", SAMPLED)):
        trace = str(own)
    elif own is not None and latency is None:
        latency = str(own)
    recording = load_recording(trace, latency)
    logs = [read_rounds(file) for file in files]
    if recording.source is not None and any(log.drafter == "draft" for log in logs):
        raise DraftsimError(
            f"the latencies are of drafting with {recording.trace.source}, and the rounds in "
            f"{path} were drafted by a draft model: give latencies of one with --latency"
        )
    return logs, recording.latency, recording.outputs


def decoded_part(trace: Trace, log: RoundLog) -> Trace:
    """The requests of `trace` that `log` decoded, in its order; all where one is not there."""
    places = {request.id: i for i, request in enumerate(trace.requests)}
    if any(request.id not in places for request in log.requests):
        return trace
    return trace.select([places[request.id] for request in log.requests])


def same_requests(logs: Sequence[RoundLog]) -> list[list[RoundLog]]:
    """The logs, grouped by the requests they decoded: only those can be compared."""
    groups: dict[tuple[str, ...], list[RoundLog]] = {}
    for log in logs:
        groups.setdefault(tuple(r.id for r in log.requests), []).append(log)
    return list(groups.values())


def _has_latency(folder: Path) -> bool:
    return folder.is_dir() and (folder / "latency.parquet").is_file()
