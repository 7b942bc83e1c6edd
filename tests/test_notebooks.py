"""The notebooks, each executed in a clean kernel as a reader would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from traces.recordings import recordings

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_S = 600
"""Against a hang, not a measure of speed: each takes seconds on an idle core."""

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def test_there_are_five() -> None:
    assert [p.stem[0] for p in NOTEBOOKS] == list("12345")


@by_name
def test_it_is_kept_without_outputs_and_tells_nothing_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8"))


@by_name
def test_it_runs_from_a_clean_kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(r.name == "bundled" for r in recordings()):
        pytest.skip("needs the bundled recording in traces/recorded/bundled")
    pytest.importorskip("torch", reason="notebooks 1 and 5 run real models")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    )
    client.execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"], (
        "a reader would see warnings"
    )
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 1
    assert last_result(notebook, path)


def last_result(notebook: Any, path: Path) -> bool:
    """What the notebook set out to show."""
    text = "\n".join(
        str(o.get("data", {}).get("text/plain", ""))
        for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs
    )  # fmt: skip
    expected = {
        "1": "oracle",
        "2": "independent",
        "3": "best gamma by replay",
        "4": "goodput",
        # Real rounds are the replayed ones, under every policy.
        "5": "{'autoregressive': 0, 'fixed:gamma=4': 0, 'mine': 0}",
    }
    return expected[path.stem[0]] in text
