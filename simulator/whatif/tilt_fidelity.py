"""Errors of tilted traces: one is tilted to the rate of another recording and compared with it.

Two recordings of different acceptance are needed: two pairs, or two kinds of prompts of
one recording.  The one is tilted to the other's rate and both are replayed; what differs
is the error of tilting, since the pair at that rate was really recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.lengths.entropy import SVIP
from simulator.whatif.tilt import Tilter, TiltMethod, acceptance, iid_like
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.vectorised import replay_many

GAMMAS = (1, 2, 4, 8)
RATIO = 0.1
"""Cost ratio c of the speedups compared."""
FEWEST_TOKENS = 200
"""A group of prompts with fewer output tokens says too little about acceptance."""


@dataclass(frozen=True)
class TiltError:
    """The measured error of tilting, and the range in which it was measured.

    Attributes
    ----------
    per_logit:
        Root mean square relative error of a speedup per unit of shift in logit(alpha).
    largest:
        Largest difference of logit(alpha) it was measured at.
    median, worst:
        Median and largest of the absolute relative errors.
    iid_median:
        The same with an i.i.d. process of the right alpha instead of the tilt.
    comparisons:
        Number of comparisons.
    """

    per_logit: float
    largest: float
    median: float
    worst: float
    iid_median: float
    comparisons: int

    def at(self, alpha: float, recorded: float) -> float:
        """Return relative error to expect of a speedup at `alpha`, tilted from `recorded`.

        NaN if nothing or everything matches: no shift leads there.
        """
        shift = abs(_logit(alpha) - _logit(recorded))
        return self.per_logit * shift if np.isfinite(shift) else _NAN

    def tried(self, alpha: float, recorded: float) -> bool:
        """Return True if a shift as large was among those measured."""
        return abs(_logit(alpha) - _logit(recorded)) <= self.largest + 1e-9


_NAN = float("nan")
UNKNOWN_ERROR = TiltError(_NAN, _NAN, _NAN, _NAN, _NAN, 0)
"""Error of a recording whose prompts are too few or too alike to measure it."""


def compare_tilt(
    tilter: Tilter, reference: Trace, policies: Mapping[str, DraftPolicy] | None = None,
    known: dict[Trace, dict[str, float]] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Tilt a recording to the acceptance of `reference` and compare the speedups of both.

    Returns one row per policy: ``reads``, whether it reads signals; ``shift`` of logit(alpha); the
    relative ``error`` of its speedup (at c = 0.1) on the tilted recording, and ``iid_error`` of
    the i.i.d. process of the same alpha.  `known` keeps the speedups of references: many
    comparisons share them.
    """
    source, alpha = tilter.trace, acceptance(reference)
    chosen = policies or default_policies(source, reference)
    known = {} if known is None else known
    if reference not in known:
        known[reference] = speedups_at_ratio(reference, chosen)
    shift = _logit(alpha) - _logit(acceptance(source))
    rows = pd.DataFrame(
        {"policy": [*chosen], "reads": [bool(p.reads) for p in chosen.values()], "shift": shift}
    )
    for name, made in (
        ("error", tilter.to(alpha)), ("iid_error", iid_like(source, alpha, tilter.seed))
    ):  # fmt: skip
        own = speedups_at_ratio(made, chosen)
        rows[name] = [own[policy] / known[reference][policy] - 1 for policy in chosen]
    return rows


def compare_groups(trace: Trace, *, method: TiltMethod = "coupled", seed: int = 0) -> pd.DataFrame:
    """Return `compare_tilt` between the prompt groups of one recording, every ordered pair.

    Groups are the categories large enough, and the thirds of all prompts by acceptance,
    which lie further apart.

    Raises DraftsimError if no two groups differ.
    """
    parts: list[pd.DataFrame] = []
    chosen = default_policies(trace)
    known: dict[Trace, dict[str, float]] = {}
    for groups in _groupings(trace):
        # A group of one outcome alone has no chance to calibrate.
        rates = {
            part: rate for part in map(trace.select, groups) if 0 < (rate := acceptance(part)) < 1
        }
        for source, own in rates.items():
            # Groups nearer than this on the logit scale ask nothing of a tilt.
            others = [t for t, rate in rates.items() if abs(_logit(rate) - _logit(own)) >= 0.05]
            if others:
                tilter = Tilter(source, method, seed)
                parts += [compare_tilt(tilter, other, chosen, known) for other in others]
    if not parts:
        raise DraftsimError(
            f"no two groups of {FEWEST_TOKENS} tokens differ in acceptance: compare this recording "
            "with another"
        )
    return pd.concat(parts, ignore_index=True)


