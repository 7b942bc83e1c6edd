"""Lengths of runs of accepted drafts, if some ends were not observed.

A round whose whole draft was accepted says that the run was at least that long, not
where it would have ended: the run is censored, and a plain mean would be too short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from policies.arrays import Bools, Floats, Ints
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Trace
from traces.errors import DraftsimError

_FEWEST_AT_RISK = 20
"""Hazards seen fewer times than this are pooled with all longer ones."""


def runs(trace: Trace) -> tuple[Ints, Bools, Ints]:
    """Return every run of matches after a mismatch, an unrecorded position or a beginning.

    Their lengths; True if a recorded mismatch ended the run, False if it was censored; and the
    index into `Trace.on_path` of the position after the run (perhaps the next request's).
    """
    match = trace.columns["match"][trace.on_path]
    begins = trace.columns["position"][trace.on_path] == 0
    begins[1:] |= match[:-1] != MATCH
    starts = np.flatnonzero(begins)
    lengths = trace.run_lengths[starts]
    ends = starts + lengths
    rejected = (ends < trace.request_ends[starts]) & ~trace.open_ended[starts]
    return lengths, rejected, ends


@dataclass(frozen=True, eq=False)
class Survival:
    """Kaplan-Meier estimate of P(run >= k), k = 0 ... K.

    A run "at risk" at k had k matches and the next outcome was seen; ``rejected[k]`` of
    ``at_risk[k]`` ended there.  Both have shape (K,).
    """

    at_risk: Ints
    rejected: Ints

    @property
    def hazard(self) -> Floats:
        """Probability that the draft after k matches is rejected, shape (K,)."""
        return np.asarray(self.rejected / self.at_risk, dtype=np.float64)

    @property
    def survival(self) -> Floats:
        """P(run >= k), shape (K + 1,): ``survival[k + 1] = survival[k] (1 - hazard[k])``."""
        return np.append(1.0, np.cumprod(1 - self.hazard))


def survival(trace: Trace) -> Survival:
    """Return Kaplan-Meier survival of the run length, fully accepted rounds censored.

    Kaplan & Meier 1958, eq. 1a.

    Raises
    ------
    DraftsimError
        If no outcome was recorded, or the draft lengths of an imported log are not known: then
        censoring hides rejections, and the estimate means nothing.
    """
    if trace.meta.get("draft_lengths_known") is False:
        raise DraftsimError(
            "survival needs to tell rejected drafts from fully accepted ones, and this import does "
            "not know the draft lengths: import with --draft-lengths hf-heuristic:N or "
            "fixed:N, or take the unknown ends as rejections (impute(trace, method='rejected'))"
        )
    lengths, seen, _ = runs(trace)
    # A censored run of k tells of k acceptances and nothing about what came after them.
    last = np.where(seen, lengths, lengths - 1)
    if (last < 0).all():
        raise DraftsimError("survival needs a recorded outcome, and the trace holds none")
    size = int(last.max()) + 1
    risk = np.bincount(last[last >= 0], minlength=size)[::-1].cumsum()[::-1]
    return Survival(risk, np.bincount(lengths[seen], minlength=size))


def impute(
    trace: Trace, seed: int = 0, method: Literal["hazard", "rejected"] = "hazard"
) -> Trace:  # fmt: skip
    """Return the trace with the matches that were not recorded filled in, marked in ``meta``.

    ``hazard`` draws each from the trace's own Kaplan-Meier hazard (`survival`) at the run of
    recorded matches before it.  ``rejected`` takes every one as a mismatch: no start then has more
    accepted than it would have had, a lower bound.  A replay of the result has fidelity
    ``approximate``, or of the latter ``lower bound``.

    Raises DraftsimError if nothing was recorded to estimate the hazard from, or the draft lengths
    of an imported log are not known.
    """
    match = np.array(trace.columns["match"])
    lengths, _, ends = runs(trace)
    on_path = match[trace.on_path]
    unknown = np.flatnonzero(on_path == UNKNOWN)
    if method == "rejected":
        filled = np.full(len(unknown), MISMATCH, dtype=np.int8)
        seen = max(int(trace.run_lengths.max(initial=0)), 1)
    elif method == "hazard":
        estimate = survival(trace)
        hazard = _pooled(estimate)
        seen = len(estimate.at_risk)
        # Every unknown position ends exactly one run of its own request.
        so_far = lengths[np.searchsorted(ends, unknown, side="right") - 1]
        chance = hazard[np.minimum(so_far, len(hazard) - 1)]
        rejected = np.random.default_rng(seed).random(len(unknown)) < chance
        filled = np.where(rejected, MISMATCH, MATCH).astype(np.int8)
    else:
        raise DraftsimError(f"imputation method is {method!r}, expected 'hazard' or 'rejected'")
    match[trace.on_path[unknown]] = filled
    note = {"method": method, "seed": seed, "positions": len(unknown), "longest_seen": seen}
    meta = {**trace.meta, "imputed": note}
    return replace(trace, columns={**trace.columns, "match": match}, meta=meta)


def _pooled(estimate: Survival) -> Floats:
    """Return the hazard after each run length; long runs with few observations share one."""
    thin = np.flatnonzero(estimate.at_risk < _FEWEST_AT_RISK)
    if not thin.size:
        return estimate.hazard
    first = int(thin[0])
    rest = estimate.rejected[first:].sum() / estimate.at_risk[first:].sum()
    return np.append(estimate.hazard[:first], rest)
