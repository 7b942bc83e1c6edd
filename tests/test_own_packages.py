"""Other distributions own our packages' names too: the program notices before it imports one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import draftsim
from tests.conftest import ROOT

STRANGE = "raise RuntimeError('imported')\n"


def started(*path: Path) -> subprocess.CompletedProcess[str]:
    """``draftsim --version`` with these folders first on the path."""
    code = "import draftsim, sys; sys.argv[1:] = ['--version']; draftsim.main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.invariant(15)
@pytest.mark.parametrize("name", draftsim.PACKAGES)
def test_a_package_of_another_earlier_on_the_path_is_refused(name: str, tmp_path: Path) -> None:
    strange = tmp_path / name / "__init__.py"
    strange.parent.mkdir()
    strange.write_text(STRANGE)
    done = started(tmp_path, ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"draftsim: `import {name}` finds {strange}, not draftsim's own")
    assert "virtual environment of its own" in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_installed_over_ours_is_refused(tmp_path: Path) -> None:
    """Two distributions with a package of one name share its folder; the later one's files stay."""
    shutil.copy(ROOT / "draftsim.py", tmp_path)
    for name in draftsim.PACKAGES:
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", tmp_path / name)
    strange = tmp_path / "traces" / "__init__.py"
    strange.write_text(STRANGE)
    done = started(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"draftsim: {strange} is another distribution's")


def test_a_folder_of_data_with_such_a_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    done = started(tmp_path, ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("draftsim")
