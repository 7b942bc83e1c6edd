"""Another acceptance rate for a recorded trace: its matches tilted, its signals with them.

This answers what the same pair would do if the draft were better or worse.  The chance of a match
at every position, calibrated on the recording (`MatchModel`), is shifted on the logit scale until
its mean is the alpha asked for.  Then matches are drawn again, one position after another, because
a chance depends on the new matches before it.

Two ways to draw:

* ``coupled`` (default): the recorded outcome stays wherever the shift does not reverse
  it.  Each outcome is a uniform number: a match if it is below the chance of a match.  The
  recording fixes the side of the chance, and the place on that side is drawn.  The same
  number is then compared with the shifted chance.  Each new outcome has the shifted chance, what
  the model does not explain stays in place, shift 0 gives the recording back, and
  neighbouring rates differ in few outcomes.
* ``redraw``: fresh uniform numbers.  All dependence then comes from the model; at shift 0
  this tests it.

A draft that is right more often is also surer of itself.  So each position takes the signals
of a recorded position with the same outcome, whose chance is higher by the shift on the logit
scale.

A match that becomes a mismatch gets the wrong token and the off-path tail of a recorded
mismatch with like signals; a mismatch that becomes a match loses its own.  A tilted trace
holds no target-side scores, whose truth ended with the recorded outcomes, so lossy rules
refuse it, and its replays have fidelity ``approximate``.  `simulator.whatif.tilt_fidelity`
measures their errors.  They are larger for policies that read signals, because an easier text
has other signals at the same rate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools, Floats, Ints
from traces.acceptance.trace import COLUMNS, MATCH, MISMATCH, SIGNAL_COLUMNS, UNKNOWN, Trace
from traces.errors import DraftsimError

TiltMethod = Literal["coupled", "redraw"]
METHODS: tuple[TiltMethod, ...] = ("coupled", "redraw")
NUMERIC = ("prob", "entropy", "logit_margin", "prob_margin")
"""Signals with a magnitude; a token's id has none."""
LONGEST_RUN = 12
"""Runs of matches at least this long are told apart no further."""
STALE = frozenset(n for n in COLUMNS if n.startswith("target_")) | {"draft_path_logprob", "overlap"}
"""Scores of the recorded drafts by the target, which new outcomes would contradict."""
SCORES = frozenset(n for needed in SIGNAL_COLUMNS.values() for n in needed) - {"draft_token"}
"""The columns that a draft's signals are computed from, without its token."""


