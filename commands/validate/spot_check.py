"""One stream decoded for real, against what the recording predicts: policies, sources and rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.output import note, say_memory, say_unjudged
from commands.common.quiet import say_texts
from commands.profile.sources import load_drafters, modules_of
from commands.validate.flow import REMEDY, CheckedPair, RealRuns, as_recorded
from policies.core import DraftPolicy
from policies.registry import PLAIN
from simulator.chosen import is_unfitted, load_policies, load_rule, say_left_out
from simulator.predict import load_source_policies, load_system, replay_systems, split_systems
from simulator.recording import load_source
from simulator.summary import speedup
from simulator.validation import common_error, verdict
from simulator.whatif.ranking import (
    Fastest,
    fastest,
    fastest_for_real,
    predicted_fastest,
    with_fastest,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError, TailError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many
from traces.sources.base import Source
from traces.sources.draft_model import DraftModelSource
from traces.sources.found import find_recordings
from traces.sources.recording import Recordings
from traces.sources.registry import SYSTEMS, describe_source
from traces.sources.replay import replay_source
from traces.store.files import read_trace
from traces.store.outputs import quality

if TYPE_CHECKING:
    from profiler.checks.spot_check import Measured

ARMS = (
    "autoregressive", "fixed:gamma=2", "fixed:gamma=4", "fixed:gamma=8", "confidence",
    "confidence:roc_update=in_call", "hf-heuristic", "hf-heuristic:full_accept_means=budget",
    "gammatune", "gammatune-plus", "svip", "adaedl", "draft-and-verify", "oracle",
)  # fmt: skip
"""Policies that a spot check runs where none is named, with the one predicted fastest."""
SOURCE_ARMS = ("fixed:gamma=2", "fixed:gamma=4", "confidence:gamma=6", "gammatune")
"""Policies run with a source where none is named, as far as its tokens carry their signals."""
LOSSY_ARMS = ("fixed:gamma=4", "fixed:gamma=8", "confidence", "gammatune", "cm-asd")
"""Policies run under a lossy rule where none is named, with the one predicted fastest."""
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
    (`profiler.checks.differences`).  ``assisted``: also run transformers' own generation, which a
    stopped check begins again.
    """

    name = "measured"
    remedy = REMEDY
    draft_model = True

    def __init__(
        self, given: CheckedPair, forced: bool = False, sampled: bool = False, assisted: bool = True
    ) -> None:
        from simulator.chosen import named

        super().__init__(given, sampled, forced)
        trace, latency, policy = self.trace, self.latency, given.policy
        chosen = named(
            load_policies(policy or as_recorded(ARMS, trace), trace, say=note, latency=latency)
        )
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
        self.as_decoded = not (self.greedy or forced)
        self.assisted = _assisted_logs(trace) if assisted and not forced and self.greedy else {}

    def outputs(self, measured: Measured) -> dict[str, list[list[int]]]:
        """Return greedy outputs of the models' own.

        Forced runs emit no such text, and sampled ones draw other numbers than the recording did.
        """
        return measured.outputs if self.greedy and not self.forced else {}

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Compare rounds and texts of greedy runs, and add transformers' own generation."""
        from profiler.models.seq2seq import is_seq2seq

        if not self.greedy:
            return rows if self.forced else rows.assign(rounds_differ=None)
        rows = super().compared(rows, measured, progress)
        # With encoder-decoders transformers 5.23 drafts otherwise than the draft model would.
        if not self.assisted or is_seq2seq(self.pair.target):
            return rows
        return pd.concat([rows, self._assisted_rows(progress)], ignore_index=True)

    def _assisted_rows(self, progress: Any) -> pd.DataFrame:
        """Return transformers' assisted generation: its target passes against replayed rounds.

        Its seconds are not compared: its first round reads the prompt, too.
        """
        import torch

        from profiler.checks.differences import divergence
        from profiler.checks.spot_check import assisted_generation

        pair, trace = self.pair, self.trace
        rows, dtype = [], getattr(torch, str(pair.meta["dtype"]))
        settings: dict[str, Any]
        for schedule, log in self.assisted.items():
            settings = dict(ASSISTED[schedule][1])
            if schedule == "constant":
                # The replay drafts no more than was recorded.
                cap = min(settings["num_assistant_tokens"], trace.max_gamma)
                settings["num_assistant_tokens"] = cap
            expected = log.per_request([1] * len(log))
            task = progress.add_task(f"transformers, {schedule}", total=len(trace.requests))
            differ, diverged = 0, []
            for i, request in enumerate(trace.requests):
                prompt = torch.tensor(request.prompt_ids, device=pair.device)
                output, passes = assisted_generation(
                    pair, prompt, request.max_new_tokens, **settings
                )
                if (found := divergence(trace, i, output, dtype)) is None:
                    differ += abs(passes - int(expected[i]))
                else:
                    diverged.append(found._asdict())
                progress.advance(task)
            rows.append(
                {
                    "policy": f"transformers {schedule}", "verify": "exact", "batch": 1,
                    "forced": False, "predicted_s": None, "measured_s": None, "error": None,
                    "spread": None, "rounds_differ": differ, "speedup_error": None,
                    "texts_diverged": len(diverged), "drafts_diverged": None, "diverged": diverged,
                    "requests_left_out": 0,
                }
            )  # fmt: skip
        return pd.DataFrame(rows)


