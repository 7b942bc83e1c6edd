"""``draftsim tune``: settings a serving engine reads, searched offline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from commands.common.configured import MOST_CONTEXT
from commands.common.options import CarriedInputs, Graphs, batch_sizes
from commands.common.output import JsonOption, emit, note, placed_as, remark, say_launch
from commands.common.printed import print_table
from commands.common.progress import working
from commands.engine.check import TRIED, WITH_DEFAULTS, check_trial, say_tried, try_settings
from commands.engine.options import DefaultsOption
from policies.registry import NO_SPECULATION
from simulator.hardware.scaling import bounds_of, said_calibrate
from simulator.pricing import extras_of, missing_parts
from simulator.serving.cost import EngineCost
from simulator.targets import Targets, parse_targets
from simulator.tune import launch
from simulator.tune.costs import DEFAULT_LENGTHS
from simulator.tune.gains import MISSED, ON
from simulator.tune.launch import proposed_graphs
from simulator.tune.search import Search
from simulator.tune.served import check_seed, closed_load, compare_served, served_rates
from simulator.tune.settings import Tuned, laid_out, write_settings
from simulator.tune.single import ONE_REQUEST
from simulator.unmeasured import said_free
from traces.acceptance.trace import Trace
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.latency.graphs import CUDAGraphs
from traces.latency.table import LatencyTable
from traces.store.operators import in_graphs

SHOWN = (
    "batch", "context", "setting", "deploy", "served_tok_s", "gain", "gain_lo", "gain_hi",
    "decode_tok_s", "decode_gain", "default", "default_gain", "within_slo", "scaled",
)  # fmt: skip
CARRIED = ("setting_dear", "gain_dear", "setting_cheap", "gain_cheap")
"""Columns found at the bounds of the latencies (`simulator.hardware.scaling.bounds_of`): of those
carried over with --gpu or --weights, and of those composed and corrected by whole steps."""
CHECKED = (
    "checked_tok_s", "deployed_tok_s", "rival", "rival_tok_s", "not_worse", "margin_lo",
    "margin_hi",
)  # fmt: skip
"""Columns that --check adds to a row."""


TunedEngine = Literal["vllm", "sglang", "hf", "llamacpp", "tensorrt-llm", "dynamo"]


@dataclass(frozen=True)
class Searched:
    """Options for the settings that are searched, and where they go."""

    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=TIME,tpot=TIME,p=SHARE",
            help="Targets, as in ttft=200ms,tpot=30ms (bare numbers are seconds): only requests "
            "within them count, and a share p of the requests (default 0.95) must meet them.",
        ),
    ] = None
    batch: Annotated[
        str | None,
        typer.Option(metavar="B,...", help="Batch sizes searched. Default: those measured."),
    ] = None
    by_context: Annotated[
        bool,
        typer.Option(
            "--by-context",
            help="Write vLLM's table by batch size and context, at the contexts measured.",
        ),
    ] = False
    context: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Write vLLM's table by batch size and these contexts."),
    ] = None
    by_length: Annotated[
        bool,
        typer.Option(
            "--by-length",
            help="Write vLLM's table by sequence length, searched at one --batch (default 1).",
        ),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed_as(b"{", b"null"),
            help="Write the setting to FILE. Default: the setting goes to standard output and the "
            "table to standard error, unless --json - takes standard output.",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also simulate serving with the setting, no speculation and K = 1, 3, 5 at every "
            "batch size, with other random numbers than the search.",
        ),
    ] = False
    resamples: Annotated[
        int | None,
        typer.Option(
            min=4,
            help="Bootstrap resamples over prompts. Default: 1000; 8 for SGLang's adaptive "
            "steps, each served.",
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the bootstrap and of the requests served.")
    ] = 0
    json: JsonOption = None


class Trial(NamedTuple):
    """How a setting is tried in the engine itself."""

    requests: int
    repeats: int
    defaults: bool


def search(
    engine: Annotated[TunedEngine, typer.Option(help="Engine to write settings for.")],
    inputs: CarriedInputs,
    graphs: Graphs,
    searched: Searched,
) -> None:
    """Search the draft lengths that give a gain, and write them as the engine's configuration.

    Without --out the setting goes to standard output and the table to standard error, so that
    `draftsim tune ... > spec.json` saves the setting.
    """
    _tune(engine, inputs, graphs, searched)


def tried(
    inputs: CarriedInputs,
    graphs: Graphs,
    searched: Searched,
    engine: Annotated[str, typer.Option(hidden=True)] = "vllm",
    try_out: Annotated[bool, typer.Option("--try", hidden=True)] = True,
    defaults: DefaultsOption = False,
    requests: Annotated[int, typer.Option(min=1, help="Requests in every load.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every policy.")] = 1,
) -> None:
    """Search vLLM's setting, start the vLLM that --latency was measured on, and serve with it.

    No speculation and K = 1, 3, 5 are served next to the setting, in a closed loop per batch size.
    """
    if try_out and engine != "vllm":
        raise DraftsimError(
            "`draftsim tune engine` (--try) runs vllm alone: use `draftsim tune search` for "
            f"{engine}"
        )
    trial = Trial(requests, repeats, defaults)
    _tune(engine, inputs, graphs, searched, trial if try_out else None)  # false in a file


def _tune(
    engine: str, inputs: CarriedInputs, graphs: Graphs, asked: Searched, trial: Trial | None = None
) -> None:
    """Search a setting, print and write it; with `trial`, serve with it in its engine."""
    targets = None if asked.slo is None else parse_targets(asked.slo)
    recording = inputs.load(chooses="tune")
    method = launch.check_drafter(engine, recording)
    recorded, out, json = recording.trace, asked.out, asked.json
    search = Search(
        engine, None if asked.batch is None else batch_sizes("--batch", asked.batch),
        asked.by_context,
        None if asked.context is None else batch_sizes("--context", asked.context, MOST_CONTEXT),
        asked.by_length, method,
    )  # fmt: skip
    recording = recording.in_graphs(graphs.graphs, search.largest(recording.latency))
    table = inputs.priced(recording)
    common: dict[str, Any] = {"slo": targets, "seed": asked.seed}
    if asked.resamples is not None:
        common["draws"] = asked.resamples
    if trial is not None:
        longest = check_trial(table)
        common["lengths"] = [k for k in DEFAULT_LENGTHS if k <= longest]

    def searched(latency: LatencyTable) -> Tuned:
        with working("searching settings", engine not in ONE_REQUEST) as say:
            return search.run(recorded, latency, progress=say, **common)

    tuned = searched(table)
    target, drafter = launch.named_models(recording, table)
    if sharing := launch.about_sharing(engine, drafter, table):
        tuned = replace(tuned, warnings=(*tuned.warnings, sharing))
    if engine == "vllm" and tuned.document is not None:
        tuned = replace(tuned, document={**drafter.config(), **tuned.document})
    rows = [dict(row) for row in tuned.rows]
    for name, other in zip(("dear", "cheap"), bounds_of(table) or (), strict=False):
        # Searched again: were the carried latencies off as before, would the setting be another?
        for row, found in zip(rows, searched(other).rows, strict=False):
            row |= {f"setting_{name}": found["setting"], f"gain_{name}": found["gain"]}
    for line in said_calibrate([table], max((row["batch"] for row in rows), default=1)):
        remark(line)
    if asked.check:
        _check(recorded, table, tuned, rows, targets, asked.seed)
    if out is not None:
        # Before anything is tried: what was found is not lost with an engine that fails.
        write_settings(tuned, out)
        remark(f"wrote {out}")
    captured = _captured(engine, tuned, table)
    line = launch.launch_line(
        engine, tuned.document, target=target, file=str(out or launch.FILE), drafter=drafter,
        captured=captured, shared=table.gpus,
    )  # fmt: skip
    asked_for = launch.said_quantised(table, line)
    tuned = replace(tuned, warnings=[*tuned.warnings, *asked_for])
    more: dict[str, Any] = {
        "settings": tuned.document, "launch": line, "warnings": list(tuned.warnings)
    }  # fmt: skip
    if captured:
        more["cudagraph_capture_sizes"] = captured
    tried = []
    if trial is not None:
        tried = more["tried"] = try_settings(
            table, recorded, tuned, trial.requests, trial.repeats, asked.seed, trial.defaults
        )
    # Standard output holds one thing: the JSON asked for, else the setting that no file takes.
    setting_out = out is None and json != "-"
    note(f"{recording.said}, {engine}: {_headline(rows)}")
    emit(
        "tune", rows, json, more=more,
        printed=lambda: print_table(rows, _columns(rows), stderr=setting_out),
    )  # fmt: skip
    if trial is not None and tried:
        if json is None:
            words = "Tried in vLLM; gains are over no speculation"
            print_table(
                tried, (*TRIED, *WITH_DEFAULTS) if trial.defaults else TRIED, words, setting_out
            )
        say_tried(tried, tuned, table)
    for warning in tuned.warnings:
        note(f"warning: {warning}")
    for free in said_free(_unpriced(recorded, table, tuned)):
        note(free)
    setting = tuned.document if engine == "vllm" else None
    unnamed = (*launch.WITHOUT_MODEL, *launch.OWN_WEIGHTS)
    if setting and "model" not in setting and setting.get("method") not in unnamed:
        why = "the recording does not name the drafter"
        if form := launch.quantised(table).get("draft"):
            why = f"the drafter in {form} is another checkpoint than the recorded one"
        note(f'{why}: add "model" to the setting before pasting it')
    if setting_out:
        print(laid_out(tuned.document))
    if not tried:
        say_launch(line, [target, drafter.model])


def _unpriced(trace: Trace, table: LatencyTable, tuned: Tuned) -> list[str]:
    """Return what cost nothing in the search because `table` lacks its cells."""
    extras = extras_of(tuned.policy.reads, sampling=trace.sampling)
    if any(row["served_tok_s"] is not None for row in tuned.rows):
        return EngineCost(table, extras).unpriced
    return missing_parts(table, extras)


def _captured(engine: str, tuned: Tuned, table: LatencyTable) -> list[int]:
    """Return sizes for vLLM to capture CUDA graphs for, with a remark.

    None where the latencies do not say the graphs of their engine.
    """
    graphs = proposed_graphs(tuned.document) if engine == "vllm" else None
    now = table.meta.get("captured")
    if graphs is None or not now:
        return []
    padded = {}
    for row in tuned.rows:
        batch, width = int(row["batch"]), int(str(row["setting"]).partition("=")[2]) + 1
        padded[batch, width] = CUDAGraphs(tuple(now)).padded(batch * width).item() / (batch * width)
    (batch, width), most = max(padded.items(), key=lambda item: item[1])
    said = "neither list pads any pass of these settings"
    if most > 1:
        at = {"batch": batch, "new_tokens": width}
        before_s = table.seconds("target", "forward", **at).item()
        said = f"at batch {batch} a verification of {batch * width} tokens is then not padded"
        said += f" to {most * batch * width:.0f}"
        # What was carried over to another device is not known in other graphs.
        if "composed" in table.meta and not table.meta.get("scaled"):
            after = in_graphs(table, graphs, batch).seconds("target", "forward", **at).item()
            said += f" ({after / before_s - 1:+.1%} of its time)"
    remark(f"capture multiples of K + 1 (--cudagraph-capture-sizes in the launch line): {said}")
    return list(graphs.sizes)


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns of the printed table: those that say something about these rows."""
    usual = {"within_slo": 1, "scaled": False, "assumed": ""}
    left_out = {name for name, value in usual.items() if all(row[name] == value for row in rows)}
    if rows[0]["served_tok_s"] is None:
        left_out.add("decode_gain")  # which is the gain
    if all(row["default"] == NO_SPECULATION for row in rows):
        left_out |= {"default", "default_gain"}  # hence the gain
    every = (*SHOWN, *CARRIED, "assumed", *CHECKED[:-2])
    return [name for name in every if name not in left_out]


