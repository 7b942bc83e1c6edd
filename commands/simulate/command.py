"""``draftsim simulate``: replay policies and price their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.devices import AlwaysOption, OnePassOption
from commands.common.drafted import load_recording
from commands.common.inputs import (
    AcceptanceOption,
    LatencyOption,
    MemoryOption,
    PolicyOption,
    TraceOption,
    VerifyOption,
    load_rule,
    say_memory,
)
from commands.common.latex import Shown
from commands.common.output import (
    JsonOption,
    OutOption,
    emit,
    note,
    placed_folder,
    said_free,
    say_drawn,
    say_unjudged,
)
from commands.common.printed import (
    print_table,
)
from commands.common.progress import working
from commands.common.quiet import say_disturbed
from commands.common.sources import SourceOption, with_free_lookups
from commands.simulate.phases import load_phases, phases_in, shown_phases
from commands.simulate.runs import (
    Asked,
    decoded_part,
    rank_source,
    recorded_rounds,
    replay_side_by_side,
    same_requests,
    split_asked,
)
from traces.errors import DraftsimError
from traces.store.recordings import DEFAULT_TRACE

if TYPE_CHECKING:
    from simulator.whatif.ranking import Ranking
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog


def simulate(
    trace: TraceOption = DEFAULT_TRACE,
    acceptance: AcceptanceOption = None,
    latency: LatencyOption = None,
    policy: PolicyOption = None,
    source: SourceOption = None,
    always_draft: AlwaysOption = None,
    one_pass: OnePassOption = False,
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
    phase: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=BEGIN..END",
            help="Also rows by phase of the answer, which begins and ends with these markers "
            "(thinking=<think>..</think>): text, or a token's #ID; without BEGIN it begins with "
            "the answer. Repeatable.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --phase: the target's folder, whose tokenizer finds text."
        ),
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Count prefill in times and speedups.")
    ] = False,
    robustness: Annotated[
        bool,
        typer.Option(
            "--robustness",
            help="Instead: mean and sd over initial draft lengths from 1 to 24, as far as drafts "
            "were recorded, of policies that have one (a parameter gamma).",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="Also print every policy's gain over this one; in JSON the default is the best "
            "fixed length.",
        ),
    ] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples over prompts.")] = 2000,
    plots: Annotated[
        Path | None,
        typer.Option(
            callback=placed_folder, help="Also draw the results into this folder: PNG, SVG and PDF."
        ),
    ] = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Predict every policy's speedup from a recorded trace and measured latencies.

    A lossy --verify rule changes the text, which a recording cannot follow: its rows are
    labelled approximate.  The exact way is to decode under the rule (`profile --verify`)
    and price those --rounds.

    Every ranking of replayed policies holds the fixed draft length that is fastest here, marked
    best fixed. Speedups are over no speculation, gains over --against. The ranking of all policies
    also holds rate-optimal, fitted to other prompts than it is judged on, where that can be done.

    --policy also takes the papers' methods by name, with drafts and verification of their own
    (pld, specbound, csd, ...), and POLICY+RULE for any other combination (gammatune+csd).  A name
    that is a policy's, too, is the policy: cm-asd is its draft lengths, cm-asd+cm-asd the whole.
    With const: latencies, searching text costs nothing.
    """
    from commands.simulate.table import with_quality
    from simulator.whatif.ranking import Ranking, lossless
    from traces.replay.always import drafting_always
    from traces.sources.replay import check_rule, runs_layers
    from traces.store.outputs import find_runs, read_run
    from traces.store.recordings import folder_of

    phases = load_phases(phase or ())
    if phases and (rounds is not None or robustness):
        raise DraftsimError("--phase is of replayed policies: drop --rounds and --robustness")
    if tokenizer is not None and not phases:
        raise DraftsimError("--tokenizer belongs to --phase: name a phase, or drop it")
    options: dict[str, Any] = {
        "against": against, "resamples": resamples, "prefill": prefill, "by_category": by_category,
    }  # fmt: skip
    if rounds is not None:
        if not rounds.exists():
            rounds = folder_of(rounds) or rounds
        logs, table, recorded = recorded_rounds(rounds, latency, trace)
        table = drafting_always(table, always_draft)
        runs = [read_run(file) for file in find_runs(rounds)]
        found = []
        for group in same_requests(logs):
            rows = _rows(Ranking([]), group, table, recorded, **options)
            found += with_quality(rows, runs, decoded_part(recorded, group[0]))
        _emit(found, json, prefill, out, of=rounds.name, gains=against is not None)
        if any(log.mismatched is not None for log in logs):
            say_unjudged(table)
        return
    recording = load_recording(
        trace,
        latency,
        source,
        acceptance=acceptance,
        one_stream=acceptance is None,
        one_pass=one_pass,
    )
    recorded = recording.trace
    table = drafting_always(recording.priced(), always_draft)
    say_disturbed(table)
    asked = split_asked(policy)
    by_name = bool(policy) and "all" not in (policy or ())
    # Read before anything is replayed, so that a wrong marker is told at once.
    found_phases = phases_in(recorded, phases, tokenizer) if phases else None
    if recording.stream is not None:
        _refuse_with("--source", asked, plots=plots, robustness=robustness)
        rule = load_rule(verify, recorded, memory)
        check_rule(rule, recording.stream, recorded)
        table = with_free_lookups(table)
        ranking = rank_source(
            recorded, table, asked.policies, recording.stream, recording.recordings, rule
        )
        rows = _rows(ranking, ranking.logs, table, recorded, **options)
        by_phase = found_phases.rows(ranking.logs, table, resamples) if found_phases else None
        _emit(
            rows, json, prefill, out, by_name, recording.said, by_phase, gains=against is not None
        )
        return
    if robustness:
        from commands.common.figures import robustness_rows

        if (other := [*asked.systems, *asked.ruled]) or verify is not None:
            what = f"--policy {other[0]}" if other else "--verify"
            raise DraftsimError(
                f"--robustness is of draft lengths verified exactly: drop {what}, or name the "
                "policy alone"
            )
        spread, said = robustness_rows(recorded, table, asked.policies)
        of = f"{recording.said}: speedup over initial draft lengths"
        emit(
            "simulate", spread, json, out=out,
            tables=lambda: [Shown(spread.to_dict("records"), of)],
        )  # fmt: skip
        for line in said:
            note(line)
        return
    if verify is not None:
        _refuse_with("--verify", asked)
    rule = load_rule(verify, recorded, None if asked.remembers else memory)
    recording.check_rule(rule)
    ranking, more = replay_side_by_side(recording, table, asked, rule, memory)
    logs, table = ranking.logs, with_free_lookups(table)
    listed = sorted([*logs, *more], key=lambda log: log is ranking.added)
    rows = _rows(ranking, listed, table, recorded, **options)
    folder = None if recording.observed else folder_of(trace)
    runs = [read_run(file) for file in find_runs(folder)] if folder is not None else []
    by_phase = found_phases.rows(listed, table, resamples) if found_phases else None
    _emit(
        with_quality(rows, runs, recorded), json, prefill, out, by_name, recording.said, by_phase,
        gains=against is not None,
    )  # fmt: skip
    if recording.said_depths and any(runs_layers(log) for log in more):
        note(recording.said_depths)
    say_memory([*logs, *more])
    if any(log.mismatched is not None for log in [*logs, *more]):
        say_unjudged(table)
    if plots is not None:
        from commands.common.figures import save_all

        if not logs:
            raise DraftsimError("--plots compares policies with the draft model: name some")
        # Lossy ones are drawn where they were asked for.
        own = {log.policy for log in more} if by_name else {*asked.ruled}
        beside = [log for log in more if lossless(log.verify) or log.policy in own]
        drawn = save_all(
            recorded, table, logs, plots, systems=beside, texts=policy, title=recording.said
        )
        say_drawn(drawn.paths)
        for line in drawn.left_out:
            note(line)


