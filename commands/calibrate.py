"""``draftsim calibrate`` and ``recommend``: what a server's own runs say of loads and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from commands.common.drafted import load_positions
from commands.common.options import AskedLoads, OtherAcceptanceOption, PassesOption, batch_sizes
from commands.common.output import (
    JsonOption,
    LevelOption,
    emit,
    note,
    placed,
    placed_recording,
    remark,
)
from commands.common.progress import working
from commands.common.written import Shown
from simulator.aggregate.advice import (
    SURE,
    PredictedSpeed,
    Suggestion,
    choices,
    concurrencies,
    draft_lengths,
    in_words,
    next_runs,
    predicted,
)
from simulator.aggregate.benches import latency_table, read_benches, with_acceptance
from simulator.aggregate.positions import Positions
from simulator.aggregate.server import COSTS, GUESSED, SECONDS, ServerFit, ServerRun, Target
from simulator.aggregate.server import calibrate as fit
from simulator.targets import parse_targets
from simulator.tune.launch import TARGET, WITHOUT_TABLE, NamedDrafter, launch_line, setting
from simulator.tune.settings import about_batches, laid_out
from traces.acceptance.trace import MOST_DRAFTED, MOST_TOKENS
from traces.digits import counted
from traces.errors import DraftsimError
from traces.operators.shapes import find_architecture
from traces.store.files import write_latency
from traces.store.writing import write_atomically

ServerEngine = Literal["vllm", "sglang", "tensorrt-llm", "llamacpp", "hf"]
ExpertsOption = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT/CHOSEN",
        help="Experts of the target, and how many of them a token chooses (128/4). Default: those "
        "of a known model (`draftsim list devices`), else none.",
    ),
]
MetricsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE|URL",
        help="The server's /metrics, for acceptance: one file or URL, or two (before, after).",
    ),
]


def calibrate(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS[@K]...",
            help="CSV or JSON lines, one run each: concurrency, draft length, output tokens/s; "
            "optionally context, acceptance, prompt and output lengths (docs/server.md). Or what "
            "`draftsim recommend --bench` takes; @K says a file's draft length.",
        ),
    ],
    loads: AskedLoads,
    metrics: MetricsOption = None,
    acceptance: OtherAcceptanceOption = None,
    passes: PassesOption = None,
    engine: Annotated[
        ServerEngine | None,
        typer.Option(help="Only llamacpp has an effect: it assumes kernels for quantised weights."),
    ] = None,
    experts: ExpertsOption = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=1e-4, max=1.0, help="Relative spread of a run's tokens/s, if you repeated runs."
        ),
    ] = None,
    level: LevelOption = 0.8,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed_recording,
            help="Write the costs as a latency table, for --latency.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Fit a server's costs to its own runs, and predict every draft length at every load.

    The first line names the best draft length by concurrency. Further lines name the costs that the
    runs do not determine, and the run that would narrow the intervals most. An interval is for one
    further run at that load.
    """
    measured, model = runs_in(runs, metrics)
    other = other_acceptance(acceptance, model)
    target = known_target(engine, experts, model)
    server = fitted(measured, target, other, passes, noise)
    batch, context, k = loads.batch, loads.context, loads.k
    batches = concurrencies(measured) if batch is None else batch_sizes("--batch", batch)
    lengths = draft_lengths(measured) if k is None else batch_sizes("--k", k, MOST_DRAFTED, 0)
    named = None if context is None else batch_sizes("--context", context, MOST_TOKENS, 0)
    contexts = [server.usual[0]] if named is None else [float(c) for c in named]
    check_contexts(server, contexts)
    with working("predicting loads"):
        best = choices(server, batches, lengths, level, contexts[0])
        answers = [
            predicted(server, b, n, c, level) for c in contexts for b in batches for n in lengths
        ]
        intervals, suggestion = server.intervals(level), next_runs(server)[0]
    meant = {**COSTS, **target.costs}
    rows = [
        {
            "cost": name, "value": i.value, "low": i.low, "high": i.high,
            "unit": "s" if name in SECONDS else "-", "of": meant[name].meaning,
        }
        for name, i in intervals.items()
    ]  # fmt: skip
    more = {
        "undetermined": list(server.undetermined), "misfit": server.misfit,
        "next_run": suggestion._asdict(), "choices": [row.row for row in best],
        "predictions": [load.row for load in answers],
    }  # fmt: skip

    if json is None:
        held = f"At {contexts[0]:,.0f} tokens of context: " if named else ""
        note(": ".join(filter(None, (model, held + headline(best, level)))))
    tables = [shown(best), shown(answers, "every load", "context"), Shown(rows, "costs")]
    emit("calibrate", rows, json, more=more, tables=lambda: tables)
    for line in _remarks(server):
        note(line)
    note(suggestion.said)
    if out is not None:
        write_latency(latency_table(server, model), out)
        note(f"wrote {out}")


