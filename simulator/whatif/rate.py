"""The rate-optimal policy of a recording: its estimates fitted, its rate found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats, Ints
from policies.core import DraftPolicy
from policies.estimators import (
    AcceptanceEstimator,
    ConstantAcceptance,
    IsotonicAcceptance,
    LogisticAcceptance,
    rising_blocks,
)
from policies.lengths.basic import Autoregressive
from policies.lengths.rate_optimal import RateOptimal
from simulator.pricing import extras_of, price
from simulator.serving.cost import TableCost
from simulator.whatif.tilt import NUMERIC
from traces.acceptance.trace import MATCH, Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.layout import Lockstep, layout_of
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many


def judged_rows(trace: Trace) -> Ints:
    """Return rows of drafted tokens that verification reached in some round, ascending.

    Where every start has drafts of its own these are its own, up to the first wrong one.
    """
    if not (trace.by_start and trace.signals):
        return np.asarray(trace.on_path)
    accepted = np.repeat(
        trace.columns["accepted"][trace.on_path], np.diff(np.append(trace.on_path, len(trace)))
    )
    judged = trace.columns["offset"] <= accepted
    judged[trace.on_path[trace.nothing_drafted]] = False
    return np.flatnonzero(judged)


def ends_draft(trace: Trace, judged: Ints) -> npt.NDArray[np.bool_]:
    """Return where no judged token follows one of `judged` in its draft."""
    if trace.by_start and trace.signals:
        follows = np.diff(judged, append=-1) == 1
        follows[:-1] &= trace.columns["offset"][judged[1:]] > 0
        return np.asarray(~follows)
    last = np.zeros(len(judged), dtype=bool)
    last[trace.request_starts[1:] - 1] = True
    return last


def first_acceptance(trace: Trace) -> float:
    """Return the share of matches where every policy begins a round.

    That is after a mismatch, and where a request's decoding begins (`Trace.first`).
    """
    match = trace.columns["match"][trace.on_path] == MATCH
    position = trace.columns["position"][trace.on_path]
    fresh = position == trace.first
    fresh[1:] |= ~match[:-1] & (position[1:] > trace.first)
    return float((match[fresh].sum() + 0.5) / (fresh.sum() + 1))


def drafts_of_rounds(trace: Trace, judged: Ints, gamma: int) -> tuple[Ints, Ints]:
    """Return indices into `judged` of tokens drafted by rounds of `gamma`, and places in the draft.

    A draft counts up to its first mismatch: what follows has no outcome of its own.
    """
    lockstep = Lockstep(layout_of(trace), trace.first, trace.takes_verified)
    begins = lockstep.begun(np.minimum(lockstep.runs, gamma) + 1)
    # By start a draft's tokens follow its first, else they are where those before it are right.
    firsts = np.searchsorted(judged, trace.on_path[begins])
    longest = np.minimum(lockstep.runs + 1, gamma)
    counts = np.minimum(longest, lockstep.room)[begins].astype(np.int64)
    if trace.by_start:
        own = np.diff(np.append(np.searchsorted(judged, trace.on_path), len(judged)))
        counts = np.minimum(counts, own[begins])
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(firsts, counts) + offset, offset


class LatencyCost(TableCost):
    """A `TableCost` in which a wider pass of the target costs no less than a narrower one.

    Differences between neighbouring widths decide how long a draft should be, and measured ones
    may be noise, or the step from one kernel to another.  So the target's seconds are an isotonic
    fit over the widths 1 to ``longest + 1``.

    Parameters
    ----------
    latency, extras:
        See `TableCost`.
    longest:
        Draft length up to which the target's pass is fitted.
    smooth:
        False leaves the seconds as measured.
    """

    def __init__(
        self, latency: LatencyTable, extras: Collection[str] = (), longest: int = 24,
        smooth: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(latency, extras)
        self.longest, self.smooth = longest, smooth
        self._widths = np.arange(1.0, longest + 2)

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Return seconds of `draft_length` batched draft steps and one verification."""
        known = _seconds.setdefault(self.latency, {})
        key = self.extras, batch, draft_length, verify_tokens, context
        seconds = known.get(key)
        if seconds is None:
            seconds = super().__call__(batch, draft_length, verify_tokens, context)
            known[key] = seconds
        if not self.smooth:
            return seconds
        beyond = _beyond(self.latency, self.longest, batch, context)
        return seconds + float(np.interp(verify_tokens / batch, self._widths, beyond))

    def __deepcopy__(self, memo: dict[int, Any]) -> LatencyCost:
        return self  # a table of measurements, which nothing changes

    def __reduce__(self) -> tuple[type[LatencyCost], tuple[Any, ...]]:
        return type(self), (self.latency, self.extras, self.longest, self.smooth)


