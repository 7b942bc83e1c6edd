"""A bare machine with a GPU: its tests are collected without the other dependencies."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

HIDDEN = (
    "simpy", "typer", "sklearn", "joblib", "jinja2", "dask", "distributed", "plotly",
    "matplotlib", "sacrebleu", "simulator", "commands", "draftsim",
)  # fmt: skip


def test_gpu_tests_are_collected_on_a_bare_machine() -> None:
    code = (
        f"import sys, pytest; sys.modules.update(dict.fromkeys({HIDDEN!r}))\n"
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/test_graphs.py::" in done.stdout
    assert "error" not in done.stdout.lower()