class Rebuilder:
    """Makes traces of one recording with given matches; call it with them.

    `seed` chooses among lenders, one per position, whatever the matches.  Raises DraftsimError if
    the recording holds tails, but not one that is whole.
    """

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        self.trace = trace
        self.seed = seed
        self._kept = {n: v for n, v in trace.columns.items() if n not in STALE}
        if trace.max_gamma is None:
            return
        recorded = trace.columns["match"][trace.on_path]
        bounds = np.append(trace.on_path, len(trace))
        self._tails: Ints = np.diff(bounds) - 1
        self._needed = _tail_lengths(trace)
        self._lender = self._lenders(np.flatnonzero(recorded == MISMATCH))

    def __call__(self, match: Bools, meta: Mapping[str, Any], shown: Ints | None = None) -> Trace:
        """Return the trace whose on-path matches are `match`, shape (positions,), with more `meta`.

        ``shown``: per position the one whose recorded signals it shows, by default its own.
        """
        trace = self.trace
        meta = {**trace.meta, **meta}
        outcome = np.where(match, MATCH, MISMATCH).astype(np.int8)
        if trace.max_gamma is None:
            columns = {**self._kept, "match": outcome}
            return Trace(columns | self._signals(columns, shown), trace.requests, None, meta)
        recorded = trace.columns["match"][trace.on_path]
        source = np.where(recorded == MISMATCH, np.arange(len(match)), self._lender)
        lengths = np.where(
            recorded == MISMATCH, self._tails, np.minimum(self._needed, self._tails[source])
        )
        lengths[match] = 0
        # Each position's own row, then the rows of the tail it has or borrows.
        counts = lengths + 1
        place = np.repeat(np.arange(len(match)), counts)
        offset = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        tail = offset > 0
        rows = np.where(tail, trace.on_path[source[place]] + offset, trace.on_path[place])
        columns = {name: values[rows] for name, values in self._kept.items()}
        own = trace.on_path[place]
        columns |= {
            "request": trace.columns["request"][own],
            "position": trace.columns["position"][own],
            "offset": offset.astype(np.int16),
            "match": np.where(tail, UNKNOWN, outcome[place]).astype(np.int8),
        }
        if "draft_token" in columns:
            heads = np.flatnonzero(~tail)
            drafted = columns["draft_token"][heads]
            if "token" in columns:
                drafted = np.where(match, columns["token"][heads], drafted)
            lost = np.flatnonzero(~match & (recorded == MATCH))
            drafted[lost] = trace.columns["draft_token"][trace.on_path[source[lost]]]
            columns["draft_token"][heads] = drafted
        columns |= self._signals(columns, shown)
        return Trace(columns, trace.requests, trace.max_gamma, meta)

    def _signals(
        self, columns: Mapping[str, npt.NDArray[Any]], shown: Ints | None
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the columns that signals are computed from, on the path as recorded if `shown`."""
        if shown is None:
            return {}
        moved = {}
        heads = np.flatnonzero(columns["offset"] == 0)
        for name in SCORES & columns.keys():
            values = moved[name] = columns[name].copy()
            values[heads] = self.trace.columns[name][self.trace.on_path[shown]]
        return moved

    def _lenders(self, mismatches: Ints) -> Ints:
        """Return the recorded mismatch that would lend each position its tail, (positions,)."""
        from scipy.spatial import cKDTree

        trace = self.trace
        whole = (
            self._tails[mismatches]
            >= min(trace.max_gamma or 1, int(self._needed.max(initial=0)) + 1) - 1
        )
        if "draft_token" in trace.columns:
            # A tail that the draft ended with EOS is whole, however short.
            last = trace.on_path[mismatches] + self._tails[mismatches]
            whole |= np.isin(
                trace.columns["draft_token"][last], trace.meta.get("eos_token_ids") or []
            )
        pool = mismatches[whole]
        if not len(pool):
            raise DraftsimError(
                "the trace has no mismatch with a whole off-path tail to lend: record longer "
                "outputs, or with a smaller --max-gamma"
            )
        signals = signal_table(trace)[trace.on_path]
        scale = signals.std(axis=0)
        scale[scale == 0] = 1.0
        signals = signals / scale
        count = min(8, len(pool))  # mismatches of like signals, among which one is drawn
        _, near = cKDTree(signals[pool]).query(signals, k=count)
        near = pool[near.reshape(len(signals), count)]
        shuffled = np.random.default_rng(self.seed).permuted(near, axis=1)
        if "draft_token" not in trace.columns or "token" not in trace.columns:
            return np.asarray(shuffled[:, 0])
        # A wrong draft must be another token than the right one.
        lent = trace.columns["draft_token"][trace.on_path][shuffled]
        differs = lent != trace.columns["token"][trace.on_path][:, None]
        return np.asarray(shuffled[np.arange(len(shuffled)), differs.argmax(axis=1)])


def _tail_lengths(trace: Trace) -> Ints:
    """Return tail tokens a mismatch at each position may need, shape (positions,).

    A draft ends one token before the output limit, which verification fills.
    """
    limit = np.repeat([r.max_new_tokens for r in trace.requests], np.diff(trace.request_starts))
    position = trace.columns["position"][trace.on_path].astype(np.int64)
    return np.clip(limit - position - 2, 0, (trace.max_gamma or 1) - 1)


class MatchModel:
    """Logistic regression on splines of the signals and on the recent history.

    ``signal_logit`` is the contribution of the signals per on-path position, intercept included;
    ``run_logit`` that of a run of length k; ``share_logit`` weights the share and its square.
    Raises DraftsimError if a match was not recorded, or all matches are alike.
    """

    def __init__(self, trace: Trace) -> None:
        # Imported here: a package that never tilts need not load scikit-learn.
        from sklearn.linear_model import LogisticRegression

        self.trace = trace
        recorded = trace.columns["match"][trace.on_path]
        _check_by_position(trace)
        if (recorded == UNKNOWN).any():
            raise DraftsimError("some matches were not recorded: impute the trace first")
        match: Bools = recorded == MATCH
        if match.all() or not match.any():
            raise DraftsimError(
                "every draft of the trace has the same outcome: there is no chance to calibrate"
            )
        self.alpha = float(match.mean())
        run, share = self.histories(match)
        signals = _spline_features(trace)
        runs = run[:, None] == np.arange(LONGEST_RUN + 1)
        features = np.column_stack([signals, runs.astype(float), share, share**2])
        with warnings.catch_warnings():
            # A column that never varies takes no weight; saying so helps nobody.
            warnings.simplefilter("ignore")
            fitted: Any = LogisticRegression(solver="newton-cholesky").fit(features, match)
        weights = np.asarray(fitted.coef_[0], dtype=np.float64)
        split = signals.shape[1]
        self.signal_logit: Floats = signals @ weights[:split] + float(fitted.intercept_[0])
        self.run_logit: Floats = weights[split : split + LONGEST_RUN + 1]
        self.share_logit: Floats = weights[split + LONGEST_RUN + 1 :]

    def histories(self, match: Bools) -> tuple[Ints, Floats]:
        """Return matches in a row (up to `LONGEST_RUN`) before each position, and their share.

        The share is exponentially weighted; both have shape (positions,).
        """
        from simulator.whatif.drawn import remembered  # loads the compiler

        run, share = np.empty(len(match), dtype=np.int64), np.empty(len(match))
        remembered(match, self.trace.request_starts, self.alpha, LONGEST_RUN, run, share)
        return run, share

    def logit(self, match: Bools) -> Floats:
        """Return log-odds at every on-path position under the histories that `match` makes."""
        run, share = self.histories(match)
        one, two = self.share_logit
        return np.asarray(self.signal_logit + (self.run_logit[run] + share * (one + two * share)))

    def drawn(self, margins: Floats, shifts: Floats) -> Bools:
        """Return matches under each shift, shape (shifts, positions).

        A position matches where its margin, the shift and what its history adds exceed 0.
        """
        from simulator.whatif.drawn import drawn  # loads the compiler

        match = np.empty((len(shifts), len(margins)), dtype=bool)
        starts, (one, two) = self.trace.request_starts, self.share_logit.tolist()
        drawn(margins, starts, shifts, self.alpha, self.run_logit, one, two, match)
        return match


def _spline_features(trace: Trace) -> Floats:
    """Return cubic B-splines of each on-path signal, shape (positions, features)."""
    from sklearn.preprocessing import SplineTransformer

    columns = signal_table(trace)[trace.on_path]
    columns = columns[:, np.ptp(columns, axis=0) > 0]
    if not columns.shape[1]:
        return columns
    spline: Any = SplineTransformer(n_knots=6, degree=3, knots="quantile", include_bias=False)
    return np.ascontiguousarray(spline.fit_transform(columns), dtype=np.float64)


_SCALE: dict[str, Callable[[Floats], Floats]] = {
    "prob": lambda v: np.log(np.clip(v, 1e-6, 1)) - np.log1p(-np.clip(v, 1e-6, 1 - 1e-6)),
    "logit_margin": lambda v: np.log1p(np.maximum(v, 0)),
}
"""Signals brought to a scale on which distances mean alike everywhere."""


def signal_table(trace: Trace) -> Floats:
    """Return the numeric signals of every row, rescaled, shape (rows, signals)."""
    parts = [_SCALE.get(n, np.asarray)(trace.signal(n)) for n in NUMERIC if n in trace.signals]
    return np.column_stack(parts) if parts else np.zeros((len(trace), 0))


class Tilter:
    """Tilts one recording to any number of acceptance rates.

    Raises DraftsimError if the trace has unknown matches, one outcome alone, or no mismatch with a
    whole off-path tail to lend.

    Parameters
    ----------
    trace:
        A recording without unknown matches; any lossless sampling.
    method:
        ``coupled`` or ``redraw``.
    seed:
        Seed of the uniform numbers, which every alpha shares, so that two rates differ by the
        shift alone.
    """

    def __init__(self, trace: Trace, method: TiltMethod = "coupled", seed: int = 0) -> None:
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
        """Return the trace with every chance of a match shifted by `shift` on the logit scale."""
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
        """Return the trace whose share of matches is as near to `alpha` as one draft can be."""
        return self.shifted(float(self.shifts([alpha])[0]))

    def shifts(self, alphas: Sequence[float]) -> Floats:
        """Return the shift that leads to each rate, shape (alphas,); they are searched together."""
        wanted = np.asarray(alphas, dtype=np.float64)
        for value in wanted:
            if not 0 < value < 1:
                raise DraftsimError(f"alpha is {value:g}, expected strictly between 0 and 1")
        low = np.full(wanted.shape, -40.0)  # log-odds that leave no recorded chance undecided
        high = -low
        for _ in range(32):
            middle = (low + high) / 2
            above = self._draw(middle).mean(axis=1) >= wanted
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        # Of the two neighbours of the jump, the nearer to the rate asked for.
        both = np.stack([low, high])
        miss = np.abs(np.stack([self._draw(s).mean(axis=1) for s in both]) - wanted)
        nearest = both[miss.argmin(axis=0), np.arange(len(wanted))]
        unmoved = (np.abs(self.alpha - wanted) < 1e-12) & (self.method == "coupled")
        return np.where(unmoved, 0.0, nearest)

    def _shown(self, match: Bools, shift: float) -> Ints | None:
        """Return the position whose signals each one shows, shape (positions,)."""
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
        """Return the random number of each outcome, shape (positions,)."""
        uniform = np.random.default_rng(self.seed).random(len(self.trace.on_path))
        if self.method == "redraw":
            return uniform
        match = self._recorded
        chance = 0.5 * (1 + np.tanh(0.5 * self.model.logit(match)))
        return np.where(match, chance * uniform, chance + (1 - chance) * uniform)

    @cached_property
    def _recorded(self) -> Bools:
        return np.asarray(self.trace.columns["match"][self.trace.on_path] == 1)

    def _draw(self, shifts: Floats) -> Bools:
        """Return matches under each shift, shape (shifts, positions)."""
        # Outcomes are compared as log-odds: a sigmoid per step and shift would cost most.
        with np.errstate(divide="ignore"):
            bar = np.log(self._uniform) - np.log1p(-self._uniform)
        return self.model.drawn(self.model.signal_logit - bar, shifts)


def iid_like(trace: Trace, alpha: float, seed: int = 0) -> Trace:
    """Return the textbook baseline: matches drawn independently with chance `alpha` everywhere.

    The signals stay and tell nothing any more.  It is what formulas with a single alpha
    assume, offered to show what they miss and marked ``iid`` in ``meta["tilt"]``.

    Raises DraftsimError if `alpha` is no probability, or the trace cannot be rebuilt (see
    `Tilter`).
    """
    if not 0 <= alpha <= 1:
        raise DraftsimError(f"alpha is {alpha:g}, expected between 0 and 1")
    _check_by_position(trace)
    match = np.random.default_rng(seed).random(len(trace.on_path)) < alpha
    tilt = {"method": "iid", "seed": seed, "asked": alpha, "alpha": float(match.mean())}
    return Rebuilder(trace, seed)(match, {"tilt": tilt, "fidelity": "approximate"})


def _check_by_position(trace: Trace) -> None:
    """Raise DraftsimError if every start has drafts of its own, which no match changes."""
    if trace.by_start:
        raise DraftsimError(
            "the trace holds acceptance by draft position, which cannot be made better or worse: "
            "leave out what asks for another acceptance"
        )


def acceptance(trace: Trace) -> float:
    """Return the share of on-path drafts that match, of those whose verdict is known."""
    match: npt.NDArray[Any] = trace.columns["match"][trace.on_path]
    return float((match[match != UNKNOWN] == MATCH).mean())
