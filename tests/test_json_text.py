"""JSON and text of users and other programs: one parser, within bounds, one line for the rest."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from policies.json_text import MOST_DEPTH, MOST_DIGITS, JSONError, parse_json
from policies.registry import parse_policy
from tests.conftest import ROOT
from traces.errors import FileError
from traces.store.text import json_lines, read_json, read_object, read_text

PACKAGES = ("policies", "traces", "profiler", "simulator", "commands")


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested(100_000), "nested deeper than 64 levels"),
        (nested(MOST_DEPTH + 1), "nested deeper than 64 levels"),
        ('{"a":' * (MOST_DEPTH + 1) + "1" + "}" * (MOST_DEPTH + 1), "nested deeper"),
        ("9" * 5000, "a number of 5000 digits, more than 40"),
        ('[1, {"a": -' + "1" * (MOST_DIGITS + 1) + "}]", "digits, more than 40"),
        (r'"\ud800"', "half a surrogate pair"),
        (b"\xff", "not UTF-8"),
        ('{"a": 1', "line 1 column"),
        ("", "line 1 column 1"),
    ],
)
def test_what_is_beyond_the_bounds_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(JSONError, match=message):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (nested(2), [[]]),
        ("1" * MOST_DIGITS, int("1" * MOST_DIGITS)),
        ("0." + "1" * 5000, pytest.approx(1 / 9)),
        (r'"\ud83d\ude00"', "\U0001f600"),
        ('"' + "9" * 5000 + '"', "9" * 5000),
        ('"' + "[" * 5000 + '"', "[" * 5000),
        (b'{"a": null}', {"a": None}),
    ],
)
def test_what_is_within_the_bounds_is_read(text: str | bytes, value: Any) -> None:
    assert parse_json(text) == value


def test_the_deepest_document_is_read() -> None:
    parse_json(nested(MOST_DEPTH))


def test_every_place_that_reads_json_reads_it_so() -> None:
    """`json.loads` is called in `policies/json_text.py` alone.

    And in the child process that runs code: it has the standard library alone, and reads what
    draftsim wrote.
    """
    found = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
        if "json" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in ("loads", "load")
        and isinstance(node.value, ast.Name) and node.value.id == "json"
    ]  # fmt: skip
    assert found == ["policies/json_text.py", "profiler/checks/sandboxed.py"]


def test_a_text_is_read_whole_or_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(b"\xef\xbb\xbf[1,\r\n2]\r")
    assert read_text(file) == "[1,\n2]\n"
    assert read_json(file) == [1, 2]
    for content, message in (
        (b'{"a": "\xe9"}', "file.json: is not text in UTF-8"),
        (nested(1000).encode(), "file.json: is not JSON .nested deeper than 64 levels"),
        (b"[]", "file.json: holds a list, expected an object: mend it"),
    ):
        file.write_bytes(content)
        with pytest.raises(FileError, match=message):
            read_object(file, "mend it")
    for path, message in (
        (tmp_path, "is a directory"), (tmp_path / "none", "no such file"),
        (Path("a\0b"), "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(FileError, match=message):
            read_text(path)


def test_a_file_that_does_not_end_is_not_read_for_ever(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="/dev/zero: is larger than 3,000,000 bytes"):
        read_text("/dev/zero", 3_000_000)
    file = tmp_path / "file"
    file.write_bytes(b"x" * 11)
    assert len(read_text(file, 11)) == 11
    with pytest.raises(FileError, match="is larger than 10 bytes"):
        read_text(file, 10)


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    """A line separator of Unicode within a text begins no line."""
    file = tmp_path / "file.jsonl"
    file.write_text('{"a": "x\u2028y"}\n\n3\n', encoding="utf-8")
    assert list(json_lines(file)) == [(1, {"a": "x\u2028y"}), (3, 3)]
    file.write_text("1\n\n{\n")
    with pytest.raises(FileError, match=r"file.jsonl line 3: is not JSON \(.*\): mend it"):
        list(json_lines(file, remedy="mend it"))


def test_a_policys_parameters_are_read_so_too() -> None:
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        parse_policy(f"batch-table:table={nested(100_000)}")
