"""Text of the bundled pair: the running Python's standard library, in documents.

Every file becomes many short documents (a function, a class head, a run of constants, a
section of reference text), each ended by the end-of-sequence token in training. Short
documents are the point: a small model trained on whole files never sees an end, so its greedy
text falls into a loop; trained on documents it learns to stop.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CATEGORIES = (
    "reference",
    "docstring",
    "function",
    "method",
    "class",
    "header",
    "charmap",
    "table",
)
# Tests are stripped from many Python builds and idlelib is optional: leaving them out keeps the
# text the same wherever the same Python version is installed.
_SKIPPED_DIRS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "idlelib", "lib2to3", "turtledemo"}
)
_CHARMAP = re.compile(r"encodings/(?!aliases)")
_HELD_OUT_ONE_IN = 8  # one file (or reference topic) in eight is held out
_MIN_CHARS = 60  # shorter documents teach little but the end token
_SECTION_CHARS = 900  # reference text and tables are cut to about this size
_MIN_TABLE_LINES = 12  # an assignment this long is a table, not a constant
_PROMPT_TOKENS = (48, 128)  # least and most
_MIN_LEFT_TOKENS = 24  # of a document after the prompt, so that there is something to continue


@dataclass(frozen=True)
class Document:
    """One training document: its text, its category (of CATEGORIES) and the file it is from."""

    category: str
    source: str
    text: str


def stable_hash(text: str) -> int:
    """Return a 32-bit hash of `text` that is the same in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def is_held_out(source: str) -> bool:
    """Return True if documents of `source` (path, or path#topic) stay out of training."""
    return stable_hash(source) % _HELD_OUT_ONE_IN == 0


LIBRARY = Path(sysconfig.get_paths()["stdlib"])
"""Folder of the running Python's standard library."""


def load_documents(roots: Iterable[Path] = (LIBRARY,)) -> tuple[list[Document], list[Document]]:
    """Return the (training, held-out) documents of the Python sources in some folders, in order.

    A text that occurs twice is kept once, and a held-out text that also occurs in training is
    dropped.

    Raises FileNotFoundError where the folders hold no Python source.
    """
    train: dict[str, Document] = {}
    held_out: dict[str, Document] = {}
    for root in roots:
        for path in sorted(_sources(root)):
            for category, source, part in _file_parts(path, path.relative_to(root).as_posix()):
                text = "\n".join(map(str.rstrip, part.splitlines())).strip("\n")
                if len(text) >= _MIN_CHARS:
                    split = held_out if is_held_out(source) else train
                    split.setdefault(text, Document(category, source, text))
    if not train:
        raise FileNotFoundError(f"no Python source under {root}")
    return list(train.values()), [d for text, d in held_out.items() if text not in train]


def _sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of `root`; folders that are left out are not walked through."""
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED_DIRS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _file_parts(path: Path, source: str) -> Iterator[tuple[str, str, str]]:
    """Yield (category, source, text) of each part of one file; none where this Python cannot parse
    it.

    In the language reference each topic is its own source, so that topics are split, not the file.
    """
    try:
        code = path.read_text(encoding="utf-8").expandtabs()
        module = ast.parse(code)
    except (SyntaxError, UnicodeDecodeError):
        return
    if source != "pydoc_data/topics.py":
        for category, text in _module_parts(module, code.splitlines()):
            # Tables of characters are by far the most predictable text there is here.
            charmap = category == "table" and _CHARMAP.match(source)
            yield "charmap" if charmap else category, source, text
        return
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            for topic, text in ast.literal_eval(statement.value).items():
                for section in _sections(text, separator="\n\n"):
                    yield "reference", f"{source}#{topic}", section


def _module_parts(module: ast.Module, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (category, text) of each top-level part; a comment goes with what is below it."""
    header: list[str] = []  # statements that are no table, function or class, up to the next one
    end = 0
    for node in module.body:
        start, end = end, node.end_lineno or node.lineno
        text = "\n".join(lines[start:end])
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        table = isinstance(node, ast.Assign) and end - node.lineno >= _MIN_TABLE_LINES
        definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not (docstring or table or definition):
            header.append(text)
            continue
        yield "header", "\n".join(header)
        header = []
        if isinstance(node, ast.ClassDef):
            yield from _class_parts(node, lines, start)
        elif table:
            yield from (("table", section) for section in _sections(text, separator="\n"))
        elif definition:
            yield "function", text
        elif node is module.body[0]:
            body = ast.get_docstring(module) or ""
            yield from (("docstring", section) for section in _sections(body, separator="\n\n"))
    yield "header", "\n".join(header)


def _class_parts(node: ast.ClassDef, lines: list[str], start: int) -> Iterator[tuple[str, str]]:
    """Yield a class: whole where short, else its head up to the first method, then each method."""
    whole = "\n".join(lines[start : node.end_lineno])
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if len(whole) <= 2 * _SECTION_CHARS or not methods:
        yield "class", whole
        return
    # Decorators stand above the `def`; the head and each method end where the next one starts.
    starts = [min([m.lineno, *(d.lineno for d in m.decorator_list)]) - 1 for m in methods]
    yield "class", "\n".join(lines[start : starts[0]])
    for method, first in zip(methods, starts, strict=True):
        yield "method", textwrap.dedent("\n".join(lines[first : method.end_lineno]))


def _sections(text: str, separator: str) -> Iterator[str]:
    """Yield `text` cut at `separator` into runs of about _SECTION_CHARS characters."""
    section: list[str] = []
    for part in inspect.cleandoc(text).split(separator):
        section.append(part)
        if sum(map(len, section)) >= _SECTION_CHARS:
            yield separator.join(section)
            section = []
    yield separator.join(section)


def cut_prompt(text: str, encode: Callable[[str], list[int]]) -> str | None:
    """Return a document's first lines as a prompt of _PROMPT_TOKENS tokens; None if none fits.

    The length aimed at differs by document. The cut is at the end of a line, before its line
    break: there the prompt's tokens are the first tokens of the document, as in training.
    """
    shortest, longest = _PROMPT_TOKENS
    aim = shortest + stable_hash(text) % (longest - shortest + 1)
    total = len(encode(text))
    lines = text.split("\n")
    for count in range(len(lines) - 1, 0, -1):
        prompt = "\n".join(lines[:count])
        length = len(encode(prompt))
        if lines[count - 1] and shortest <= length <= min(aim, total - _MIN_LEFT_TOKENS):
            return prompt
    return None


class Known:
    """A search for texts in all of the documents."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._all = "\0".join(document.text for document in documents)
        self._lines = {line for document in documents for line in document.text.split("\n")}

    def __contains__(self, text: str) -> bool:
        # Where it occurs, its inner lines are lines there; a search of everything takes long.
        inner = text.split("\n")[1:-1]
        return all(line in self._lines for line in inner) and text in self._all


def cuts(
    documents: Sequence[Document], category: str, known: Known, encode: Callable[[str], list[int]]
) -> Iterator[str]:
    """Yield a prompt of each document of a category, none of them twice or `known`.

    A document is cut only when its turn comes.
    """
    found: set[str] = set()
    for document in documents:
        text = cut_prompt(document.text, encode) if document.category == category else None
        if text and text not in found and text not in known:
            found.add(text)
            yield text
