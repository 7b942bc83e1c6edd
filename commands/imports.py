"""``draftsim import``: files of other programs, made into what the commands read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.common.output import JsonOption, emit, note, placed_recording, placed_table
from commands.common.printed import print_table
from commands.common.progress import working
from commands.common.written import TABLES
from simulator.aggregate.acceptance import emitted_rows
from simulator.aggregate.positions import of_totals, reservation
from traces.acceptance.trace import UNKNOWN, Trace
from traces.digits import counted
from traces.errors import DraftsimError
from traces.importers.base import Options
from traces.importers.registry import AUTO, IMPORTERS, find_importer, import_log
from traces.importers.totals import Totals
from traces.latency.table import LatencyTable
from traces.operators.table import OperatorTable
from traces.store.files import write_latency, write_trace
from traces.store.operators import write_operators

FORMATS = ", ".join([*IMPORTERS, AUTO])


def _placed(path: Path | None) -> Path | None:
    """Return `path` of a recording, or of counts where its suffix says so, if it can be written."""
    counts = path is not None and path.suffix == ".json"
    return (placed_table if counts else placed_recording)(path)


def import_file(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {FORMATS}.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files that the program wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="T",
            callback=_placed,
            help="Trace or latency table to write; FILE.json if the log holds counts alone.",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Log of the same server without speculation, for the speedup."
        ),
    ] = None,
    draft_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="Policy that chose the log's draft lengths, if the log does not hold them: infer "
            "(default), none, at-least:N, fixed:N, hf-heuristic:N or a policy that reads no "
            "signal.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Output limit of the log's requests; default 1024.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Drafter to read, if the log holds several, such as eagle."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Device that latencies were measured on.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of operators, if no folder names it.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Turn another program's log into a trace, or its timings into latencies, for every command.

    A log that holds the rounds in order makes a trace. Counts alone make a survival curve, or the
    interval of curves that they allow. If a log does not hold its draft lengths, every known
    schedule is tried; if none or several fit, predictions are lower bounds and nothing is ranked.
    """
    given = {
        "baseline": baseline, "draft_lengths": draft_lengths, "max_new_tokens": max_new_tokens,
        "drafter": drafter, "device": device, "model": model,
    }  # fmt: skip
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    takes = find_importer(form, files).takes
    if odd := [name for name in chosen if name not in takes]:
        option = odd[0].replace("_", "-")
        raise DraftsimError(f"--{option} says nothing about a log of {form}: drop it")
    with working(f"reading {files[0]}") as say:
        found = import_log(form, files, Options(**chosen, progress=say))
    if isinstance(found, Totals):
        _totals(found, form, out, json)
    else:
        if isinstance(found, Trace):
            rows = _trace(found, _recording(out, "this log makes a trace"))
        elif isinstance(found, LatencyTable):
            rows = _latency(found, _recording(out, "this makes latencies"))
        else:
            rows = _operators(found, _recording(out, "this makes an operator table"))
        if json is not None:
            emit("import", rows, json)
    for reason in found.meta.get("left_out") or ():
        note(f"left out: {reason}")


def _recording(out: Path | None, made: str) -> Path:
    """Return the file for what was made: a Parquet file whatever its name, but not a table's."""
    if out is None:
        raise DraftsimError(f"{made}: name a file for it with --out")
    if out.suffix in TABLES and out.suffix != ".parquet":
        raise DraftsimError(f"--out {out}: {made}, a Parquet file: name a .parquet file")
    return out


Rows = list[Mapping[Any, Any]]


def _trace(trace: Trace, out: Path) -> Rows:
    write_trace(trace, out)
    unknown = int((trace.columns["match"] == UNKNOWN).sum())
    note(
        f"wrote {out}: {counted(len(trace.requests), 'request')}, "
        f"{counted(trace.tokens, 'token')}, {counted(unknown, 'position')} that no draft reached"
    )
    _say(trace.meta)
    return [{
        "file": str(out), "requests": len(trace.requests), "tokens": trace.tokens,
        "not_observed": unknown, "draft_lengths": trace.meta["draft_lengths"],
        "draft_lengths_known": trace.meta["draft_lengths_known"], **measured(trace.meta),
    }]  # fmt: skip


