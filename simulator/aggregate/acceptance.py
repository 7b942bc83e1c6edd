"""Acceptance lengths from an acceptance rate, from counts, or from a published curve.

An acceptance rate does not determine the acceptance length, because some stretches of a text are
easy and some are hard.  Here positions are easy or hard in stretches of random length (the
two-state chain of `traces.acceptance.synthetic.Bursty`).  All chains with the given rate are
considered, so a rate gives an interval.
Acceptance lengths measured at some draft lengths are extended to others by
`simulator.aggregate.hazard`.

Files of curves are those of SemiAnalysisAI/InferenceX, ``golden_al_distribution``: YAML of two
levels (model, mode) with a length per draft length.  Other YAML is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from policies.arrays import Floats
from simulator.aggregate.hazard import check_totals, emitted_at
from simulator.bootstrap import Interval
from simulator.formulas.leviathan import acceptance_rate
from traces.errors import DraftsimError, FileError
from traces.store.text import read_text

SHARE = 0.5
"""Share of easy positions."""
MEMORIES = (0.5, 0.9, 0.99)
"""Correlations of neighbouring positions' states: stretches of 2 to 100 tokens."""
UNEVENNESS = (0.0, 0.1, 0.2, 0.3)
"""Variances of a position's acceptance over the largest, mean (1 - mean), that the family spans.

The bundled recording has 0.07, as a draft model's of several tasks in one."""


@dataclass(frozen=True)
class TwoState:
    """Acceptance that depends on whether a position is easy or hard.

    Parameters
    ----------
    mean:
        Chance that a drafted token is accepted, over all positions.
    uneven:
        Variance of a position's chance over ``mean (1 - mean)``: 0 is i.i.d., 1 all or nothing.
    share:
        Share of easy positions.
    memory:
        Correlation of neighbouring positions' states.
    """

    mean: float
    uneven: float = 0.0
    share: float = SHARE
    memory: float = 0.9

    def chances(self) -> Floats:
        """Return the acceptance at an easy and at a hard position.

        A value outside 0 to 1 means that the parameters are impossible (`possible`).
        """
        deviation = np.sqrt(self.uneven * self.mean * (1 - self.mean))
        odds = np.sqrt((1 - self.share) / self.share)
        return np.array([self.mean + deviation * odds, self.mean - deviation / odds])

    @property
    def possible(self) -> bool:
        """Return True if both chances lie between 0 and 1."""
        return bool(np.all((self.chances() >= -1e-9) & (self.chances() <= 1 + 1e-9)))

    def survival(self, gamma: int) -> Floats:
        """Return chances that the first 1, 2, ... of `gamma` drafted tokens are all accepted,
        (gamma,).

        A round begins where the one before ended, so more rounds begin in hard stretches.
        """
        accept = np.clip(self.chances(), 0, 1)
        overall = np.array([self.share, 1 - self.share])
        step = self.memory * np.eye(2) + (1 - self.memory) * overall
        # after[k][i, j]: chance that k tokens are accepted from state i on and state j follows.
        after = [np.linalg.matrix_power(accept[:, None] * step, k) for k in range(gamma + 1)]
        # Row i: where the next round begins if this one began in state i.
        ends = sum(after[:-1], np.zeros((2, 2))) @ ((1 - accept)[:, None] * step) + after[-1] @ step
        # The share of rounds that begin in each state is the chain's stationary one.
        begins = np.array([ends[1, 0], ends[0, 1]])
        first = begins / begins.sum() if begins.sum() > 0 else overall
        return np.array([first @ states @ accept for states in after[:-1]])

    def emitted(self, gamma: int) -> float:
        """Return the mean tokens of a round that drafts `gamma`, the target's own one included."""
        return 1.0 + float(self.survival(gamma).sum()) if gamma else 1.0


LENGTHS = (1, 2, 3, 4, 5, 6, 8)
"""Draft lengths that are always told."""


def emitted_of_rate(rate: float, gamma: int) -> Interval:
    """Return tokens per round of `gamma` drafts at acceptance `rate`: i.i.d., smallest and largest.

    ``rate`` is the chance that the draft's token is the target's at any position of the text, like
    alpha.  Rounds begin more often in hard stretches, so the middle of the range can be below the
    i.i.d. value.

    Raises DraftsimError if the rate is not between 0 and 1.

    >>> emitted_of_rate(0.8, 1).value
    1.8
    """
    if not 0 <= rate <= 1:
        raise DraftsimError(f"acceptance is {rate:g}, expected 0 to 1")
    shapes = [
        TwoState(rate, uneven, memory=memory) for uneven, memory in product(UNEVENNESS, MEMORIES)
    ]
    values = [shape.emitted(gamma) for shape in shapes if shape.possible]
    even = TwoState(rate).emitted(gamma)
    return Interval(even, min([even, *values]), max([even, *values]))


