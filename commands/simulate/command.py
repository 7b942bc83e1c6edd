"""``draftsim simulate``: replayed policies, their priced rounds, and phases of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from commands.common.drafted import load_recording
from commands.common.options import (
    AlwaysOption,
    Inputs,
    Policies,
    Recorded,
    SourceOption,
)
from commands.common.output import (
    MEASURE_MORE,
    JsonOption,
    OutOption,
    PlotsOption,
    emit,
    note,
    remark,
    say_drawn,
    say_memory,
    say_unjudged,
)
from commands.common.printed import print_table
from commands.common.progress import working
from commands.common.quiet import say_disturbed
from commands.common.written import Shown
from commands.simulate.table import BY_PHASE, headline, over_all, print_ranked, ranked_tables
from policies.registry import PLAIN
from simulator import predict
from simulator.phases import Phase, phase_rows, phases_of
from simulator.predict import Compared, split_asked
from simulator.robustness import families_of, speedup_by_gamma
from simulator.robustness import robustness as spread_of
from simulator.summary import price_all
from simulator.unmeasured import free_hosts, said_free, said_outside
from simulator.whatif.ranking import Ranking, is_called, lossless
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError, missing
from traces.latency.table import LatencyTable
from traces.replay.calls import drafting_always
from traces.replay.rounds import RoundLog
from traces.sources.replay import runs_layers
from traces.store.identity import check_folder
from traces.store.outputs import find_runs, read_run
from traces.store.recordings import SAMPLED, folder_of, given_name


@dataclass(frozen=True)
class AnySource(Inputs):
    """The inputs of one stream, which any source may draft for."""

    source: SourceOption = None


@dataclass(frozen=True)
class DecodedInputs(Recorded):
    """The recording and costs of rounds that were decoded."""

    always_draft: AlwaysOption = None


@dataclass(frozen=True)
class RankedRounds:
    """Options for the rows of rounds, and where they go."""

    by_category: Annotated[
        bool, typer.Option("--by-category", help="Also one row per policy and category of prompts.")
    ] = False
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Count prefill in times and speedups.")
    ] = False
    against: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="Also print every policy's gain over this one (POLICY, or POLICY+RULE where rules "
            "differ); in JSON the default is the best fixed length.",
        ),
    ] = None
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples over prompts.")] = 2000
    out: OutOption = None
    json: JsonOption = None

    def rows(self, compared: Compared, against: str | None) -> list[dict[str, Any]]:
        """Return the rows of what was compared, with gains over `against`."""
        with working("pricing their rounds", alone=True) as say:
            return compared.rows(
                against=against, resamples=self.resamples, prefill=self.prefill,
                by_category=self.by_category, progress=partial(say, "pricing their rounds"),
            )  # fmt: skip


@dataclass(frozen=True)
class Ranked(RankedRounds):
    """Options for the rows of a replay, which are drawn, too."""

    plots: PlotsOption = None


def replay(ranked: Ranked, inputs: AnySource, policies: Policies) -> None:
    """Predict every policy's speedup from a recorded trace and measured latencies.

    Speedups are over no speculation, gains over --against. Two rows are added to every ranking: the
    fastest fixed draft length (best fixed) and, for all policies, rate-optimal, which is fitted on
    one half of the prompts and judged on the other.

    A lossy --verify rule changes the text, so its rows are approximate. For exact rows decode under
    the rule (`profile decode`) and price those rounds (`simulate rounds`).

    --policy also takes the papers' methods by name, with their own drafts and verification (pld,
    specbound, csd, ...), and POLICY+RULE for any other combination (gammatune+csd). If a policy and
    a method share a name, it is the policy: cm-asd sets draft lengths alone, cm-asd+cm-asd is the
    method. With const: latencies, searching text costs nothing.
    """
    _replayed(ranked, inputs, policies)


def phases(
    phase: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=BEGIN..END...",
            help="A phase and its markers (thinking=<think>..</think>). A marker is text or a "
            "token's #ID; without BEGIN the phase begins with the answer.",
        ),
    ],
    *,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The target's folder, whose tokenizer finds text markers."
        ),
    ] = None,
    ranked: Ranked,
    inputs: AnySource,
    policies: Policies,
) -> None:
    """Predict every policy's speedup as `simulate replay` does, and also by phase of the answer.

    The rows by phase are of lossless policies: lossy rules write other texts.
    """
    chosen = [Phase.parse(text) for text in phase]
    names = [one.name for one in chosen]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DraftsimError(f"phase {twice}=... is given twice: name each phase once")
    _replayed(ranked, inputs, policies, chosen, tokenizer)


def rounds(
    rounds: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A round log of `profile decode`, or a run folder or bundled recording for all of "
            "its logs.",
        ),
    ],
    ranked: RankedRounds,
    inputs: DecodedInputs,
) -> None:
    """Price the rounds that were decoded under lossy rules; rank them by speedup.

    Rows are exact: the rounds are those of the texts that the rules wrote. They have the quality of
    these texts, too.  Rounds of other prompts have a table of their own.
    """
    if not rounds.exists():
        rounds = folder_of(rounds) or rounds
    logs, table, recorded = recorded_rounds(rounds, inputs.latency, inputs.trace)
    if inputs.always_draft and (other := [log for log in logs if log.recorded_calls is not None]):
        raise DraftsimError(
            f"--always-draft is for a draft model, and {other[0].source} drafted rounds in "
            f"{rounds}: drop it"
        )
    table = drafting_always(table, inputs.always_draft)
    runs = [read_run(file) for file in find_runs(rounds)]
    found: list[list[dict[str, Any]]] = []
    groups, against = predict.same_requests(logs), ranked.against
    rivals = [_in_rounds(against, group) for group in groups]
    if against is not None and not any(rivals):
        raise DraftsimError(
            f"--against {against}: not among the rounds in {rounds}: name some as POLICY or "
            f"POLICY+RULE, such as {logs[0].policy}+{logs[0].verify}"
        )
    for group, rival in zip(groups, rivals, strict=True):
        if others := _of_other_lengths(group):
            remark(
                f"plain decoding is priced over the texts of {group[0].policy}, verified by "
                f"{group[0].verify}; {counted(others, 'other run')} wrote texts of other lengths"
            )
        rows = ranked.rows(predict.Compared(recorded, Ranking([]), group, table), rival)
        rows = predict.with_quality(rows, runs, predict.decoded_part(recorded, group[0]))
        found.append(rows)
    if len(found) > 1:
        # Rows of other prompts are not comparable, and two sets may be of one size.
        for i, (rows, group) in enumerate(zip(found, groups, strict=True), 1):
            of = f"{len(group[0].requests)} prompts (set {i} of {len(groups)})"
            found[i - 1] = [{**row, "prompts": of} for row in rows]
        sets = f"{len(groups)} sets of prompts"
        remark(f"{rounds} holds rounds of {sets}: each has its own table")
    every = [row for rows in found for row in rows]
    _emit(every, ranked, of=rounds.name)
    if any(log.mismatched is not None for log in logs):
        say_unjudged(table)


def _of_other_lengths(logs: Sequence[RoundLog]) -> int:
    """Return how many of the logs have texts of other lengths than the first's."""
    first, *others = ([request.tokens for request in log.requests] for log in logs)
    return sum(lengths != first for lengths in others)


