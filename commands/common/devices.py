"""Latency tables that several commands price with: pairs of a file, other GPUs, other engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.inputs import load_latency
from commands.common.output import note
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.chosen import Say
    from simulator.hardware import WeightFormat
    from simulator.recording import Recording
    from simulator.whatif.sweep.prices import Prices
    from traces.latency.table import LatencyTable

GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="GPU to carry latencies measured on another over to, approximately: see "
        "`draftsim list --devices`. For `sweep`, several with commas between.",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FORMAT",
        help="Carry latencies over to weights kept in this format, approximately: awq-int4, fp8, "
        "... for both models, or target=...,draft=... (`draftsim list --weight-formats`).",
    ),
]
AlwaysOption = Annotated[
    int | None,
    typer.Option(
        "--always-draft",
        metavar="K",
        min=1,
        help="Draft passes that the engine runs in every round, whatever is drafted or verified: "
        "1 where it calls the drafter every round, all slots where it fills them.",
    ),
]
OnePassOption = Annotated[
    bool,
    typer.Option(
        "--one-pass",
        help="The drafter drafts all tokens of a round in one pass: --latency's draft pass is paid "
        "once a round, whatever the draft length.",
    ),
]
BlocksOption = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Cache blocks of 16 tokens, or auto[:UTILISATION] for those that fit a composed "
        "table's GPU next to the weights; default: no limit.",
    ),
]

CaptureOption = Annotated[
    str | None,
    typer.Option(
        "--cudagraph-capture-sizes",
        metavar="N,...",
        help="Tokens that the engine captures CUDA graphs for: a pass costs what the next captured "
        "size costs. Default: vLLM's list for composed latencies, as measured for others.",
    ),
]
GraphModeOption = Annotated[
    str | None,
    typer.Option(
        "--cudagraph-mode",
        metavar="MODE",
        help="FULL (default), PIECEWISE or NONE, of composed latencies.",
    ),
]


def in_graphs(recording: Recording, sizes: str | None, mode: str | None, largest: int) -> Recording:
    """`recording` with its latencies in the CUDA graphs that the options name.

    Raises DraftsimError for sizes and modes that are none, or that the latencies say nothing of.
    """
    from traces.latency.graphs import CUDAGraphs
    from traces.store.operators import in_graphs

    named = sizes is not None or mode is not None
    graphs = CUDAGraphs.parsed(sizes, mode) if named else None
    tables = {name: in_graphs(t, graphs, largest) for name, t in recording.tables.items()}
    return replace(recording, tables=tables)


def blocks_of(text: str | None, table: LatencyTable) -> int | None:
    """The blocks that ``--kv-blocks`` asks for; with auto, said in a note.

    Raises DraftsimError if it is no number, or the table does not say what GPU and models it is of.
    """
    from traces.operators.memory import UTILISATION, blocks_of_meta

    if text is None:
        return None
    kind, _, share = text.partition(":")
    try:
        if kind != "auto":
            return int(text)
        utilisation = float(share) if share else UTILISATION
    except ValueError:
        raise DraftsimError(
            f"--kv-blocks is {text!r}, expected a whole number or auto[:UTILISATION]"
        ) from None
    found = blocks_of_meta(table.meta, utilisation)
    note(found.said)
    return found.blocks


def latencies(
    names: Sequence[str] | None, trace_name: str, priced: bool, assume_batch_free: bool = False,
    say: Say = note,
) -> dict[str, LatencyTable]:  # fmt: skip
    """The tables named, by name; none where something else prices already (`priced`).

    With ``assume_batch_free``, those of one batch size are taken to cost the same at every other.
    A table of the GPU suite, which holds many pairs and modes, gives one table each, or the one
    that a suffix names (``FILE:PAIR/MODE``).
    """
    if not names:
        return (
            {} if priced else {trace_name: load_latency(None, trace_name, assume_batch_free, say)}
        )
    found: dict[str, LatencyTable] = {}
    for name in names:
        path, _, chosen = name.rpartition(":")
        if name.startswith("const:") or not Path(path).is_file():
            path, chosen = name, ""
        tables = _by_pair(load_latency(path, trace_name, say=say))
        if chosen and chosen not in tables:
            raise DraftsimError(
                f"--latency {name}: {path} holds {', '.join(filter(None, tables)) or 'one pair'}, "
                f"not {chosen!r}"
            )
        for pair, own in tables.items():
            # A table of many pairs is no pair's: each one knows its own batches.
            table = own.assumed_batch_free() if assume_batch_free else own
            if not chosen:
                found[f"{path}:{pair}" if pair else path] = table
            elif pair == chosen:
                found[name] = table
    return found


def in_batches(
    tables: Mapping[str, LatencyTable], ratios: Sequence[float], largest: int, assume: bool
) -> str:
    """Return which costs batches up to `largest` are assumed not to have; empty for none.

    Raises DraftsimError where nobody said that they may, be it of tables or of ratios (`assume`).
    """
    from traces.latency.table import BATCH_FREE_SAID

    if largest > 1 and ratios and not assume:
        raise DraftsimError(
            "--c gives the cost of a draft pass relative to a target pass, not that of a batch: "
            "leave --batch at 1, give --latency measured at batches, or take every batch to cost "
            "the same with --assume-batch-free"
        )
    said = BATCH_FREE_SAID if largest > 1 and ratios else ""
    for table in tables.values():
        table.check_sizes("target", "forward", largest, 1)
        said = said or table.said_batch_free(largest)
    return said


def carried(
    tables: Mapping[str, LatencyTable], gpu: str | None = None, weights: str | None = None,
    say: Say = note,
) -> dict[str, LatencyTable]:  # fmt: skip
    """`tables` on the device they were measured on, or the one table carried over to one GPU.

    ``weights`` as of `weight_formats`.

    Raises
    ------
    DraftsimError
        If it is more than one GPU, or the table cannot be carried over.
    """
    wanted, forms = gpu_names(gpu), weight_formats(weights)
    if not wanted and not forms:
        return dict(tables)
    if len(wanted) > 1:
        raise DraftsimError(f"--gpu is {gpu!r}, expected one GPU here: run once for each")
    from simulator.whatif.sweep.prices import Prices

    prices = Prices(latencies=tables, gpus=wanted, weights=forms)
    say_scaling(prices, say)
    return dict.fromkeys(tables, prices.tables[0].table)


def _by_pair(table: LatencyTable) -> dict[str, LatencyTable]:
    """The tables of every pair with a draft and mode in a table of the suite; else itself."""
    models = {str(m) for m in table.cells["model"]}
    drafts = [tuple(m.split("/")) for m in models if m.endswith("/draft") and m.count("/") == 2]
    if not drafts:
        return {"": table}
    from profiler.suite.unpack import tables_of

    return {f"{pair}/{mode}": tables_of(table, pair, mode) for pair, mode, _ in sorted(drafts)}


def gpu_names(text: str | None) -> tuple[str, ...]:
    """The names of ``--gpu``; DraftsimError for one without a data-sheet entry."""
    from simulator.hardware import find_device

    names = [part.strip() for part in (text or "").split(",")] if text is not None else []
    return tuple(dict.fromkeys(find_device(name).name for name in names))


def weight_formats(text: str | None) -> dict[str, WeightFormat]:
    """Return the formats of ``--weights`` by role; DraftsimError for an unknown one."""
    from simulator.hardware import find_format

    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(("target", "draft"), find_format(text))
    found = {}
    for part in text.split(","):
        role, _, name = (piece.strip() for piece in part.partition("="))
        if role not in ("target", "draft") or role in found:
            raise DraftsimError(f"--weights {text}: expected FORMAT or target=FORMAT,draft=FORMAT")
        found[role] = find_format(name)
    return found


def say_calibrate(tables: Iterable[LatencyTable], largest: int) -> None:
    """Note, where carried latencies price batches above one, what does that better."""
    from simulator.hardware import CALIBRATE

    if largest > 1 and any(table.meta.get("scaled") for table in tables):
        note(CALIBRATE)


def say_scaling(prices: Prices, say: Say = note) -> None:
    """Note what was carried over to another GPU, and the model's known errors."""
    from simulator.hardware import interval_words, scaling_error, scaling_words

    scaled = [t for t in prices.tables if t.scaled]
    for name in dict.fromkeys(t.latency for t in scaled):
        own = [t for t in scaled if t.latency == name]
        how = own[0].table.meta["scaled"]
        if not isinstance(how, Mapping):
            say(f"{name}: scaled, not measured: {scaling_words(own[0].table)}")
            continue
        there = ", ".join(t.gpu for t in own)
        kept = ", ".join(f"{role} in {form}" for role, form in how["weights"].items())
        to = f"{there}, {kept}" if kept else there
        say(f"{name}: measured on {how['from']}, scaled to {to}: approximate")
        say(f"  by {scaling_error(how)}")
        say(f"  {interval_words(own[0].table)}")
