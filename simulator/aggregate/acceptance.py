"""Acceptance of a text whose positions are easy or hard, from one acceptance rate.

The rate at which a draft matches the target at any position does not say how long its accepted
runs are: some stretches of a text are easy and some are hard.  Here positions are easy or hard,
in stretches of random length (the two-state chain of `traces.acceptance.synthetic.Bursty`), and
every member of that family with the given rate is kept.  Acceptance lengths measured at some draft
lengths are extended to others by `simulator.aggregate.hazard`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """Return True if both chances lie between 0 and 1."""
        return bool(np.all((self.chances() >= -1e-9) & (self.chances() <= 1 + 1e-9)))

    def survival(self, gamma: int) -> Floats:
        """Chances that the first 1, 2, ... of `gamma` drafted tokens are all accepted, (gamma,).

        Rounds begin where the one before ended, so more of them in hard stretches.
        """
        return np.asarray(_survival(gamma, *self._columns())[0])

    def emitted(self, gamma: int) -> float:
        """Return the mean tokens of a round that drafts `gamma`, the target's own one included."""
        return 1.0 + float(self.survival(gamma).sum()) if gamma else 1.0

    def _columns(self) -> tuple[Floats, ...]:
        values = (self.mean, self.uneven, self.share, self.memory, self.later)
        return tuple(np.array([value]) for value in values)


def iid_mean(gamma: int, emitted: float) -> float:
    """Return the i.i.d. acceptance at which rounds of `gamma` emit `emitted` tokens (Leviathan eq.
    1).

    Raises DraftsimError if no acceptance does.
    """
    if not 1 <= emitted <= gamma + 1 or gamma < 1:
        raise DraftsimError(f"no acceptance gives {emitted:g} tokens a round of {gamma}")
    low, high = 0.0, 1.0
    while high - low > 1e-15:
        mean = (low + high) / 2
        under = sum(mean**k for k in range(gamma + 1)) < emitted
        low, high = (mean, high) if under else (low, mean)
    return high


def _chances(mean: Floats, uneven: Floats, share: Floats, *rest: Floats) -> Floats:
    """Return acceptance at easy and hard positions of some members, (members, 2)."""
    del rest
    deviation = np.sqrt(uneven * mean * (1 - mean))
    odds = np.sqrt((1 - share) / share)
    return np.stack([mean + deviation * odds, mean - deviation / odds], axis=1)


def _survival(
    gamma: int, mean: Floats, uneven: Floats, share: Floats, memory: Floats, later: Floats
) -> Floats:
    """Return chances that the first 1, 2, ... drafted tokens are all accepted, (members, gamma)."""
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
