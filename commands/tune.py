"""``draftsim tune``: settings a serving engine reads, searched offline."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.devices import (
    AlwaysOption,
    GpuOption,
    WeightsOption,
    say_calibrate,
)
from commands.common.drafted import DraftedOption, load_recording
from commands.common.inputs import (
    SERVED_TRACE,
    AssumeOption,
    LatencyOption,
    TraceOption,
    origin_of,
)
from commands.common.output import JsonOption, emit, note, placed
from commands.common.printed import print_table
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.tune import Slo, Tuned
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

SHOWN = (
    "batch", "context", "setting", "deploy", "throughput_tok_s", "default", "gain", "gain_lo",
    "gain_hi",
)  # fmt: skip
CARRIED = ("setting_dear", "gain_dear", "setting_cheap", "gain_cheap")
"""With --gpu or --weights: what would be found were drafting and verifying as much dearer, or
cheaper, than carried over as the carrying model was off before."""


class Engine(StrEnum):
    """Engines whose settings can be written."""

    VLLM = "vllm"
    SGLANG = "sglang"
    HF = "hf"
    LLAMACPP = "llamacpp"


ONE_REQUEST = {
    Engine.HF: "assisted generation of hf decodes one request",
    Engine.LLAMACPP: "llama.cpp's server has one setting for every batch size, no table of them",
}
"""Why an engine's settings are those of a single stream."""


def tune(
    engine: Annotated[Engine, typer.Option(help="Whose settings to write.")],
    trace: TraceOption = SERVED_TRACE,
    latency: LatencyOption = None,
    source: DraftedOption = None,
    always_draft: AlwaysOption = None,
    gpu: GpuOption = None,
    weights: WeightsOption = None,
    assume_batch_free: AssumeOption = False,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=S,tpot=S", help="Targets in seconds: only requests within them count."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="B,...", help="Batch sizes searched. Default: those measured."),
    ] = None,
    by_context: Annotated[
        bool, typer.Option("--by-context", help="vLLM's batch x context form.")
    ] = False,
    context: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="With --by-context. Default: those measured."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=placed,
            help="Write what the engine reads; the rows are --json's.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also serve the setting against off and K = 1, 3, 5 at every batch, in "
            "simulated time, under other random numbers than the search's.",
        ),
    ] = False,
    try_out: Annotated[
        bool,
        typer.Option(
            "--try",
            help="Of vllm: also start the engine that --latency was measured on, and serve the "
            "setting in it beside off and K = 1, 3, 5, one closed loop a batch.",
        ),
    ] = False,
    requests: Annotated[int, typer.Option(min=1, help="Of --try: requests of every load.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Of --try: runs of every arm.")] = 1,
    resamples: Annotated[
        int | None,
        typer.Option(
            min=4,
            help="Bootstrap resamples over prompts. Default: 1000; 8 for sglang, each served.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the bootstrap and of the requests served.")
    ] = 0,
    json: JsonOption = None,
) -> None:
    """Search the draft lengths that pay, and write them as the engine's configuration."""
    from simulator.hardware import bounds_of
    from simulator.tune import launch_line, write_settings
    from simulator.tune.costs import DEFAULT_LENGTHS
    from simulator.tune.launch import FILE
    from traces.replay.always import drafting_always

    recording = load_recording(
        trace, latency, source, chooses="tune", gpu=gpu, weights=weights,
        assume_batch_free=assume_batch_free,
    )  # fmt: skip
    recorded = recording.trace
    if recording.source is not None and engine in ONE_REQUEST:
        raise DraftsimError(
            f"what is tuned for {engine.value} drafts with a model, not with "
            f"{recorded.source}: tune for vllm or sglang"
        )
    table = drafting_always(recording.priced(), always_draft)
    if engine is not Engine.VLLM and (by_context or context):
        raise DraftsimError(f"--by-context is a form of vllm's, not of {engine.value}'s")
    sizes = _numbers("--batch", batch)
    if engine in ONE_REQUEST and sizes not in (None, [1]):
        raise DraftsimError(f"{ONE_REQUEST[engine]}: leave out --batch")
    longest = None
    if try_out:
        if engine is not Engine.VLLM:
            raise DraftsimError(f"--try runs vllm, not {engine.value}")
        from commands.engine.trial import check_trial

        longest = check_trial(table)
    targets = parse_slo(slo)
    common: dict[str, Any] = {"slo": targets, "seed": seed}
    if resamples is not None:
        common["draws"] = resamples
    if longest is not None:
        common["lengths"] = [k for k in DEFAULT_LENGTHS if k <= longest]
    tuned = _search(engine, recorded, table, sizes, by_context, context, common)
    rows = [dict(row) for row in tuned.rows]
    for name, other in zip(("dear", "cheap"), bounds_of(table) or (), strict=False):
        # Searched again: were the carried latencies off as before, would the setting be another?
        again = _search(engine, recorded, other, sizes, by_context, context, common)
        for row, found in zip(rows, again.rows, strict=False):
            row |= {f"setting_{name}": found["setting"], f"gain_{name}": found["gain"]}
    say_calibrate([table], max(row["batch"] for row in rows) if rows else 1)
    shown = [c for c in SHOWN if c != "context" or by_context]
    if targets is not None:
        shown.append("within_slo")
    if gpu is not None or weights is not None:
        shown += ["scaled", *(n for n in CARRIED if rows and n in rows[0])]
    if any(row["assumed"] for row in rows):
        shown.append("assumed")
    if check:
        _served(recorded, table, tuned, rows, targets, seed)
        shown += ["served_tok_s", "deployed_tok_s", "rival", "rival_tok_s", "not_worse"]
    if out is not None:
        # Before anything is tried: what was found is not lost with an engine that fails.
        write_settings(tuned, out)
        note(f"wrote {out}")
    line = launch_line(engine.value, tuned.document, file=str(out or FILE))
    more: dict[str, Any] = {
        "settings": tuned.document, "launch": line, "warnings": list(tuned.warnings)
    }  # fmt: skip
    tried = []
    if try_out:
        from commands.engine.trial import try_settings

        tried = more["tried"] = try_settings(table, recorded, tuned, requests, repeats, seed)
    title = f"Settings for {engine.value}: {origin_of(trace, latency)}"
    emit("tune", rows, json, show=shown, title=title, more=more)
    if tried:
        from commands.engine.trial import TRIED, say_tried

        if json is None:
            print_table(tried, TRIED, title="Tried in vLLM; gains are over no speculation")
        say_tried(tried, tuned, table)
    for warning in tuned.warnings:
        note(f"warning: {warning}")
    if out is None and json is None:
        from json import dumps

        note(dumps(tuned.document))
    if not tried:
        note(f"launch: {line}")