def _totals(totals: Totals, form: str, out: Path | None, json: str | None) -> None:
    rows = totals.rows()
    summary = {
        "format": form, "rounds": totals.rounds, "drafted": totals.drafted,
        "accepted": totals.accepted, "accepted_per_round": totals.mean_accepted,
        "longest": totals.longest, "requests": totals.requests, "tree": totals.tree,
        "differ": totals.differ, "drafting": totals.meta.get("drafting"),
        "scrapes": totals.meta.get("scrapes"), **measured(totals.meta),
    }  # fmt: skip
    lengths = _lengths(totals)
    more = {"counts": summary, "tokens_by_length": lengths}
    if out is not None and out.suffix != ".json":
        raise DraftsimError(f"--out {out}: {form} made counts, and no trace: name a .json file")
    if out is not None:
        emit("import", rows, str(out), more=more)
        note(f"wrote {out}")
    _say(totals.meta)
    rounds = "means of an unknown number of" if totals.rounds is None else str(totals.rounds)
    note(f"{rounds} rounds: {totals.mean_accepted:.3f} drafted tokens accepted per round")
    if said := reservation(totals):
        note(said)
    if totals.tree:
        note(
            "this log is of tree drafting: only its measured speedup and acceptance length can be "
            "used"
        )
    elif totals.per_position is None:
        note("the totals bound the survival curve from both sides; no trace can be made of them")
    else:
        note(
            "counts do not hold rounds in order, so they make no trace: give the counters, or the "
            "JSON of --out, as --acceptance to simulate, serve, tune, capacity or sweep"
        )
    if json is not None or (rows and out is None):
        emit("import", rows, json, more=more)
    if lengths and json is None:
        print_table(lengths, title="Tokens per round at other draft lengths, from the totals")


def _lengths(totals: Totals) -> list[dict[str, Any]]:
    """Return tokens a round by draft length with intervals; none if the counts tell none."""
    if totals.tree or not totals.fixed_length or not totals.reach:
        return []
    return emitted_rows(of_totals("", totals).known)


def _latency(table: LatencyTable, out: Path) -> Rows:
    write_latency(table, out)
    note(f"wrote {out}: {len(table.cells)} cells, {table.meta['device']}")
    for role, name in (table.meta.get("models") or {}).items():
        note(f"{role}: {name}")
    passes = table.cells[table.cells["phase"] == "forward"]
    if not table.has("draft", "forward"):
        note("no passes of a draft model: import the files of target and draft together")
    if not (passes[passes["model"] == "target"]["new_tokens"] > 1).any():
        note("no target pass over 2 tokens or more: what verification costs is not known")
    if not table.has("target", "host_round"):
        note("no host time: time between the passes counts as 0")
    return list(table.cells.to_dict("records"))


def _operators(table: OperatorTable, out: Path) -> Rows:
    write_operators(table, out)
    corrected = int((table.rows["measured"] == 0).sum())
    note(f"wrote {out}: {len(table.rows)} timings on {', '.join(table.devices)}")
    for model, shared in table.models:
        own = sorted(set(table.of(model=model, tensor_parallel=shared)["operator"]))
        note(f"{model} on {shared} GPU(s): {', '.join(own)}")
    if corrected:
        note(f"{corrected} timings of norms and rotary embeddings were corrected to fused kernels")
    if table.models:
        note(f"use it as --latency {out}/{table.models[0][0]}+DRAFT")
    keys = ["device", "model", "tensor_parallel", "operator", "source"]
    found = table.rows.groupby(keys, sort=True)["measured"].agg(["size", "sum"]).reset_index()
    return list(found.rename(columns={"size": "timings", "sum": "measured"}).to_dict("records"))


def measured(meta: Any) -> dict[str, float]:
    """Return the measurements of the log and its baseline: seconds, tokens a round, speedup."""
    own, plain = meta.get("measured") or {}, meta.get("baseline") or {}
    return {
        **{name: own[name] for name in ("per_round", "wall_s") if name in own},
        **{name: plain[name] for name in ("target_s", "per_token_s", "speedup") if name in plain},
    }


def _say(meta: Any) -> None:
    if "draft_lengths_found" in meta:
        note(str(meta["draft_lengths_found"]))
    found = measured(meta)
    if "target_s" in found:
        note(
            f"measured: {found['target_s']:.5g} s per token without speculation (median over "
            f"requests; {found['per_token_s']:.5g} s over all), speedup {found['speedup']:.4g}"
        )