def _headline(rows: list[dict[str, Any]]) -> str:
    """Return one sentence that says what to deploy."""
    here: dict[int, dict[str, Any]] = {}
    for row in rows:  # of several contexts, all settings at a batch
        at = here.setdefault(row["batch"], {**row, "settings": {}})
        at["settings"].setdefault(row["setting"], []).append(f"{row.get('context') or 0:,}")
    steps = "steps " if rows[0]["setting"][:1].isdigit() and rows[0]["engine"] == "sglang" else ""
    on = [
        f"{steps}{_by_context(row['settings'])} at batch {batch}"
        + _gained(row)
        for batch, row in here.items() if row["deploy"] == ON
    ]  # fmt: skip
    missed = [str(batch) for batch, row in here.items() if row["deploy"] == MISSED]
    off = [str(batch) for batch, row in here.items() if row["deploy"] not in (ON, MISSED)]
    said = [f"use {', '.join(on)}"] if on else []
    if off:
        said.append(f"no speculation at batch {', '.join(off)}")
    if missed:
        said.append(f"no setting meets the SLO at batch {', '.join(missed)}")
    return "; ".join(said)


def _by_context(settings: dict[str, list[str]]) -> str:
    """Return a setting, or of several each with its contexts."""
    if len(settings) == 1:
        return next(iter(settings))
    return ", ".join(f"{one} (context {' and '.join(at)})" for one, at in settings.items())


