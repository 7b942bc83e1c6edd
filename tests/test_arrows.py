"""The import rules: policies <- traces <- {profiler, simulator} <- commands; no clock below."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

MAY = {
    "policies": {"policies"},
    "traces": {"policies", "traces"},
    "profiler": {"policies", "traces", "profiler"},
    "simulator": {"policies", "traces", "simulator"},
    "commands": {"policies", "traces", "profiler", "simulator", "commands"},
}
CLOCKS = {"time", "datetime", "timeit", "sched", "asyncio", "threading", "simpy"}
MODELS = {"torch", "transformers", "tokenizers", "safetensors", "vllm"}


class Parsed(NamedTuple):
    """A file's imports and classes, wherever in it they are."""

    modules: set[str]
    """Full names of what it imports: modules, where a name is one."""
    classes: list[str]
    """Classes at its top."""


@cache
def parsed(path: Path) -> Parsed:
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if is_module(name)} or {str(node.module)}
    return Parsed(found, [node.name for node in tree.body if isinstance(node, ast.ClassDef)])


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a file imports."""
    return {name.partition(".")[0] for name in parsed(path).modules}


def modules_imported(path: Path) -> set[str]:
    """Full names of the modules of ours that a file imports."""
    return {name for name in parsed(path).modules if name.partition(".")[0] in MAY}


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def room(name: str) -> str:
    """The folder of a module, dotted; of a package, itself."""
    return name if ROOT.joinpath(*name.split(".")).is_dir() else name.rpartition(".")[0]


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.invariant(14)
@pytest.mark.parametrize("package", MAY)
def test_imports_follow_the_arrows(package: str) -> None:
    for path in files(package):
        assert imported(path) & MAY.keys() <= MAY[package], path
        assert not imported(path) & {"benchmarks", "tests"}, path
        if package in ("policies", "traces", "simulator"):
            assert not imported(path) & MODELS, path


def test_no_class_name_stands_for_two_things() -> None:
    places = defaultdict(list)
    for path in (path for package in MAY for path in files(package)):
        for name in parsed(path).classes:
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.invariant(4)
def test_policies_know_no_clock() -> None:
    for path in files("policies"):
        names = imported(path)
        assert not names & CLOCKS, path
        assert names - set(sys.stdlib_module_names) <= {"policies", "numpy"}, path


@pytest.mark.invariant(14)
def test_rooms_beside_each_other_form_no_circle() -> None:
    """A folder and a folder inside it are one room here: the outer one opens the inner."""
    edges: dict[str, set[str]] = defaultdict(set)
    for package in MAY:
        for path in files(package):
            here = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for name in modules_imported(path):
                there = room(name)
                if not (f"{here}.".startswith(f"{there}.") or f"{there}.".startswith(f"{here}.")):
                    edges[here].add(there)
    assert len(edges) > 20
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


@pytest.mark.invariant(14)
def test_files_form_no_circle() -> None:
    """Imports within functions and for types count, too."""
    edges: dict[str, set[str]] = {}
    for package in MAY:
        for path in files(package):
            here = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            edges[here] = modules_imported(path) - {here}
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_what_engines_share_names_none() -> None:
    """An engine's own folder alone knows it, so that another engine is one new folder."""
    engines = ROOT / "profiler" / "engines"
    names = [path.parent.name for path in engines.glob("*/__init__.py")]
    assert names
    for path in engines.glob("*.py"):
        text = path.read_text(encoding="utf-8").lower()
        assert not [name for name in names if name in text], path
