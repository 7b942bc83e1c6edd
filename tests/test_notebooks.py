"""The notebooks: kept as executed, and executed again in a clean kernel as a reader would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from traces.store.recordings import recordings

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from jupyter_client.manager import KernelManager  # noqa: E402

from notebooks.run import NOTEBOOKS, executed  # noqa: E402

CLEAN = """
%reset -f
import builtins, warnings
builtins.kept_filters = getattr(builtins, "kept_filters", None) or warnings.filters[:]
warnings.filters[:] = builtins.kept_filters
%reset -f
"""
"""A new kernel would import the same libraries again: of what ran before it keeps nothing else."""
MEASURED = """
from profiler.checks import spot_check
from tests.few_cells import few_cells, given
fewer = few_cells()
fewer.__enter__()
spot_check.run_requests = given(spot_check.run_requests, repeats=1)
"""
"""Notebooks 1 and 5 measure: what they show does not depend on how often."""
SIMULATED = """
import simulator.check, simulator.serving
from tests.few_cells import given
simulator.check.run_checks = given(simulator.check.run_checks, tokens=500)
simulator.serving.Scenario = given(simulator.serving.Scenario, requests=20)
"""
"""Nor what notebooks 3 and 4 draw on how many requests and tokens that is of."""
FEWER = {"1": MEASURED, "3": SIMULATED, "4": SIMULATED, "5": MEASURED}
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def test_there_are_five_and_the_readme_links_them() -> None:
    assert [p.stem[0] for p in NOTEBOOKS] == list("12345")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(notebooks/{p.name})" in readme for p in NOTEBOOKS)


@by_name
def test_it_is_kept_executed_and_tells_nothing_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    complete(notebook, path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    # What would differ at every run without telling a reader anything.
    assert all(cell.metadata == {} for cell in code)
    assert set(notebook.metadata.language_info) == {"name"}
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/| at 0x[0-9a-f]{6}", text)


@by_name
def test_it_imports_the_public_api_alone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(from|import) (policies|traces|profiler|simulator|commands)\b", text)


def test_they_are_modest() -> None:
    assert sum(p.stat().st_size for p in NOTEBOOKS) < 1.5e6


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    manager = KernelManager(kernel_name="python3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        manager.start_kernel(cwd=str(ROOT))
    yield manager
    manager.shutdown_kernel(now=True)


@by_name
def test_it_runs_from_a_clean_kernel(path: Path, kernel: KernelManager) -> None:
    if not any(r.name == "bundled" for r in recordings()):
        pytest.skip("needs the bundled recording in traces/recorded/bundled")
    pytest.importorskip("torch", reason="notebooks 1 and 5 run real models")
    fewer = FEWER.get(path.stem[0], "")
    complete(executed(path, CLEAN + fewer, kernel), path)


def complete(notebook: Any, path: Path) -> None:
    """That a notebook has all its outputs, and no errors or warnings among them."""
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"], (
        "a reader would see warnings"
    )
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 1
    text = "\n".join(str(o.get("data", {}).get("text/plain", "")) for o in outputs)
    # What the notebook set out to show.
    expected = {
        "1": "oracle",
        "2": "independent",
        "3": "best gamma by replay",
        "4": "goodput",
        # Real rounds are the replayed ones, under every policy.
        "5": "{'autoregressive': 0, 'fixed:gamma=4': 0, 'mine': 0}",
    }
    assert expected[path.stem[0]] in text