def _gained(row: dict[str, Any]) -> str:
    """Return a gain with its interval, in brackets; nothing where it is not known."""
    gain, low, high = (row[name] for name in ("gain", "gain_lo", "gain_hi"))
    if gain is None or math.isnan(gain):
        return ""
    span = (
        "" if low is None or math.isnan(low) else f", {three_digits(low)} to {three_digits(high)}"
    )
    return f" ({three_digits(gain)}x{span})"


def _check(
    trace: Trace, latency: LatencyTable, tuned: Tuned, rows: list[dict[str, Any]],
    slo: Targets | None, seed: int,
) -> None:  # fmt: skip
    """Add to each row what serving other requests at its batch size in a closed loop gave.

    ``checked_tok_s`` is what the written setting gives, ``deployed_tok_s`` what is to be deployed
    there (that, or no speculation), which ``not_worse`` judges.  Where nothing meets the targets
    there is nothing to judge, and all are None.
    """
    batches = sorted({row["batch"] for row in rows if row["deploy"] != MISSED})
    loads = [closed_load(trace, b, slo, check_seed(seed), latency) for b in batches]
    policies = [tuned.policy_at(b) for b in batches]
    share = 0.0 if slo is None else slo.share
    with working("serving the setting against other lengths"):
        found = compare_served(trace, latency, policies, loads, share=share)
        own = {
            b: float(served_rates(trace, latency, [tuned.policy], load).mean())
            for b, load in zip(batches, loads, strict=True)
        }
    at = {int(r["batch"]): r for r in found.to_dict("records")}
    for row in rows:
        served = at.get(row["batch"])
        values = (None,) * len(CHECKED) if served is None else (
            own[row["batch"]], served["tuned"], served["rival"], served["rival_value"],
            served["not_worse"], served["margin_lo"], served["margin_hi"],
        )  # fmt: skip
        row |= dict(zip(CHECKED, values, strict=True))
    if worse := [f"{at[b]['rival']} at batch {b}" for b in batches if not at[b]["not_worse"]]:
        remark(f"served faster than the setting: {', '.join(worse)}")
