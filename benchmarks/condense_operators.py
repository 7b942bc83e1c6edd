"""Condense others' operator timings to the figures that draftsim carries.

    python -m benchmarks.condense_operators ../shared/data/gpu_ops

Every file of the folder is imported; of each GPU a selection of sizes is kept, at the median of
what was timed, and written to ``traces/operators/data/<gpu>.parquet`` with source, commit and
licence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from traces.importers.base import Options
from traces.importers.registry import import_log
from traces.operators.attention import PROMPT
from traces.operators.dense import OTHERWISE
from traces.operators.devices import DATA
from traces.operators.table import OperatorTable, joined
from traces.store.operators import write_operators

SOURCES = {
    "microsoft/vidur": "github.com/microsoft/vidur at 7d475134, data/profiling, MIT licence",
    "casys-kaist/LLMServingSim": "github.com/casys-kaist/LLMServingSim at 5daddb21, profiler/perf "
    "and its older profiler, MIT licence; whole steps at 4c0bb4fc",
}
TOKENS = {
    1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128,
    136, 144, 160, 176, 192, 224, 256, 264, 272, 320, 384, 448, 512, 544, 640, 768, 896, 1024,
    2560, 3072, 3584, 4096, 6144, 8192, *range(512, 2049, 64), *range(528, 1024, 64),
}  # fmt: skip
CONTEXTS = {0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}


def imported(folder: Path) -> OperatorTable:
    """Return everything in the folder."""
    tables = []
    for kind in ("vidur", "llmservingsim"):
        for file in sorted((folder / kind).rglob("*.csv*")):
            if "bench" not in file.parts and not file.name.startswith("skew"):
                tables.append(import_log(kind, [file], Options()))
    return joined([table for table in tables if isinstance(table, OperatorTable)])


def condensed(table: OperatorTable, device: str) -> OperatorTable:
    """Return the sizes of one GPU that are carried."""
    rows = table.of(device=device)
    dense = rows[~rows["operator"].isin(OTHERWISE) & rows["tokens"].isin(TOKENS)]
    attention = rows[(rows["operator"] == "attention") & rows["longest"].eq(0)]
    few = attention.loc[attention["tokens"] > 0, "tokens"].min()
    kept = attention["context"].isin(CONTEXTS) & attention["batch_context"].isin(CONTEXTS)
    alone = (attention["batch"] == 0) | (attention["tokens"] == 0)
    beside = attention["tokens"].isin([few, PROMPT]) & (attention["context"] == 0)
    messages = rows[rows["operator"] == "all_reduce"]
    parts = [
        dense, attention[kept & (alone | beside)], _thinned(messages),
        rows[rows["operator"].isin(["moe", "step", "step_saved"])],
    ]  # fmt: skip
    own = pd.concat(parts, ignore_index=True)
    own["seconds"] = [float(f"{s:.4g}") for s in own["seconds"]]
    named = {name: SOURCES[name] for name in sorted(set(own["source"]))}
    return OperatorTable(own, {"sources": named, "made_by": "benchmarks.condense_operators"})


def _thinned(messages: pd.DataFrame) -> pd.DataFrame:
    """Return a quarter's quantile of the messages of each doubling of bytes."""
    if messages.empty:
        return messages
    octave = messages["size"].map(lambda size: 1 << max(int(size) - 1, 1).bit_length())
    keys = ["tensor_parallel", "mode"]
    kept = messages.assign(octave=octave)
    low = kept.groupby([*keys, "octave"])["seconds"].transform(lambda s: s.quantile(0.25))
    size = kept.groupby([*keys, "octave"])["size"].transform("median")
    kept = kept.assign(seconds=low, size=size.round().astype("int64"))
    return kept.drop_duplicates([*keys, "octave"]).drop(columns="octave")


def main() -> None:
    """Write a file for each GPU."""
    table = imported(Path(sys.argv[1]))
    for device in table.devices:
        path = DATA / f"{device}.parquet"
        write_operators(condensed(table, device), path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
