"""Choices among settings and policies, and their gains, with prompts as the unit of evidence.

A setting is chosen and served on resampled prompts, and so is the fastest policy of a load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from policies.arrays import Bools, Floats
from policies.batch.base import Policy
from policies.lengths.basic import Autoregressive
from policies.registry import NO_SPECULATION, PLAIN, is_bound
from policies.rules.base import VerifyRule
from simulator.bootstrap import CONFIDENCE, Interval, gain, half_width, ratio, widened
from simulator.executors import results_of
from simulator.serving import Scenario, simulate
from simulator.serving.scenario import FILLS
from simulator.tune.served import SEARCH_CONFIDENCE
from traces.acceptance.trace import Trace, once_per_trace
from traces.aliases import Row
from traces.digits import three_digits
from traces.latency.table import LatencyTable

UNDRAFTED = (PLAIN, NO_SPECULATION)
"""Names of no speculation among served rows."""


@dataclass(frozen=True, eq=False)
class Objective:
    """Tokens per second of several options over the same prompts.

    Parameters
    ----------
    tokens, seconds:
        Tokens that count and seconds spent, per option and prompt: shape (options, prompts).
        Among equal options the first is preferred, so that which drafts least is first.
    weights:
        How often each prompt counts in each bootstrap resample, shape (resamples,
        prompts); of all prompts or of a part.
    """

    tokens: Floats
    seconds: Floats
    weights: Floats

    @cached_property
    def rates(self) -> Floats:
        """Tokens per second of each option over all prompts, shape (options,)."""
        return np.asarray(self.tokens.sum(axis=1) / self.seconds.sum(axis=1))

    def on(self, prompts: Bools) -> Objective:
        """Return the same options on some of the prompts, resampled among themselves."""
        weights = self.weights[:, prompts]
        return Objective(self.tokens[:, prompts], self.seconds[:, prompts], weights)

    @property
    def admissible(self) -> Bools:
        """Options that the best does not beat beyond the interval, shape (options,).

        The interval is the paired percentile bootstrap over prompts of the ratio of
        their rates; a single prompt has none, and only the best is admissible.
        """
        best = int(np.argmax(self.rates))
        equal = self.rates >= self.rates[best] * (1 - 1e-12)
        if self.tokens.shape[1] < 2:
            return np.asarray(equal)
        tokens, seconds = self.tokens @ self.weights.T, self.seconds @ self.weights.T
        drawn = ratio(tokens[best] * seconds, tokens * seconds[best])
        # An option without tokens that count is beaten by any that has them.
        drawn[np.isnan(drawn)] = np.inf
        low = np.percentile(drawn, 50 * (1 - CONFIDENCE), axis=1, method="lower")
        return np.asarray(equal | (low <= 1))


def choose(objective: Objective) -> int:
    """Return the first admissible option: it drafts least of those as good as the best."""
    return int(np.flatnonzero(objective.admissible)[0])


def folds(categories: Sequence[str]) -> Bools:
    """Return every second prompt of each category: True if it belongs to the second half."""
    seen: dict[str, int] = {}
    second: Bools = np.zeros(len(categories), dtype=bool)
    for i, category in enumerate(categories):
        seen[category] = seen.get(category, 0) + 1
        second[i] = seen[category] % 2 == 0
    # Categories of one prompt each would all land in the first half.
    return second if 4 * second.sum() >= len(second) else np.arange(len(second)) % 2 == 1


def can_hold_back(second: Bools) -> bool:
    """Return True if both halves have two prompts or more, the fewest that can be resampled."""
    return bool(min(second.sum(), (~second).sum()) >= 2)


def cross_fitted(
    objective: Objective,
    second: Bools,
    default: tuple[Floats, Floats],
    option: int,
    halves: tuple[int, int] | None = None,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Return the gain over `default`, with its interval, on prompts it was not chosen on.

    Each half of the prompts is run under the option chosen on the other half; the gain
    is that of both together, with its bootstrap interval.

    Parameters
    ----------
    objective, second:
        The options, and which prompts form the second half (`folds`).
    default:
        Tokens and seconds of the default per prompt, each of shape (prompts,).
    option:
        Option chosen on all prompts, which is reported.
    halves:
        Options chosen on the first and on the second half.  None: too few prompts to hold some
        back, so the gain is that of `option` on the prompts that chose it.
    confidence:
        Level of the interval.
    """
    chosen = np.full(len(second), option)
    if halves is not None:
        chosen = np.where(second, halves[0], halves[1])
    prompt = np.arange(len(second))
    own = np.stack([objective.tokens[chosen, prompt], objective.seconds[chosen, prompt]])
    return gain(own, np.stack(default), objective.weights, confidence)