def robustness(
    inputs: Inputs,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="P",
            help="name[:key=value,...] or FILE.py:Class[:...], with a parameter gamma; repeatable. "
            "Default: fixed, hf-heuristic, confidence, gammatune and gammatune-plus.",
        ),
    ] = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Compare policies over initial draft lengths 1 to 24, as far as recorded: mean and sd.

    The initial draft length is a policy's parameter gamma. Speedups are over the mean speedup of
    fixed, and verification is lossless.
    """
    recording = inputs.load()
    table = inputs.priced(recording)
    say_disturbed(table)
    asked = split_asked(policy)
    if other := [*asked.systems, *asked.ruled]:
        raise DraftsimError(
            f"--policy {other[0]} has a source or a rule of its own, and initial draft lengths are "
            "compared for length policies: name the policy alone"
        )
    made, gammas, said = families_of(recording.trace, policy)
    spread = spread_of(speedup_by_gamma(recording.trace, made, table, gammas))
    title = f"{recording.said}: speedup over initial draft lengths, fixed's mean speedup is 1"
    if json is None:
        best = max(spread.to_dict("records"), key=lambda row: float(row["mean"]))
        note(
            f"{recording.said}: on average over initial draft lengths {best['policy']} is fastest, "
            f"{best['mean']:.3g} times fixed"
        )
    emit(
        "simulate", spread, json, out=out, tables=lambda: [Shown(spread.to_dict("records"), title)]
    )
    begun = [make(gammas[0]) for make in made.values()]
    for line in [*said, *said_free(free_hosts([table], begun, recording.trace.sampling))]:
        note(line)


def _replayed(
    ranked: Ranked, inputs: AnySource, policies: Policies, phases: Sequence[Phase] = (),
    tokenizer: Path | None = None,
) -> None:  # fmt: skip
    """Print or write the policies ranked on a recording, and rows of `phases`, if any are named."""
    recording = inputs.load(one_stream=inputs.acceptance is None)
    recorded = recording.trace
    table = inputs.priced(recording)
    say_disturbed(table)
    policy, memory = policies.policy, policies.memory
    asked = predict.split_asked(policy)
    by_name = bool(policy) and "all" not in (policy or ())
    # Read before anything is replayed, so that a wrong marker is told at once.
    found_phases = phases_in(recorded, phases, tokenizer) if phases else None
    if recording.stream is not None and ranked.plots is not None:
        raise DraftsimError("--plots compares policies with the draft model: drop --source")
    rule = recording.rule(policies.verify, None if asked.remembers else memory)
    with working("replaying policies", alone=True) as say:
        compared = predict.compare(
            recording, table, asked, rule, memory, always=inputs.always_draft is not None,
            say=remark, progress=partial(say, "replaying policies"),
        )  # fmt: skip
    table, more = compared.latency, compared.more
    rows = ranked.rows(compared, ranked.against)
    by_phase = None
    if found_phases is not None:  # lossy rules write other texts
        own_texts = price_all([log for log in compared.logs if lossless(log.verify)], table)
        by_phase = phase_rows(own_texts, recorded, phases, found_phases, ranked.resamples)
    if recording.stream is None:
        folder = None if recording.observed else folder_of(inputs.trace)
        runs = [read_run(file) for file in find_runs(folder)] if folder is not None else []
        rows = predict.with_quality(rows, runs, recorded)
    _emit(rows, ranked, by_name, recording.said, by_phase)
    if recording.stream is not None:
        return
    if recording.said_depths and any(runs_layers(log) for log in more):
        note(recording.said_depths)
    say_memory(compared.logs)
    if any(log.mismatched is not None for log in compared.logs):
        say_unjudged(table)
    if ranked.plots is not None:
        from simulator.plots.recording import save_all

        if not compared.ranking.logs:
            raise DraftsimError("--plots compares policies with the draft model: name some")
        # Lossy ones are drawn where they were asked for.
        own = {log.policy for log in more} if by_name else {*asked.ruled}
        systems = [log for log in more if lossless(log.verify) or log.policy in own]
        paths, left_out = save_all(
            recorded, table, compared.ranking.logs, ranked.plots, texts=policy,
            title=recording.said, resamples=ranked.resamples, prefill=ranked.prefill,
            systems=systems,
        )  # fmt: skip
        say_drawn(paths)
        if lossy := len(more) - len(systems):
            note(f"the plots leave out {counted(lossy, 'lossy method')}: --policy NAME draws one")
        for line in left_out:
            note(line)


def _in_rounds(against: str | None, logs: Sequence[RoundLog]) -> str | None:
    """Return `against` if it names plain decoding or one of `logs`; other requests have no gain."""
    names = [{"policy": PLAIN, "verify": ""}, *map(vars, logs)]
    return against if against and any(is_called(name, against) for name in names) else None


def recorded_rounds(
    path: Path, latency: str | None, trace: str
) -> tuple[list[RoundLog], LatencyTable, Trace]:
    """Return the recorded round logs at `path`, their folder's latencies by default, and its trace.

    Where they lie in no run folder, `trace` names the trace.  Raises DraftsimError if it names
    another than the folder's.
    """
    files = find_runs(path)
    if not files:
        raise DraftsimError(
            f"{path} holds no recorded rounds: record some with `draftsim profile decode`"
        )
    near = (path, path.parent, path.parent.parent)
    own = next((f for f in near if f.is_dir() and (f / "latency.parquet").is_file()), None)
    if own is not None:
        check_folder(own, files)
    if own is not None and any((own / name).is_file() for name in ("trace.parquet", SAMPLED)):
        named = folder_of(trace) or Path(trace)
        if given_name(trace) is not None and named.resolve() != own.resolve():
            raise DraftsimError(
                f"the rounds lie in {own} with their own trace: drop --trace {trace}"
            )
        trace = str(own)
    elif own is not None and latency is None:
        latency = str(own)
    recording = load_recording(trace, latency)
    logs = [read_run(file).log for file in files]
    if recording.source is not None and any(log.drafter == "draft" for log in logs):
        raise DraftsimError(
            f"the latencies are those of {recording.trace.source}, and the rounds in {path} were "
            "drafted by a draft model: give latencies of one with --latency"
        )
    return logs, recording.latency, recording.outputs


def _emit(
    rows: list[dict[str, Any]], ranked: RankedRounds, by_name: bool = False, of: str = "",
    by_phase: Sequence[dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Print or write the rows, and say what was read outside the measured cells, or not at all.

    ``by_name``: the policies were named one by one.  ``of``: the recording, its models and device.
    ``by_phase``: rows by phase, if any were named.
    """
    gains = ranked.against is not None
    more: dict[str, Any] = {"headline": headline(over_all(rows), of)}
    if by_phase:
        more["phases"] = list(by_phase)

    drafting = [row for row in by_phase or () if row["policy"] != PLAIN]
    phased = [Shown(drafting, "by phase of the answer", BY_PHASE)] if drafting else []

    def printed() -> None:
        print_ranked(rows, by_name, of, gains)
        for one in phased:
            print_table(one.rows, one.show, one.title)

    emit(
        "simulate", rows, ranked.json, more=more, out=ranked.out, printed=printed,
        tables=lambda: [*ranked_tables(rows, by_name, gains, of), *phased],
    )  # fmt: skip
    if phased and ranked.out is not None and ranked.out.suffix in (".csv", ".parquet"):
        note(f"{ranked.out} holds no rows by phase: .tex, .json and --json have them")
    for line in said_outside(over_all(rows)):
        note(f"{line}; {MEASURE_MORE}")
    for line in said_free({what for row in rows for what in row["unpriced"]} - {"judging"}):
        note(line)


