"""Another acceptance rate for a recorded trace: its matches tilted, its signals with them.

What would the same pair do if the draft were better or worse?  The chance of a match at
every position, calibrated on the recording (`MatchModel`), is shifted on the logit scale
until the mean is the alpha asked for, and the matches are drawn again.  Position follows
position, since the chance depends on the matches before it, the new ones.

Two ways to draw:

* ``coupled`` (default): the recorded outcome stays wherever the shift does not reverse
  it.  Every outcome is thought of as a uniform number lying below the chance of a match
  or not; the recording tells on which side, a fresh draw where on that side; the shifted
  chance is compared with the same number.  Each new outcome has the shifted chance, what
  the model does not explain stays in place, shift 0 gives the recording back, and
  neighbouring rates differ in few outcomes.
* ``redraw``: fresh uniform numbers.  All dependence then comes from the model; at shift 0
  this tests it.

A draft that is right more often is also surer of itself.  What a signal says of the chance
of a match is therefore kept, and the signals move: each position shows those of a recorded
one of the same outcome whose chance lies higher by the shift, on the logit scale.

A match that becomes a mismatch gets the wrong token and the off-path tail of a recorded
mismatch with like signals; a mismatch that becomes a match loses its own.  A tilted trace
holds no target-side scores, whose truth ended with the recorded outcomes, so lossy rules
refuse it, and its replays have fidelity ``approximate``.  How far off they are is
measured by `simulator.whatif.tilt.fidelity`: more for policies that read signals, where it is the
texts that differ: one that is itself easier to foretell is drafted with other signals at the
same rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from simulator.whatif.tilt.matchmodel import Bools, Floats, MatchModel
from simulator.whatif.tilt.rebuild import Ints, Rebuilder
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

Method = Literal["coupled", "redraw"]
METHODS: tuple[Method, ...] = ("coupled", "redraw")
LARGEST_SHIFT = 40.0
"""Log-odds beyond which no recorded chance is left undecided."""
_HALVINGS = 32
_FEW = 4
"""Rates up to which a draw's time is that of its steps, not of its numbers."""


