"""How `docs.made` reads the code: docstrings, the strings after assignments, Markdown tables."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; bars and line ends of the cells are taken care of."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(c).replace("|", r"\|").replace("\n", " ") for c in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def code(name: object) -> str:
    """Return `name` as code."""
    return f"`{name}`"


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return as_markdown(text.partition("\n")[0])


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the strings after the fields of a class."""
    (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    return strings_behind(body.body)


def string_behind(module: str, name: str) -> str:
    """Return the string after an assignment of a module."""
    found = importlib.import_module(module)
    return strings_behind(ast.parse(inspect.getsource(found)).body)[name]


def strings_behind(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Return names assigned or annotated, with the strings that follow them."""
    found = {}
    for one, following in pairwise(body):
        if not isinstance(one, ast.Assign | ast.AnnAssign):
            continue
        target = one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
        if isinstance(target, ast.Name) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[target.id] = as_markdown(inspect.cleandoc(value.value))
    return found


def as_markdown(text: str) -> str:
    """Return a docstring's double backticks as single ones."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)
