"""Acceptance from totals alone: what tokens a round at one draft length say of another length.

Tokens drafted in a row are not accepted independently.  Some stretches of a text are easy and
some are hard, so that a long draft finds more accepted than the textbook's i.i.d. reading of the
totals has it; and a drafter that feeds on its own features loses quality with every token, so
that it finds fewer.  Totals show neither.  Here positions are easy or hard, in stretches of random
length (the two-state chain of `traces.acceptance.synthetic.Bursty`), and tokens after the first
are accepted less often by a factor; every member of that family that agrees with the totals is
kept, and what they say together is an interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from traces.errors import DraftsimError

Floats = npt.NDArray[np.float64]

SHARE = 0.5
"""Share of easy positions."""
MEMORIES = (0.5, 0.9, 0.99)
"""Correlations of neighbouring positions' states: stretches of 2 to 100 tokens."""
UNEVENNESS = (0.0, 0.1, 0.2, 0.3)
"""Variances of a position's acceptance over the largest, mean (1 - mean), that the family spans.

The bundled recording has 0.07 (`unevenness`), as a draft model's of several tasks in one."""
LATER = (0.8, 0.9, 1.0)
"""Factors on the acceptance of drafted tokens after the first.

A draft model has 1; heads that feed on their own features lose up to a fifth (EAGLE,
arXiv:2401.15077, acceptance by the number of features predicted)."""


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
    later:
        Factor on the chances of drafted tokens after a round's first.
    """

    mean: float
    uneven: float = 0.0
    share: float = SHARE
    memory: float = 0.9
    later: float = 1.0

    def chances(self) -> Floats:
        """Acceptance at an easy and at a hard position; out of 0..1 if there is no such member."""
        return np.asarray(_chances(*self._columns())[0])

    @property
    def possible(self) -> bool:
        """Whether both chances are chances."""
        return bool(np.all((self.chances() >= -1e-9) & (self.chances() <= 1 + 1e-9)))

    def survival(self, gamma: int) -> Floats:
        """Chances that the first 1, 2, ... of `gamma` drafted tokens are all accepted, (gamma,).

        Rounds begin where the one before ended, so more of them in hard stretches.
        """
        return np.asarray(_survival(gamma, *self._columns())[0])

    def emitted(self, gamma: int) -> float:
        """Mean tokens of a round that drafts `gamma`, the target's own one included."""
        return 1.0 + float(self.survival(gamma).sum()) if gamma else 1.0

    def _columns(self) -> tuple[Floats, ...]:
        values = (self.mean, self.uneven, self.share, self.memory, self.later)
        return tuple(np.array([value]) for value in values)


