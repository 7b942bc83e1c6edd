"""Acceptance compared with the expected one: z by position, and the cause that fits the pattern.

At each position the observed rate is compared with the expected one on the scale of log-odds.
The variance has two parts: that of both counts (times `WITHIN`, because rounds of one text are
alike), and the usual difference between two sound runs (`BETWEEN`).  So a difference of half a
percent is no fault, however many rounds were counted.

Each cause in `CAUSES` is a pattern with one free number: the factor by which acceptance fell at
some positions.  The cause that leaves the smallest sum of squared z is named, if that is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.arrays import Floats
from simulator.aggregate.hazard import ANOTHER_RUN
from simulator.aggregate.positions import Positions
from simulator.bootstrap import Interval

WITHIN = 2.0
"""Variance of a rate counted over rounds of a text, over that of independent rounds."""
BETWEEN = 0.06
"""Standard deviation between two sound runs, in log-odds: 1.5% at an acceptance rate of 0.5."""
DIFFERS = 3.0
"""Absolute z from which a position differs."""
NOTHING = 0.05
"""Acceptance rate below which a position accepts nothing."""
FEW = 5.0
"""Rounds that must reach a position for it to be judged."""
CONTEXTS = 4
"""Parts of equal size that rounds are split into by context."""
COLLAPSED = 0.7
"""Fall from short to long contexts, over the profile's own fall, from which it is a collapse."""

CAUSES = {
    "as expected": "nothing to do",
    "better": "the profile is of harder text, a worse drafter or another temperature",
    "dummy drafter": "nothing is accepted: random or missing weights, another tokenizer, or a "
    "drafter of another target",
    "wrong head or template": "position 1 alone is worse: another head or chat template than the "
    "drafter was trained with, or hidden states of other layers",
    "few drafts": "position 1 alone is worse, as not every step had a draft: lookups that found "
    "none, or a server that does not draft under load",
    "domain": "every position is worse by one factor: other text, temperature or quantisation "
    "than the profile's",
    "cap": "positions from {at} on accept nothing: a cap on the draft length below the profile's, "
    "or the drafter's own context limit",
    "context length": "acceptance collapses at long contexts: the drafter's context limit, its "
    "window or its RoPE scaling",
    "late positions": "later positions are worse step by step: drafts feed on their own errors "
    "(one module applied again and again, a quantised drafter)",
    "mixed": "no single cause fits: compare by category of prompts",
}
"""Causes with the pattern, and what to look at."""


class Place(NamedTuple):
    """One position of a draft."""

    position: int
    expected: float
    """Acceptance rate, given that the tokens before were accepted."""
    observed: float
    z: float


class ContextPart(NamedTuple):
    """Rounds at similar contexts."""

    low: int
    high: int
    """Tokens in the cache when the rounds began."""
    rounds: int
    tokens_per_round: float


@dataclass(frozen=True)
class Diagnosis:
    """A comparison by position, and the most likely cause of the difference."""

    places: list[Place]
    contexts: list[ContextPart]
    draft_length: int
    expected: Interval
    """Tokens per round at the observed draft length, with their 80% interval."""
    observed: float
    cause: str
    """A key of `CAUSES`."""
    at: int | None
    """First position that accepts nothing, of a cap."""
    leaves: float
    """Root mean square z that the cause does not explain."""

    @property
    def advice(self) -> str:
        """Describe the pattern, and say what to look at."""
        return CAUSES[self.cause].format(at=self.at)


def diagnose(observed: Positions, expected: Positions) -> Diagnosis:
    """Compare observed acceptance with the expected one, at the draft length observed."""
    k = observed.longest
    should = expected.emitted(k)
    count = min(len(observed.rates), len(expected.rates))
    mine, its = observed.rates[:count], expected.rates[:count]
    error = _errors(observed, expected, count)
    judged = ~(np.isnan(mine) | np.isnan(its) | np.isnan(error))
    gap = np.where(judged, _logit(mine) - _logit(its), 0.0)
    z = np.where(judged, gap / np.where(judged, error, 1.0), np.nan)
    places = [Place(j + 1, float(its[j]), float(mine[j]), float(z[j])) for j in range(count)]
    parts = rounds_by_context(observed)
    if judged.any():
        falls = _fall(parts) < COLLAPSED * _fall(rounds_by_context(expected))
        cause, at, leaves = _cause(mine[judged], its[judged], gap[judged], error[judged], falls)
        if cause == "wrong head or template" and observed.drafting < expected.drafting:
            # A step without one accepts nothing at position 1.
            drafted = np.minimum(mine[0] * expected.drafting / observed.drafting, 1.0)
            if _logit(drafted) - _logit(its[0]) > -DIFFERS * error[0]:
                cause = "few drafts"
    else:
        cause, at, leaves = _by_length(observed.known[k], should), None, 0.0
    return Diagnosis(places, parts, k, should, observed.known[k], cause, at, leaves)


