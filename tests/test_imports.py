"""Imports of the commands: slow libraries are imported only where they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SLOW = {"scipy", "matplotlib", "torch", "transformers", "joblib", "sklearn", "dask"}


@pytest.mark.parametrize(
    "modules",
    [
        ("simulator", "simulator.whatif.sweep.run", "traces", "commands.tune"),
        ("simulator.serving",),
    ],
    ids=str,
)
def test_no_slow_library_comes_with_a_package(modules: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {name.partition(".")[0] for name in done.stdout.split()} & SLOW


def test_no_optimiser_is_loaded_where_something_is_read_beyond_the_cells() -> None:
    """Prompts of the default recording are longer than its latencies know, and need the fit."""
    asked = ["simulate", "--trace", "smollm2-cpu", "--policy", "rate-optimal", "--prefill"]
    code = (
        f"import sys, draftsim\nsys.argv = ['draftsim', *{[*asked, '--json', '-']}]\n"
        "from traces.latency import interpolate\n"
        "fit, fitted = interpolate.non_negative, []\n"
        "interpolate.non_negative = lambda *given: fitted.append(1) or fit(*given)\n"
        "try:\n    draftsim.main()\n"
        "except SystemExit:\n"
        "    print(bool(fitted), 'scipy.optimize' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "True False"


def test_no_slow_library_is_loaded_to_say_that_a_folder_is_no_run(tmp_path: Path) -> None:
    kinds = [[], ["--source", "pld"], ["--batch", "2"], ["--verify", "csd"]]
    code = (
        f"import sys, draftsim\nfor kind in {kinds}:\n"
        f"    sys.argv = ['draftsim', 'validate', '--run', {str(tmp_path)!r}, *kind]\n"
        "    try:\n        draftsim.main()\n"
        "    except SystemExit as stop:\n        print(stop.code, file=sys.stderr)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said, codes = done.stderr.splitlines()[::2], done.stderr.splitlines()[1::2]
    assert codes == ["2"] * len(kinds)
    assert all(line.startswith(f"draftsim: {tmp_path} is not a run folder") for line in said)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & SLOW
    assert not list(tmp_path.iterdir())