def _assisted_logs(trace: Trace) -> dict[str, RoundLog]:
    """Return the replay of each of transformers' schedules, if their drafts were recorded."""
    logs = {}
    for schedule, (text, _) in ASSISTED.items():
        try:
            [logs[schedule]] = replay_many(trace, load_policies([text], trace, say=note), first=0)
        except (TailError, SignalError) as error:
            note(f"left out: transformers' own generation, {schedule} schedule: {error}")
    return logs


def say_faster(run: Path, trace: Trace, latency: LatencyTable, best: Fastest) -> None:
    """Note where a method with drafts of its own is predicted to be faster than `best`."""
    try:
        recordings = find_recordings(str(run), trace)
    except DraftsimError:
        return  # of other outputs: nothing here reads them, and `simulate` says what is wrong
    listed, _ = replay_systems(SYSTEMS, trace, recordings, latency)
    first = fastest([best.log, *listed], latency)
    if first is not best.log:
        note(
            f"{first.policy}, which has its own drafts, is predicted to be even faster: decode it "
            f"with --policy {first.policy}"
        )


class SourceRuns(RealRuns):
    """One request at a time, with a source of drafts and with named methods.

    The rows also have the column ``source``.
    """

    name = "measured-sources"
    remedy = REMEDY

    def __init__(self, given: CheckedPair, source: str | None) -> None:
        super().__init__(given)
        recordings = find_recordings(str(given.run), self.whole)
        self.policies, self.logs = {}, []
        self.sources: dict[str, Source | None] = {}
        for (name, policy), drafting in self._asked(recordings, source):
            if name in self.policies:
                continue
            own = None if drafting is None else drafting.for_decoding(recordings)
            self.policies[name], self.sources[name] = policy, own
            self.logs.append(
                replay_source(
                    self.whole, own or DraftModelSource(), policy, recordings=recordings, name=name,
                    requests=self.chosen,
                )
            )  # fmt: skip
        sources = [None if s is None else describe_source(s) for s in self.sources.values()]
        self.conditions = {"sources": sources}

    def _asked(
        self, recordings: Recordings, source: str | None
    ) -> Iterator[tuple[tuple[str, DraftPolicy], Source | None]]:
        """Yield each policy with its source: plain decoding, then the policies and systems named.

        Where a source has no policies named for it, these are `SOURCE_ARMS` and the one predicted
        fastest.
        """
        trace = self.whole
        texts, systems = split_systems(self.given.policy)
        drafting = load_source(source)
        if drafting is not None and systems:
            raise DraftsimError(f"{systems[0]!r} has a draft source of its own: drop --source")
        yield from ((plain, None) for plain in load_policies([PLAIN], trace))
        if drafting is not None:
            named = load_source_policies(texts or SOURCE_ARMS, drafting, trace, recordings, note)
            if not texts:
                held = drafting.held(recordings)
                named = [n for n in named if set(n[1].reads) <= held]
                own = drafting.for_decoding(recordings)
                longest = drafting.longest(trace, recordings)
                best = predicted_fastest(
                    self.latency, load_policies(None, trace, signals=held, max_gamma=longest),
                    longest,
                    lambda some: [
                        replay_source(
                            trace, own, p, recordings=recordings, name=n, requests=self.chosen
                        )
                        for n, p in some
                    ],
                )  # fmt: skip
                named = with_fastest(named, best, note)
            yield from ((n, drafting) for n in named if n[0] != PLAIN)
        elif texts:
            with_model = load_policies(texts, trace, say=note, latency=self.latency)
            yield from ((c, None) for c in with_model if c[0] != PLAIN)
        for system in systems:
            own, one = load_system(system, trace, recordings)
            yield one, own

    def load(self) -> None:
        """Load the models, and what drafts; a source without a real decoder is refused."""
        from profiler.sources.run import SourceRunner

        super().load()
        named = [source for source in self.sources.values() if source is not None]
        drafters = load_drafters(self.pair, named)
        self.modules = {**modules_of(self.pair, self.info, self.given.run), **drafters}
        self.drafters = SourceRunner(self.pair.target, self.whole, self.modules)
        for source in named:
            self.drafters.decoder(source, 0)  # one without a real decoder is refused before any run

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Compare rounds and texts, and name the source."""
        rows = super().compared(rows, measured, progress)
        return rows.assign(source=rows["policy"].map({log.policy: log.source for log in self.logs}))


class LossyRuns(RealRuns):
    """One request at a time under a lossy rule, plain decoding first.

    The predicted seconds price the rounds really decoded.  The rows also have
    ``accepted_per_round`` of the real run and ``replay_accepted_per_round`` of the replay along
    the recorded text, ``bias`` (the second over the first, less 1) and ``speedup_bias`` (the same
    of the predicted speedups), and the fields of `traces.store.outputs.Quality`.
    """

    name = "measured-lossy"
    as_decoded = True

    def __init__(
        self, given: CheckedPair, verify: str, memory: Path | None, sampled: bool = False
    ) -> None:
        from profiler.checks.interleaved import rule_conditions

        super().__init__(given, sampled)
        trace, policy = self.trace, given.policy
        self.greedy = read_trace(given.run / "trace.parquet") if sampled else self.whole
        rule = load_rule(verify, memory)
        if rule is None or rule.lossless:
            raise DraftsimError(f"--verify {verify} is lossless: leave it out, its replay is exact")
        texts = policy or as_recorded(LOSSY_ARMS, trace)
        loaded = load_policies(texts, trace, say=note, latency=self.latency)
        chosen = [c for c in loaded if c[0] != PLAIN]
        if not policy:
            best = predicted_fastest(
                self.latency, load_policies(None, trace, latency=self.latency), trace.max_gamma,
                lambda some: list(replay_many(trace, some, rule=rule)),
            )  # fmt: skip
            chosen = with_fastest(chosen, best, note)
        self.policies, self.rule = dict(load_policies([PLAIN], trace) + chosen), rule
        self.logs = list(replay_many(trace, chosen, rule=rule))
        self.conditions = rule_conditions(rule)

    def times(self, measured: Measured) -> pd.DataFrame:
        """Return all times: these texts are not those of the recording."""
        return measured.times

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Add the error of the replay, and the quality of the outputs."""
        from profiler.checks.differences import answers_to, rounds_differ
        from profiler.checks.spot_check import real_run

        del progress
        extra: list[dict[str, Any]] = [{}]
        differ, answers = [0], answers_to(self.greedy)
        for run, theirs in zip(self.planned[1:], self.logs, strict=True):
            name = {"run": self.given.run.name}
            real = real_run(self.pair, self.greedy, run, measured, name, answers)
            mine = real.log
            differ.append(rounds_differ(mine, theirs))
            own, replayed = (float(log.rounds["accepted"].mean()) for log in (mine, theirs))
            extra.append(
                {
                    "accepted_per_round": own,
                    "replay_accepted_per_round": replayed,
                    "bias": replayed / own - 1 if own else math.nan,
                    "speedup_bias": speedup(theirs, self.latency) / speedup(mine, self.latency) - 1,
                    **asdict(quality(real.outputs, self.greedy)),
                }
            )
        say_memory([*measured.logs.values()])
        say_unjudged(self.latency)
        return pd.concat([rows, pd.DataFrame(extra)], axis=1).assign(rounds_differ=differ)


