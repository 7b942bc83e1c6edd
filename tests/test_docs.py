"""The examples in the README and in docstrings run and say what they print."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import typer.main

from commands import app
from tests.conftest import ROOT

PACKAGES = ("commands", "policies", "profiler", "simulator", "traces")
WITH_EXAMPLES = [
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


def test_readme_examples() -> None:
    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_docstring_examples(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_readme_names_only_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    known = set(typer.main.get_command(app.app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"^draftsim ([a-z]+)", text, re.M))
    named |= set(re.findall(r"`draftsim ([a-z]+)", text))
    assert {"simulate", "profile", "validate", "check"} <= named
    assert named <= known
