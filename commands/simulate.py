"""``draftsim simulate``: replay policies and price their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.inputs import (
    BUNDLED,
    LatencyOption,
    MemoryOption,
    PolicyOption,
    TraceOption,
    VerifyOption,
    load_latency,
    load_method,
    load_rule,
    load_trace,
    replay_all,
    say_memory,
)
from commands.output import JsonOption, emit, note, say_unjudged
from commands.quiet import say_disturbed
from commands.ranking import (
    Ranking,
    is_unfitted,
    named,
    rank,
    ranks_all,
    with_best_fixed,
    without_plain,
)
from commands.sources import (
    SourceOption,
    load_recordings,
    load_source,
    load_source_policies,
    longest_draft,
    replay_system,
    replay_systems,
    replay_with,
    split_systems,
    with_free_lookups,
)
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from policies.rules import VerifyRule
    from traces.latency import LatencyTable
    from traces.rounds import RoundLog
    from traces.sources.base import Recordings, Source
    from traces.trace import Trace

SHOWN = (
    "policy", "tokens", "rounds", "block_efficiency", "acceptance_rate", "wall_s", "speedup",
    "speedup_lo", "speedup_hi", "fidelity",
)  # fmt: skip


def simulate(
    trace: TraceOption = BUNDLED,
    latency: LatencyOption = None,
    policy: PolicyOption = None,
    source: SourceOption = None,
    verify: VerifyOption = None,
    memory: MemoryOption = None,
    rounds: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of replaying: price the rounds that `profile --verify` recorded; "
            "a round log, or a run folder for all of its own.",
        ),
    ] = None,
    by_category: Annotated[
        bool, typer.Option("--by-category", help="One row per policy and prompt category.")
    ] = False,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Count prefill in times and speedups.")
    ] = False,
    robustness: Annotated[
        bool,
        typer.Option(
            "--robustness", help="Instead: mean and sd over twelve initial draft lengths."
        ),
    ] = False,
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples over prompts.")] = 2000,
    plots: Annotated[
        Path | None, typer.Option(help="Also draw the results as PNG files into this folder.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Predict every policy's speedup from a recorded trace and measured latencies.

    A lossy --verify rule changes the text, which a recording cannot follow: its rows are
    labelled approximate.  The exact way is to decode under the rule (`profile --verify`)
    and price those --rounds.

    Every ranking holds the fixed draft length that is fastest here, marked best fixed, and
    rate-optimal fitted to other prompts than it is judged on, where that can be done.

    --policy also takes the papers' named systems with another draft source, like specbound
    or pld; all lists them too.  With const: latencies, searching text costs nothing.
    """
    from simulator.summary import summarize, summarize_by_category, to_rows

    summary = summarize_by_category if by_category else summarize
    shown = [
        *(["category"] if by_category else []), *SHOWN[:1], "verify", "source", *SHOWN[1:]
    ]  # fmt: skip
    if rounds is not None:
        logs, table = recorded_rounds(rounds, latency, trace)
        rows = [
            row
            for group in same_requests(logs)
            for row in to_rows(summary(group, table, resamples=resamples, prefill=prefill))
        ]
        emit("simulate", rows, json, show=shown)
        if any(log.mismatched is not None for log in logs):
            say_unjudged(table)
        return
    recorded = load_trace(trace)
    table = load_latency(latency, trace)
    say_disturbed(table)
    drafting, (texts, systems) = load_source(source), split_systems(policy)
    if drafting is not None:
        _refuse_with("--source", plots=plots, robustness=robustness, systems=systems)
        recordings = load_recordings(trace, recorded)
        rule = load_rule(verify, recorded, memory)
        table = with_free_lookups(table)
        ranking = rank_source(recorded, table, texts, drafting, recordings, rule)
        frame = summary(ranking.logs, table, resamples=resamples, prefill=prefill)
        _emit_ranked(ranking, to_rows(frame), json, shown)
        return
    if robustness:
        from commands.figures import robustness_families
        from simulator.robustness import robustness as spread_over
        from simulator.robustness import speedup_by_gamma

        families = robustness_families(recorded.max_gamma or 24)
        emit("simulate", spread_over(speedup_by_gamma(recorded, families, table)), json)
        return
    ranking = Ranking([])
    if texts is None or texts:
        ranking = rank(recorded, table, texts, load_rule(verify, recorded, memory))
    logs = ranking.logs
    more: list[RoundLog] = []
    table = with_free_lookups(table)
    if systems:
        _refuse_with("--policy", verify=verify, systems=systems)
        recordings = load_recordings(trace, recorded)
        more = [replay_system(name, recorded, recordings) for name in systems]
    # What the papers call by a name is listed with everything else.
    if verify is None and (texts is None or "all" in texts):
        more += replay_methods(recorded)
        recordings = load_recordings(trace, recorded)
        named = {log.policy for log in more}
        more += [s for s in replay_systems(recorded, recordings, table) if s.policy not in named]
    frame = summary([*logs, *more], table, resamples=resamples, prefill=prefill)
    _emit_ranked(ranking, to_rows(frame), json, shown)
    say_memory([*logs, *more])
    if any(log.mismatched is not None for log in [*logs, *more]):
        say_unjudged(table)
    if plots is not None:
        from commands.figures import save_all

        if not logs:
            raise DraftsimError("--plots compares policies with the draft model: name some")
        for path in save_all(recorded, table, logs, plots):
            note(f"wrote {path}")


