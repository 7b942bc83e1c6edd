"""Published GPU measurements and the prediction of each from a part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simulator.bootstrap import Interval
from simulator.published import published_rows

SAME = 0.02
"""Speeds this close are not told apart: no order of theirs is right or wrong."""


class Evidence(NamedTuple):
    """One prediction."""

    study: str
    given: str
    """Data that the prediction was made from; nothing else of the study entered it."""
    quantity: str
    predicted: float
    measured: float
    error: float
    low: float | None = None
    high: float | None = None
    """The interval predicted, where there is one."""
    sign_right: bool | None = None
    """True if it is on the right side of plain decoding; None if that says nothing."""
    rank_right: bool | None = None
    """True if it stands right among the other settings of the study; None likewise."""


def evidence(
    study: str, given: str, quantity: str, predicted: float | Interval, measured: float,
    plain: float | None = None,
) -> Evidence:  # fmt: skip
    """Return a row with its error, and with its sign if `plain` decoding's value is given."""
    low = high = sign = None
    if isinstance(predicted, Interval):
        low, high, predicted = predicted.low, predicted.high, predicted.value
    if plain is not None and abs(measured / plain - 1) > SAME:
        sign = (predicted > plain) == (measured > plain)
    return Evidence(
        study, given, quantity, predicted, measured, predicted / measured - 1, low, high, sign
    )


def ranked(rows: Sequence[Evidence], known: Sequence[float] = ()) -> list[Evidence]:
    """Return the rows with their rank judged among themselves and `known` measured values."""
    return [row._replace(rank_right=_rank(row, rows, known)) for row in rows]


def _rank(row: Evidence, rows: Sequence[Evidence], known: Sequence[float]) -> bool | None:
    others = [(r.predicted, r.measured) for r in rows if r is not row]
    others += [(value, value) for value in known]
    apart = [(p, m) for p, m in others if abs(row.measured / m - 1) > SAME]
    if not apart:
        return None
    return all((row.predicted > p) == (row.measured > m) for p, m in apart)


class Record(NamedTuple):
    """The errors of many rows, and how often interval, sign and rank are right."""

    rows: int
    median: float
    worst: float
    """Signed."""
    covered: int
    intervals: int
    sign_right: int
    signs: int
    rank_right: int
    ranks: int


def record(rows: Sequence[Evidence]) -> Record:
    """Return the record of the rows."""
    errors = np.array([row.error for row in rows])
    within = [r.low <= r.measured <= r.high for r in rows if r.low is not None and r.high]
    signs = [r.sign_right for r in rows if r.sign_right is not None]
    ranks = [r.rank_right for r in rows if r.rank_right is not None]
    return Record(
        len(rows), float(np.median(np.abs(errors))), float(errors[np.abs(errors).argmax()]),
        sum(within), len(within), sum(signs), len(signs), sum(ranks), len(ranks),
    )  # fmt: skip


def by_study(rows: Sequence[Evidence]) -> Mapping[tuple[str, str], Record]:
    """Return the record of every study and kind of given information, in order of appearance."""
    groups: dict[tuple[str, str], list[Evidence]] = {}
    for row in rows:
        groups.setdefault((row.study, kind_of(row.given)), []).append(row)
    return {name: record(group) for name, group in groups.items()}


def kind_of(given: str) -> str:
    """Return the kind of the given information: the text before its colon."""
    return given.partition(":")[0]


class Note(NamedTuple):
    """A remark on the rows of some studies: ``study`` and ``given`` are parts of their names."""

    study: str
    given: str
    says: str

    def on(self, study: str, given: str) -> bool:
        """Return True if it is about these rows."""
        return self.study in study and self.given in given


LARGE = 0.2
"""An error beyond this has a note."""
NOTES = tuple(Note(**row) for row in published_rows("unexplained"))
"""Explanations of the largest errors, and what is not explained."""


def notes_on(rows: Sequence[Evidence]) -> list[str]:
    """Return the notes on these rows, each after the parts of the names it is about."""
    groups = [*by_study(rows)]
    return [
        f"{note.study} ({note.given or 'all rows'}): {note.says}"
        for note in NOTES if any(note.on(*group) for group in groups)
    ]  # fmt: skip