def phases_in(
    trace: Trace, phases: Sequence[Phase], tokenizer: Path | None
) -> npt.NDArray[np.int64]:
    """Return the phase of every output position (`simulator.phases.phases_of`).

    Raises DraftsimError if none of `phases` occurs, or a marker needs a tokenizer.
    """
    found = phases_of(trace, phases, token_text(tokenizer, trace))
    absent = [phase.name for i, phase in enumerate(phases, 1) if not (found == i).any()]
    if len(absent) == len(phases):
        raise DraftsimError(f"none of {', '.join(absent)} occurs in the outputs: check the markers")
    for name in absent:
        note(f"phase {name} occurs in no output")
    return found


def token_text(folder: Path | None, trace: Trace) -> Callable[[int], str] | None:
    """Return a function from a token id to its text, by the tokenizer in `folder`; None for None.

    Raises DraftsimError if there is no tokenizer, or it is of another vocabulary than the trace.
    """
    if folder is None:
        return None
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not path.is_file():
        raise DraftsimError(
            f"--tokenizer {folder}: holds no tokenizer.json: name the target's folder"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing(["tokenizers"], "--tokenizer") from None
    tokenizer = Tokenizer.from_file(str(path))
    known = (trace.meta.get("tokenizer") or {}).get("vocab_size") or trace.vocab_size
    size = tokenizer.get_vocab_size()
    if known is not None and size > known:
        raise DraftsimError(
            f"--tokenizer {folder}: has {size} tokens and the recording's target {known}: name "
            "the target's own"
        )
    return cache(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))
