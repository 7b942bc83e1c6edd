"""A bare machine with a GPU: the suite and the GPU's tests do without the other dependencies."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

HIDDEN = (
    "simpy", "typer", "sklearn", "joblib", "jinja2", "dask", "distributed", "plotly",
    "matplotlib", "sacrebleu", "simulator", "commands", "draftsim",
)  # fmt: skip


def test_stages_and_gpu_tests_need_nothing_but_the_libraries_named() -> None:
    code = (
        f"import sys, pytest; sys.modules.update(dict.fromkeys({HIDDEN!r}))\n"
        "from profiler.suite import unpack, __main__\n"
        "from profiler.suite import latency_stage\n"
        "from profiler.suite import forced_stage, trained_stage\n"
        "print('stages imported')\n"
        "left = pytest.main(['-m', 'gpu', '--collect-only', '-q', '-p', 'no:cacheprovider'])\n"
        f"loaded = [m for m in {HIDDEN!r} if sys.modules[m] is not None]\n"
        "assert not loaded, loaded\n"
        "sys.exit(left)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}  # ours alone
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=environment, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "stages imported" in done.stdout
    assert "tests/test_graphs.py::" in done.stdout
    assert "error" not in done.stdout.lower()
