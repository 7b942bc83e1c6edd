"""The printed comparison: eighty columns, whole numbers, each note once."""

from __future__ import annotations

import pytest

from commands.papers import print_papers
from simulator.papers.ours import EXPERIMENT, Row


def test_tables_fit_a_hundred_columns_and_say_each_note_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "without adaptive verification (adaptive k, fixed tau), and longer still"
    rows = [
        Row("T 1", long, "gain over SpecDecode, percent", 12345.678, 0.98765, EXPERIMENT, "a; b"),
        Row("T 1", long, "speed", None, 1.5, EXPERIMENT, "b; " + "many words " * 20, "never fires"),
        Row("T 2", "[red]row", "speed", 2.0, None, EXPERIMENT, ""),
    ]
    print_papers(rows)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 100
    for number in ("12,346", "0.988", "1.50 *", "2.00", "[red]row"):
        assert number in printed
    assert [line for line in lines if line.strip() == "2  b"] == ["2  b"]
    assert "* never fires" in printed
    assert printed.count("without adaptive") == 1