def known_target(engine: str | None, experts: str | None, model: str | None) -> Target:
    """Return what is known of the target's passes; a remark says so.

    ``experts`` is ``COUNT/CHOSEN``, by default those of `model` where its sizes are known.
    Raises DraftsimError if it is anything else.
    """
    vectors = engine == "llamacpp"
    if experts is None:
        try:
            known = find_architecture(model or "")
        except DraftsimError:
            return Target(vectors=vectors)
        chosen = (known.experts, known.experts_per_token) if known.experts else None
        if chosen:
            remark(f"{model}: a token chooses {chosen[1]} of {chosen[0]} experts")
        return Target(chosen, vectors)
    count, slash, each = experts.partition("/")
    if not (slash and count.strip().isdecimal() and each.strip().isdecimal()):
        raise DraftsimError(f"--experts {experts!r}: expected COUNT/CHOSEN, such as 128/4")
    return Target((int(count), int(each)), vectors)


def other_acceptance(acceptance: str | None, model: str | None) -> Positions | None:
    """Return the acceptance that ``--acceptance`` names; a remark says whose it is.

    ``model`` is the target that the runs name, if they name one.
    """
    if acceptance is None:
        return None
    found = load_positions(acceptance)
    differ = model is not None and found.model not in (None, model)
    whose, costs = (f" of {found.model}", f" ({model})") if differ else ("", "")
    remark(f"predicted for {found.said}{whose}, with the costs of the runs{costs}")
    return found


def runs_in(
    files: Sequence[str], metrics: Sequence[str] | None = None
) -> tuple[Sequence[ServerRun], str | None]:
    """Return the runs in `files`, and the model that they name; those without acceptance get that
    of the server's counters in `metrics`.

    Remarks say what is left out of the files, and name the draft lengths that the counters do not
    tell.
    """
    found = read_benches(files, acceptance_told=metrics is not None)
    for line in found.notes:
        remark(line)
    runs = found.runs
    if not metrics:
        return runs, found.model
    drafting = {run.k for run in runs if run.k and run.round_tokens is None}
    told = load_positions(metrics, drafts=drafting.pop() if len(drafting) == 1 else None)
    known = with_acceptance(runs, told)
    if known == runs:
        remark(
            "--metrics has no effect: no run takes acceptance from it; --acceptance predicts for "
            "that of another workload"
        )
    if longer := {run.k for run in known if run.round_tokens is None}:
        remark(
            f"acceptance at K = {', '.join(map(str, sorted(longer)))} is estimated from the "
            f"speeds: {told.label} does not tell it"
        )
    return known, found.model


def fitted(
    runs: Sequence[ServerRun], target: Target, other: Positions | None, passes: int | None,
    noise: float | None = None,
) -> ServerFit:  # fmt: skip
    """Return the costs that the runs tell, with the acceptance that `other_acceptance` found.

    A remark says what is left out.
    """
    with working("fitting the server's costs"):
        server = fit(runs, passes=passes, noise=noise, target=target)
    if other is None:
        return server
    if server.guessed:
        remark(GUESSED)
    if server.stopping():
        remark(
            "all drafts are taken as K tokens long: the runs do not tell where they stop at "
            "another acceptance"
        )
    return server.at_acceptance(other.known)


def headline(rows: Sequence[PredictedSpeed], level: float) -> str:
    """Return the best draft lengths, and the first speedup among them, in one sentence."""
    gain = ""
    if (first := next((row for row in rows if row.k), None)) is not None:
        span = first.speedup
        gain = (
            f"; at {counted(first.batch, 'request')} {span.value:.2f} times no speculation "
            f"({level:.0%} interval {span.low:.2f} to {span.high:.2f})"
        )
    return f"{in_words(rows)}{gain}."


def _remarks(server: ServerFit) -> list[str]:
    """Return a line on each thing that the runs do not determine."""
    lines = [*contradictions(server), *untold_gains(server)]
    if not server.tells_context:
        lines.append("all runs have one context, so the cost of a longer one is not determined")
    if server.undetermined:
        names = ", ".join(name.replace("_", " ") for name in server.undetermined)
        lines.append(f"not determined by these runs, taken from other servers: {names}")
    return lines


def contradictions(server: ServerFit) -> list[str]:
    """Return a line on the run that the fitted costs miss most, if they miss one by much."""
    if server.contradicting is None:
        return []
    run, fitted_speed = server.contradicting
    return [
        f"the run of {counted(run.batch, 'request')} at K = {run.k} gave {run.tokens_per_s:.3g} "
        f"tokens/s, the costs that fit all runs give {fitted_speed:.3g}: check its numbers, "
        "measure it again, or leave it out"
    ]


