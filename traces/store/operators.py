"""Reading and writing operator tables, and the latencies composed from those that come along."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from traces.errors import DraftsimError
from traces.latency.graphs import CUDAGraphs
from traces.latency.table import LatencyTable
from traces.operators.compose import Composer
from traces.operators.dense import NVLINK_SHARE
from traces.operators.devices import DATA, DEVICES, find_device
from traces.operators.shapes import Placed, find_architecture
from traces.operators.table import OPERATOR_COLUMNS, OperatorTable
from traces.store.header import PathLike, meta_of, named
from traces.store.parquet import frame_of, read_file, table_of, write_file

VLLM_GRAPHS = CUDAGraphs()


def write_operators(table: OperatorTable, path: PathLike) -> None:
    """Write an operator table: one row per timing, provenance in the header."""
    rows = table_of(table.rows, OPERATOR_COLUMNS)
    write_file(path, "operators", rows, {"meta": dict(table.meta)})


def read_operators(path: PathLike) -> OperatorTable:
    """Return the operator table in a file; FileError if it is missing, damaged or another."""
    header, table = read_file(path, "operators")
    rows, meta = frame_of(path, table, OPERATOR_COLUMNS), meta_of(path, header)
    with named(path, "import it again"):
        return OperatorTable(rows, meta)


STANDS_FOR = {"h800": "h100"}
"""GPUs whose operators are another's: within one GPU they are the same chip and memory."""


OPERATORS_ALONE = ":operators"
"""Ends the GPU's name where passes are to be the sum of their operators."""
_HEADS = r"eagle|medusa|mtp"
"""Occurs in the names of drafters that are heads of a target, and have the sizes of no model."""


def timed_devices() -> dict[str, Path]:
    """Return the GPUs whose operators come along, and the files that hold them."""
    return {path.stem: path for path in sorted(DATA.glob("*.parquet"))}


def bundled_operators(device: str) -> OperatorTable:
    """Return the operators of a GPU that come along; DraftsimError if no timings are known."""
    wanted = find_device(device)
    files, own = timed_devices(), STANDS_FOR.get(wanted.name, wanted.name)
    if own not in files:
        raise DraftsimError(
            f"no operators were timed on {wanted.name} (only on {', '.join([*files, *STANDS_FOR])})"
            f": import some, or carry a table of another GPU over with --gpu {wanted.name}"
        )
    table = read_operators(files[own])
    if own == wanted.name:
        return table
    rows = table.rows.assign(device=wanted.name)
    summed = rows["operator"] == "all_reduce"
    gpus, size = (rows.loc[summed, c].to_numpy(float) for c in ("tensor_parallel", "size"))
    slower = (1 / wanted.link - 1 / DEVICES[own].link) / NVLINK_SHARE
    rows.loc[summed, "seconds"] += 2 * (gpus - 1) / gpus * size * slower
    return OperatorTable(rows, {**table.meta, "stands_for": f"{own}, links as the data sheet's"})


def coverage(device: str) -> dict[str, str]:
    """Return in words which tables of a GPU are measured, composed or a roofline."""
    if STANDS_FOR.get(device, device) not in timed_devices():
        return {"latencies": "roofline (--gpu)", "measured": "-", "composed": "-"}
    table = bundled_operators(device)
    layers: dict[str, list[int]] = {}
    for model, shared in table.models:
        layers.setdefault(model, []).append(shared)
    attended = {str(m) for m in table.of(operator="attention")["model"]}
    words = [
        f"{model} (TP {', '.join(map(str, shared))}{', attention' if model in attended else ''})"
        for model, shared in layers.items()
    ]
    gpus = sorted(set(table.of(operator="all_reduce")["tensor_parallel"]))
    if gpus:
        words.append(f"all-reduce over {', '.join(map(str, gpus))} GPUs")
    words += [f"whole steps of {m}" for m in sorted(set(table.of(operator="step")["model"]))]
    said = "operators of " + STANDS_FOR[device] + ": " if device in STANDS_FOR else ""
    less = [] if attended else ["attention, by bytes"]
    less += [] if gpus else ["all-reduce, assumed"]
    return {
        "latencies": "measured, composed", "measured": said + "; ".join(words),
        "composed": "; ".join([*less, "other models, from near sizes"]),
    }  # fmt: skip