def shared_by_neighbours(allowed: Bools) -> Bools:
    """Return the options that a group of neighbours along the first axis shares; (n, m, options).

    A group grows as long as every place along the second axis has a shared option, which gives the
    fewest groups.
    """
    out = allowed.copy()
    start, common = 0, allowed[0]
    for i in range(1, len(allowed) + 1):
        both = common & allowed[i] if i < len(allowed) else np.zeros_like(common)
        if both.any(axis=1).all():
            common = both
            continue
        out[start:i] = common
        if i < len(allowed):
            start, common = i, allowed[i]
    return out


DRAWS = 8
"""Resamples of the prompts that are served, if not said otherwise."""
ON, OFF, MISSED = "on", "off", "SLO missed"
"""Values of `deploy`: the setting, no speculation, or neither meets the targets."""


class Resampled(NamedTuple):
    """Bootstrap resamples of the prompts; half of them from each half of the recording."""

    traces: Sequence[Trace]
    late: Bools
    """Which resamples are of the second half, shape (draws,)."""
    told: bool
    """True if every half has two prompts or more: one prompt resampled is that prompt again."""


def resampled(trace: Trace, second: Bools, draws: int, seed: int) -> Resampled:
    """Return `draws` resamples of the prompts.

    They are of each half (`folds`), so that a choice made on one is judged on the other; of all
    prompts if the halves cannot be told apart (`can_hold_back`).
    """
    late, apart = np.arange(draws) >= draws // 2, can_hold_back(second)
    halves = [np.flatnonzero(second == part if apart else second | True) for part in late]
    drawn = [
        trace.select(np.random.default_rng([seed, i]).choice(half, len(half)).tolist())
        for i, half in enumerate(halves)
    ]
    return Resampled(drawn, late, min(map(len, halves)) >= 2)


class Against(NamedTuple):
    """Tokens per second of a setting and of no speculation; arrays of shape (draws,)."""

    own: Floats
    plain: Floats
    told: bool = True
    """True if the spread of the draws measures the uncertainty of the gain."""

    @property
    def gain(self) -> Interval:
        """The setting's rate over that of no speculation, with its 95% interval.

        NaN if no speculation serves nothing that counts.
        """
        return gain_of(ratio(self.own, self.plain), self.told)

    @property
    def faster(self) -> bool:
        """True if the setting serves more than no speculation, beyond the search's interval."""
        gaps = self.own - self.plain
        reach = half_width(gaps, SEARCH_CONFIDENCE) if self.told else 0.0
        # Equal runs differ by rounding alone.
        return bool(gaps.mean() - reach > 1e-9 * self.plain.mean())


def gain_of(ratios: Floats, told: bool = True) -> Interval:
    """Return the mean of ratios over resampled prompts, and its 95% interval; NaN if not `told`."""
    return Interval.around(float(ratios.mean()), half_width(ratios) if told else math.nan)


def to_deploy(faster: bool, own_meets: bool, plain_meets: bool) -> str:
    """Return what to deploy, given whether the setting and no speculation meet the targets.

    `ON` if the setting meets them and is `faster`, or no speculation misses them; else `OFF` if no
    speculation meets them; else `MISSED`.
    """
    if own_meets and (faster or not plain_meets):
        return ON
    return OFF if plain_meets else MISSED


FEWEST = 200
"""Fewest requests of a load served again on resampled prompts."""


class Leader(NamedTuple):
    """The fastest policy that drafts at one load."""

    load: float | None
    """Requests at a time, or requests per second; None for arrivals that span no time."""
    place: int
    """Number of the load's first row."""
    policy: str | None
    """None if nothing drafts."""
    ratio: float
    """Speed over no speculation; 0 if that is not known, as no request that counts finished."""
    served: bool
    """False if no policy produced a token."""