def _rows(
    ranking: Ranking, logs: Sequence[RoundLog], latency: LatencyTable, trace: Trace,
    **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of `simulator.whatif.ranking.ranked_rows`, with a progress bar."""
    from simulator.whatif.ranking import ranked_rows

    with working("pricing their rounds", alone=True) as say:
        said = partial(say, "pricing their rounds")
        return ranked_rows(ranking, latency, trace, logs, **options, progress=said)


def _emit(
    rows: list[dict[str, Any]], json: str | None, prefill: bool, out: Path | None,
    by_name: bool = False, of: str = "", by_phase: Sequence[dict[str, Any]] | None = None,
    gains: bool = False,
) -> None:  # fmt: skip
    """Print or write the rows, and say what was read outside the measured cells, or not at all.

    ``by_name``: True if the policies were named one by one.  ``of``: the recording, its models
    and device.  ``by_phase``: the rows by phase, if phases were named.  ``gains``: True to print
    the gain over another row than no speculation.
    """
    from commands.simulate.table import headline, over_all, print_ranked, ranked_tables

    more: dict[str, Any] = {"headline": headline(over_all(rows), of)}
    if by_phase:
        more["phases"] = list(by_phase)
    emit(
        "simulate", rows, json, more=more, out=out,
        printed=lambda: print_ranked(rows, by_name, of, gains),
        tables=lambda: ranked_tables(rows, by_name, gains, of),
    )  # fmt: skip
    if by_phase and json is None:
        print_table(shown_phases(by_phase), title="by phase of the answer")
    shown = over_all(rows)
    outside = [row for row in shown if row["outside"]]
    if outside:
        worst = max(outside, key=lambda row: row["outside"])
        note(
            f"{len(outside)} of {len(shown)} rows read passes outside the measured cells, by a "
            f"fitted roofline: most {worst['policy']} ({worst['outside']:.1%} of its passes)"
        )
    for line in said_free({what for row in rows for what in row["unpriced"]} - {"judging"}):
        note(line)


def _refuse_with(
    option: str, asked: Asked, *, plots: Path | None = None, robustness: bool = False
) -> None:
    """DraftsimError where options do not go together."""
    from traces.sources.methods import method_of

    if plots is not None or robustness:
        raise DraftsimError(f"--plots and --robustness belong to the draft model: drop {option}")
    own = [*asked.systems, *asked.ruled, *(t for t in asked.policies or () if method_of(t))]
    if own:
        what = "a draft source" if option == "--source" else "a verification"
        raise DraftsimError(f"{own[0]!r} is a method, which has {what} of its own: drop {option}")
