"""The tests that `make test` leaves out."""

from __future__ import annotations

import re

from tests.conftest import ROOT, SLOW
from tests.slow import slow_tests


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
