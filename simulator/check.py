"""Closed forms against simulation: where they hold, and how far off they are elsewhere.

`run_checks` compares every formula with the replay loop (or a small event simulation)
on synthetic i.i.d. acceptance, where it must agree within four standard errors.  On a
recorded trace the assumptions fail; `simulator.check_recorded` then shows by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pandas as pd

from simulator.check_iid import iid_checks
from simulator.check_recorded import recorded_checks
from simulator.estimate import Estimate
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

LIMIT = 4.0
"""Standard errors within which a closed form and its simulation must agree."""


class Check(NamedTuple):
    """One comparison."""

    formula: str
    parameters: str
    closed_form: float
    simulated: float
    standard_error: float
    """Of `simulated`; 0 where the simulation has no randomness."""
    z: float
    ok: bool


def run_checks(
    trace: Trace | None = None,
    latency: LatencyTable | None = None,
    *,
    tokens: int = 20_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Every closed form against simulation, one row each (columns of `Check`).

    Parameters
    ----------
    trace, latency:
        A recording, whose rows (formulas that begin with ``recorded``) follow the
        synthetic ones.  They show how far the i.i.d. formula is off, and may be not ok.
    tokens:
        Length of each synthetic output; standard errors fall with its square root.
    seed:
        Of the synthetic outputs.
    """
    return pd.DataFrame(list(_checks(trace, latency, tokens, seed)), columns=list(Check._fields))


def compare(formula: str, parameters: str, closed_form: float, simulated: Estimate) -> Check:
    """A `Check` of a closed form against a simulated value with its standard error."""
    value, error = simulated
    gap = value - closed_form
    if error > 0:
        z = gap / error
    else:
        z = 0.0 if math.isclose(value, closed_form, rel_tol=1e-9, abs_tol=1e-12) else math.inf
    return Check(formula, parameters, closed_form, value, error, z, abs(z) < LIMIT)


def _checks(
    trace: Trace | None, latency: LatencyTable | None, tokens: int, seed: int
) -> Iterator[Check]:
    rows: Iterable[tuple[str, str, float, Estimate]] = iid_checks(tokens, seed)
    yield from (compare(*row) for row in rows)
    if trace is not None:
        yield from (compare(*row) for row in recorded_checks(trace, latency))