def summarize_error(rows: pd.DataFrame) -> TiltError:
    """Return the error of `compare_tilt` rows."""
    error, shift = rows["error"].to_numpy(float), rows["shift"].to_numpy(float)
    return TiltError(
        float(np.sqrt((error**2).sum() / (shift**2).sum())), float(np.abs(shift).max()),
        float(np.median(np.abs(error))), float(np.abs(error).max()),
        float(np.median(np.abs(rows["iid_error"]))), len(rows),
    )  # fmt: skip


class TiltErrors(NamedTuple):
    """The error of tilting apart for policies that read signals.

    Signals move with the acceptance as far as they tell it; texts that differ in how easy they
    are to foretell differ in signals at the same acceptance, which makes the second error the
    larger one.
    """

    lengths: TiltError
    """Error for policies that read no signal."""
    signals: TiltError
    """Error for policies that read signals; unknown where the recording holds none."""

    def of(self, reads: bool) -> TiltError:
        """Return the one for a policy that does or does not read signals."""
        return self.signals if reads else self.lengths


def tilt_errors(trace: Trace, *, method: TiltMethod = "coupled", seed: int = 0) -> TiltErrors:
    """Return the errors of tilting `trace`, from its own prompt groups; NaN if too alike."""
    try:
        rows = compare_groups(trace, method=method, seed=seed)
    except DraftsimError:
        return TiltErrors(UNKNOWN_ERROR, UNKNOWN_ERROR)
    parts = (rows[~rows["reads"]], rows[rows["reads"]])
    return TiltErrors(*(summarize_error(p) if len(p) else UNKNOWN_ERROR for p in parts))


def default_policies(*traces: Trace) -> dict[str, DraftPolicy]:
    """Return fixed lengths, and a policy that follows the signals where all `traces` hold them."""
    bounds = [t.max_gamma for t in traces if t.max_gamma is not None]
    longest = min(bounds, default=max(GAMMAS))
    chosen: dict[str, DraftPolicy] = {f"fixed:gamma={g}": Fixed(g) for g in GAMMAS if g <= longest}
    svip = SVIP(gamma_max=longest)
    if all(set(svip.reads) <= t.signals for t in traces):
        chosen["svip"] = svip
    return chosen


def speedups_at_ratio(trace: Trace, policies: Mapping[str, DraftPolicy]) -> dict[str, float]:
    """Return the speedup of each policy at the cost ratio `RATIO`."""
    found = {}
    for log in replay_many(trace, policies):
        emitted, forwards = (log.per_request(log.rounds[n]) for n in ("emitted", "draft_forwards"))
        costs = log.per_request(np.ones(len(log))) + RATIO * forwards
        found[log.policy] = float(emitted.sum() / costs.sum())
    return found


def _groupings(trace: Trace) -> list[list[list[int]]]:
    """Return the prompts of every category, and thirds of all by acceptance, each large enough."""
    match = trace.columns["match"][trace.on_path] == 1
    tokens = np.diff(trace.request_starts)
    share = np.add.reduceat(match.astype(float), trace.request_starts[:-1]) / tokens
    categories: dict[str, list[int]] = {}
    for i, request in enumerate(trace.requests):
        categories.setdefault(request.category, []).append(i)
    thirds = np.array_split(np.argsort(share, kind="stable"), 3)
    return [
        [group for group in groups if tokens[np.array(group, dtype=int)].sum() >= FEWEST_TOKENS]
        for groups in ([*categories.values()], [sorted(part.tolist()) for part in thirds])
    ]


def _logit(alpha: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log(alpha) - np.log1p(-alpha))
