"""What commands import: slow libraries where they are used, not wherever something else is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SLOW = {"scipy", "matplotlib", "torch", "transformers", "joblib", "sklearn", "dask"}


@pytest.mark.parametrize(
    "module", ["simulator", "simulator.serving", "simulator.whatif", "traces", "commands.tune"]
)
def test_no_slow_library_comes_with_a_package(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not {name.partition(".")[0] for name in done.stdout.split()} & SLOW
