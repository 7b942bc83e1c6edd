"""One stream really decoded under every policy, against what the recording predicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.common.quiet import say_machine, say_texts, with_machine
from traces.errors import DraftsimError, SignalError, TailError

if TYPE_CHECKING:
    from profiler.models.loading import Pair
    from simulator.whatif.ranking import Fastest
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

ARMS = (
    "autoregressive", "fixed:gamma=2", "fixed:gamma=4", "fixed:gamma=8", "confidence",
    "confidence:roc_update=in_call", "hf-heuristic", "hf-heuristic:full_accept_means=budget",
    "gammatune", "gammatune-plus", "svip", "adaedl", "draft-and-verify", "oracle",
)  # fmt: skip
"""Policies that a spot check runs where none is named, with the one predicted fastest."""

ASSISTED = {
    "constant": (
        "confidence:roc_update=in_call",
        {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
         "assistant_confidence_threshold": 0.4},
    ),
    "heuristic": (
        "hf-heuristic:gamma=5,gamma_max=none",
        {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic_transient",
         "assistant_confidence_threshold": 0.0},
    ),
}  # fmt: skip
"""transformers' schedules: the policy that replays each, and its generation settings."""


REMEDY = "predict from latencies measured between the runs, with --remeasure"


def spot_check(
    run: Path,
    policy: list[str] | None = None,
    forced: bool = False,
    sampled: bool = False,
    repeats: int = 3,
    limit: int | None = None,
    assisted: bool = True,
    remeasure: bool = False,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Return the rows of `validate`; the measured times are kept in the run folder.

    With `remeasure` the sweeps over the latencies are spread over the real runs, the rows are
    predicted from them, and `profile_error` and `profile_speedup_error` are those of the run's own
    table.  That second table is kept in the run folder (`traces.store.files.CHECKED`).

    A request whose text diverged from the recorded one is counted in ``texts_diverged``: its rounds
    are compared up to there, and its seconds not at all, under no policy
    (`profiler.checks.differences`).

    The runs of a stopped check, and the sweeps between them, are kept there too: the same call
    goes on with them, but runs transformers' own generation from its beginning.
    """
    from commands.validate.remeasure import Remeasured, seconds_of
    from commands.validate.texts import Texts
    from profiler.checks.spot_check import Arm, run_arms
    from profiler.checks.unfinished import check_options, unfinished
    from profiler.models.seq2seq import is_seq2seq
    from profiler.recording.run import read_run
    from simulator.chosen import load_policies, named, say_left_out
    from simulator.pricing import price
    from simulator.validation import compare
    from simulator.whatif.ranking import fastest_for_real, is_unfitted, with_fastest
    from traces.replay.vectorised import replay_many
    from traces.store.files import read_latency, read_trace
    from traces.store.measured import MeasuredRuns, write_measured

    info = read_run(run, trust_remote_code)
    trace = read_trace(run / ("sampled.parquet" if sampled else "trace.parquet"))
    latency = read_latency(run / "latency.parquet")
    check_ids(trace)
    if limit is not None:
        trace = trace.select(spread_over_categories(trace, limit))
    chosen = named(load_policies(policy or as_recorded(ARMS, trace), trace, say=note))
    if not policy:
        lacking = {n: p for n, p in chosen if not trace.signals.issuperset(p.reads)}
        say_left_out(lacking, trace.signals, note)
        chosen = [(n, p) for n, p in chosen if n not in lacking]
        best = fastest_for_real(trace, latency)
        chosen = with_fastest(chosen, best, note)
        say_faster(run, trace, latency, best)
    for name in (n for n, p in chosen if is_unfitted(p)):
        note(f"{name} runs unfitted: with the estimates and the rate it comes with")
    if "autoregressive" not in dict(chosen):
        chosen = load_policies(["autoregressive"], trace) + chosen
    replayed = {log.policy: log for log in replay_many(trace, chosen)}
    greedy = assisted and not forced and trace.temperature == 0
    others = _assisted_logs(trace) if greedy else {}
    pair = info.load()
    total = repeats * len(trace.requests) * len(chosen)
    logs = list(replayed.values())
    expected = [price(log, latency) for log in logs]
    work = check_options(pair, trace, logs, repeats, forced=forced, remeasure=remeasure)
    with unfinished(run, work, total, note, together=len(chosen)) as kept:
        again = None
        if remeasure:
            again = Remeasured(pair, total, repeats * seconds_of(expected), trace, kept)
        with progress_bar() as progress:
            task = progress.add_task("decoding for real", total=total)

            def advance() -> None:
                progress.advance(task)
                if again is not None:
                    again.advance()

            measured = run_arms(
                pair, trace, [Arm(name, p) for name, p in chosen], forced=forced, repeats=repeats,
                advance=advance, kept=kept,
            )  # fmt: skip
            # Forced runs emit no text of the model's own, and sampled ones draw other numbers than
            # the recording did: only greedy outputs can be the recorded ones.
            greedy = trace.temperature == 0
            learners = [name for name, policy in chosen if policy.learns_across_requests]
            outputs = measured.outputs if greedy and not forced else {}
            texts = Texts(trace, outputs, str(pair.meta["dtype"]), learners)
            times = texts.times(measured.times)
            if again is not None:
                rows = again.compare(logs, times, expected, run)
            else:
                rows = compare(expected, times)
            rows = with_machine(rows, latency, measured.machine)
            if greedy:
                rows = texts.compared(rows, measured.logs, replayed, draft_model=True)
                # With encoder-decoders transformers 5.23 drafts otherwise than the draft model
                # would.
                if others and not is_seq2seq(pair.target):
                    assisted_rows = _assisted_rows(pair, trace, others, progress)
                    rows = pd.concat([rows, assisted_rows], ignore_index=True)
        say_machine(latency, measured.machine, None if remeasure else REMEDY)
        meta = {**pair.meta, "machine": measured.machine}
        write_measured(MeasuredRuns(times, meta), run / "measured.parquet")
    return rows


def check_ids(trace: Trace) -> None:
    """Raise DraftsimError if two requests have the same id: measured times are filed by it."""
    times = Counter(request.id for request in trace.requests)
    if again := [name for name, count in times.items() if count > 1]:
        raise DraftsimError(
            f"the trace has {len(again)} ids more than once, as {again[0]!r}, and measured times "
            "are filed by them: record prompts with ids of their own"
        )


def as_recorded(texts: Sequence[str], trace: Trace) -> list[str]:
    """Return those of the default arms `texts` whose fixed length the trace was recorded for."""
    longest = trace.max_gamma or 0
    fixed = {text: text.removeprefix("fixed:gamma=") for text in texts}
    beyond = [t for t, gamma in fixed.items() if gamma.isdigit() and int(gamma) > longest]
    if beyond:
        note(f"left out: {', '.join(beyond)}; drafts of up to {longest} were recorded")
    return [text for text in texts if text not in beyond]


def _assisted_logs(trace: Trace) -> dict[str, RoundLog]:
    """The replay of each of transformers' schedules, as far as their drafts were recorded."""
    from simulator.chosen import load_policies
    from traces.replay.vectorised import replay_many

    logs = {}
    for schedule, (text, _) in ASSISTED.items():
        try:
            [logs[schedule]] = replay_many(trace, load_policies([text], trace, say=note), first=0)
        except (TailError, SignalError) as error:
            note(f"left out: transformers' own generation, {schedule} schedule: {error}")
    return logs


def say_faster(run: Path, trace: Trace, latency: LatencyTable, best: Fastest) -> None:
    """A note where a method with drafts of its own is predicted to be faster than `best`."""
    from simulator.systems import replay_systems
    from simulator.whatif.ranking import fastest
    from traces.sources.found import find_recordings
    from traces.sources.registry import SYSTEMS

    try:
        recordings = find_recordings(str(run), trace)
    except DraftsimError:
        return  # of other outputs: nothing here reads them, and `simulate` says what is wrong
    listed = replay_systems(SYSTEMS, trace, recordings, latency)
    first = fastest([best.log, *listed.logs], latency)
    if first is not best.log:
        note(
            f"{first.policy}, with drafts of its own, is predicted to be faster still: decode it "
            f"with --policy {first.policy}"
        )


def _assisted_rows(
    pair: Pair, trace: Trace, logs: Mapping[str, RoundLog], progress: Any
) -> pd.DataFrame:
    """transformers' assisted generation: its target passes against the replayed rounds."""
    import torch

    from profiler.checks.assisted import assisted_generation
    from profiler.checks.differences import divergence

    rows, dtype = [], getattr(torch, str(pair.meta["dtype"]))
    for schedule, log in logs.items():
        settings = ASSISTED[schedule][1]
        expected = log.per_request([1] * len(log))
        task = progress.add_task(f"transformers, {schedule}", total=len(trace.requests))
        seconds, differ, diverged = 0.0, 0, []
        for i, request in enumerate(trace.requests):
            prompt = torch.tensor(request.prompt_ids, device=pair.device)
            output, passes, wall = assisted_generation(
                pair, prompt, request.max_new_tokens, **settings
            )
            if (found := divergence(trace, i, output, dtype)) is None:
                differ += abs(passes - int(expected[i]))
            else:
                diverged.append(found._asdict())
            seconds += wall
            progress.advance(task)
        rows.append(
            {
                "policy": f"transformers {schedule}", "verify": "exact", "batch": 1,
                "forced": False, "predicted_s": None, "measured_s": seconds, "error": None,
                "spread": None, "rounds_differ": differ, "speedup_error": None,
                "texts_diverged": len(diverged), "drafts_diverged": None, "diverged": diverged,
                "requests_left_out": 0,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def say_verdict(rows: pd.DataFrame) -> None:
    """Print the verdict of the comparison in words."""
    from simulator.validation import verdict

    priced = rows.dropna(subset=["predicted_s"])
    said = verdict(priced)
    records = rows.to_dict("records")
    say_texts(records)
    note(
        f"{int(rows['rounds_differ'].sum())} differing rounds; "
        f"median |error| {said.median_error:.1%}, worst {said.worst_error:+.1%} "
        f"({said.worst_policy}), of the speedups {priced['speedup_error'].abs().median():.1%}; "
        f"{len(said.misranked)} of {said.ranked_pairs} clearly different pairs misranked, "
        f"{len(said.wrong_sign)} of {said.sign_arms} on the wrong side of 1x"
    )
    if "profile_error" in priced:
        note(
            "predicted from latencies measured between the real runs; from those of the profile "
            f"before them the median |error| is {priced['profile_error'].abs().median():.1%}"
        )


def spread_over_categories(trace: Trace, limit: int) -> list[int]:
    """`limit` request indices, in turn from each category."""
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(trace.requests):
        groups.setdefault(request.category, []).append(i)
    order = sorted(
        range(len(trace.requests)), key=lambda i: groups[trace.requests[i].category].index(i)
    )
    return sorted(order[:limit])