def find_composed(
    name: str, graphs: CUDAGraphs = VLLM_GRAPHS, largest: int = 0
) -> LatencyTable | None:
    """Return the latency table of ``GPU[:operators]/TARGET[@tpN][+DRAFT[@tpN]]``; None for no such
    name.

    ``GPU`` is one whose operators come along, or the file of an operator table, followed by a colon
    and the GPU where it holds several.  Where whole steps were timed on the GPU, passes are
    corrected by them; with ``:operators`` they are the sum of their operators.  ``graphs`` and
    ``largest`` as in `Composer` and `Composer.table`.

    Raises DraftsimError if no timings of the GPU are known, a model is not known by its sizes, or
    the weights do not fit.
    """
    where, slash, models = name.rpartition("/")
    if not slash or not models or Path(name).exists():
        return None
    by_steps = not where.endswith(OPERATORS_ALONE)
    where = where.removesuffix(OPERATORS_ALONE)
    file, _, within = where.rpartition(":") if ":" in where else (where, "", "")
    if Path(file).is_file():
        written = Path(file).stat().st_mtime_ns
        return _composed(file, within, models, by_steps, graphs, largest, written)
    try:
        device = find_device(where)
    except DraftsimError:
        if "+" in models or "@" in models:
            raise
        return None
    if Path(where).is_dir():
        return None
    return _composed("", device.name, models, by_steps, graphs, largest, 0)


@lru_cache(maxsize=8)
def _composed(
    file: str, device: str, models: str, by_steps: bool, graphs: CUDAGraphs, largest: int,
    written: int,
) -> LatencyTable:  # fmt: skip
    del written  # a file that was written again is read again
    table = read_operators(file) if file else bundled_operators(device)
    if not device:
        if len(table.devices) != 1:
            named = f"{file}:{table.devices[0]}/{models}"
            raise DraftsimError(
                f"{file} holds operators of {', '.join(table.devices)}: name one, as in {named}"
            )
        device = table.devices[0]
    first, *others = models.split("+")
    if len(others) > 1:
        raise DraftsimError(f"{models!r} names {1 + len(others)} models: a target and a draft")
    if others and re.search(_HEADS, others[0].lower()):
        raise DraftsimError(
            f"{models}: no head such as {others[0]} was timed on {device}: give `draftsim "
            "recommend` two runs of your server, without and with it"
        )
    within = f"{file}:{device}" if file else device
    name = f"{within}{'' if by_steps else OPERATORS_ALONE}/{models}"
    target, draft = _placed(first), _placed(others[0]) if others else None
    return Composer(table, device, graphs, by_steps).table(target, draft, name, largest)


def operators_alone(latency: LatencyTable) -> LatencyTable | None:
    """Return the table without the correction by whole steps; None if it has none."""
    meta = latency.meta
    if not any((meta.get("steps") or {}).values()):
        return None
    where, _, models = str(meta["composed"]).rpartition("/")
    graphs = CUDAGraphs(tuple(meta["captured"]), meta["graph_mode"])
    found = find_composed(f"{where}{OPERATORS_ALONE}/{models}", graphs, meta["every_batch_to"])
    return found if found is None else at_depths(found, meta.get("at_depths_of"))


def at_depths(latency: LatencyTable, layers: int | None) -> LatencyTable:
    """Return composed latencies whose single layers are those of a target with `layers` layers.

    A layer of a recorded target is priced as the same share of the composed target's depth:
    layer 15 of 30 as layer 16 of 32.  Other tables, and those of as many layers, stay as they are.
    """
    own = (latency.meta.get("shapes") or {}).get("target", {}).get("layers")
    if "composed" not in latency.meta or None in (own, layers) or own == layers:
        return latency
    assert own is not None
    assert layers is not None
    cells = latency.cells.copy()
    single = (cells["model"] == "target") & (cells["phase"] == "layer")
    cells.loc[single, "median_s"] *= own / layers
    return LatencyTable(cells, {**latency.meta, "at_depths_of": layers})


def in_graphs(latency: LatencyTable, graphs: CUDAGraphs | None, largest: int) -> LatencyTable:
    """Return the latencies of up to `largest` sequences in an engine with these CUDA graphs.

    None means vLLM's graphs for a composed table, and the measured ones for any other.  A composed
    table that was carried over to another device is returned as it is.

    Raises DraftsimError if a table does not say what it takes in other graphs.
    """
    if "composed" in latency.meta and latency.meta.get("scaled"):
        if graphs is not None:
            raise DraftsimError(
                "composed latencies are carried over to another device in vLLM's graphs: drop "
                "--cudagraph-capture-sizes and --cudagraph-mode, or --gpu and --weights"
            )
        return latency
    if "composed" in latency.meta:
        found = find_composed(str(latency.meta["composed"]), graphs or VLLM_GRAPHS, largest)
        if found is not None:
            return found
    return latency if graphs is None else graphs.applied(latency, largest)


def _placed(text: str) -> Placed:
    name, at, shared = text.partition("@")
    if at and not re.fullmatch(r"tp[1-9]\d*", shared):
        raise DraftsimError(f"{text!r}: expected a model and @tpN for the GPUs that share it")
    return Placed(find_architecture(name), int(shared[2:]) if at else 1)
