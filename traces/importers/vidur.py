"""Reading Vidur's profiles: operators of a layer by tokens, and all-reduce by bytes.

``<gpu>/<model>/mlp.csv``: a row for each number of tokens and of GPUs that share the layer, with
``time_stats.<operator>.median`` in milliseconds.  ``<topology>/all_reduce.csv``: a row for each
message.  GPU and model are the names of the folders, or are given.  Only messages within one
machine are taken.  Source of the format: microsoft/vidur, ``data/profiling``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.timed import numbers, place_of, read_frame
from traces.operators.table import OperatorTable, joined, rows_of

TAKEN = {
    "emb": ("embedding", 0), "attn_pre_proj": ("qkv", 1), "attn_rope": ("rope", 1),
    "attn_post_proj": ("o", 1), "mlp_up_proj": ("gate_up", 1), "mlp_act": ("act", 1),
    "mlp_down_proj": ("down", 1), "add": ("add", 1),
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
SOURCE = "microsoft/vidur"


class Vidur:
    """Vidur's profiles."""

    name = "vidur"
    summary = "Vidur's mlp.csv and all_reduce.csv of a GPU, gzipped or not: operators"
    takes = ("device", "model")

    def sniff(self, text: str) -> bool:
        head = text.partition("\n")[0]
        return "time_stats.mlp_up_proj.median" in head or "time_stats.all_reduce.median" in head

    def read(self, files: Sequence[Path], options: Options) -> OperatorTable:
        return joined([_read(file, options) for file in files])


def _read(file: Path, options: Options) -> OperatorTable:
    frame = read_frame(file)
    if "time_stats.all_reduce.median" in frame:
        return _collective(file, frame, options)
    if "time_stats.mlp_up_proj.median" not in frame:
        raise FileError(f"{file}: is no profile of Vidur: expected its mlp.csv or all_reduce.csv")
    return _layer(file, frame, options)


def _layer(file: Path, frame: pd.DataFrame, options: Options) -> OperatorTable:
    device, model, _ = place_of(file, options)
    tokens, shared = (
        numbers(file, frame, c) for c in ("num_tokens", "num_tensor_parallel_workers")
    )
    parts = []
    norms = [f"time_stats.{n}.median" for n in NORMS if f"time_stats.{n}.median" in frame]
    found = {name: numbers(file, frame, f"time_stats.{name}.median") for name in TAKEN}
    timed = {TAKEN[name]: values for name, values in found.items()}
    if norms:
        each = np.array([numbers(file, frame, column) for column in norms])
        timed["norm", len(norms)] = each.mean(axis=0)
    for (operator, per_layer), milliseconds in timed.items():
        parts.append(rows_of(
            device=device.name, model=model.name, operator=operator, per_layer=per_layer,
            tensor_parallel=shared, tokens=tokens, seconds=milliseconds * 1e-3, source=SOURCE,
        ))  # fmt: skip
    rows = pd.concat(parts, ignore_index=True)
    return joined([OperatorTable(rows, {"files": [file.name]})])


def _collective(file: Path, frame: pd.DataFrame, options: Options) -> OperatorTable:
    topology = file.resolve().parent.name
    folders = [folder.name.partition("_")[0] for folder in file.resolve().parents]
    device, _, _ = place_of(file, options, needs_model=False, folders=folders)
    workers, beside, size, milliseconds = (
        numbers(file, frame, c)
        for c in ("num_workers", "devices_per_node", "size", "time_stats.all_reduce.min")
    )
    own = workers == beside
    if not own.any():
        raise FileError(f"{file}: holds no message within one machine")
    # Three repeats, launched from the host: the quickest is the one that the host did not hold up.
    rows = rows_of(
        device=device.name, operator="all_reduce", per_layer=2, tensor_parallel=workers[own],
        size=size[own], mode=topology, seconds=milliseconds[own] * 1e-3, source=SOURCE,
    )  # fmt: skip
    left = int((~own).sum())
    meta = {"files": [file.name]}
    if left:
        meta["left_out"] = [f"{file}: {left} messages between machines"]
    return joined([OperatorTable(rows, meta)])