def _search(
    engine: Engine, trace: Trace, latency: LatencyTable, batches: list[int] | None,
    by_context: bool, context: str | None, common: dict[str, Any],
) -> Tuned:  # fmt: skip
    from simulator.tune import tune_huggingface, tune_llamacpp, tune_sglang, tune_vllm

    if engine is Engine.HF:
        return tune_huggingface(trace, latency, **common)
    if engine is Engine.LLAMACPP:
        return tune_llamacpp(trace, latency, **common)
    if engine is Engine.SGLANG:
        return tune_sglang(trace, latency, batches, **common)
    return tune_vllm(
        trace, latency, batches, by_context=by_context or context is not None,
        contexts=_numbers("--context", context), **common,
    )  # fmt: skip


def _served(
    trace: Trace, latency: LatencyTable, tuned: Tuned, rows: list[dict[str, Any]],
    slo: Slo | None, seed: int,
) -> None:  # fmt: skip
    """Add to each row what serving other requests at its batch size in a closed loop gave.

    ``served_tok_s`` is what was written gives, ``deployed_tok_s`` what is to be deployed there
    (that, or no speculation), which ``not_worse`` judges.
    """
    from simulator.tune import check_seed, closed_load, compare_served, served_rates

    batches = sorted({row["batch"] for row in rows})
    loads = [closed_load(trace, b, slo, check_seed(seed)) for b in batches]
    policies = [tuned.policy_at(b) for b in batches]
    found = compare_served(trace, latency, policies, loads)
    at = {int(r["batch"]): r for r in found.to_dict("records")}
    own = {
        b: float(served_rates(trace, latency, [tuned.policy], load).mean())
        for b, load in zip(batches, loads, strict=True)
    }
    for row in rows:
        served = at[row["batch"]]
        row["served_tok_s"], row["deployed_tok_s"] = own[row["batch"]], served["tuned"]
        row["rival"] = served["rival"]
        row["rival_tok_s"], row["not_worse"] = served["rival_value"], served["not_worse"]
        row["margin_lo"], row["margin_hi"] = served["margin_lo"], served["margin_hi"]
    if worse := [b for b in batches if not at[b]["not_worse"]]:
        note(f"served at batch {', '.join(map(str, worse))}, a fixed length was faster")


def parse_slo(text: str | None) -> Slo | None:
    """Targets written ``ttft=0.2,tpot=0.05``, seconds.

    Raises
    ------
    DraftsimError
        If the text is anything else.
    """
    from simulator.tune import Slo

    if text is None:
        return None
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (s.strip() for s in part.partition("="))
        try:
            seconds = float(value)
        except ValueError:
            seconds = float("nan")
        if name not in ("ttft", "tpot") or f"{name}_s" in given or not seconds > 0:
            raise DraftsimError(
                f"--slo {text!r} has the part {part!r}: expected ttft=SECONDS,tpot=SECONDS, "
                "each at most once"
            )
        given[f"{name}_s"] = seconds
    return Slo(**given)


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise DraftsimError(f"{option} is {text!r}, expected whole numbers >= 1 as in 1,4,16")
    return values
