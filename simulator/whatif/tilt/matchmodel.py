"""The chance that a recorded draft matches, given its signals and the matches before it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.acceptance.schema import MATCH, UNKNOWN
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NUMERIC = ("prob", "entropy", "logit_margin", "prob_margin")
"""Signals with a magnitude; a token's id has none."""
LONGEST_RUN = 12
"""Runs of matches at least this long are told apart no further."""
DECAY = 0.9
"""Weight of the past in the running share of matches, per token."""


class History(NamedTuple):
    """What is remembered of the matches before a position; arrays of one shape."""

    run: npt.NDArray[np.int64]
    """Matches in a row, up to `LONGEST_RUN`."""
    share: Floats
    """Exponentially weighted share of matches."""

    def after(self, match: Bools) -> History:
        """The history one position later."""
        run = np.where(match, np.minimum(self.run + 1, LONGEST_RUN), 0)
        return History(run, DECAY * self.share + (1 - DECAY) * match)


class MatchModel:
    """Logistic regression on splines of the signals and on the recent history.

    Parameters
    ----------
    trace:
        The recording it is fitted to, at every on-path position.
    ridge:
        Inverse strength of the penalty (``C`` of scikit-learn's LogisticRegression).

    Attributes
    ----------
    signal_logit:
        What the signals contribute, per on-path position, the intercept included.
    run_logit, share_logit:
        What a run of length k contributes, and the weights of the share and its square.

    Raises
    ------
    DraftsimError
        If a match was not recorded, or all matches are alike: nothing to calibrate on.
    """

    def __init__(self, trace: Trace, ridge: float = 1.0) -> None:
        # Imported here: a package that never tilts need not load scikit-learn.
        from sklearn.linear_model import LogisticRegression

        self.trace = trace
        self.ridge = ridge
        recorded = trace.columns["match"][trace.on_path]
        if trace.by_start:
            raise DraftsimError(
                "the trace holds acceptance by start, which cannot be made better or worse: leave "
                "out what asks for another acceptance"
            )
        if (recorded == UNKNOWN).any():
            raise DraftsimError("some matches were not recorded: impute the trace first")
        match: Bools = recorded == MATCH
        if match.all() or not match.any():
            raise DraftsimError(
                "every draft of the trace has the same outcome: there is no chance to calibrate"
            )
        self.alpha = float(match.mean())
        self.padded = _Padded(trace)
        history = self.histories(match)
        signals = _spline_features(trace)
        features = np.column_stack([signals, _history_features(history)])
        with warnings.catch_warnings():
            # A column that never varies takes no weight; saying so helps nobody.
            warnings.simplefilter("ignore")
            fitted: Any = LogisticRegression(C=ridge, solver="newton-cholesky").fit(features, match)
        weights = np.asarray(fitted.coef_[0], dtype=np.float64)
        split = signals.shape[1]
        self.signal_logit: Floats = signals @ weights[:split] + float(fitted.intercept_[0])
        self.run_logit: Floats = weights[split : split + LONGEST_RUN + 1]
        self.share_logit: Floats = weights[split + LONGEST_RUN + 1 :]

    def start(self, shape: tuple[int, ...]) -> History:
        """The history of a request that has emitted nothing."""
        return History(np.zeros(shape, dtype=np.int64), np.full(shape, self.alpha))

    def history_logit(self, history: History) -> Floats:
        """What `history` contributes to the log-odds of a match."""
        one, two = self.share_logit
        share = history.share
        return np.asarray(self.run_logit[history.run] + share * (one + two * share))

    def histories(self, match: Bools) -> History:
        """The history before each on-path position, given all matches; shape (positions,)."""
        state = self.start((self.padded.requests,))
        runs, shares = [], []
        for column in self.padded.table(match):
            runs.append(state.run)
            shares.append(state.share)
            state = state.after(column)
        return History(self.padded.flat(np.array(runs)), self.padded.flat(np.array(shares)))

    def logit(self, match: Bools) -> Floats:
        """Log-odds at every on-path position under the histories that `match` makes."""
        return self.signal_logit + self.history_logit(self.histories(match))


class _Padded:
    """On-path positions as a (longest, requests) table, one step of all requests a row."""

    def __init__(self, trace: Trace) -> None:
        starts = trace.request_starts
        lengths = np.diff(starts)
        self.requests = len(lengths)
        self.longest = int(lengths.max(initial=0))
        steps = np.arange(self.longest)[:, None]
        self.inside: Bools = steps < lengths
        self.index = np.where(self.inside, starts[:-1] + steps, 0)
        self._order = np.argsort(self.index[self.inside], kind="stable")

    def table(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`values` (..., positions) as (longest, ..., requests); beyond a request, anything."""
        return np.moveaxis(values[..., self.index], -2, 0)

    def flat(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A (longest, ..., requests) table as (..., positions)."""
        inner = np.moveaxis(table, 0, -2)[..., self.inside]
        return np.asarray(inner[..., self._order])


def _spline_features(trace: Trace) -> Floats:
    """Cubic B-splines of each signal at the on-path positions, shape (positions, features)."""
    from sklearn.preprocessing import SplineTransformer

    make: Any = SplineTransformer
    columns = signal_table(trace)[trace.on_path]
    parts = [np.zeros((len(columns), 0))]
    for values in columns.T:
        if np.ptp(values) == 0:
            continue
        spline = make(n_knots=6, degree=3, knots="quantile", include_bias=False)
        parts.append(np.asarray(spline.fit_transform(values[:, None]), dtype=np.float64))
    return np.column_stack(parts)


_SCALE: dict[str, Callable[[Floats], Floats]] = {
    "prob": lambda v: np.log(np.clip(v, 1e-6, 1)) - np.log1p(-np.clip(v, 1e-6, 1 - 1e-6)),
    "logit_margin": lambda v: np.log1p(np.maximum(v, 0)),
}
"""Signals brought to a scale on which distances mean alike everywhere."""


def _as_is(values: Floats) -> Floats:
    return values


def signal_table(trace: Trace) -> Floats:
    """The numeric signals of every row, rescaled, shape (rows, signals)."""
    parts = [_SCALE.get(n, _as_is)(trace.signal(n)) for n in NUMERIC if n in trace.signals]
    return np.column_stack(parts) if parts else np.zeros((len(trace), 0))


def _history_features(history: History) -> Floats:
    run = history.run[:, None] == np.arange(LONGEST_RUN + 1)
    return np.column_stack([run.astype(float), history.share, history.share**2])