def rounds_by_context(observed: Positions) -> list[ContextPart]:
    """Return tokens per round by context, in parts of equally many rounds; empty without rounds."""
    if observed.log is None or len(observed.log) < CONTEXTS * 20:
        return []
    rounds, context = observed.log.rounds, observed.log.context
    whole = rounds["drafted"] == rounds["drafted"].max()
    parts = []
    for rows in np.array_split(np.argsort(context[whole], kind="stable"), CONTEXTS):
        held = context[whole][rows]
        tokens = 1 + rounds["accepted"][whole][rows].mean()
        parts.append(ContextPart(int(held.min()), int(held.max()), len(rows), float(tokens)))
    return parts


def _fall(parts: list[ContextPart]) -> float:
    """Return tokens accepted per round at the longest contexts over those at the shortest.

    1 if the rounds are not known.
    """
    if not parts:
        return 1.0
    return (parts[-1].tokens_per_round - 1) / max(parts[0].tokens_per_round - 1, 1e-9)


def _errors(observed: Positions, expected: Positions, count: int) -> Floats:
    """Return standard errors of log-odds' differences, (count,); NaN where too few rounds came."""
    variance = np.full(count, BETWEEN**2)
    for side in (observed, expected):
        if not side.counted:
            continue
        # Half a round more on either side: a rate of 0 or 1 has an error, too.
        reached, hits = side.reached[:count], side.accepted[:count]
        own = WITHIN * (1 / (hits + 0.5) + 1 / (reached - hits + 0.5))
        variance = variance + np.where(reached >= FEW, own, np.nan)
    return np.asarray(np.sqrt(variance))


def _cause(
    mine: Floats, its: Floats, gap: Floats, error: Floats, falls: bool
) -> tuple[str, int | None, float]:
    """Return the cause, the position of a cap, and the z that it leaves."""
    z = gap / error

    def left(rest: Floats) -> float:
        return float(np.sqrt(np.square(rest / error).mean()))

    if np.all(mine < NOTHING) or (mine[0] < NOTHING <= its[0]):
        return "dummy drafter", None, 0.0
    if np.all(np.abs(z) < DIFFERS) and abs(z.sum()) < DIFFERS * np.sqrt(len(z)):
        return "as expected", None, left(gap)
    if np.all(z > -DIFFERS) and z.sum() > 0:
        return "better", None, left(gap)
    # A cliff by context shows at every position, as another domain does: it is looked for first.
    if falls:
        return "context length", None, left(gap)
    empty = np.flatnonzero((mine < NOTHING) & (its > 2 * NOTHING))
    if len(empty):
        at = int(empty[0])
        return "cap", at + 1, left(np.where(np.arange(len(gap)) < at, gap, 0.0))
    place = np.arange(len(gap))
    shapes = {
        "wrong head or template": (place == 0).astype(float),
        "domain": np.ones(len(gap)),
        "late positions": place.astype(float),
    }
    weight = 1 / error**2
    rests = {}
    for name, shape in shapes.items():
        size = float((weight * shape * gap).sum() / max((weight * shape**2).sum(), 1e-12))
        rests[name] = left(gap - size * shape) if size < 0 else np.inf
    best = min(rests, key=lambda name: rests[name])
    # With three positions or more, a pattern that leaves most of the gap explains nothing.
    if rests[best] > max(DIFFERS, 0.5 * left(gap)):
        return "mixed", None, rests[best]
    return best, None, rests[best]


def _by_length(observed: float, expected: Interval) -> str:
    """Return a cause from acceptance lengths alone, which have no pattern by position.

    Two sound runs differ by `ANOTHER_RUN`, and a fault by `DIFFERS` times that.
    """
    if observed < 1 + NOTHING:
        return "dummy drafter"
    if observed > expected.high * (1 + DIFFERS * ANOTHER_RUN):
        return "better"
    return "mixed" if observed < expected.low * (1 - DIFFERS * ANOTHER_RUN) else "as expected"


def _logit(rates: Floats) -> Floats:
    """Return log-odds, of rates kept a thousandth away from 0 and 1."""
    kept = np.clip(rates, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(kept / (1 - kept)))