def say_verdict(rows: pd.DataFrame) -> None:
    """Print the verdict of the comparison in words."""
    priced = rows.dropna(subset=["predicted_s"])
    # No speculation has a speedup of 1 by definition, which is never wrong.
    speedups = priced.loc[priced["policy"] != PLAIN, "speedup_error"].dropna().abs()
    ratios = f", of the speedups {speedups.median():.1%}" if len(speedups) else ""
    said = verdict(priced)
    records = rows.to_dict("records")
    say_texts(records)
    ranks = "no two policies are clearly different"
    if priced["spread"].isna().all():
        ranks = "one repeat cannot tell which policies differ: --repeats 3 can"
    elif said.ranked_pairs:
        ranks = f"{len(said.misranked)} of {said.ranked_pairs} clearly different pairs misranked"
    sides = (
        f", {len(said.wrong_sign)} of {said.sign_arms} on the wrong side of 1x"
        if said.sign_arms else ""
    )  # fmt: skip
    rounds = rows["rounds_differ"].dropna()
    note(
        (f"{int(rounds.sum())} differing rounds; " if len(rounds) else "")
        + f"median |error| {said.median_error:.1%}, worst {said.worst_error:+.1%} "
        f"({said.worst_policy}){ratios}; {ranks}{sides}"
    )
    if line := common_error(priced):
        note(line)
    if "profile_error" in priced:
        note(
            "predicted from latencies measured between the real runs; from those of the profile "
            f"before them the median |error| is {priced['profile_error'].abs().median():.1%}"
        )
