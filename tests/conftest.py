"""Shared fixtures: the command line, where public data lies, and the packages on the path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


class Ran(NamedTuple):
    """How a command ended, and what it wrote to standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows it printed as JSON."""
        assert self.code == 0, self.err
        document = json.loads(self.out)
        assert document["schema"] == 1
        results: list[dict[str, Any]] = document["results"]
        return results


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``draftsim ARGUMENTS...`` in this process."""
    import draftsim  # only now: the packages are on the path

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["draftsim", *map(str, arguments)])
        code = 0
        try:
            draftsim.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data kept beside the checkout; tests that need it skip where it is absent."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs the public data folder ../shared/data beside the checkout")
    return path


@pytest.fixture(scope="session")
def shared_tables() -> Path:
    """The tables of the four source papers, kept beside the checkout."""
    path = ROOT.parent / "shared" / "tables"
    if not path.is_dir():
        pytest.skip("needs the papers' tables in ../shared/tables beside the checkout")
    return path
