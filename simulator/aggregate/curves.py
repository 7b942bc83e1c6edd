"""Published acceptance curves: acceptance length by draft length, extended and judged.

Files are those of SemiAnalysisAI/InferenceX, ``golden_al_distribution``: YAML of two levels (model,
mode) with a length per draft length.  Only that much YAML is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.aggregate.acceptance import TwoState, iid_mean
from simulator.aggregate.hazard import check_totals, emitted_at
from simulator.aggregate.rates import emitted_of_rate
from traces.errors import DraftsimError, FileError
from traces.store.text import read_text

LINE = re.compile(r"^( *)([^:#\s][^:#]*):[ \t]*([^\s#]*)[ \t]*(?:#.*)?$")
ABSENT = ("N/A", "null", "~", "")


def is_curves(text: str) -> bool:
    """Return True if `text` names a YAML file, with or without ``#CURVE``."""
    return text.partition("#")[0].endswith((".yaml", ".yml"))


def read_curves(path: str | os.PathLike[str]) -> dict[str, dict[int, float]]:
    """Return acceptance lengths by draft length, by curve (``model/mode``).

    Raises
    ------
    FileError
        Naming the line that is not of the form.
    """
    curves: dict[str, dict[int, float]] = {}
    above: list[tuple[int, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(("#", "---")):
            continue
        found = LINE.match(line)
        if found is None:
            raise FileError(f"{path} line {number}: {line.strip()[:40]!r} is no `key: value`")
        indent, key, value = len(found[1]), found[2].strip().strip("'\""), found[3]
        above = [(at, name) for at, name in above if at < indent]
        if not key.isdigit():
            above.append((indent, key))
            continue
        if value in ABSENT:
            continue
        try:
            emitted = float(value)
            check_totals({int(key): emitted})
        except (ValueError, DraftsimError) as error:
            raise FileError(f"{path} line {number}: {error}") from None
        name = "/".join(part for _, part in above) or Path(path).stem
        curves.setdefault(name, {})[int(key)] = emitted
    if not curves:
        raise FileError(f"{path}: holds no acceptance length by draft length")
    return curves


def pick_curve(text: str) -> dict[int, float]:
    """Return the one curve of a file, or the one named after ``#`` (by its end).

    Raises FileError if it is not one.
    """
    path, _, name = text.partition("#")
    curves = read_curves(path)
    fitting = {n: c for n, c in curves.items() if n.endswith(name)} if name else curves
    if len(fitting) != 1:
        raise FileError(f"{path}: holds the curves {', '.join(curves)}: name one as {path}#CURVE")
    return next(iter(fitting.values()))


def extended(
    curve: Mapping[int, float], given: Sequence[int], asked: Sequence[int], level: float = 0.8
) -> list[dict[str, Any]]:
    """Extend the lengths at `given` draft lengths to those `asked`, a row each.

    ``hazard`` with ``low`` and ``high`` is the fitted hazard by position (`hazard.emitted_at`),
    ``iid`` one acceptance rate for all positions, ``two_state`` the middle of the range over texts
    with easy and hard stretches.  Where the curve has the length, the errors are relative to it.
    """
    known = {k: curve[k] for k in given}
    near = max(known)
    rate = iid_mean(near, known[near])
    rows = []
    for k in asked:
        span = emitted_at(known, k, level)
        states = emitted_of_rate(rate, k)
        found = {
            "hazard": span.value, "iid": TwoState(rate).emitted(k),
            "two_state": (states.low + states.high) / 2,
        }  # fmt: skip
        measured = curve.get(k)
        rows.append({
            "k": k, "measured": measured, **found, "low": span.low, "high": span.high,
            "inside": None if measured is None else span.holds(measured),
            **{f"{name}_error": None if measured is None else value / measured - 1
               for name, value in found.items()},
        })  # fmt: skip
    return rows
