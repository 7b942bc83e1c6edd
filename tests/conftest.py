"""Shared fixtures: where public data lies, and the top-level packages on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


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
