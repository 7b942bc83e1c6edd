"""One stream really decoded under every policy, against what the recording predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.output import note
from commands.common.quiet import say_texts
from commands.validate.flow import REMEDY, Given, RealRuns, as_recorded
from policies.registry import PLAIN
from traces.errors import DraftsimError, SignalError, TailError

if TYPE_CHECKING:
    from profiler.checks.spot_check import Measured
    from simulator.whatif.ranking import Fastest
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog
    from traces.store.checkpoint import Checkpoint

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


class SpotCheck(RealRuns):
    """One request at a time, drafted by the draft model.

    A request whose text diverged from the recorded one is counted in ``texts_diverged``: its rounds
    are compared up to there, and its seconds not at all, under no policy
    (`profiler.checks.differences`).

    Parameters
    ----------
    assisted:
        Also run transformers' own generation, which a stopped check begins again.
    """

    name = "measured"
    remedy = REMEDY
    draft_model = True

    def __init__(
        self, given: Given, forced: bool = False, sampled: bool = False, assisted: bool = True
    ) -> None:
        from simulator.chosen import load_policies, named, say_left_out
        from simulator.whatif.ranking import fastest_for_real, is_unfitted, with_fastest
        from traces.replay.vectorised import replay_many

        super().__init__(given, sampled, forced)
        trace, latency, policy = self.trace, self.latency, given.policy
        chosen = named(load_policies(policy or as_recorded(ARMS, trace), trace, say=note))
        if not policy:
            lacking = {n: p for n, p in chosen if not trace.signals.issuperset(p.reads)}
            say_left_out(lacking, trace.signals, note)
            chosen = [(n, p) for n, p in chosen if n not in lacking]
            best = fastest_for_real(trace, latency)
            chosen = with_fastest(chosen, best, note)
            say_faster(given.run, trace, latency, best)
        for name in (n for n, p in chosen if is_unfitted(p)):
            note(f"{name} is not fitted: it runs with its default estimates and rate")
        if PLAIN not in dict(chosen):
            chosen = load_policies([PLAIN], trace) + chosen
        self.policies, self.logs = dict(chosen), list(replay_many(trace, chosen))
        self.conditions, self.greedy = {"forced": forced}, trace.temperature == 0
        self.assisted = _assisted_logs(trace) if assisted and not forced and self.greedy else {}

    def decode(self, kept: Checkpoint, advance: Callable[[], None]) -> Measured:
        """Decode with both models, or as the trace says."""
        from profiler.checks.spot_check import Arm, run_arms

        return run_arms(
            self.pair, self.trace, [Arm(*own) for own in self.policies.items()],
            forced=self.forced, repeats=self.given.repeats, advance=advance, kept=kept,
        )  # fmt: skip

    def outputs(self, measured: Measured) -> dict[str, list[list[int]]]:
        """Return greedy outputs of the models' own.

        Forced runs emit no such text, and sampled ones draw other numbers than the recording did.
        """
        return measured.outputs if self.greedy and not self.forced else {}

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Compare rounds and texts of greedy runs, and add transformers' own generation."""
        from profiler.models.seq2seq import is_seq2seq

        if not self.greedy:
            return rows
        rows = super().compared(rows, measured, progress)
        # With encoder-decoders transformers 5.23 drafts otherwise than the draft model would.
        if not self.assisted or is_seq2seq(self.pair.target):
            return rows
        return pd.concat([rows, self._assisted_rows(progress)], ignore_index=True)

    def _assisted_rows(self, progress: Any) -> pd.DataFrame:
        """Return transformers' assisted generation: its target passes against replayed rounds."""
        import torch

        from profiler.checks.differences import divergence
        from profiler.checks.spot_check import assisted_generation

        pair, trace = self.pair, self.trace
        rows, dtype = [], getattr(torch, str(pair.meta["dtype"]))
        for schedule, log in self.assisted.items():
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


def _assisted_logs(trace: Trace) -> dict[str, RoundLog]:
    """Return the replay of each of transformers' schedules, as far as their drafts were
    recorded.
    """
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
    """Note where a method with drafts of its own is predicted to be faster than `best`."""
    from simulator.predict import replay_systems
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
            f"{first.policy}, which has its own drafts, is predicted to be even faster: decode it "
            f"with --policy {first.policy}"
        )


def say_verdict(rows: pd.DataFrame) -> None:
    """Print the verdict of the comparison in words."""
    from simulator.validation import CONTROL, common_error, verdict

    priced = rows.dropna(subset=["predicted_s"])
    # No speculation has a speedup of 1 by definition, which is never wrong.
    speedups = priced.loc[priced["policy"] != CONTROL, "speedup_error"].dropna().abs()
    ratios = f", of the speedups {speedups.median():.1%}" if len(speedups) else ""
    said = verdict(priced)
    records = rows.to_dict("records")
    say_texts(records)
    ranks = (
        f"{len(said.misranked)} of {said.ranked_pairs} clearly different pairs misranked"
        if said.ranked_pairs else "no two policies are clearly different"
    )  # fmt: skip
    sides = (
        f", {len(said.wrong_sign)} of {said.sign_arms} on the wrong side of 1x"
        if said.sign_arms else ""
    )  # fmt: skip
    note(
        f"{int(rows['rounds_differ'].sum())} differing rounds; "
        f"median |error| {said.median_error:.1%}, worst {said.worst_error:+.1%} "
        f"({said.worst_policy}){ratios}; {ranks}{sides}"
    )
    if line := common_error(priced):
        note(line)
    if "profile_error" in priced:
        note(
            "predicted from latencies measured between the real runs; from those of the profile "
            f"before them the median |error| is {priced['profile_error'].abs().median():.1%}"
        )
