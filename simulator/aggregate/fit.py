"""Fits a server's costs to a handful of its runs, with intervals that hold together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simulator.aggregate.acceptance import Interval, TwoState
from simulator.aggregate.server import COSTS, Server, ServerRun
from traces.errors import DraftsimError

Floats = npt.NDArray[np.float64]

ACCEPTANCE = "acceptance"
DROPPED = ("step_s", "draft_token_s", "context_s", "draft_s", ACCEPTANCE, "token_s")
"""What is left out first where the runs do not tell parameters apart."""
SURE = 0.001
"""Chance of seeing a step, at any of the thresholds tried, where there is none."""
LEAST_STEP = 0.05
"""A step smaller than this part of a verification is none: other bends look like it."""
NOTHING = 1e-6
"""A cost below this part of a typical iteration, at the largest load measured, is 0."""
ALIKE = 1e-7
"""Parameters whose columns are dependent up to this, relative, are not told apart."""


@dataclass(frozen=True)
class Calibration:
    """A fitted server, the intervals of what the runs determine, and what they do not."""

    server: Server
    intervals: dict[str, Interval]
    """Values are those of `server`; bounds are simultaneous, with the level asked for.

    Costs are at least 0, the acceptance within 0 to 1."""
    undetermined: tuple[str, ...]
    noise: float
    """Standard deviation of a run's speed, relative: as named, or as the runs scatter."""
    covariance: Floats
    """Of the determined parameters, in the order of `intervals`."""
    level: float
    freedom: float
    """Runs beyond the parameters; infinite where the noise was named."""
    misses: tuple[float, ...]
    """Predicted over measured speed of each run, minus one."""


def calibrate(
    runs: Sequence[ServerRun], *, noise: float | None = None, level: float = 0.95,
    threshold: int | None = None, always: int | None = None, find_step: bool = True,
) -> Calibration:  # fmt: skip
    """Fit the costs that explain the runs best; none is negative, except a step's.

    Parameters
    ----------
    noise:
        Relative standard deviation of a run's tokens/s, if repeated runs tell it; else the
        scatter of the runs about the fit stands for it.
    threshold:
        Tokens an iteration above which another kernel runs; looked for where None, and taken up
        only where the runs leave little doubt (`SURE`).
    always:
        As of `Server`.

    Raises
    ------
    DraftsimError
        If there are too few runs, none without speculation, or fewer than one more than
        determined parameters where the noise is not named.
    """
    from scipy.stats import f, norm

    if not any(run.k == 0 for run in runs):
        raise DraftsimError("no run with speculation off (k = 0): measure one")
    base = Server(threshold=threshold, always=always)
    plain = _fitted(base, runs, noise, level)
    if threshold is not None or not find_step:
        return plain
    tokens = sorted({run.batch * (run.k + 1) for run in runs})
    tried = [
        _fitted(replace(base, threshold=low), runs, noise, level)
        for low in tokens[:-1] if len(runs) > len(plain.intervals) + 2
    ]  # fmt: skip
    tried = [one for one in tried if "step_s" in one.intervals]
    if not tried:
        return plain
    best = min(tried, key=_squares)
    freedom = len(runs) - len(best.intervals)
    if noise is None and not _squares(best):
        return plain  # the runs say nothing of chance
    if noise is None:
        ratio = (_squares(plain) - _squares(best)) / (_squares(best) / freedom)
        doubt = float(f.sf(ratio, 1, freedom))
    else:
        doubt = float(2 * norm.sf(np.sqrt(max(0.0, _squares(plain) - _squares(best))) / noise))
    server = best.server
    there = server.fixed_s + server.token_s * (server.threshold or 0)
    large = abs(server.step_s) > LEAST_STEP * there
    return best if large and doubt * len(tried) < SURE else plain


def _squares(found: Calibration) -> float:
    return float(np.square(found.misses).sum())


