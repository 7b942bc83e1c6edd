"""``draftsim simulate``: replay policies and price their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.devices import AlwaysOption
from commands.common.drafted import load_recording
from commands.common.inputs import (
    DEFAULT_TRACE,
    LatencyOption,
    MemoryOption,
    PolicyOption,
    TraceOption,
    VerifyOption,
    load_rule,
    say_memory,
)
from commands.common.output import JsonOption, OutOption, emit, note, placed_folder, say_unjudged
from commands.common.quiet import say_disturbed
from commands.common.ranking import (
    Ranking,
)
from commands.common.sources import (
    SourceOption,
    split_systems,
    with_free_lookups,
)
from commands.simulate.runs import (
    decoded_part,
    rank_source,
    recorded_rounds,
    replay_side_by_side,
    same_requests,
)
from commands.simulate.table import (
    compared,
    headline,
    lossless,
    over_all,
    print_ranked,
    with_quality,
)
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog


def simulate(
    trace: TraceOption = DEFAULT_TRACE,
    latency: LatencyOption = None,
    policy: PolicyOption = None,
    source: SourceOption = None,
    always_draft: AlwaysOption = None,
    verify: VerifyOption = None,
    memory: MemoryOption = None,
    rounds: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of replaying: price the rounds that `profile --verify` recorded; "
            "a round log, or a run folder or a bundled recording for all of its own.",
        ),
    ] = None,
    by_category: Annotated[
        bool, typer.Option("--by-category", help="Also one row per policy and category of prompts.")
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
    against: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="Policy that gains are over. Default: the best fixed length.",
        ),
    ] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples over prompts.")] = 2000,
    plots: Annotated[
        Path | None,
        typer.Option(
            callback=placed_folder, help="Also draw the results as PNG files into this folder."
        ),
    ] = None,
    out: OutOption = None,
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
    from traces.replay.always import drafting_always
    from traces.sources.replay import check_rule
    from traces.store.outputs import find_runs, read_run
    from traces.store.recordings import folder_of

    if rounds is not None:
        if not rounds.exists():
            rounds = folder_of(rounds) or rounds
        logs, table, recorded = recorded_rounds(rounds, latency, trace)
        table = drafting_always(table, always_draft)
        runs = [read_run(file) for file in find_runs(rounds)]
        found = []
        for group in same_requests(logs):
            rows = _rows(Ranking([]), group, table, against, resamples, prefill, by_category)
            found += with_quality(rows, runs, decoded_part(recorded, group[0]))
        _emit(found, json, prefill, out, rounds.name)
        if any(log.mismatched is not None for log in logs):
            say_unjudged(table)
        return
    recording = load_recording(trace, latency, source, one_stream=True)
    recorded = recording.trace
    table = drafting_always(recording.priced(), always_draft)
    say_disturbed(table)
    texts, systems = split_systems(policy)
    if recording.stream is not None:
        _refuse_with("--source", plots=plots, robustness=robustness, systems=systems)
        rule = load_rule(verify, recorded, memory)
        check_rule(rule, recording.stream, recorded)
        table = with_free_lookups(table)
        ranking = rank_source(recorded, table, texts, recording.stream, recording.recordings, rule)
        rows = _rows(ranking, ranking.logs, table, against, resamples, prefill, by_category)
        _emit(rows, json, prefill, out, recording.said)
        return
    if robustness:
        from commands.common.figures import robustness_families
        from simulator.robustness import robustness as spread_over
        from simulator.robustness import speedup_by_gamma

        families = robustness_families(recorded.max_gamma or 24)
        spread = spread_over(speedup_by_gamma(recorded, families, table))
        emit("simulate", spread, json, out=out)
        return
    if systems:
        _refuse_with("--policy", verify=verify, systems=systems)
    rule = load_rule(verify, recorded, memory)
    recording.check_rule(rule)
    ranking, more = replay_side_by_side(recording, table, texts, systems, rule)
    logs, table = ranking.logs, with_free_lookups(table)
    rows = _rows(ranking, [*logs, *more], table, against, resamples, prefill, by_category)
    folder = folder_of(trace)
    runs = [read_run(file) for file in find_runs(folder)] if folder is not None else []
    _emit(with_quality(rows, runs, recorded), json, prefill, out, recording.said)
    say_memory([*logs, *more])
    if any(log.mismatched is not None for log in [*logs, *more]):
        say_unjudged(table)
    if plots is not None:
        from commands.common.figures import save_all

        if not logs:
            raise DraftsimError("--plots compares policies with the draft model: name some")
        own_text = [log for log in more if lossless(log.verify)]
        for path in save_all(recorded, table, logs, plots, systems=own_text):
            note(f"wrote {path}")


def _rows(
    ranking: Ranking, logs: Sequence[RoundLog], latency: LatencyTable, against: str | None,
    resamples: int, prefill: bool, by_category: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of `logs` after plain decoding's, with all that is known of each."""
    from simulator.summary import (
        price_all,
        summarize_runs,
        summarize_runs_by_category,
        to_rows,
    )

    runs = price_all(logs, latency)

    def made(summary: Any) -> list[dict[str, Any]]:
        return ranking.noted(to_rows(summary(runs, resamples=resamples, prefill=prefill)))

    overall = compared(made(summarize_runs), runs, latency, against, resamples, prefill)
    if not by_category:
        return overall
    # Gains are over all prompts: a category holds few.
    of_all = {(r["policy"], r["verify"], r["source"]): r for r in overall}
    blank = dict.fromkeys(("against", "gain", "gain_lo", "gain_hi"))
    return [{"category": None, **row} for row in overall] + [
        {**of_all[row["policy"], row["verify"], row["source"]], **blank, **row}
        for row in made(summarize_runs_by_category)
    ]


def _emit(
    rows: list[dict[str, Any]], json: str | None, prefill: bool, out: Path | None, of: str = ""
) -> None:
    """Print or write the rows, and say what was read outside the measured cells, or not at all.

    ``of``: the recording, its models and device.
    """
    more = {"headline": headline(over_all(rows), of)}
    emit("simulate", rows, json, more=more, out=out, printed=lambda: print_ranked(rows, of))
    shown = over_all(rows)
    outside = [row for row in shown if row["outside"]]
    if outside:
        worst = max(outside, key=lambda row: row["outside"])
        note(
            f"{len(outside)} of {len(shown)} rows read passes outside the measured cells, by a "
            f"fitted roofline: most {worst['policy']} ({worst['outside']:.1%} of its passes)"
        )
    if free := sorted({what for row in rows for what in row["unpriced"]} - {"judging"}):
        note(f"not in the latency table, hence free: {', '.join(free)}")


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