def _beyond(latency: LatencyTable, longest: int, batch: int, context: float) -> Floats:
    """Return what a fit that nowhere falls adds to the target's pass of each width, (widths,)."""
    known = _known.setdefault(latency, {})
    key = longest, batch, context
    if key not in known:
        width = np.arange(1, longest + 2)
        raw = latency.seconds("target", "forward", batch=batch, new_tokens=width, context=context)
        blocks = rising_blocks(raw, np.ones(len(raw)))
        values, weights = [v for _, _, v in blocks], [int(w) for _, w, _ in blocks]
        known[key] = np.repeat(values, weights) - raw
    return known[key]


# Fits of one recording read one table, under several ways to weigh the same passes.
_known: WeakKeyDictionary[LatencyTable, dict[tuple[int, int, float], Floats]] = WeakKeyDictionary()
_seconds: WeakKeyDictionary[
    LatencyTable, dict[tuple[frozenset[str], int, int, int, float], float]
] = WeakKeyDictionary()


Estimates = Literal["auto", "isotonic", "logistic", "none"]
KINDS: tuple[Estimates, ...] = ("none", "isotonic", "logistic")
DEFAULT_GAMMA = 20
_ITERATIONS = 30
TOLERANCE = 1e-6
"""Relative change of the rate at which its fixed point is reached."""


class RateFit(NamedTuple):
    """A fitted policy and what it achieves."""

    policy: RateOptimal
    """`RateOptimal` with everything filled in."""
    estimates: str
    """The estimates it reads: ``isotonic``, ``logistic`` or ``none``."""
    achieved: float
    """Tokens per second on the training prompts, at the first batch."""


def fit_rate_optimal(
    trace: Trace,
    latency: LatencyTable,
    train: Sequence[int] | None = None,
    *,
    estimates: Estimates = "auto",
    gamma_max: int | None = None,
    batches: Sequence[int] = (1,),
) -> RateFit:
    """Fit `policies.lengths.rate_optimal.RateOptimal` on the prompts `train` (default: all).

    ``estimates``: ``isotonic`` reads the draft's probability, monotone; ``logistic``
    every signal recorded and the place in the draft; ``none`` takes one chance for every
    token, also where the trace holds no signals; ``auto`` keeps what does best on the
    training prompts, since reading signals has a price.  The estimate of the token to
    come is fitted likewise to the signals of the one before it; the first one's is the share
    of matches after a mismatch and at the begin of decoding, where every policy begins a round.

    The rate is Dinkelbach's fixed point: replay with the rate, price, take the rate
    achieved.  Estimates that are not exact move the best rate away from it, so that some
    fractions of it are tried too, and the one of most tokens per second is taken.  The
    table is read both as it is and smoothed (`LatencyCost`).
    ``batches`` beyond 1 are priced in step (`simulator.pricing.price`) and give rows of
    ``rate``.

    Raises DraftsimError if there is no training prompt, the estimates are unknown, or the table
    lacks a model.
    """
    learned = trace if train is None else trace.select(train)
    if not len(learned.requests):
        raise DraftsimError("no prompt to train on: give at least one index")
    longest = gamma_max or min(DEFAULT_GAMMA, trace.max_gamma or DEFAULT_GAMMA)
    kinds: tuple[str, ...] = (estimates,)
    if estimates == "auto":
        kinds = KINDS if set(NUMERIC) & trace.signals else ("none",)
    fits = []
    plain = [_achieved(learned, latency, [Autoregressive()], batch)[0] for batch in batches]
    fitted = {kind: fit_estimates(learned, kind, longest) for kind in kinds}
    # The training prompts decide if a dip of the target's pass is noise or real.
    for kind, smooth in product(kinds, (True, False)):
        now, following, first = fitted[kind]
        extras = extras_of(now.reads, sampling=learned.sampling)
        priced = LatencyCost(latency, extras, longest, smooth)
        rule = RateOptimal(plain[0], longest, first, True, 0.0, now, following, priced)
        found = [
            _best_rate(learned, latency, rule, batch, rate)
            for batch, rate in zip(batches, plain, strict=True)
        ]
        table = sorted([float(b), best] for b, (best, _) in zip(batches, found, strict=True))
        rate: float | list[list[float]] = table[0][1] if list(batches) == [1] else table
        fits.append(RateFit(rule.at_rate(rate), kind, found[0][1]))
    return max(fits, key=lambda fit: fit.achieved)


