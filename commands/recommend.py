"""``draftsim recommend``: from a running server's counters and benchmarks to its setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.calibrate import (
    Engine,
    ExpertsOption,
    fitted,
    headline,
    known_target,
    other_acceptance,
    shown_choice,
    untold_gains,
)
from commands.common.drafted import load_positions
from commands.common.options import OtherAcceptanceOption, batch_sizes
from commands.common.output import JsonOption, emit, note, placed, remark
from commands.common.printed import print_table
from commands.common.progress import working
from traces.digits import counted
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.aggregate.advice import PredictedSpeed, Suggestion
    from simulator.aggregate.server import ServerFit

ONE_LENGTH = ("sglang", "llamacpp", "hf")
"""Engines that take one draft length, whatever the load."""
WITHOUT_SPEEDS = (
    "counters hold acceptance and no costs: also give --bench, with runs without speculation and "
    "with K = {k} at one concurrency"
)


def recommend(
    engine: Annotated[Engine, typer.Option(help="Engine of the server.")] = "vllm",
    bench: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[@K]",
            help="Benchmark runs: results of `vllm bench serve` or `sweep`, SGLang's "
            "bench_serving, GuideLLM or AIPerf, a folder of them, or a CSV. @K gives a file's "
            "draft length. Repeatable.",
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|URL",
            help="The server's /metrics, for acceptance: one file or URL, or two (before, after).",
        ),
    ] = None,
    acceptance: OtherAcceptanceOption = None,
    target: Annotated[str | None, typer.Option(help="Target model, for the command.")] = None,
    draft: Annotated[str | None, typer.Option(help="Drafter, for the command.")] = None,
    method: Annotated[
        str | None, typer.Option(help="vLLM's method: eagle3, eagle, mtp, draft_model, ngram, ...")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="tpot=30ms", help="Refuse if no draft length meets this TPOT."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,..", help="Concurrencies to answer for.")
    ] = None,
    passes: Annotated[
        int | None,
        typer.Option(min=1, help="Drafter passes in a step. Default: K."),
    ] = None,
    experts: ExpertsOption = None,
    level: Annotated[float, typer.Option(min=0.5, max=0.999, help="Level of the intervals.")] = 0.8,
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
    from simulator.aggregate.advice import choices, concurrencies, next_runs
    from simulator.aggregate.benches import read_benches, with_acceptance
    from simulator.tune.launch import TARGET, NamedDrafter, launch_line, setting

    if not bench:
        if metrics:
            raise DraftsimError(WITHOUT_SPEEDS.format(k=load_positions(metrics).longest))
        raise DraftsimError(
            "no benchmark runs: give --bench, and --metrics if they hold no acceptance"
        )
    found = read_benches(bench, acceptance_told=metrics is not None)
    other = other_acceptance(acceptance, found.model)
    for line in found.notes:
        remark(line)
    drafting = {run.k for run in found.runs if run.k and run.round_tokens is None}
    only = drafting.pop() if len(drafting) == 1 else None
    told = load_positions(metrics, drafts=only) if metrics else None
    runs = found.runs if told is None else with_acceptance(found.runs, told)
    if told is not None and runs == found.runs:
        remark(
            "--metrics has no effect: no run takes acceptance from it; --acceptance predicts for "
            "that of another workload"
        )
    if told is not None and (longer := {run.k for run in runs if run.round_tokens is None}):
        remark(
            f"acceptance at K = {', '.join(map(str, sorted(longer)))} is estimated from the "
            f"speeds: {told.label} does not tell it"
        )
    if not any(run.k for run in runs):
        raise DraftsimError(
            "no run with speculation, so the drafter's cost and acceptance are unknown: "
            f"measure K = 3 at {counted(runs[0].batch, 'request')} and give both (FILE@3)"
        )
    known = known_target(engine, experts, target or found.model)
    server = fitted(runs, known, other, passes)
    batches = concurrencies(runs) if batch is None else batch_sizes("--batch", batch)
    with working("comparing draft lengths"):
        rows = choices(server, batches, level=level)
        _check_tpot(server, rows, slo)
        suggestions = next_runs(server)
    suggestion = suggestions[0]
    document = setting(engine, rows, method)
    line = launch_line(
        engine, document, target=target or found.model or TARGET,
        drafter=NamedDrafter(method, draft),
    )  # fmt: skip
    more = {
        "setting": document, "launch": line, "next_run": suggestion._asdict(),
        "next_runs": [one._asdict() for one in suggestions],
        "undetermined": list(server.undetermined), "misfit": server.misfit,
    }  # fmt: skip

    def printed() -> None:
        note(": ".join(filter(None, (target or found.model, headline(rows, level)))))
        print_table([shown_choice(row) for row in rows])

    emit("recommend", [row.row for row in rows], json, more=more, printed=printed)
    for text in _remarks(server, rows, suggestions):
        note(text)
    if engine in ONE_LENGTH and len({(row.k, row.p_min) for row in rows}) > 1:
        note(
            f"{engine} has one draft length for every load: the command sets {_one_length(rows)}; "
            "--batch N chooses another load"
        )
    if engine == "tensorrt-llm" and max(row.k for row in rows) > rows[0].k:
        note(
            "tensorrt-llm drafts no more than at the smallest batch: the command sets at most "
            f"{document['max_draft_len'] if document else 0}"
        )
    note(suggestion.said)
    if out is not None:
        from simulator.tune.settings import laid_out
        from traces.store.writing import write_atomically

        write_atomically(out, f"{laid_out(document)}\n".encode())
        note(f"wrote {out}")
    note(line, whole=True)


def _check_tpot(server: ServerFit, rows: Sequence[PredictedSpeed], slo: str | None) -> None:
    """Raise DraftsimError if even the fastest draft length misses the bound on TPOT.

    A remark says where the runs do not tell TTFT, without which a miss is not certain.
    """
    if slo is None:
        return
    from simulator.targets import parse_targets

    targets = parse_targets(slo, share=False)
    if math.isfinite(targets.ttft_s):
        raise DraftsimError(
            f"--slo {slo}: benchmark totals do not tell TTFT at other draft lengths: give tpot "
            "alone, or use `draftsim tune --slo` with a latency table"
        )
    for row in rows:
        speed, load = row.tokens_per_s.value, counted(row.batch, "request")
        tpot_s = server.tpot_s(row.batch, speed)
        if tpot_s is not None and tpot_s > targets.tpot_s:
            raise DraftsimError(
                f"--slo {slo}: no draft length meets it at {load}; the fastest, K = {row.k}, takes "
                f"{1e3 * tpot_s:.3g} ms a token"
            )
        if tpot_s is None and row.batch / speed > targets.tpot_s:
            remark(
                f"--slo {slo} cannot be checked at {load}: the {1e3 * row.batch / speed:.3g} ms a "
                "token include the wait for the first token, which the runs do not tell"
            )


def _one_length(rows: Sequence[PredictedSpeed]) -> str:
    """Return which of the choices an engine with one draft length is set to, in words."""
    first = next((row for row in rows if row.k), rows[0])
    if first is rows[0]:
        return f"that for {counted(first.batch, 'request')}"
    return (
        f"K = {max(row.k for row in rows)}, though no speculation is fastest at "
        f"{counted(rows[0].batch, 'request')}"
    )


def _remarks(
    server: ServerFit, rows: Sequence[PredictedSpeed], suggestions: Sequence[Suggestion]
) -> list[str]:
    from simulator.aggregate.advice import SURE

    lines = untold_gains(server)
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
