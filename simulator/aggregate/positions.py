"""Acceptance by position of a draft: rates, how many rounds they were counted in, and rounds drawn.

What logs, counters, profiles, published curves and recordings have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from policies.lengths.basic import Fixed
from simulator.aggregate.hazard import Interval, check_totals, emitted_at
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.importers.totals import Totals
from traces.replay.lanes import replay_many
from traces.replay.rounds import RoundLog

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Positions:
    """Acceptance by position.

    Parameters
    ----------
    label:
        Whose acceptance it is.
    known:
        Acceptance lengths (tokens per round, the target's own included) by draft length.
    reached, accepted:
        Rounds whose draft reached positions 1, 2, ... (drafted that far, all tokens before
        accepted), and those of them that accepted the token there; (K,).  Empty where only
        lengths are known, chances of a round where its counts are not (`counted`).
    counted:
        True if `reached` and `accepted` are numbers of rounds.
    log:
        The rounds themselves, where they are known.

    Raises DraftsimError for impossible lengths.
    """

    label: str
    known: Mapping[int, float]
    reached: Floats = field(default_factory=lambda: np.empty(0))
    accepted: Floats = field(default_factory=lambda: np.empty(0))
    counted: bool = False
    log: RoundLog | None = None

    def __post_init__(self) -> None:
        check_totals(self.known)

    @property
    def longest(self) -> int:
        """Longest draft length with a measured acceptance length."""
        return max(self.known)

    @property
    def rounds(self) -> int | None:
        """Rounds counted; None where they are not known."""
        return int(self.reached[0]) if self.counted and len(self.reached) else None

    @cached_property
    def rates(self) -> Floats:
        """Chance of each token to be accepted if those before it were, (K,); NaN if unknown."""
        if len(self.reached):
            seen = np.where(self.reached > 0, self.reached, np.nan)
            return np.asarray(self.accepted / seen)
        # Lengths at K and K - 1 differ by the chance that all K are accepted.
        longest = self.longest
        if set(self.known) != set(range(1, longest + 1)):
            return np.full(longest, np.nan)
        lengths = np.array([1.0, *(self.known[k] for k in range(1, longest + 1))])
        alive = np.append(1.0, np.clip(np.diff(lengths), 0.0, 1.0))
        alive = np.minimum.accumulate(alive)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(alive[1:] / alive[:-1])

    def emitted(self, k: int, level: float = 0.8) -> Interval:
        """Acceptance length at draft length `k`, extended where it was not measured."""
        return emitted_at(self.known, k, level)


def of_rates(label: str, rates: npt.ArrayLike) -> Positions:
    """Return positions with these chances, each given that the tokens before it were accepted.

    Raises DraftsimError if one is no chance.
    """
    found = np.atleast_1d(np.asarray(rates, dtype=float))
    if not (np.all(found >= 0) and np.all(found <= 1)):
        raise DraftsimError(f"acceptance {found.tolist()}: expected chances, 0 to 1")
    alive = np.cumprod(found)
    known = {k: float(e) for k, e in enumerate(1 + np.cumsum(alive), 1)}
    return Positions(label, known, np.append(1.0, alive[:-1]), alive)


def of_totals(label: str, totals: Totals) -> Positions:
    """Return the positions that counts tell of.

    Raises DraftsimError for trees, or counts without any draft length.
    """
    if totals.tree:
        raise DraftsimError(f"{label}: a tree was verified in every round, no chain of positions")
    if totals.per_position is None:
        if not totals.fixed_length:
            raise DraftsimError(
                f"{label}: neither acceptance by position nor one draft length is told: read "
                "/metrics, or per-request metrics"
            )
        return Positions(label, {totals.reach: 1.0 + totals.mean_accepted})
    alive = np.asarray(totals.per_position, dtype=float)
    counted = totals.rounds is not None
    reached = np.append(float(totals.rounds or 1), alive[:-1])
    emitted = 1 + np.cumsum(alive / reached[0])
    return Positions(label, dict(enumerate(emitted.tolist(), 1)), reached, alive, counted)


def of_trace(label: str, trace: Trace, k: int) -> Positions:
    """Return the positions of a recording's rounds at draft length `k`.

    Raises TailError if drafts of `k` were not recorded.
    """
    [log] = replay_many(trace, [(f"fixed:gamma={k}", Fixed(k))])
    drafted, accepted = log.rounds["drafted"], log.rounds["accepted"]
    place = np.arange(1, k + 1)
    reached = ((drafted[:, None] >= place) & (accepted[:, None] >= place - 1)).sum(axis=0)
    passed = ((drafted[:, None] >= place) & (accepted[:, None] >= place)).sum(axis=0)
    with np.errstate(invalid="ignore"):
        alive = np.cumprod(np.nan_to_num(passed / np.maximum(reached, 1)))
    known = dict(enumerate((1 + np.cumsum(alive)).tolist(), 1))
    return Positions(label, known, reached.astype(float), passed.astype(float), True, log)