def leaders(rows: Sequence[Row]) -> list[Leader]:
    """Return the fastest policy of each load.

    In closed loops by output tokens/s, with open arrivals by mean end-to-end latency.
    """
    closed = is_closed(rows)
    found = []
    for load in dict.fromkeys(_load(row) for row in rows):
        at = [i for i, row in enumerate(rows) if _load(row) == load]
        drafting = [
            (_ratio(row, closed), row["policy"]) for row in map(rows.__getitem__, at)
            if row["policy"] not in UNDRAFTED and not is_bound(row["policy"])
        ]  # fmt: skip
        ratio, policy = max(drafting, key=lambda pair: pair[0], default=(0.0, None))
        served = any(rows[i]["throughput_tok_s"] > 0 for i in at)
        found.append(Leader(load, at[0], policy, ratio, served))
    return found


def goodputs(rows: Sequence[Row]) -> dict[float | None, dict[str, float]]:
    """Return by load the goodput of no speculation, then that of the best policy that drafts.

    Loads at which one of them is not known are left out.
    """
    found = {}
    for load in dict.fromkeys(_load(row) for row in rows):
        known = {
            row["policy"]: float(row["goodput_req_s"]) for row in rows
            if _load(row) == load and math.isfinite(row["goodput_req_s"])
        }  # fmt: skip
        plain = next((name for name in known if name in UNDRAFTED), None)
        drafting = [name for name in known if name not in UNDRAFTED and not is_bound(name)]
        if plain is not None and drafting:
            best = max(drafting, key=known.__getitem__)
            found[load] = {PLAIN: known[plain], best: known[best]}
    return found


def best_within(pair: Mapping[str, float]) -> str:
    """Return the policy that serves more within the SLO, by a load's `goodputs`.

    No speculation, if the other's lead does not show in three digits.
    """
    (plain, base), (name, own) = pair.items()
    return name if own > base and three_digits(own) != three_digits(base) else plain


def is_closed(rows: Sequence[Row]) -> bool:
    """Return True if every row is of a closed loop."""
    return all(row["concurrency"] is not None for row in rows)


def _load(row: Row) -> float | None:
    load = row["rate"] if row["concurrency"] is None else row["concurrency"]
    return None if load is None else float(load)


def _ratio(row: Row, closed: bool) -> float:
    """Return how many times as fast as no speculation; 0 where that is not known."""
    value = row["speedup"] if closed else 1 / (row.get("latency_ratio") or math.inf)
    return float(value) if math.isfinite(value) else 0.0


def interval_over_prompts(
    leader: Leader, trace: Trace, latency: LatencyTable, policies: Mapping[str, Policy],
    scenarios: Sequence[Scenario], rule: VerifyRule | None,
) -> Interval | None:  # fmt: skip
    """Return the 95% interval of a leader's ratio, None for fewer than two prompts.

    The leader and no speculation are served again on bootstrap resamples of the prompts, and the
    spread of their ratios is the standard error (`simulator.tune.gains`).

    Parameters
    ----------
    policies, scenarios:
        Those of the rows: a scenario has a row for each policy, in order.
    """
    if leader.policy is None or len(trace.requests) < 2:
        return None
    load = scenarios[leader.place // len(policies)]
    closed = load.arrivals.concurrency is not None
    enough = max(FEWEST, len(trace.requests), FILLS * (load.arrivals.concurrency or 0))
    load = replace(load, requests=min(load.requests or enough, enough), replications=1)
    both = policies[leader.policy], Autoregressive()
    drawn = _redrawn(trace)

    def ratio(prompts: Trace) -> float:
        own, plain = (simulate(prompts, latency, one, load, rule=rule) for one in both)
        if closed:
            return own.throughput / plain.throughput if plain.throughput else math.nan
        own_s, plain_s = (run.columns(measured=True)["e2e_s"].mean() for run in (own, plain))
        return float(plain_s / own_s)

    ratios = np.array(results_of(
        [partial(ratio, one) for one in drawn], 2 * sum(one.tokens for one in drawn)
    ))  # fmt: skip
    if not np.isfinite(ratios).all():
        return None
    # About what was served, scaled from the mean of the resamples.
    reach = half_width(ratios) * widened(CONFIDENCE, len(trace.requests))
    return Interval.around(leader.ratio, reach * leader.ratio / ratios.mean())


@once_per_trace
def _redrawn(trace: Trace) -> Sequence[Trace]:
    """Return resamples of all prompts: the same for every load, so that loads can be compared."""
    no_half = np.zeros(len(trace.requests), dtype=bool)
    return resampled(trace, no_half, DRAWS, seed=0).traces
