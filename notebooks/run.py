"""Executes the notebooks in place, as ``make notebooks`` does: ``python notebooks/run.py [FILE...]``.

Values that differ at every run and tell a reader nothing (times of execution, the interpreter's
version, addresses of objects) are removed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_S = 600
"""Against a hang, not a measure of speed: each takes seconds on an idle core."""


def executed(path: Path, first: str = "", kernel: Any = None) -> nbformat.NotebookNode:
    """The notebook at `path` with the outputs of a clean kernel, in which `first` ran before.

    ``kernel`` is the manager of one that runs already, and goes on running; else it is a new one.

    Raises nbclient's CellExecutionError where a cell does.
    """
    kept = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    nbclient.NotebookClient(
        notebook,
        km=kernel,
        timeout=LIMIT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": ROOT}},
    ).execute()
    del notebook.cells[0]
    notebook.metadata = kept.metadata
    for cell, before in zip(notebook.cells, kept.cells, strict=True):
        cell.metadata = before.metadata
        for output in cell.get("outputs", ()):
            if "text/plain" in output.get("data", {}):
                text = output["data"]["text/plain"]
                output["data"]["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", text)
    return notebook


def main() -> None:
    """Execute the notebooks named, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        notebook = executed(path)
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        print(f"executed {path.name}, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
