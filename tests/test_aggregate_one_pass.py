"""Public runs of vLLM's threads on one-pass drafters, predicted from some of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def printed() -> str:
    """The text that the benchmark prints."""
    import contextlib
    import io

    from benchmarks import one_pass

    if not one_pass.TABLES.is_dir():
        pytest.skip("needs the public tables in ../shared/tables, next to the checkout")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        one_pass.main()
    return text.getvalue()


def errors(printed: str, title: str) -> list[float]:
    """Return the errors of the rows below a title that were not given."""
    part = printed[printed.index(f"{title}:") :].partition("|error|")[0]
    return [abs(float(error)) for error in re.findall(r"([-+][\d.]+)%$", part, re.MULTILINE)]


def test_both_drafters_runs_are_predicted_from_part_of_them(
    printed: str, shared_tables: Path
) -> None:
    assert shared_tables.is_dir()
    for title, count, median in (
        ("52362, none", 4, 5), ("52362, fixed", 4, 12), ("52362, adaptive", 5, 15),
        ("32628, EAGLE-3", 20, 8),
    ):  # fmt: skip
        found = errors(printed, title)
        assert len(found) == count, title
        assert np.median(found) < median, title


def test_one_pass_gains_as_the_thread_says(printed: str) -> None:
    """Within 6 points at each of four loads; and its time per token hardly depends on K."""
    pairs = re.findall(r"predicted ([-+\d.]+)%, published ([-+\d.]+)%", printed)
    assert len(pairs) == 4
    assert all(abs(float(mine) - float(theirs)) < 6 for mine, theirs in pairs)
    found = re.findall(r"EAGLE-3 ([\d.]+), one pass predicted ([\d.]+)", printed)
    eagle3, at_once = np.array(found, dtype=float).T
    assert len(found) == 6
    assert at_once.max() / at_once.min() < 0.5 * (1 + eagle3.max() / eagle3.min())