def _fitted(
    base: Server, runs: Sequence[ServerRun], noise: float | None, level: float
) -> Calibration:
    from scipy.optimize import least_squares
    from scipy.stats import norm, t

    columns = base.columns([r.batch for r in runs], [r.k for r in runs], [r.context for r in runs])
    unknown = np.array([r.round_tokens is None for r in runs])
    known = np.array([r.round_tokens or 1.0 for r in runs])
    lengths = [r.k for r in runs]
    batches, speeds = (np.array([getattr(r, n) for r in runs], dtype=float)
                       for n in ("batch", "tokens_per_s"))  # fmt: skip

    def emitted(acceptance: float) -> Floats:
        iid = [TwoState(acceptance).emitted(k) if u else 1.0
               for k, u in zip(lengths, unknown, strict=True)]  # fmt: skip
        return np.where(unknown, iid, known)

    def gaps(x: Floats) -> Floats:
        """Logarithm of iteration predicted over measured; ``x`` costs and acceptance."""
        ratio = columns @ x[:-1] * speeds / (batches * emitted(float(x[-1])))
        return np.asarray(np.log(np.maximum(ratio, 1e-6)))

    start = np.array([*np.zeros(len(COSTS)), 0.6])
    names = [*COSTS, ACCEPTANCE]
    free = [
        i for i, name in enumerate(names)
        if (np.any(columns[:, i]) if name != ACCEPTANCE else unknown.any())
    ]  # fmt: skip
    if base.threshold is None:
        free = [i for i in free if names[i] != "step_s"]
    scale = np.array([*(1 / np.maximum(np.abs(columns).max(axis=0), 1e-12)), 1.0])
    scale[:-1] *= float(np.median(batches * emitted(0.6) / speeds))

    costs = [i for i, name in enumerate(names) if name in COSTS]
    signed = names.index("step_s")

    def solve(free: Sequence[int]) -> tuple[Floats, Floats]:
        """The best values, and the slopes of the gaps there in units of the scale.

        A cost that would be negative is 0, exactly: the others are then fitted without it.
        """
        moving = list(free)
        while True:
            low = np.array(
                [-np.inf if i == signed else 0.0 if i in costs else 0.01 for i in moving]
            )
            high = np.array([np.inf if i in costs else 0.99 for i in moving])
            x0 = np.array([0.2 if i in costs else start[-1] for i in moving])

            def part(y: Floats, moving: list[int] = moving) -> Floats:
                x = start.copy()
                x[moving] = y * scale[moving]
                return gaps(x)

            found = least_squares(part, x0, bounds=(low, high), xtol=1e-14, ftol=1e-14, gtol=1e-14)
            nothing = {
                i for i, y in zip(moving, found.x, strict=True)
                if i in costs and i != signed and y < NOTHING
            }  # fmt: skip
            if not nothing:
                break
            moving = [i for i in moving if i not in nothing]
        x = start.copy()
        x[moving] = found.x * scale[moving]
        return x, slopes_at(x)[:, list(free)]

    def slopes_at(x: Floats) -> Floats:
        """How the gaps depend on every cost and the acceptance, in units of the scale."""
        iterations = columns @ x[:-1]
        step = 1e-6
        sides = [np.log(emitted(float(x[-1]) + side)) for side in (-step, step)]
        acceptance = (sides[0] - sides[1]) / (2 * step)
        slopes: Floats = np.column_stack([columns / iterations[:, None], acceptance]) * scale
        return slopes

    x, slopes = solve(free)
    while True:
        # Unknown or alike: what is left out is named, and counts as nothing.
        _, sizes, ways = np.linalg.svd(slopes / np.linalg.norm(slopes, axis=0))
        enough = len(runs) >= len(free) + (0 if noise is not None else 1)
        if enough and sizes[-1] > ALIKE * sizes[0]:
            break
        alike = np.abs(ways[-1]) > 0.1 * np.abs(ways[-1]).max()
        within = {names[i] for i, same in zip(free, alike, strict=True) if same or not enough}
        out = next((name for name in DROPPED if name in within), None)
        if out is None:
            break
        free = [i for i in free if names[i] != out]
        x, slopes = solve(free)
    freedom = len(runs) - len(free)
    if noise is None and freedom < 1:
        raise DraftsimError(
            f"{len(runs)} runs for {len(free)} costs: measure one more, or name --noise"
        )
    final = gaps(x)
    scatter = float(np.sqrt(np.square(final).sum() / freedom)) if freedom else 0.0
    sigma = scatter if noise is None else noise
    units = scale[free]
    inverse = np.linalg.inv(slopes.T @ slopes)
    covariance: Floats = np.asarray(inverse * sigma**2 * np.outer(units, units), dtype=np.float64)
    tail = 1 - (1 - level) / (2 * len(free))
    reach = float(t.ppf(tail, freedom) if noise is None else norm.ppf(tail))
    widths = reach * np.sqrt(np.diag(covariance))
    intervals = {}
    for i, width in zip(free, widths, strict=True):
        least = -np.inf if i == signed else 0.0
        most = np.inf if i in costs else 1.0
        intervals[names[i]] = Interval(
            float(x[i]), float(max(least, x[i] - width)), float(min(most, x[i] + width))
        )
    server = base.with_costs(x[:-1])
    if ACCEPTANCE in intervals:
        server = replace(server, acceptance=float(x[-1]))
    possible = [n for n in names if n != ACCEPTANCE or unknown.any()]
    left = tuple(
        n for n in possible
        if n not in intervals and not (n == "step_s" and base.threshold is None)
    )  # fmt: skip
    return Calibration(
        server, intervals, left, sigma, covariance, level,
        np.inf if noise is not None else float(freedom), tuple(np.expm1(-final).tolist()),
    )  # fmt: skip
