"""Operator tables: seconds of each operator of a model's pass, timed by itself on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from traces.errors import DraftsimError
from traces.latency.table import typed

OPERATOR_COLUMNS: dict[str, tuple[str, str]] = {
    "device": ("str", "the GPU, a name of `draftsim list devices`"),
    "model": ("str", "the model whose sizes the operator has; empty for a collective"),
    "operator": ("str", "what was timed, see OPERATORS"),
    "tensor_parallel": ("int32", "GPUs that share the operator, or take part in a collective"),
    "per_layer": ("int32", "times it runs in a layer; 0: once in a pass"),
    "tokens": ("int32", "tokens; for attention, those of a prompt's chunk"),
    "context": ("int32", "attention: tokens of that prompt in the cache before the chunk"),
    "batch": ("int32", "attention and whole steps: sequences that decode one token"),
    "batch_context": ("int32", "mean cached tokens of these sequences"),
    "longest": ("int32", "most cached tokens of one of these sequences; 0 if all are equal"),
    "experts": ("int32", "MoE block: experts that the tokens reach"),
    "size": ("int64", "collective: bytes"),
    "mode": ("str", "step: full, piecewise or no CUDA graph; collective: kind of link"),
    "seconds": ("float64", "median over the repeats"),
    "measured": ("int8", "1 as timed, 0 if the importer corrected it"),
    "source": ("str", "the program that timed it"),
}

OPERATORS: dict[str, str] = {
    "embedding": "looking up the tokens' embeddings",
    "norm": "a layer's norm, before attention or before the MLP",
    "qkv": "the product that makes queries, keys and values; `q`, `k`, `v` where apart",
    "q": "the product that makes queries",
    "k": "the product that makes keys",
    "v": "the product that makes values",
    "qk_norm": "norms of queries and keys",
    "rope": "rotary positions",
    "attention": "attention over the cache: a prompt's chunk and sequences that decode, together",
    "attention_unsplit": "the same in the kernel for several tokens per sequence, which does not "
    "spread a sequence's cache over multiprocessors",
    "o": "the product after attention",
    "gate_up": "the MLP's first product; `gate` and `up` where apart",
    "gate": "the MLP's gate",
    "up": "the MLP's first product without its gate",
    "act": "the MLP's activation",
    "down": "the MLP's last product",
    "add": "adding the residual",
    "router": "choosing experts",
    "expert_gate_up": "one expert's first product",
    "expert_gate": "one expert's gate",
    "expert_up": "one expert's first product without its gate",
    "expert_act": "one expert's activation",
    "expert_down": "one expert's last product",
    "moe": "a whole MoE block: routing and experts",
    "final_norm": "the norm before the output projection",
    "lm_head": "the output projection (tokens = rows)",
    "sampler": "choosing tokens from logits (tokens = rows)",
    "all_reduce": "summing over GPUs",
    "step": "a whole step of the engine",
    "step_saved": "what its CUDA graph saves compared with launching kernel by kernel",
}

KEY = [name for name in OPERATOR_COLUMNS if name not in ("seconds", "measured", "source")]


@dataclass(frozen=True, eq=False)
class OperatorTable:
    """Operators timed on one or more GPUs, columns as in `OPERATOR_COLUMNS`.

    Raises DraftsimError on missing or mistyped columns, unknown operators, impossible times, or no
    GPU.
    """

    rows: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = typed(self.rows, OPERATOR_COLUMNS, "operator table")
        if unknown := sorted(set(rows["operator"].unique()) - set(OPERATORS)):
            raise DraftsimError(f"operator table has unknown operator(s) {', '.join(unknown)}")
        if (gpus := rows["tensor_parallel"].min()) < 1:
            raise DraftsimError(f"operator table has operators on {gpus} GPUs, expected 1 or more")
        object.__setattr__(self, "rows", rows)

    def __repr__(self) -> str:
        return f"<OperatorTable: {len(self.rows)} operators, {', '.join(self.devices)}>"

    @property
    def devices(self) -> list[str]:
        """GPUs that operators were timed on."""
        return sorted(self.rows["device"].unique())

    @property
    def models(self) -> list[tuple[str, int]]:
        """(model, GPUs that share it) of every model that has operators."""
        own = self.rows[(self.rows["model"] != "") & (self.rows["operator"] != "step")]
        pairs = own[["model", "tensor_parallel"]].drop_duplicates()
        return sorted((str(m), int(n)) for m, n in pairs.itertuples(index=False))

    def of(self, **values: Any) -> pd.DataFrame:
        """Return the rows whose columns have these values; a list means any of them."""
        keep = np.ones(len(self.rows), dtype=bool)
        for name, value in values.items():
            column = self.rows[name]
            some = column.isin(value) if isinstance(value, list | tuple | set) else column == value
            keep &= some.to_numpy()
        return self.rows[keep]


def rows_of(**columns: Any) -> pd.DataFrame:
    """Return rows with these columns, the others empty, zero or one."""
    frame = pd.DataFrame(columns)
    for name, (dtype, _) in OPERATOR_COLUMNS.items():
        if name not in frame:
            one = name in ("tensor_parallel", "measured", "per_layer")
            frame[name] = "" if dtype == "str" else int(one)
    return frame[list(OPERATOR_COLUMNS)]


def joined(tables: Sequence[OperatorTable]) -> OperatorTable:
    """Return one table of several; rows that repeat a timing are joined at their median."""
    rows = pd.concat([table.rows for table in tables], ignore_index=True)
    if rows.duplicated([*KEY, "source"]).any():
        keys = [*KEY, "source"]
        together = {"seconds": "median", "measured": "min"}
        rows = rows.groupby(keys, sort=False, as_index=False).agg(together)
    meta: dict[str, Any] = {}
    for table in tables:
        for name, value in table.meta.items():
            if isinstance(value, list):
                before = meta.get(name, [])
                meta[name] = [*before, *(v for v in value if v not in before)]
            elif isinstance(value, dict):
                meta[name] = {**meta.get(name, {}), **value}
            else:
                meta.setdefault(name, value)
    return OperatorTable(rows, meta)