def rank_source(
    trace: Trace, latency: LatencyTable, texts: Sequence[str] | None, source: Source,
    recordings: Recordings, rule: VerifyRule | None = None,
) -> Ranking:  # fmt: skip
    """The policies of `texts` with `source` drafting, to be ranked."""
    from simulator.ranking import UNFITTED

    def replayed(some: list[tuple[str, DraftPolicy]]) -> list[RoundLog]:
        return replay_with(trace, source, some, recordings, rule)

    chosen = without_plain(named(load_source_policies(texts, source, trace, recordings)))
    # The rule is fitted to a draft model's passes, which another source does not make.
    notes = {name: UNFITTED for name, policy in chosen if is_unfitted(policy)}
    ranking = Ranking(replayed(chosen), notes)
    if not ranks_all(texts):
        return ranking
    return with_best_fixed(ranking, latency, longest_draft(source, trace, recordings), replayed)


def _emit_ranked(
    ranking: Ranking, rows: list[dict[str, Any]], json: str | None, shown: list[str]
) -> None:
    """Print or write the rows, with their notes where there are any."""
    rows = ranking.noted(rows)
    told = any(row["note"] for row in rows)
    emit("simulate", rows, json, show=[*shown, "note"] if told else shown)


def _refuse_with(
    option: str,
    *,
    plots: Path | None = None,
    robustness: bool = False,
    verify: str | None = None,
    systems: Sequence[str] = (),
) -> None:
    """DraftsimError where options do not go together."""
    if plots is not None or robustness:
        raise DraftsimError(f"--plots and --robustness belong to the draft model: drop {option}")
    if systems and option == "--source":
        raise DraftsimError(f"{systems[0]!r} has a draft source of its own: drop --source")
    if systems and verify is not None:
        raise DraftsimError(f"{systems[0]!r} verifies exactly: drop --verify")


def recorded_rounds(
    path: Path, latency: str | None, trace: str
) -> tuple[list[RoundLog], LatencyTable]:
    """The recorded round logs at `path`, and by default the latencies of their run folder."""
    from traces.files import read_rounds
    from traces.identity import check_folder
    from traces.outputs import find_runs

    files = find_runs(path)
    if not files:
        raise DraftsimError(
            f"{path} holds no recorded rounds: record some with `draftsim profile --verify`"
        )
    own = next((f for f in (path, path.parent, path.parent.parent) if _has_latency(f)), None)
    if own is not None:
        check_folder(own, files)
    table = load_latency(latency, trace if own is None else str(own))
    return [read_rounds(file) for file in files], table


def same_requests(logs: Sequence[RoundLog]) -> list[list[RoundLog]]:
    """The logs, grouped by the requests they decoded: only those can be compared."""
    groups: dict[tuple[str, ...], list[RoundLog]] = {}
    for log in logs:
        groups.setdefault(tuple(r.id for r in log.requests), []).append(log)
    return list(groups.values())


def _has_latency(folder: Path) -> bool:
    return folder.is_dir() and (folder / "latency.parquet").is_file()


def replay_methods(trace: Trace) -> list[RoundLog]:
    """The papers' lossy methods with a draft model, as far as the trace can tell of them."""
    from traces.errors import SignalError
    from traces.methods import METHODS
    from traces.sources.registry import DRAFT_MODEL

    logs: dict[tuple[str, str], RoundLog] = {}
    for name, chosen in METHODS.items():
        if chosen.source != DRAFT_MODEL or chosen.rule == "exact":
            continue
        text, policy, rule = load_method(name, trace)
        try:
            [log] = replay_all(trace, named([(text, policy)]), rule=rule)
        except SignalError:
            continue
        logs.setdefault((log.policy, log.verify), log)
    return list(logs.values())
