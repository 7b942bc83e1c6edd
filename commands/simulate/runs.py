"""The rounds that ``draftsim simulate`` prices beside plain replays: of sources, methods, files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.drafted import Recording, load_recording
from commands.common.inputs import load_method, replay_all
from commands.common.ranking import (
    Ranking,
    is_unfitted,
    named,
    rank,
    ranks_all,
    with_best_fixed,
    without_plain,
)
from commands.common.sources import (
    Listed,
    in_listed_order,
    load_source_policies,
    longest_draft,
    replay_system,
    replay_systems,
    replay_with,
    with_free_lookups,
)
from traces.errors import DraftsimError, SignalError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from policies.rules.base import VerifyRule
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog
    from traces.sources.base import Recordings, Source


def rank_source(
    trace: Trace, latency: LatencyTable, texts: Sequence[str] | None, source: Source,
    recordings: Recordings, rule: VerifyRule | None = None,
) -> Ranking:  # fmt: skip
    """The policies of `texts` with `source` drafting, to be ranked."""
    from simulator.whatif.ranking import UNFITTED

    def replayed(some: list[tuple[str, DraftPolicy]]) -> list[RoundLog]:
        return replay_with(trace, source, some, recordings, rule)

    chosen = without_plain(named(load_source_policies(texts, source, trace, recordings)))
    # The rule is fitted to a draft model's passes, which another source does not make.
    notes = {name: UNFITTED for name, policy in chosen if is_unfitted(policy)}
    ranking = Ranking(replayed(chosen), notes)
    if not ranks_all(texts):
        return ranking
    return with_best_fixed(ranking, latency, longest_draft(source, trace, recordings), replayed)


def replay_side_by_side(
    recording: Recording, latency: LatencyTable, texts: Sequence[str] | None,
    systems: Sequence[str], rule: VerifyRule | None = None, lossy: bool = True,
) -> tuple[Ranking, list[RoundLog]]:  # fmt: skip
    """Return the policies of `texts` to be ranked, and the logs to list with them.

    Listed are the `systems`, and with every policy all that the papers call by a name, unless a
    `rule` is asked for; the methods that change the text only if ``lossy``.
    """
    from simulator.forks import results_of
    from traces.sources.base import Recordings
    from traces.sources.found import find_recordings
    from traces.sources.registry import SYSTEMS

    name, outputs, trace = recording.name, recording.outputs, recording.trace
    free = with_free_lookups(latency)

    def ranked() -> Ranking:
        return rank(trace, latency, texts, rule) if texts is None or texts else Ranking([])

    def asked() -> list[RoundLog]:
        recordings = find_recordings(name, outputs) if systems else Recordings()
        return [log for system in systems for log in replay_system(system, outputs, recordings)]

    parts: list[Callable[[], Any]] = [ranked, asked]
    every = rule is None and (texts is None or "all" in texts)
    if every:
        # The longest first.
        methods = partial(replay_methods, trace) if lossy else list
        parts = [*_listed(name, outputs, free), methods, *parts]
    same = [latency, free, *trace.requests]
    *found, ranking, more = results_of(parts, trace.tokens * len(SYSTEMS), shared=same)
    if every:
        *listed, of_methods = found
        more += of_methods
        known = {log.policy for log in more}
        more += [log for log in in_listed_order(listed) if log.policy not in known]
    return ranking, more


def _listed(name: str, trace: Trace, latency: LatencyTable) -> list[Callable[[], Listed]]:
    """Every named system replayed, in two parts, of which one reads the recordings beside `name`.

    The other's drafts are looked up in the trace itself.
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


def replay_methods(trace: Trace) -> list[RoundLog]:
    """The papers' lossy methods with a draft model, as far as the trace can tell of them."""
    from traces.sources.methods import METHODS
    from traces.sources.registry import DRAFT_MODEL

    logs: dict[tuple[str, str], RoundLog] = {}
    for name, chosen in METHODS.items():
        if chosen.source != DRAFT_MODEL or chosen.rule == "exact":
            continue
        try:
            text, policy, rule = load_method(name, trace)
            [log] = replay_all(trace, named([(text, policy)]), rule=rule)
        except SignalError:
            continue
        logs.setdefault((log.policy, log.verify), log)
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
