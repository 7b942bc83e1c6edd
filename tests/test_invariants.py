"""Lists of tests name tests that exist: the page of invariants, and `tests/slow.txt`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT, SLOW
from tests.slow import slow_tests

PAGE = ROOT / "docs" / "invariants.md"
NUMBER = re.compile(r"^## (\d+)\. \S", re.MULTILINE)
TEST = re.compile(r"^\* `(tests/\w+\.py)::(\w+)`$", re.MULTILINE)


def marked() -> Iterator[tuple[int, str]]:
    """Every number that a test is marked with, and the test."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.invariant" in text else ():
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                text = ast.unparse(decorator)
                if text.startswith("pytest.mark.invariant"):
                    assert isinstance(decorator, ast.Call), f"{path}: {text} names no number"
                    for argument in decorator.args:
                        yield ast.literal_eval(argument), f"{path.name}::{node.name}"


def on_the_page() -> Iterator[tuple[int, str]]:
    """Every number on the page, and the tests below it."""
    parts = NUMBER.split(PAGE.read_text(encoding="utf-8"))[1:]
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        for file, name in TEST.findall(text):
            yield int(number), f"{file.removeprefix('tests/')}::{name}"


def test_numbers_are_in_order_and_each_is_held() -> None:
    numbers = [int(number) for number in NUMBER.findall(PAGE.read_text(encoding="utf-8"))]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {number for number, _ in on_the_page()} == set(numbers)


def test_page_and_marks_name_the_same_tests() -> None:
    page, tests = list(on_the_page()), list(marked())
    assert len(page) == len(set(page)) > 50
    assert set(page) - set(tests) == set(), "the page names tests that are not so marked"
    assert set(tests) - set(page) == set(), "marked tests that the page does not name"
    lines = re.findall(r"^\* .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == len(page), "a line of the page is no test"


def test_every_test_that_is_left_out_exists() -> None:
    """A renamed test would be run by `make test` again, and its old name stay."""
    assert SLOW
    for name in SLOW:
        path, _, function = name.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\b", text, re.M), name


def test_the_slow_ones_are_read_from_what_pytest_prints() -> None:
    lines = """
12.05s call     tests/test_a.py::test_long[closed:1]
1.00s setup    tests/test_a.py::test_starts
0.99s call     tests/test_b.py::test_short
3.10s teardown tests/test_b.py::test_other
5 passed in 20.1s
"""
    found = ["tests/test_a.py::test_long", "tests/test_a.py::test_starts"]
    assert slow_tests(lines.splitlines()) == found
