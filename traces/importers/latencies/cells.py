"""Reading latencies as CSV: a row a cell, as any program or person can write them.

Columns ``model`` (target, draft), ``phase`` (`traces.latency.schema.PHASES`; default forward),
``batch`` (1), ``new_tokens``, ``context`` and ``seconds``; ``spread_s`` and ``repeats`` are
optional.  A format of ours.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shown

import pandas as pd

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.bounds import MOST_SECONDS, MOST_TOKENS, decimal, digits
from traces.importers.rows import only_file
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.store.text import read_text

NEEDED = ("model", "new_tokens", "context", "seconds")
DEFAULTS = {"phase": "forward", "batch": "1", "spread_s": "0", "repeats": "1"}


class Latency:
    """Latencies as CSV."""

    name = "latency"
    summary = "CSV of latencies: model,phase,batch,new_tokens,context,seconds"
    takes = ("device",)

    def sniff(self, text: str) -> bool:
        return set(NEEDED) <= set(_head(text.partition("\n")[0]))

    def read(self, files: Sequence[Path], options: Options) -> LatencyTable:
        file = only_file(self.name, files)
        reader = csv.DictReader(read_text(file).splitlines(), skipinitialspace=True)
        names = _head(",".join(reader.fieldnames or ()))
        if missing := [name for name in NEEDED if name not in names]:
            raise FileError(f"{file}: lacks the column(s) {', '.join(missing)}")
        if unknown := sorted(set(names) - {*NEEDED, *DEFAULTS}):
            expected = ", ".join((*NEEDED, *DEFAULTS))
            raise FileError(
                f"{file}: has unknown column(s) {', '.join(unknown)[:80]}: expected {expected}"
            )
        reader.fieldnames = names
        cells: list[list[object]] = []
        for number, row in enumerate(reader, 2):
            at = f"{file} line {number}"
            if None in row or None in row.values():
                raise FileError(f"{at}: has not as many values as the header has columns")
            given = {**DEFAULTS, **{k: v.strip() for k, v in row.items() if v.strip()}}
            if empty := [name for name in NEEDED if name not in given]:
                raise FileError(f"{at}: {empty[0]} is empty")
            own = ("seconds" if name == "median_s" else name for name in CELL_COLUMNS)
            kinds = (kind for kind, _ in CELL_COLUMNS.values())
            cells.append(
                [_value(at, name, kind, given[name]) for name, kind in zip(own, kinds, strict=True)]
            )
        if not cells:
            raise FileError(f"{file}: holds no latencies: expected a row a cell")
        meta = {
            "kind": self.name, "source": file.name, "device": options.device or "not said",
            "estimator": "mean",
        }  # fmt: skip
        return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)), meta)


def _head(line: str) -> list[str]:
    return [name.strip().strip('"').lower() for name in line.split(",")]


def _value(at: str, name: str, kind: str, text: str) -> object:
    if kind == "str":
        return text
    if kind.startswith("int"):
        return digits(at, name, text, most=MOST_TOKENS)
    value = decimal(text)
    if not 0 <= value <= MOST_SECONDS:
        raise FileError(f"{at}: {name} is {shown(text)}, expected seconds, 0 or more")
    return value
