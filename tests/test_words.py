"""Words and openings that the project's prose does not use, counted per folder.

A count may only fall: whoever mends prose lowers its line in `LEFT`. Messages, docstrings and
comments of Python files count, and the text of pages outside code.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

RULED_OUT = {
    "behind": "after",
    "beside": "next to, compared with",
    "so many": "this many, that many",
    "anew": "again",
    "whoever": "a noun",
    "nobody's": "a noun",
    "in the place of": "instead of",
    "as of": "as in, see",
    "the very": "the same, exactly the",
    "is none": "say what is",
    "stands? for": "is, means",
    "what pays": "what gives a speedup",
}
"""Words that no prose uses, and what to write instead."""
OF_PAGES = {
    "pays": "gives a speedup, costs",
    "arms?": "run",
    "bench": "benchmark",
    "ledgers?": "a noun",
    "pieces?": "part, text, amount",
    "settling": "say what it is",
    "stands": "is",
    "walks?": "replay",
    "lanes?": "setting",
    "slabs?": "a noun",
    "tapes?": "a noun",
    "stations?": "a noun",
}
"""Private words that pages do not use either; `docs/terms.md` has the words that they use."""
OPENINGS = re.compile(r"(?:Of|What|Whether|So|Those|Who|Whose|Whom)\b")
"""Words that no docstring begins with: a verb in the imperative or a noun does."""
PARTS = re.compile(r"(?:\n *\n|:\n) *(?=((?:Of|What|Whether|Who|Whose|Whom|How many)\b))")
"""Words that no later paragraph of a docstring begins with, nor what it says of a parameter."""

NO_VERB = re.compile(
    r"(?:The|An?|One|All|Every|Both|Its?|Each|As|In|Per|How|Where|By|Another|[A-Z][a-z]+[^\Ws]s|"
    r"[(`\[{$].*)(?!\w)"
)
"""Beginnings that no docstring of a function has, which begins with a verb in the imperative."""
PERCENT = re.compile(r"(?<=[\d}]) %(?![a-zA-Z(%}])")
"""A percentage with a blank before its sign: 95% is written without, as the program prints it."""

CODE = re.compile(r"`[^`\n]+`|^ +\w+(?:, \w+)*:$", re.M)
"""Code in a string: an expression in backticks, or the parameters that a paragraph is about."""

FOLDERS = ("policies", "traces", "profiler", "simulator", "commands", "docs", "benchmarks", "tests")
LEFT: dict[str, int] = {}
"""Folders that are not clean yet: words and openings left. A number may only fall."""


def pattern(words: dict[str, str]) -> re.Pattern[str]:
    """Match these words, capitalised or not, but not "there is none" or names (Spec-Bench)."""
    either = "|".join(f"[{w[0].upper()}{w[0]}]{w[1:]}" for w in words)
    return re.compile(rf"(?<!\b[Tt]here )(?<!-)\b(?:{either})\b")


IN_CODE, IN_PAGES = pattern(RULED_OUT), pattern({**RULED_OUT, **OF_PAGES})


class Found(NamedTuple):
    """A Python file's findings, each with its line."""

    words: list[str]
    """Ruled-out words and openings."""
    no_verbs: list[str]
    """Functions whose docstrings begin with no verb."""
    blanks: list[str]
    """Percentages with a blank."""