def emitted_rows(totals: Mapping[int, float]) -> list[dict[str, Any]]:
    """Return tokens per round by draft length, with intervals and the i.i.d. value, from totals.

    The column ``known`` is True if the totals hold the length itself.
    """
    return [
        {
            "draft_length": row["k"], "tokens_a_round": row["hazard"], "low": row["low"],
            "high": row["high"], "independent": row["iid"], "known": row["k"] in totals,
        }
        for row in extended(totals, [*totals], sorted({*LENGTHS, *totals}))
    ]  # fmt: skip


LINE = re.compile(r"^( *)([^:#\s][^:#]*):[ \t]*([^\s#]*)[ \t]*(?:#.*)?$")
ABSENT = ("N/A", "null", "~", "")


def is_curves(text: str) -> bool:
    """Return True if `text` names a YAML file, with or without ``#CURVE``."""
    return text.partition("#")[0].endswith((".yaml", ".yml"))


def read_curves(path: str | os.PathLike[str]) -> dict[str, dict[int, float]]:
    """Return acceptance lengths by draft length, by curve (``model/mode``).

    Raises FileError naming the line that is not of the form.
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
        curve = curves.setdefault(name, {})
        if int(key) in curve:
            raise FileError(f"{path} line {number}: {name} has draft length {key} twice")
        curve[int(key)] = emitted
    if not curves:
        raise FileError(f"{path}: holds no acceptance length by draft length")
    return curves


def pick_curve(text: str) -> dict[int, float]:
    """Return the only curve of a file, or the one whose name ends in the text after ``#``.

    Raises FileError if not exactly one fits.
    """
    path, _, name = text.partition("#")
    curves = read_curves(path)
    fitting = {n: c for n, c in curves.items() if n.endswith(name)} if name else curves
    if len(fitting) != 1:
        raise FileError(f"{path}: holds the curves {', '.join(curves)}: name one as {path}#CURVE")
    return next(iter(fitting.values()))


NOISE = 0.05
"""Share by which runs of one drafter may differ before their acceptance lengths contradict."""


def contradiction(known: Mapping[int, float]) -> str:
    """Return in words which acceptance lengths no drafter has together; empty if it may.

    A longer draft has no fewer tokens accepted, and each of its further tokens no more often than
    those before it were in the mean.
    """
    for (k, emitted), (more, longer) in pairwise(sorted(known.items())):
        most = emitted + (more - k) * (emitted - 1) / k
        if longer < emitted * (1 - NOISE) or longer > most * (1 + NOISE):
            return (
                f"{longer:g} tokens per round at K = {more} contradict {emitted:g} at K = {k} "
                f"(expected {emitted:.3g} to {most:.3g})"
            )
    return ""


def extended(
    curve: Mapping[int, float], given: Sequence[int], asked: Sequence[int], level: float = 0.8
) -> list[dict[str, Any]]:
    """Extend the lengths at `given` draft lengths to those `asked`, a row each.

    ``hazard`` with ``low`` and ``high`` is the fitted hazard by position (`hazard.emitted_at`),
    ``iid`` one acceptance rate for all positions, ``two_state`` the middle of the range over texts
    with easy and hard stretches.  Where the curve has the length and it is not `given`, the errors
    are relative to it, and ``inside`` says if the interval holds it.
    """
    known = {k: curve[k] for k in given}
    near = max(known)
    rate = acceptance_rate(known[near], near)
    rows = []
    for k in asked:
        span, states = emitted_at(known, k, level), emitted_of_rate(rate, k)
        found = {
            "hazard": span.value, "iid": states.value, "two_state": (states.low + states.high) / 2,
        }  # fmt: skip
        judge = None if k in known else curve.get(k)
        rows.append({
            "k": k, "measured": curve.get(k), **found, "low": span.low, "high": span.high,
            "inside": None if judge is None else span.holds(judge),
            **{f"{name}_error": None if judge is None else value / judge - 1
               for name, value in found.items()},
        })  # fmt: skip
    return rows