@dataclass(frozen=True)
class Interval:
    """A value, and the least and largest that agree with what is known."""

    value: float
    low: float
    high: float

    def holds(self, other: float) -> bool:
        """Whether `other` lies within."""
        return self.low <= other <= self.high

    def scaled(self, factor: float) -> Interval:
        """All three times a factor."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Interval(self.value * factor, low, high)


def iid_mean(gamma: int, emitted: float) -> float:
    """The i.i.d. acceptance under which rounds of `gamma` emit so many tokens (Leviathan eq. 1).

    Raises DraftsimError where no acceptance does.
    """
    if not 1 <= emitted <= gamma + 1 or gamma < 1:
        raise DraftsimError(f"no acceptance gives {emitted:g} tokens a round of {gamma}")
    low, high = 0.0, 1.0
    while high - low > 1e-15:
        mean = (low + high) / 2
        under = sum(mean**k for k in range(gamma + 1)) < emitted
        low, high = (mean, high) if under else (low, mean)
    return high


def members(totals: Mapping[int, float], later: Sequence[float] = LATER) -> list[TwoState]:
    """The members of the family that agree with tokens a round by draft length.

    One length leaves unevenness and the factor on later tokens open, within `UNEVENNESS` and
    ``later``.  With several, each unevenness has the mean and factor that are nearest to all of
    them by least squares, and only members about as near as the best are kept.

    Raises
    ------
    DraftsimError
        If a total is impossible: below 1, or above one more than the draft length.
    """
    check_totals(totals)
    return list(_members(tuple(sorted(totals.items())), tuple(later)))


@lru_cache(maxsize=4096)
def _members(
    known: tuple[tuple[int, float], ...], later: tuple[float, ...]
) -> tuple[TwoState, ...]:
    totals = dict(known)
    shapes = [
        TwoState(0.5, uneven, memory=memory)
        for uneven, memory in product(UNEVENNESS, MEMORIES) if uneven or memory == MEMORIES[0]
    ]  # fmt: skip
    if len(totals) > 1:
        found, misses = _nearest(totals, shapes)
        possible = [m.possible for m in found]
        best = min((miss for miss, ok in zip(misses, possible, strict=True) if ok), default=np.inf)
        return tuple(
            member for member, miss, ok in zip(found, misses, possible, strict=True)
            if ok and miss <= 2 * best + 0.002
        )  # fmt: skip
    ((gamma, emitted),) = totals.items()
    open_ = [replace(shape, later=factor) for shape, factor in product(shapes, later)]
    return tuple(_means(gamma, emitted, open_))


def check_totals(totals: Mapping[int, float]) -> None:
    """Raise DraftsimError for tokens a round that no acceptance gives."""
    for gamma, emitted in totals.items():
        if gamma < 1 or not 1 <= emitted <= gamma + 1:
            raise DraftsimError(
                f"{emitted:g} tokens a round at draft length {gamma}: expected 1 to {gamma + 1}"
            )


def emitted_at(totals: Mapping[int, float], gamma: int, later: Sequence[float] = LATER) -> Interval:
    """Tokens a round at another draft length: the family's middle, least and largest.

    >>> emitted_at({1: 1.8}, 1)
    Interval(value=1.8, low=1.8, high=1.8)
    """
    if gamma in totals or gamma == 0:
        known = totals.get(gamma, 1.0)
        return Interval(known, known, known)
    values = _emitted(gamma, members(totals, later))
    if not len(values):  # more is accepted of longer drafts than any member has it, or less
        values = _emitted(gamma, _means(*max(totals.items()), [TwoState(0.5)]))
    return Interval(float(np.median(values)), float(values.min()), float(values.max()))


def unevenness(totals: Mapping[int, float], memory: float = 0.9) -> float:
    """The unevenness nearest to tokens a round by draft length, of a drafter that does not tire."""
    check_totals(totals)
    shapes = [TwoState(0.5, uneven, memory=memory) for uneven in np.arange(0, 0.9, 0.01).tolist()]
    near = max(totals)
    found = _means(near, totals[near], shapes)
    gaps = [np.square(_emitted(g, found) / totals[g] - 1) for g in totals]
    return found[int(np.sum(gaps, axis=0).argmin())].uneven


def _chances(mean: Floats, uneven: Floats, share: Floats, *rest: Floats) -> Floats:
    """Acceptance at easy and hard positions of some members, (members, 2)."""
    del rest
    deviation = np.sqrt(uneven * mean * (1 - mean))
    odds = np.sqrt((1 - share) / share)
    return np.stack([mean + deviation * odds, mean - deviation / odds], axis=1)


def _survival(
    gamma: int, mean: Floats, uneven: Floats, share: Floats, memory: Floats, later: Floats
) -> Floats:
    """Chances that the first 1, 2, ... drafted tokens are all accepted, (members, gamma)."""
    chances = _chances(mean, uneven, share)
    accepts = [np.clip(chances * (later[:, None] if k else 1.0), 0, 1) for k in range(gamma)]
    overall = np.stack([share, 1 - share], axis=1)[:, None]  # (members, 1, 2)
    step = memory[:, None, None] * np.eye(2) + (1 - memory)[:, None, None] * overall
    # Row i: where the next round begins if this one began in state i.
    alive, ends = np.broadcast_to(np.eye(2), step.shape), np.zeros_like(step)
    for accept in accepts:
        ends = ends + (alive * (1 - accept)[:, None]) @ step
        alive = (alive * accept[:, None]) @ step
    ends = ends + alive @ step
    begins = np.stack([ends[:, 1, 0], ends[:, 0, 1]], axis=1)
    still = begins.sum(axis=1, keepdims=True)
    now = np.where(still > 0, begins / np.where(still > 0, still, 1), overall[:, 0])
    out = np.empty((len(mean), gamma))
    for k, accept in enumerate(accepts):
        now = now * accept
        out[:, k] = now.sum(axis=1)
        now = (now[:, None] @ step)[:, 0]
    return out


def _columns(members: Sequence[TwoState]) -> tuple[Floats, ...]:
    rows = [(m.mean, m.uneven, m.share, m.memory, m.later) for m in members]
    return tuple(np.array(rows, dtype=float).reshape(len(rows), 5).T)


def _emitted(gamma: int, members: Sequence[TwoState]) -> Floats:
    return np.asarray(1.0 + _survival(gamma, *_columns(members)).sum(axis=1))


def _means(gamma: int, emitted: float, shapes: Sequence[TwoState]) -> list[TwoState]:
    """The members of some shapes that emit so much, those that there are; by bisection."""
    columns = list(_columns(shapes))
    odds = columns[2] / (1 - columns[2])
    # The smallest and the largest mean whose chances are both within 0..1.
    low, high = columns[1] * odds, 1 / (1 + columns[1] / odds)
    low = low / (1 + low)

    def at(mean: Floats) -> Floats:
        return np.asarray(1.0 + _survival(gamma, mean, *columns[1:]).sum(axis=1))

    there = (at(low) <= emitted + 1e-9) & (at(high) >= emitted - 1e-9)
    for _ in range(40):
        middle = (low + high) / 2
        under = at(middle) < emitted
        low, high = np.where(under, middle, low), np.where(under, high, middle)
    return [
        replace(shape, mean=float(mean))
        for shape, mean, ok in zip(shapes, (low + high) / 2, there, strict=True) if ok
    ]  # fmt: skip


def _nearest(
    totals: Mapping[int, float], shapes: Sequence[TwoState]
) -> tuple[list[TwoState], list[float]]:
    """The members of some shapes nearest to the totals, with their relative misses.

    By damped Gauss-Newton steps in mean and factor, all shapes at once.
    """
    gammas = sorted(totals)
    wanted = np.array([totals[g] for g in gammas])
    fixed = _columns(shapes)

    def misses(x: Floats) -> Floats:
        uneven, share, memory = (np.tile(column, len(x) // len(shapes)) for column in fixed[1:4])
        made = (x[:, 0], uneven, share, memory, x[:, 1])
        tokens = 1.0 + np.cumsum(_survival(gammas[-1], *made), axis=1)
        chances = _chances(*made)
        outside = 10 * np.clip(np.abs(chances - 0.5) - 0.5, 0, None)
        return np.concatenate([tokens[:, [g - 1 for g in gammas]] / wanted - 1, outside], axis=1)

    def with_slopes(x: Floats) -> tuple[Floats, Floats]:
        # At once: calls are what takes the time.
        moved = np.concatenate([x, *(x + h for h in 1e-5 * np.eye(2))])
        here, *beside = misses(moved).reshape(3, len(x), -1)
        return here, np.stack([(there - here) / 1e-5 for there in beside], axis=2)

    start = TwoState(min(0.95, max(0.05, iid_mean(gammas[0], wanted[0]))))
    x = np.tile([start.mean, 0.95], (len(shapes), 1))
    damp, (gaps, slopes) = np.full(len(shapes), 1e-3), with_slopes(x)
    for _ in range(30):
        normal = slopes.transpose(0, 2, 1) @ slopes + damp[:, None, None] * np.eye(2)
        move = np.linalg.solve(normal, -(slopes.transpose(0, 2, 1) @ gaps[..., None]))[..., 0]
        tried = np.clip(x + move, [0.001, 0.3], [0.999, 1.3])
        if np.abs(tried - x).max() < 1e-12:  # which changes nothing
            break
        after, steeper = with_slopes(tried)
        better = np.square(after).sum(1) < np.square(gaps).sum(1)
        x, gaps = np.where(better[:, None], tried, x), np.where(better[:, None], after, gaps)
        slopes = np.where(better[:, None, None], steeper, slopes)
        damp = np.clip(np.where(better, damp / 5, damp * 10), 1e-12, 1e6)
    pairs = zip(shapes, x.tolist(), strict=True)
    found = [replace(shape, mean=mean, later=later) for shape, (mean, later) in pairs]
    return found, np.sqrt(np.square(gaps[:, : len(gammas)]).mean(axis=1)).tolist()