def check_contexts(server: ServerFit, contexts: Sequence[float]) -> None:
    """Raise DraftsimError for far contexts unless the runs determine the cost of context."""
    held = [run.held for run in server.runs]
    if not any(held) and any(contexts):
        raise DraftsimError(
            "--context: the runs do not say theirs: give each a column context, or prompt and "
            "answer (mean lengths)"
        )
    far = [c for c in contexts if server.far(c)]
    if far and (not server.tells_context or "cached" in server.undetermined):
        several = f"{min(held):,.0f} to {max(held):,.0f}"
        span = several if server.tells_context else f"one of about {max(held):,.0f}"
        raise DraftsimError(
            f"--context: all runs have {span} tokens, so the cost of {far[0]:,.0f} is not "
            f"determined: add runs at about {far[0]:,.0f}"
        )
    if far:
        remark(f"no run had about {far[0]:,.0f} tokens of context: its cost is extrapolated")


def untold_gains(server: ServerFit) -> list[str]:
    """Return a line on each thing about speedups that the runs do not determine."""
    lines = []
    if not any(run.k == 0 for run in server.runs):
        lines.append(
            "no run without speculation (K = 0): speedups rely on costs of other servers; the best "
            "K does not"
        )
    if any(run.k for run in server.runs) and not server.tells_passes_apart:
        lines.append(
            "these runs cannot separate a draft pass from a verified token (one concurrency, or "
            "one draft length): the split of their cost comes from other servers"
        )
    return lines


BEST = "best draft length at each concurrency"
CHANCE = "chance faster"
"""Column of the chance that speculation is faster, which its name in JSON does not say."""


def shown(rows: Sequence[PredictedSpeed], title: str = BEST, *more: str) -> Shown:
    """Return the table of predictions; ``more`` are further columns."""
    names = ["batch", "k", *(["p_min"] if any(row.p_min for row in rows) else []), *more]
    for name in ("tokens_per_s", "speedup"):
        names += [name, f"{name}_lo", f"{name}_hi"]
    cells = [{**row.row, CHANCE: row.row["faster"]} for row in rows]
    return Shown(cells, title, [*names, CHANCE])