def fit_estimates(
    trace: Trace, estimates: str, gamma: int
) -> tuple[AcceptanceEstimator, AcceptanceEstimator | None, float]:
    """Return acceptance in `trace` of (a drafted token, the one after it, a round's first)."""
    if estimates not in ("isotonic", "logistic", "none"):
        raise DraftsimError(f"estimates is {estimates!r}, expected isotonic, logistic or none")
    judged = judged_rows(trace)
    match = trace.columns["match"][judged] == MATCH
    names = tuple(n for n in NUMERIC if n in trace.signals)
    first = first_acceptance(trace)
    if estimates == "none" or not names:
        chance = float(match.mean())
        # One chance for all: what a round's start tells would be another, unknown signal.
        return ConstantAcceptance(chance), None, chance
    last = ends_draft(trace, judged)
    before = np.flatnonzero(match & ~last)
    if len(before) == 0:
        before = np.flatnonzero(~last)
    if estimates == "isotonic":
        signal = "prob" if "prob" in names else names[0]
        rising = signal != "entropy"
        values = trace.signal(signal)[judged]
        return (
            IsotonicAcceptance.fit(signal, values, _smoothed(values, match, rising), rising),
            IsotonicAcceptance.fit(
                signal, values[before], _smoothed(values[before], match[before + 1], rising), rising
            ) if len(before) else None,
            first,
        )  # fmt: skip
    values = np.column_stack([trace.signal(n)[judged] for n in names])
    rows, offset = drafts_of_rounds(trace, judged, gamma)
    seen = rows[match[rows] & ~last[rows]], offset[match[rows] & ~last[rows]]
    return (
        LogisticAcceptance.fit(names, values[rows], offset, match[rows]),
        LogisticAcceptance.fit(names, values[seen[0]], seen[1], match[seen[0] + 1])
        if len(seen[0]) else None,
        first,
    )  # fmt: skip


def _smoothed(
    values: npt.NDArray[np.float64], match: npt.NDArray[np.bool_], rising: bool
) -> npt.NDArray[np.float64]:
    """Return outcomes with the ends pooled: steps of few samples claim certainty."""
    result = match.astype(np.float64)
    order = np.argsort(values, kind="stable")
    pool = max(1, min(len(order) // 20, 25))
    for ends in (order[:pool], order[-pool:]):
        result[ends] = (match[ends].sum() + 0.5) / (len(ends) + 1)
    return result


def _best_rate(
    trace: Trace, latency: LatencyTable, rule: RateOptimal, batch: int, rate: float
) -> tuple[float, float]:
    """Return the fixed point from `rate` on, or a better fraction of it, and the rate achieved."""

    def achieved(*rates: float) -> list[float]:
        return _achieved(trace, latency, [rule.at_rate(r) for r in rates], batch)

    tried: dict[float, float] = {}
    following = rate
    for _ in range(_ITERATIONS):
        rate = following
        [following] = achieved(rate)
        tried[rate] = following
        if following <= rate * (1 + TOLERANCE):
            break
    if tried[rate] < rate * (1 - TOLERANCE) or len(tried) == _ITERATIONS:
        # The estimates are not exact: another rate may do better than the fixed point.
        others = [fraction * rate for fraction in (0.6, 0.7, 0.8, 0.9, 0.95, 1.05)]
        tried |= zip(others, achieved(*others), strict=True)
    most = max(tried.values())
    best = rate if tried[rate] >= most * (1 - TOLERANCE) else max(tried, key=lambda r: tried[r])
    return best, tried[best]


def _achieved(
    trace: Trace, latency: LatencyTable, policies: Sequence[DraftPolicy], batch: int
) -> list[float]:
    """Return tokens per second and sequence under each policy."""
    logs = replay_many(trace, [("", policy) for policy in policies], batch=batch)
    return [tokens_per_second(log, latency, batch) for log in logs]


def tokens_per_second(log: RoundLog, latency: LatencyTable, batch: int = 1) -> float:
    """Return tokens per second and sequence of a log's decoding."""
    return (
        float(log.rounds["emitted"].sum(dtype=np.int64)) / price(log, latency, batch=batch).total_s
    )