class Tilter:
    """Tilts one recording to any number of acceptance rates.

    Parameters
    ----------
    trace:
        A recording without unknown matches; any lossless sampling.
    method:
        ``coupled`` or ``redraw``, see above.
    seed:
        Of the uniform numbers; the same ones serve every alpha, so that two rates differ
        by the shift alone.

    Raises
    ------
    DraftsimError
        If the trace has unknown matches, one outcome alone, or no mismatch with a whole
        off-path tail to lend.
    """

    def __init__(self, trace: Trace, method: Method = "coupled", seed: int = 0) -> None:
        if method not in METHODS:
            raise DraftsimError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
        self.trace = trace
        self.method = method
        self.seed = seed
        self.model = MatchModel(trace)
        self._rebuild = Rebuilder(trace, seed)

    @property
    def alpha(self) -> float:
        """Share of recorded drafts that match."""
        return self.model.alpha

    def shifted(self, shift: float) -> Trace:
        """The trace with every chance of a match shifted by `shift` on the logit scale."""
        if not np.isfinite(shift):
            raise DraftsimError(f"shift is {shift}, expected a finite number")
        match = self._draw(np.array([shift]))[0]
        tilt: dict[str, Any] = {
            "method": self.method, "seed": self.seed, "shift": shift,
            "alpha": float(match.mean()), "recorded_alpha": self.alpha,
        }  # fmt: skip
        shown = self._shown(match, shift)
        return self._rebuild(match, {"tilt": tilt, "fidelity": "approximate"}, shown)

    def to(self, alpha: float) -> Trace:
        """The trace whose share of matches is as near to `alpha` as one more draft can be."""
        return self.shifted(float(self.shifts([alpha])[0]))

    def shifts(self, alphas: Sequence[float]) -> Floats:
        """The shift that leads to each rate, shape (alphas,); they are searched together."""
        wanted = np.asarray(alphas, dtype=np.float64)
        for value in wanted:
            if not 0 < value < 1:
                raise DraftsimError(f"alpha is {value:g}, expected strictly between 0 and 1")
        low = np.full(wanted.shape, -LARGEST_SHIFT)
        high = -low
        # A draw costs the same for one shift and for a few: then several halvings at once.
        at_once = 4 if len(wanted) <= _FEW else 1
        for _ in range(_HALVINGS // at_once):
            low, high = self._halved(wanted, low, high, at_once)
        # Of the two neighbours of the jump, the nearer to the rate asked for.
        both = np.stack([low, high])
        miss = np.abs(np.stack([self._draw(s).mean(axis=1) for s in both]) - wanted)
        nearest = both[miss.argmin(axis=0), np.arange(len(wanted))]
        unmoved = (np.abs(self.alpha - wanted) < 1e-12) & (self.method == "coupled")
        return np.where(unmoved, 0.0, nearest)

    def _halved(
        self, wanted: Floats, low: Floats, high: Floats, times: int
    ) -> tuple[Floats, Floats]:
        """The interval of each rate's shift, halved `times` times; all of shape (alphas,)."""
        parts = 2**times
        step = (high - low) / parts
        inner = low + step * np.arange(1, parts)[:, None]
        above = self._draw(inner.ravel()).mean(axis=1).reshape(inner.shape) >= wanted
        each = np.arange(len(wanted))
        first, last = np.zeros(len(wanted), dtype=int), np.full(len(wanted), parts)
        for _ in range(times):
            middle = (first + last) // 2
            left = above[middle - 1, each]
            first, last = np.where(left, first, middle), np.where(left, middle, last)
        return low + step * first, low + step * last

    def _shown(self, match: Bools, shift: float) -> Ints | None:
        """The position whose signals each one shows under the new matches, shape (positions,)."""
        if not self.trace.signals:
            return None
        logit, recorded = self.model.signal_logit, self._recorded
        shown = np.arange(len(match))
        for outcome in (True, False):
            pool = np.flatnonzero(recorded == outcome)
            pool = pool[np.argsort(logit[pool], kind="stable")]
            moved = np.flatnonzero((match == outcome) & ((recorded != outcome) | (shift != 0)))
            wanted, there = logit[moved] + shift, logit[pool]
            above = np.clip(np.searchsorted(there, wanted), 1, len(pool) - 1)
            nearer = wanted - there[above - 1] < there[above] - wanted
            shown[moved] = pool[above - nearer] if len(pool) > 1 else pool[0]
        return shown

    @cached_property
    def _uniform(self) -> Floats:
        """The number behind each outcome, shape (positions,)."""
        drawn = np.random.default_rng(self.seed).random(len(self.trace.on_path))
        if self.method == "redraw":
            return drawn
        match = self._recorded
        chance = _sigmoid(self.model.logit(match))
        return np.where(match, chance * drawn, chance + (1 - chance) * drawn)

    @cached_property
    def _recorded(self) -> Bools:
        return np.asarray(self.trace.columns["match"][self.trace.on_path] == 1)

    def _draw(self, shifts: Floats) -> Bools:
        """Matches under each shift, shape (shifts, positions)."""
        model, padded = self.model, self.model.padded
        # Outcomes are compared as log-odds: a sigmoid per step and shift would cost most.
        with np.errstate(divide="ignore"):
            bar = np.log(self._uniform) - np.log1p(-self._uniform)
        margins = padded.table(model.signal_logit - bar)  # (longest, requests)
        state = model.start((len(shifts), padded.requests))
        matches = np.empty((padded.longest, len(shifts), padded.requests), dtype=bool)
        for step, margin in enumerate(margins):
            matches[step] = margin + model.history_logit(state) + shifts[:, None] > 0
            state = state.after(matches[step])
        return padded.flat(matches)


def tilt_to(trace: Trace, alpha: float, *, method: Method = "coupled", seed: int = 0) -> Trace:
    """`trace` with its acceptance tilted to `alpha`; see `Tilter`, which does several at once."""
    return Tilter(trace, method, seed).to(alpha)


def iid_like(trace: Trace, alpha: float, seed: int = 0) -> Trace:
    """The textbook baseline: matches drawn independently with chance `alpha` everywhere.

    The signals stay and tell nothing any more.  It is what formulas with a single alpha
    assume, offered to show what they miss and marked ``iid`` in ``meta["tilt"]``.

    Raises
    ------
    DraftsimError
        If `alpha` is no probability, or the trace cannot be rebuilt (see `Tilter`).
    """
    if not 0 <= alpha <= 1:
        raise DraftsimError(f"alpha is {alpha:g}, expected between 0 and 1")
    match = np.random.default_rng(seed).random(len(trace.on_path)) < alpha
    tilt = {"method": "iid", "seed": seed, "asked": alpha, "alpha": float(match.mean())}
    return Rebuilder(trace, seed)(match, {"tilt": tilt, "fidelity": "approximate"})


def acceptance(trace: Trace) -> float:
    """Share of on-path drafts that match."""
    match: npt.NDArray[Any] = trace.columns["match"][trace.on_path]
    return float((match == 1).mean())


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))
