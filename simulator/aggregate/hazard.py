"""Acceptance by position: how likely each drafted token is accepted if those before it were.

The chance that token j of a draft is accepted, given that tokens 1 to j - 1 were, is the hazard
of position j.  Its logit is `first` at position 1, and `later` + `slope` x (j - 2) at the positions
after it.  A drafter that feeds on its own output gets worse with every token (slope < 0); on text
that comes in easy and hard stretches, the later tokens of a draft are easier than its first
(later > first).  Both occur, so neither is assumed: the three numbers have a prior (`PRIOR`) that
is as wide as published acceptance curves differ (vLLM with EAGLE-3, MTP and DSpark), and measured
acceptance narrows it.  The prior of the slope has heavy tails: one MTP module that is applied again
and again loses most of its acceptance after two or three tokens.

`draws_of` draws parameters for any likelihood; `draws_near` is a hundred times faster for the
hazard's, whose posterior is nearly normal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from policies.arrays import Floats
from simulator.bootstrap import Interval
from traces.acceptance.trace import MOST_DRAFTED
from traces.errors import DraftsimError

WALKERS, STEPS, KEPT = 64, 700, 400
"""Size of the ensemble, steps it takes, and steps of which every tenth is kept."""


class Prior(NamedTuple):
    """A normal prior of one parameter."""

    mean: float
    spread: float
    """Standard deviation."""


def draws_of(priors: Mapping[str, Prior], log_likelihood: Callable[[Floats], Floats]) -> Floats:
    """Return draws from the posterior, (draws, parameters), in the order of `priors`.

    ``log_likelihood``: (draws, parameters) to (draws,).  The ensemble (emcee: Goodman and Weare's
    stretch moves, and differential evolution) begins around the most likely values.
    """
    import emcee
    from scipy.optimize import minimize

    mean, spread = np.array(list(priors.values())).T

    def log_density(z: Floats) -> Floats:
        found = log_likelihood(mean + spread * z)
        return np.asarray(np.where(np.isfinite(found), found, -np.inf) - 0.5 * (z**2).sum(axis=-1))

    def loss(z: Floats) -> tuple[float, Floats]:
        """Return the loss and its slopes, by differences to points that are asked for at once."""
        steps = np.sqrt(np.finfo(float).eps) * np.maximum(np.abs(z), 1.0)
        points = np.concatenate([z[None], z + np.diag(steps)])
        values = np.nan_to_num(-log_density(points), nan=1e12, posinf=1e12)
        return float(values[0]), (values[1:] - values[0]) / steps

    best = minimize(loss, np.zeros(len(mean)), jac=True, method="L-BFGS-B").x
    random = np.random.RandomState(0)
    start = best + 0.1 * random.standard_normal((WALKERS, len(mean)))
    moves = [(emcee.moves.DEMove(), 0.6), (emcee.moves.StretchMove(), 0.4)]
    sampler = emcee.EnsembleSampler(WALKERS, len(mean), log_density, moves=moves, vectorize=True)
    sampler.log_prob_fn = log_density  # emcee's wrapper around it prints a traceback at Ctrl-C
    sampler.random_state = random.get_state()
    sampler.run_mcmc(start, STEPS, skip_initial_state_check=True)
    kept = sampler.get_chain(discard=STEPS - KEPT, thin=10, flat=True)
    return np.asarray(mean + spread * kept)


DRAWN, KEPT_NEAR, TAILS = 4000, 1000, 4.0
"""Proposals, draws kept of them, and degrees of freedom of the proposals' tails."""


@lru_cache(maxsize=512)
def draws_near(told: tuple[tuple[int, float], ...]) -> Floats:
    """Return draws of the hazard's parameters given (draft length, acceptance length), (draws, 3).

    They are drawn by importance sampling about the posterior's mode.
    """
    from scipy.optimize import least_squares

    known, (mean, spread) = dict(told), np.array(list(HAZARD.values())).T

    def all_gaps(z: Floats) -> Floats:
        points = np.atleast_2d(z)
        found = np.concatenate([gaps(mean + spread * points, known), points], axis=1)
        return found.reshape(*z.shape[:-1], -1)

    found = least_squares(all_gaps, np.zeros(len(mean)))
    slopes = np.asarray(found.jac, dtype=np.float64)
    root = np.linalg.inv(np.linalg.cholesky(slopes.T @ slopes)).T
    random = np.random.default_rng(0)
    normal = random.standard_normal((DRAWN, len(mean)))
    wide = normal / np.sqrt(random.chisquare(TAILS, (DRAWN, 1)) / TAILS)
    z = found.x + wide @ root.T
    proposed = -0.5 * (TAILS + len(mean)) * np.log1p(np.square(wide).sum(axis=1) / TAILS)
    log_weight = -0.5 * np.square(all_gaps(z)).sum(axis=1) - proposed
    weight = np.exp(log_weight - log_weight.max())
    kept = random.choice(DRAWN, KEPT_NEAR, p=weight / weight.sum())
    return np.asarray(mean + spread * z[kept])


HAZARD: Mapping[str, Prior] = {
    "first": Prior(1.2, 0.8),
    "later": Prior(-0.25, 0.6),
    "slope": Prior(-0.10, 0.2),
}
"""Priors: logit at position 1; logit at position 2 minus that at 1; change per further position."""

