"""Draws of parameters, given priors and the likelihood of what was measured.

`draws_of` is for any likelihood; `draws_near` is a hundred times faster, for few parameters whose
posterior is nearly normal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WALKERS, STEPS, KEPT = 64, 700, 400
"""Size of the ensemble, steps it takes, and steps of which every tenth is kept."""


class Prior(NamedTuple):
    """A normal prior of one parameter."""

    mean: float
    spread: float
    """Standard deviation."""


def draws_of(
    priors: Mapping[str, Prior], log_likelihood: Callable[[Floats], Floats], seed: int = 0
) -> Floats:
    """Draws from the posterior, (draws, parameters), in the order of `priors`.

    ``log_likelihood``: (draws, parameters) to (draws,).  The ensemble (emcee: Goodman and Weare's
    stretch moves, and differential evolution) begins around the most likely values.  The same
    `seed` gives the same draws.
    """
    import emcee
    from scipy.optimize import minimize

    mean = np.array([prior.mean for prior in priors.values()])
    spread = np.array([prior.spread for prior in priors.values()])

    def log_density(z: Floats) -> Floats:
        found = log_likelihood(mean + spread * z)
        return np.asarray(np.where(np.isfinite(found), found, -np.inf) - 0.5 * (z**2).sum(axis=-1))

    def loss(z: Floats) -> float:
        return float(np.nan_to_num(-log_density(z[None])[0], nan=1e12, posinf=1e12))

    best = minimize(loss, np.zeros(len(mean)), method="L-BFGS-B").x
    random = np.random.RandomState(seed)
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


def draws_near(
    priors: Mapping[str, Prior], residuals: Callable[[Floats], Floats], seed: int = 0
) -> Floats:
    """Draws from the posterior, (draws, parameters), by importance sampling about its mode.

    ``residuals``: (draws, parameters) to (draws, measurements), in standard deviations.
    """
    from scipy.optimize import least_squares

    mean = np.array([prior.mean for prior in priors.values()])
    spread = np.array([prior.spread for prior in priors.values()])

    def gaps(z: Floats) -> Floats:
        return np.concatenate([residuals(mean + spread * z), z], axis=1)

    def gaps_at(z: Floats) -> Floats:
        return np.asarray(gaps(z[None])[0])

    found = least_squares(gaps_at, np.zeros(len(mean)))
    slopes = np.asarray(found.jac, dtype=np.float64)
    root = np.linalg.inv(np.linalg.cholesky(slopes.T @ slopes)).T
    random = np.random.default_rng(seed)
    normal = random.standard_normal((DRAWN, len(mean)))
    wide = normal / np.sqrt(random.chisquare(TAILS, (DRAWN, 1)) / TAILS)
    z = found.x + wide @ root.T
    proposed = -0.5 * (TAILS + len(mean)) * np.log1p(np.square(wide).sum(axis=1) / TAILS)
    log_weight = -0.5 * np.square(gaps(z)).sum(axis=1) - proposed
    weight = np.exp(log_weight - log_weight.max())
    kept = random.choice(DRAWN, KEPT_NEAR, p=weight / weight.sum())
    return np.asarray(mean + spread * z[kept])