def recommend(
    engine: Annotated[ServerEngine, typer.Option(help="Engine of the server.")] = "vllm",
    bench: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[@K]",
            help="Benchmark runs: results of `vllm bench serve` or `sweep`, SGLang's "
            "bench_serving, GuideLLM or AIPerf, a folder of them, or a CSV. @K gives a file's "
            "draft length. Repeatable.",
        ),
    ] = None,
    metrics: MetricsOption = None,
    acceptance: OtherAcceptanceOption = None,
    target: Annotated[str | None, typer.Option(help="Target model, for the command.")] = None,
    draft: Annotated[str | None, typer.Option(help="Drafter, for the command.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            callback=lambda name: name and name.lower(),
            help="vLLM's method: eagle3, eagle, mtp, draft_model, ngram, ...",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="tpot=30ms",
            help="Leave out loads at which no draft length meets this TPOT.",
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,..", help="Concurrencies to answer for.")
    ] = None,
    passes: PassesOption = None,
    experts: ExpertsOption = None,
    level: LevelOption = 0.8,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=placed, help="Write the engine's setting."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Recommend a draft length by concurrency, from a server's own benchmark runs.

    Two runs suffice for a first answer: one without speculation and one with. More runs, at other
    concurrencies and draft lengths, narrow the intervals. The last line is a command to paste.
    """
    if not bench:
        if metrics:
            raise DraftsimError(
                "counters hold acceptance and no costs: also give --bench, with runs without "
                f"speculation and with K = {load_positions(metrics).longest} at one concurrency"
            )
        raise DraftsimError(
            "no benchmark runs: give --bench, and --metrics if they hold no acceptance"
        )
    runs, model = runs_in(bench, metrics)
    other = other_acceptance(acceptance, model)
    if not any(run.k for run in runs):
        raise DraftsimError(
            "no run with speculation, so the drafter's cost and acceptance are unknown: "
            f"measure K = 3 at {counted(runs[0].batch, 'request')} and give both (FILE@3)"
        )
    known = known_target(engine, experts, target or model)
    server = fitted(runs, known, other, passes)
    batches = concurrencies(runs) if batch is None else batch_sizes("--batch", batch)
    with working("comparing draft lengths"):
        rows = choices(server, batches, level=level)
        rows = _within_tpot(server, rows, slo)
        suggestions = next_runs(server)
    suggestion = suggestions[0]
    document = setting(engine, rows, method)
    line = launch_line(
        engine, document, target=target or model or TARGET,
        drafter=NamedDrafter(method, draft),
    )  # fmt: skip
    more = {
        "setting": document, "launch": line, "next_run": suggestion._asdict(),
        "next_runs": [one._asdict() for one in suggestions],
        "undetermined": list(server.undetermined), "misfit": server.misfit,
    }  # fmt: skip

    if json is None:
        note(": ".join(filter(None, (target or model, headline(rows, level)))))
    emit("recommend", [row.row for row in rows], json, more=more, tables=lambda: [shown(rows)])
    for text in [*_remarks_on(server, rows, suggestions), *about_batches(batches)]:
        note(text)
    without_table = method in WITHOUT_TABLE.get(engine, ())
    one_length = without_table or engine in ("sglang", "llamacpp", "hf")
    if one_length and len({(row.k, row.p_min) for row in rows}) > 1:
        who = f"{engine} with {method}" if without_table else engine
        note(
            f"{who} has one draft length for every load: the command sets {_one_length(rows)}; "
            "--batch N chooses another load"
        )
    if engine == "tensorrt-llm" and max(row.k for row in rows) > rows[0].k:
        note(
            "tensorrt-llm drafts no more than at the smallest batch: the command sets at most "
            f"{document['max_draft_len'] if document else 0}"
        )
    note(suggestion.said)
    if out is not None:
        write_atomically(out, f"{laid_out(document)}\n".encode())
        note(f"wrote {out}")
    note(line, whole=True)


def _within_tpot(
    server: ServerFit, rows: list[PredictedSpeed], slo: str | None
) -> list[PredictedSpeed]:
    """Return the loads at which the fastest draft length meets the bound on TPOT.

    Remarks name the others, and say where the runs do not tell TTFT, without which a miss is not
    certain.  Raises DraftsimError if every load misses it.
    """
    if slo is None:
        return rows
    targets = parse_targets(slo, share=False)
    if math.isfinite(targets.ttft_s):
        raise DraftsimError(
            f"--slo {slo}: benchmark totals do not tell TTFT at other draft lengths: give tpot "
            "alone, or use `draftsim tune --slo` with a latency table"
        )
    missed = {}
    for row in rows:
        speed, load = row.tokens_per_s.value, counted(row.batch, "request")
        tpot_s = server.tpot_s(row.batch, speed)
        if tpot_s is not None and tpot_s > targets.tpot_s:
            missed[row.batch] = (
                f"--slo {slo}: no draft length meets it at {load}; the fastest, K = {row.k}, takes "
                f"{1e3 * tpot_s:.3g} ms a token"
            )
        if tpot_s is None and row.batch / speed > targets.tpot_s:
            remark(
                f"--slo {slo} cannot be checked at {load}: the {1e3 * row.batch / speed:.3g} ms a "
                "token include the wait for the first token, which the runs do not tell"
            )
    if len(missed) == len(rows):
        raise DraftsimError(next(iter(missed.values())))
    for text in missed.values():
        remark(text)
    return [row for row in rows if row.batch not in missed]


def _one_length(rows: Sequence[PredictedSpeed]) -> str:
    """Return which of the choices an engine with one draft length is set to, in words."""
    first = next((row for row in rows if row.k), rows[0])
    if first is rows[0]:
        return f"that for {counted(first.batch, 'request')}"
    return (
        f"K = {max(row.k for row in rows)}, though no speculation is fastest at "
        f"{counted(rows[0].batch, 'request')}"
    )


def _remarks_on(
    server: ServerFit, rows: Sequence[PredictedSpeed], suggestions: Sequence[Suggestion]
) -> list[str]:
    lines = [*contradictions(server), *untold_gains(server)]
    open_ = [str(row.batch) for row in rows if row.k and 1 - SURE < row.faster < SURE]
    if open_:
        two = " and ".join(
            f"{counted(one.batch, 'request')} with K = {one.k}" for one in suggestions
        )
        lines.append(
            f"at {', '.join(open_)} requests both a gain and a loss are possible; these two runs "
            f"would tell most: {two}"
        )
    off = [row.batch for row in rows if row.k == 0]
    if off and len(off) < len(rows):
        where = (
            f"from {off[0]} requests on" if not any(row.k for row in rows if row.batch > off[0])
            else f"at {', '.join(map(str, off))} requests"
        )  # fmt: skip
        lines.append(
            f"{where} no speculation is fastest; a server with a drafter runs it even at K = 0"
        )
    if max(row.k for row in rows) > max(run.k for run in server.runs):
        lines.append(
            "the longest recommended draft length was not measured: measure it before you deploy"
        )
    if max(row.batch for row in rows) > (widest := max(run.batch for run in server.runs)):
        lines.append(
            f"loads above {counted(widest, 'request')} were not measured: measure one before you "
            "deploy"
        )
    return lines