SPREAD = 0.008
"""Relative standard deviation of a measured acceptance length: prompts differ from run to run."""
ANOTHER_RUN = 0.02
"""Relative standard deviation of the acceptance length of a run at another draft length."""
BEND = 0.3
"""Standard deviation by which each position after the measured ones departs from the line."""


def chances(values: Floats, longest: int) -> Floats:
    """Return chances that the first 1, 2, ... drafted tokens are all accepted, (draws, longest).

    ``values``: (draws, 3) in the order of `HAZARD`.
    """
    return _alive(_logits(values, longest))


def _alive(logits: Floats) -> Floats:
    """Return chances that all positions up to each are accepted, from logits of the hazard."""
    # The logistic function, by way of tanh: exp would overflow far from zero.
    return np.asarray(np.cumprod(0.5 * (1 + np.tanh(0.5 * logits)), axis=1))


def _logits(values: Floats, longest: int) -> Floats:
    """Return logits of the hazard at positions 1 to `longest`, (draws, longest)."""
    first, later, slope = (values[:, i, None] for i in range(3))
    mean, spread = HAZARD["slope"]
    # A normal draw far from the mean is a slope much farther from it.
    slope = mean + spread * np.sinh(np.clip((slope - mean) / spread, -20, 20))
    place = np.arange(longest)
    return np.asarray(first + np.where(place > 0, later + slope * (place - 1), 0.0))


def lengths(values: Floats, k: int) -> Floats:
    """Return acceptance lengths (the target's own token included) at draft length `k`, (draws,)."""
    return np.asarray(1.0 + chances(values, k).sum(axis=1))


def gaps(values: Floats, known: Mapping[int, float]) -> Floats:
    """Return model less measured acceptance lengths, in standard deviations, (draws, known)."""
    if not known:
        return np.zeros((len(values), 0))
    alive = np.cumsum(chances(values, max(known)), axis=1)
    return np.stack(
        [np.log((1 + alive[:, k - 1]) / emitted) / SPREAD for k, emitted in known.items()], axis=1
    )


def interval_of(draws: Floats, level: float) -> Interval:
    """Return the median of draws, and the ends of their central interval."""
    low, value, high = np.quantile(draws, [(1 - level) / 2, 0.5, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def check_totals(known: Mapping[int, float]) -> None:
    """Raise DraftsimError for an acceptance length that no acceptance gives, or a huge draft."""
    for k, emitted in known.items():
        if k > MOST_DRAFTED:  # arrays are as long
            raise DraftsimError(f"draft length {k}: expected at most {MOST_DRAFTED}")
        if k < 1 or not 1 <= emitted <= k + 1:
            raise DraftsimError(
                f"{emitted:g} tokens a round at draft length {k}: expected 1 to {k + 1}"
            )


def further(values: Floats, known: Mapping[int, float], k: int) -> Floats:
    """Return acceptance lengths at draft length `k`, (draws,), given some measured ones.

    Each position after the measured ones departs from the line by `BEND`; the departure of a
    position is the same at every `k`.  ``values``: (draws, 3) in the order of `HAZARD`;
    ``known``: measured acceptance lengths by draft length.
    """
    below = max((n for n in known if n < k), default=0)
    bends = BEND * np.random.default_rng(0).standard_normal((k, len(values))).T
    bends[:, : max(known, default=0)] = 0.0
    alive = np.cumsum(_alive(_logits(values, k) + np.cumsum(bends, axis=1)), axis=1)
    found = 1 + alive[:, -1]
    if below:  # The measured length is the start: the model's own is off by a percent or so.
        found = known[below] * found / (1 + alive[:, below - 1])
    # A longer draft has no fewer tokens accepted.
    least = known.get(below, 1.0)
    most = min((v for n, v in known.items() if n > k), default=k + 1.0)
    return np.asarray(np.clip(found, min(least, most), most))


def emitted_at(known: Mapping[int, float], k: int, level: float = 0.8) -> Interval:
    """Return acceptance length at draft length `k`, from those measured at other draft lengths.

    A measured length is returned as it is.  Raises DraftsimError for impossible lengths.

    >>> emitted_at({1: 1.8}, 1)
    Interval(value=1.8, low=1.8, high=1.8)
    """
    check_totals(known)
    if k == 0 or k in known:
        value = known.get(k, 1.0)
        return Interval(value, value, value)
    found = further(draws_near(tuple(sorted(known.items()))), known, k)
    most = min((v for n, v in known.items() if n > k), default=k + 1.0)
    # The same departures at every K, so that a bound does not fall by chance as K grows.
    other = np.exp(ANOTHER_RUN * np.random.default_rng(1).standard_normal(len(found)))
    return interval_of(np.clip(found * other, 1.0, most), level)


def median_survival(known: Mapping[int, float], longest: int) -> tuple[float, ...]:
    """Return chances that the first 1, 2, ... `longest` tokens are all accepted, the likeliest
    ones.

    ``known``: measured acceptance lengths by draft length.  Raises DraftsimError for impossible
    ones.
    """
    check_totals(known)
    alive = np.median(chances(draws_near(tuple(sorted(known.items()))), longest), axis=0)
    if longest in known:  # the sum is measured: keep it
        alive = alive * (known[longest] - 1) / alive.sum()
    return tuple(float(chance) for chance in np.minimum.accumulate(np.minimum(alive, 1.0)))