@cache
def read(path: Path) -> Found:
    """Parse a Python file once for all tests."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    prose = [(t.start[0], t.string) for t in tokens if t.type in PROSE]
    return Found(
        [*ruled_out(path, tree, tokens)], [*without_verb(path, tree)], [*with_blanks(path, prose)]
    )


def of_python(path: Path) -> list[str]:
    return read(path).words


def ruled_out(path: Path, tree: ast.Module, tokens: Sequence[tokenize.TokenInfo]) -> Iterator[str]:
    """Yield each ruled-out word or opening of a Python file, with its line."""
    formatted = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = " " not in node.value  # a column, a phase
            prose = CODE.sub(lambda m: "_" * len(m[0]), node.value)
            for word in () if names else IN_CODE.finditer(prose):
                line = node.lineno + (
                    prose[: word.start()].count("\n") if id(node) not in formatted else 0
                )
                yield f"{path.relative_to(ROOT)}:{line}: {word[0]}"
        # A string by itself is a docstring: of a module, a class, a function or an attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            said = node.value.value
            if not isinstance(said, str):
                continue
            begins = [OPENINGS.match(said.lstrip()), *PARTS.finditer(said)]
            for opening in filter(None, begins):
                line = node.lineno + said[: opening.end()].count("\n")
                word = opening[opening.lastindex or 0]
                yield f"{path.relative_to(ROOT)}:{line}: begins with {word!r}"
        if isinstance(node, ast.keyword) and node.arg == "help":  # of an option
            said = node.value.value if isinstance(node.value, ast.Constant) else ""
            if opening := OPENINGS.match(str(said)):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: help begins with {opening[0]!r}"
    for token in tokens:
        if token.type == tokenize.COMMENT:
            for word in IN_CODE.finditer(token.string):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}: {word[0]}"


def of_page(path: Path) -> Iterator[str]:
    """Each ruled-out word of a page, outside code, with its line."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]+`|^\{\{.*\}\}$", "", text, flags=re.M)
    for word in IN_PAGES.finditer(text):
        yield f"{path.relative_to(ROOT)}:{text[: word.start()].count(chr(10)) + 1}: {word[0]}"


def of_notebook(path: Path) -> Iterator[str]:
    """Each ruled-out word of a notebook's text, with its cell."""
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"], 1):
        if cell["cell_type"] == "markdown":
            for word in IN_PAGES.finditer(re.sub(r"`[^`\n]+`", "", "".join(cell["source"]))):
                yield f"{path.relative_to(ROOT)}, cell {number}: {word[0]}"


READERS = {".py": of_python, ".md": of_page, ".ipynb": of_notebook}
"""Functions that look for words in a file, by suffix."""


def found_in(folder: str) -> list[str]:
    """Every finding of a top folder, or of the files next to them where it is ``.``."""
    root = ROOT / folder
    files = sorted(root.glob("*") if folder == "." else root.rglob("*"))
    files = [p for p in files if p.suffix in READERS and p != Path(__file__).resolve()]
    return [f for p in files for f in READERS[p.suffix](p)]


@pytest.mark.parametrize("folder", [*FOLDERS, "notebooks", "."])
def test_ruled_out_words_only_become_fewer(folder: str) -> None:
    found = found_in(folder)
    most = LEFT.get(folder, 0)
    said = "\n".join(found[-40:])
    assert len(found) <= most, f"{len(found)} in {folder}, at most {most}:\n{said}"


def without_verb(path: Path, tree: ast.Module) -> Iterator[str]:
    """Each function whose docstring begins with no verb; a property's is a noun phrase."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            said = ast.get_docstring(node) or ""
            if NO_VERB.match(said) and "property" not in marks and ".setter" not in marks:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {said.splitlines()[0]}"


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f != "tests"])
def test_docstrings_of_functions_begin_with_a_verb(folder: str) -> None:
    assert [s for p in sorted((ROOT / folder).rglob("*.py")) for s in read(p).no_verbs] == []


def with_blanks(path: Path, parts: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Each percentage with a blank in texts that begin at a line of a file."""
    for line, said in parts:
        for found in PERCENT.finditer(said):
            at = line + said.count("\n", 0, found.start())
            yield f"{path.relative_to(ROOT)}:{at}: {said[max(found.start() - 20, 0) : found.end()]}"


PROSE = {
    getattr(tokenize, name) for name in ("STRING", "COMMENT", "FSTRING_MIDDLE")
    if hasattr(tokenize, name)
}  # fmt: skip
"""Kinds of token that hold words."""


@pytest.mark.parametrize("folder", [*FOLDERS, "notebooks", "."])
def test_percentages_are_written_without_a_blank(folder: str) -> None:
    root = ROOT / folder
    files = sorted(root.glob("*") if folder == "." else root.rglob("*"))
    kinds = (".py", ".md", ".html", ".js", ".ipynb")
    own = Path(__file__).resolve()
    found = []
    for path in (p for p in files if p.suffix in kinds and p != own):
        text = [(1, path.read_text(encoding="utf-8"))]
        found += read(path).blanks if path.suffix == ".py" else with_blanks(path, text)
    assert found == []


def test_no_allowance_is_kept_for_nothing() -> None:
    assert set(LEFT) <= {*FOLDERS, "."}
    assert all(LEFT.values())
