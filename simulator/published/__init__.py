"""Figures that papers and other projects published, in CSV files next to this module.

Only figures were carried over, no text and no code; ``sources.csv`` and ``studies.csv`` name the
source of each, with the licence of data that was measured by other projects.  An empty cell is a
value that was not given.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import groupby
from typing import Literal, NamedTuple

CONTEXT = 512
"""Tokens in the cache that the papers' mean latencies are read at; none of the papers says."""
QUANTISED = {"meta-llama/Llama-3.1-70B": "nf4"}
"""int4 by GammaTune's table, int8 by its text: its kernels are not those of the others."""


class PaperTable(NamedTuple):
    """A published table: rows by name, values in the order of the columns."""

    name: str
    columns: tuple[str, ...]
    cells: Mapping[str, tuple[float | None, ...]]

    def value(self, row: str, column: str) -> float | None:
        """Return the published number of a cell; None if the paper gives none."""
        return self.cells[row][self.columns.index(column)]

    def number(self, row: str, column: str) -> float:
        """Return the published number of a cell; NaN if the paper gives none."""
        value = self.value(row, column)
        return math.nan if value is None else value


class MethodLine(NamedTuple):
    """One method on one model (SpecBound, Table 1): values by task, in the order of `TASKS`."""

    compression: tuple[float, ...]
    """CR, tokens per speculation round as the method counts them."""
    speedup: tuple[float, ...]
    overall: float
    """The printed overall speedup."""


class PublishedRun(NamedTuple):
    """Passes of one model at batch 1."""

    model: str
    """A name in `simulator.hardware.record.SHAPES`."""
    device: str
    weights: str
    """A name in `simulator.hardware.roofline.FORMATS`."""
    tokens_per_s: float
    new_tokens: int = 1
    """Tokens of a pass."""
    context: int = 1024
    """Mean tokens in the cache."""

    @property
    def seconds(self) -> float:
        """Seconds of one pass."""
        return self.new_tokens / self.tokens_per_s


class PublishedStudy(NamedTuple):
    """Runs of one engine by one group."""

    name: str
    engine: str
    mode: Literal["eager", "graph"]
    runs: tuple[PublishedRun, ...]
    libraries: Mapping[str, str] = {}
    """Libraries whose kernels read a weight format, where these are not the engine's own."""


class EngineRun(NamedTuple):
    """A run of an engine at one draft length and load."""

    tokens_per_s: float
    emitted: float
    """Tokens a verification, the target's own included; NaN if it was not said."""
    cycle: float = math.nan
    """Time of a round over one plain decoding step."""
    gains: tuple[float, ...] = ()
    """Speedup by class of `CLASSES`, percent."""


def published_rows(name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file of this folder."""
    with files(__name__).joinpath(f"{name}.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _tables() -> dict[str, PaperTable]:
    found = {}
    for name, group in groupby(published_rows("tables"), lambda row: row["table"]):
        cells: dict[str, dict[str, float | None]] = {}
        for row in group:
            value = float(row["value"]) if row["value"] else None
            cells.setdefault(row["row"], {})[row["column"]] = value
        columns = tuple(next(iter(cells.values())))
        values = {label: tuple(line.values()) for label, line in cells.items()}
        found[name] = PaperTable(name, columns, values)
    return found


def _specbound_1() -> dict[tuple[str, str], MethodLine]:
    found = {}
    rows = list(published_rows("specbound_1"))
    for cr, sd in zip(rows[::2], rows[1::2], strict=True):
        compression, speedup = (tuple(float(row[task]) for task in TASKS) for row in (cr, sd))
        found[sd["model"], sd["method"]] = MethodLine(compression, speedup, float(sd["Overall"]))
    return found


def _studies() -> tuple[PublishedStudy, ...]:
    runs: dict[str, list[PublishedRun]] = {
        GAMMATUNE_1.name: [
            PublishedRun(model, "h100", "bf16", 1e3 / milliseconds, 1, CONTEXT)
            for model, milliseconds in GAMMATUNE_MS.items()
            if model not in QUANTISED
        ]
    }
    for row in published_rows("passes"):
        run = PublishedRun(
            row["model"], row["device"], row["weights"], float(row["tokens_per_s"]),
            int(row["new_tokens"]), int(row["context"]),
        )  # fmt: skip
        runs.setdefault(row["study"], []).append(run)
    return tuple(
        PublishedStudy(
            row["name"], row["engine"], "eager" if row["mode"] == "eager" else "graph",
            tuple(runs[row["name"]]),
            dict(part.split("=") for part in row["libraries"].split("; ") if part),
        )
        for row in published_rows("studies")
    )  # fmt: skip


def _ladders() -> dict[str, dict[int, EngineRun]]:
    found: dict[str, dict[int, EngineRun]] = {}
    for row in published_rows("ladders"):
        found.setdefault(row["drafter"], {})[int(row["draft_length"])] = EngineRun(
            float(row["tokens_per_s"]), float(row["emitted"]), float(row["cycle"]),
            tuple(float(row[name]) for name in CLASSES),
        )  # fmt: skip
    return found


def _engines() -> dict[str, dict[int, dict[int, EngineRun]]]:
    found: dict[str, dict[int, dict[int, EngineRun]]] = {}
    for row in published_rows("engines"):
        loads = found.setdefault(row["study"], {})
        run = EngineRun(float(row["tokens_per_s"]), float(row["emitted"] or math.nan))
        loads.setdefault(int(row["load"]), {})[int(row["draft_length"])] = run
    return found


SOURCES = {
    row["name"]: row["source"] for file in ("sources", "studies") for row in published_rows(file)
}
"""Sources of the figures, by table or study."""
TABLES = _tables()
"""The papers' tables by name, without SpecBound's Table 1."""
CMASD_1, CMASD_2, CMASD_3, CMASD_4, CMASD_5 = (
    TABLES[f"CM-ASD Table {number}"] for number in ("I", "II", "III", "IV", "V")
)
CSD_ABLATION, CSD_MAIN = TABLES["CSD ablation"], TABLES["CSD main results"]
CSD_GAINS = {row: gain or math.nan for row, (gain,) in TABLES.pop("CSD gains").cells.items()}
CSD_PATTERNS = TABLES["CSD rejection patterns"]
GAMMATUNE_1, GAMMATUNE_2 = (TABLES[f"GammaTune Table {number}"] for number in (1, 2))
GAMMATUNE_MS = {name: ms or math.nan for name, (ms,) in GAMMATUNE_1.cells.items()}
"""Milliseconds a token on one H100 (GammaTune, Table 1)."""
SPECBOUND_2, SPECBOUND_3, SPECBOUND_4, SPECBOUND_5 = (
    TABLES[f"SpecBound Table {number}"] for number in (2, 3, 4, 5)
)
TASKS = ("Math", "Multi.", "QA", "RAG", "Sum.", "Trans.")
SPECBOUND_1 = _specbound_1()
"""Table 1 of SpecBound by model and method."""
CONTRADICTIONS = tuple((row["table"], row["says"]) for row in published_rows("contradictions"))
"""Where the papers contradict themselves: (table, what it says)."""
STUDIES = _studies()
"""Single passes on GPUs."""
GAMMATUNE = STUDIES[0]
CLASSES = ("chat", "code", "prose", "reason", "zh")
RTX3090_PLAIN = 41.57
"""Tokens/s without speculation of `RTX3090`."""
RTX3090 = _ladders()
"""A ladder of draft lengths by drafter."""
ENGINE_STUDIES = _engines()
"""Runs by study, load and draft length; 0 is plain decoding."""
