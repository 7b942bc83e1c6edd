"""The Prometheus text format: samples of one scrape, and what counters grew by between two.

Source of the format: prometheus.io, "Exposition formats".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import NamedTuple

from traces.errors import FileError
from traces.importers.bounds import MOST_COUNT, MOST_DRAFTED, decimal, digits
from traces.store.text import read_text

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$", re.ASCII)
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:\\.|[^"\\])*)"', re.ASCII)
TOTAL = "_total"
"""The format's suffix of a counter's name."""

Counts = Mapping[tuple[str, int], int]
"""Counts by name and position; position 0 of a counter that has none."""


class Sample(NamedTuple):
    """One line of a scrape."""

    where: str
    """File and line, for error messages."""
    name: str
    labels: Mapping[str, str]
    text: str
    """The value as written."""


def read_samples(file: Path, prefix: str) -> list[Sample]:
    """The samples of `file` whose names begin with `prefix`."""
    found = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if line.startswith(prefix) and (parts := _SAMPLE.match(line)) is not None:
            name, labels, text = parts.groups()
            pairs = dict(_LABEL.findall(labels or ""))
            found.append(Sample(f"{file} line {number}", name, pairs, text))
    return found


def read_counts(
    files: Sequence[Path], prefix: str, plain: Collection[str], placed: Collection[str] = (),
    label: str = "position",
) -> Counts:  # fmt: skip
    """Counters by name (without `prefix`), summed over engines and models.

    Parameters
    ----------
    files:
        A scrape, or one before and one after, whose difference counts.
    plain, placed:
        Counters without, and with, the `label` that gives a draft position.

    Raises
    ------
    FileError
        If a value is no count, a label does not belong there, or the second scrape counts less.
    """
    if len(files) > 2:
        raise FileError(f"prometheus takes a scrape, or two, not {len(files)} files")
    counts = _count(files[-1], prefix, plain, placed, label)
    if len(files) == 2:
        before = _count(files[0], prefix, plain, placed, label)
        counts = {key: value - before.get(key, 0) for key, value in counts.items()}
        if any(value < 0 for value in counts.values()):
            raise FileError(
                f"{files[1]}: counts less than {files[0]}: name the earlier scrape first; a "
                "server that was restarted between them cannot be told"
            )
    return counts


def by_position(counts: Counts, name: str, file: Path) -> list[int]:
    """A counter's values at draft positions 0, 1, ...; empty where it is not there."""
    positions = sorted(p for n, p in counts if n == name)
    if positions != list(range(len(positions))):
        raise FileError(f"{file}: positions {positions} are not 0, 1, 2, ...")
    return [counts[name, p] for p in positions]


def _count(
    file: Path, prefix: str, plain: Collection[str], placed: Collection[str], label: str
) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for where, full, labels, text in read_samples(file, prefix):
        name = full.removeprefix(prefix).removesuffix(TOTAL)
        if name not in plain and name not in placed:
            continue
        if (name in placed) != (label in labels):
            raise FileError(f"{where}: the label {label} does not belong there")
        position = digits(where, f"the label {label}", labels.get(label, "0"), most=MOST_DRAFTED)
        value = decimal(text)
        if not 0 <= value <= MOST_COUNT or not value.is_integer():
            raise FileError(f"{where}: {shown(text)} is no count of at most {MOST_COUNT:,}")
        key = name, position
        counts[key] = counts.get(key, 0) + int(value)
    return counts
