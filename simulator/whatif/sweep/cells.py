"""One part of a sweep: some policies at one acceptance rate and batch, at every price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from policies.core import DraftPolicy
from policies.lengths.basic import Fixed, Oracle
from simulator.bootstrap import intervals, resamples
from simulator.hardware.scaling import bounds_of
from simulator.pricing import autoregressive, price
from simulator.ratios import ratio_costs
from simulator.summary import totals
from simulator.tune.costs import longest_draft
from simulator.whatif.batching import InBatches, Speedups
from simulator.whatif.ladder import GAMMAS
from simulator.whatif.sweep.prices import ANY, Prices
from simulator.whatif.tilt.trace import Tilter, acceptance, iid_like
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.always import always_drafted
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many

POINT = ("alpha_asked", "alpha", "source", "c", "latency", "gpu", "batch", "context")
"""Columns that name one point of a sweep, the policies apart."""


def references(trace: Trace, policies: Mapping[str, DraftPolicy]) -> dict[str, DraftPolicy]:
    """Return the fixed lengths that the trace's tails allow and the oracle, less what `policies`
    hold.
    """
    # After longer drafts than a log holds, what was accepted would be a guess.
    longest = longest_draft(trace)
    there = {
        policy.gamma for name, policy in policies.items()
        if family(name) == "fixed" and isinstance(policy, Fixed)
    }  # fmt: skip
    found: dict[str, DraftPolicy] = {
        f"fixed:gamma={g}": Fixed(g)
        for g in GAMMAS
        if g not in there and (longest is None or g <= longest)
    }
    bound = Oracle(gamma_max=trace.max_gamma)
    if not any(family(n) == "oracle" and vars(p) == vars(bound) for n, p in policies.items()):
        found["oracle"] = bound
    return {name: policy for name, policy in found.items() if name not in policies}


def family(name: str) -> str:
    """Return a policy's name without its parameters."""
    return name.partition(":")[0]


def with_regrets(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with what the best fixed length and the oracle among them do at the same
    point.

    New columns: ``best_fixed`` and ``best_gamma`` (0: plain decoding), ``oracle``,
    ``regret_fixed`` = 1 - speedup / best_fixed and ``regret_oracle`` likewise, and
    ``adapting``: the oracle's speedup less the best fixed length's, all that adapting the
    draft length could bring.  NaN if no such policy is among the rows.  The best fixed
    length is chosen at each point in hindsight.  The oracle drafts for each request by itself:
    in a batch, where every step drafts as often as its longest draft, it is no bound.
    """
    point = frame.groupby(list(POINT), sort=False, observed=True, dropna=False).ngroup()
    kind, value = frame["family"].astype(str), frame["speedup"]
    fixed, oracle = (
        value.where(kind == name).groupby(point).transform("max") for name in ("fixed", "oracle")
    )
    best = fixed.clip(lower=1.0)
    lengths = frame["gamma"].where((kind == "fixed") & (value == best))
    return frame.assign(
        best_fixed=best, best_gamma=lengths.groupby(point).transform("last").fillna(0.0),
        oracle=oracle, regret_fixed=1 - value / best, regret_oracle=1 - value / oracle,
        adapting=oracle - best,
    )  # fmt: skip


COLUMNS = (
    "policy", "family", "gamma", "alpha", "alpha_asked", "source", "c", "latency", "batch",
    "context", "gpu", "scaled", "scale_error", "fit_error", "tokens", "rounds", "drafted",
    "accepted", "draft_forwards", "block_efficiency", "acceptance_rate", "wall_s", "speedup",
    "speedup_lo", "speedup_hi", "carried_lo", "carried_hi", "share_below_1", "best_fixed",
    "best_gamma", "oracle", "regret_fixed", "regret_oracle", "adapting", "outside", "tilt_error",
    "tilt_tried", "fidelity", "cache_fits",
)  # fmt: skip
"""Columns of a sweep: one row per policy, alpha, batch and price (c, or latency and context).

* ``alpha``, ``alpha_asked``: acceptance rate replayed, and asked for (NaN: as recorded).
  ``source`` is recorded, tilted or iid.
* ``c``: cost ratio, NaN if a latency table prices; ``latency`` is then its name, else ``ratio``.
* ``context``: NaN means as recorded.
* ``gpu``: device of the latencies (``any`` with a cost ratio).  ``scaled``: True if they were
  extrapolated to it.  ``scale_error``: median relative error of that extrapolation for published
  figures of other devices.  ``fit_error``: the same for the measured passes that it was fitted to.
* ``speedup_lo``, ``speedup_hi``: interval over prompts.
* ``carried_lo``, ``carried_hi``: smallest and largest speedup within the bounds of extrapolated or
  composed latencies (`simulator.hardware.scaling.bounds_of`); NaN for others.
* ``outside``: share of passes read outside the measured cells.
* ``wall_s``: decode seconds, or target passes with a cost ratio; in a batch, the seconds of these
  tokens at the full batch's rate.
* ``share_below_1``: share of prompts that are slower than without speculation.
* ``best_fixed`` to ``adapting``: from the fixed lengths 1 to 12 and the oracle, swept or not
  (`simulator.whatif.sweep.cells.with_regrets`).
* ``tilt_error``: relative error to expect of a speedup after changing alpha; NaN if not known.
  ``tilt_tried``: True if it was measured for a change this large.
* ``cache_fits``: False if the batch's KV cache exceeds the memory of a composed table's GPU.
"""
CARRIED = ("carried_lo", "carried_hi")
TEXT = ("policy", "family", "source", "latency", "gpu", "fidelity")


@dataclass(frozen=True)
class SweepPart:
    """Replays that share a trace: the unit that is computed, kept and, if need be, lost.

    Parameters
    ----------
    alpha:
        Acceptance to tilt to; None leaves the recording as it is.
    batch:
        Sequences decoded together.
    policies:
        Names, of those the study holds.
    """

    alpha: float | None
    batch: int
    policies: tuple[str, ...]


class _Singles:
    """A log of single streams against plain decoding: prices any table or cost ratio.

    Parameters
    ----------
    weights:
        How often each prompt is drawn, shape (resamples, prompts); None: no interval.
    plain:
        That of another log of the same requests.
    """

    def __init__(
        self, log: RoundLog, weights: Floats | None,
        plain: dict[tuple[LatencyTable, int | None], tuple[Floats, float]] | None = None,
    ) -> None:  # fmt: skip
        self._held: dict[int | None, RoundLog] = {None: log}
        self._weights = weights
        # Decode seconds of each prompt, and the share of passes outside the measured cells.
        self.plain = {} if plain is None else plain

    def at_latency(self, latency: LatencyTable, context: int | None) -> Speedups:
        """Price with measured or assumed passes, with prompts of `context` tokens; shape (1,)."""
        if context is not None and context not in self._held:
            self._held[context] = _at_context(self._held[None], context)
        log = self._held[context]
        if (latency, context) not in self.plain:
            priced = price(autoregressive(log), latency)
            self.plain[latency, context] = priced.decode_s, priced.outside
        plain_s, outside = self.plain[latency, context]
        ours = price(log, latency)
        return self._compared(plain_s, ours.decode_s[None], max(ours.outside, outside))

    def at_ratios(self, c: Floats, verify: float) -> Speedups:
        """Price with a draft pass of c and a verification of `verify` target passes; shape of
        `c`.
        """
        costs = ratio_costs(self._held[None])
        return self._compared(costs.plain, costs.at(c, verify), 0.0)

    def _compared(self, plain: Floats, ours: Floats, outside: float) -> Speedups:
        """Compare costs `ours`, (prices, prompts), with `plain`, (prompts,)."""
        total = ours.sum(axis=1)
        low = high = np.full(len(ours), np.nan)
        if (weights := self._weights) is not None:
            low, high = intervals((weights @ plain)[:, None] / (weights @ ours.T))
        counted = plain > 0
        slower = ours[:, counted] > plain[counted] * (1 + 1e-12)
        return Speedups(
            total, plain.sum() / total, low, high, slower.mean(axis=1),
            np.full(len(ours), outside),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class SweepRunner:
    """Everything a part needs, sent once to each worker."""

    trace: Trace
    policies: Mapping[str, DraftPolicy]
    """The policies asked for, and their references."""
    prices: Prices
    tilter: Tilter | None = None
    """None: another acceptance rate is that of an i.i.d. process."""
    shifts: Mapping[float, float] = field(default_factory=dict)
    """Shifts of the tilter, by acceptance rate."""
    resamples: int = 200
    seed: int = 0
    references: frozenset[str] = frozenset()
    """Policies not asked for, left out where the recording does not reach."""

    def run(self, part: SweepPart) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of `part` as columns, without those that compare policies or tell the
        tilt's error.

        Raises what `traces.replay.run.replay` and `simulator.pricing.price` raise.
        """
        trace, source = self.trace, "recorded"
        if part.alpha is not None:
            if self.tilter is not None:
                trace, source = self.tilter.shifted(self.shifts[part.alpha]), "tilted"
            else:
                trace, source = iid_like(trace, part.alpha, self.seed), "iid"
        blocks: list[dict[str, Any]] = []
        plain: Any = None
        alpha = acceptance(trace)
        logs = replay_many(
            trace, {name: self.policies[name] for name in part.policies}, batch=part.batch,
            leave_out=lambda n, _: n in self.references,
        )  # fmt: skip
        for log in (always_drafted(one, self.prices.passes_always) for one in logs):
            name = log.policy
            if not len(log):
                raise DraftsimError("the outputs are too short for a round: record longer ones")
            policy = self.policies[name]
            gamma = getattr(getattr(policy, "policy", policy), "gamma", None)
            fixed = {
                "policy": name, "family": family(name),
                "gamma": float("nan") if gamma is None else float(gamma),
                "alpha": alpha,
                "alpha_asked": float("nan") if part.alpha is None else part.alpha,
                "source": source, "batch": part.batch, **totals(log.rounds),
                "fidelity": log.fidelity,
            }  # fmt: skip
            repeated = {k: np.repeat(np.array(v), self.prices.count) for k, v in fixed.items()}
            streams: _Singles | InBatches = (
                _Singles(log, self._weights, plain) if part.batch == 1
                else InBatches(log, part.batch, min(self.resamples, 30), self.seed, plain)
            )  # fmt: skip
            plain = streams.plain
            blocks.append({**repeated, **self._priced(streams), **self._labels()})
        return {k: np.concatenate([b[k] for b in blocks]) for k in blocks[0]}

    def _priced(self, streams: _Singles | InBatches) -> dict[str, npt.NDArray[Any]]:
        prices = self.prices
        pieces: list[dict[str, Any]] = []
        if len(prices.ratios):
            c = np.asarray(prices.ratios, dtype=np.float64)
            none = dict.fromkeys(CARRIED, np.full(len(c), np.nan))
            pieces.append({"c": c, **streams.at_ratios(c, prices.verify)._asdict(), **none})
        for context, at in product(prices.contexts, prices.tables):
            found = streams.at_latency(at.table, context)
            ends = sorted(
                streams.at_latency(table, context).speedup[0]
                for table in bounds_of(at.table) or ()
            ) or [np.nan, np.nan]  # fmt: skip
            carried = {name: np.array([end]) for name, end in zip(CARRIED, ends, strict=True)}
            pieces.append({"c": np.array([np.nan]), **found._asdict(), **carried})
        return {k: np.concatenate([p[k] for p in pieces]) for k in pieces[0]}

    def _labels(self) -> dict[str, npt.NDArray[Any]]:
        """Return the labels that tell the prices of one log apart, shape (prices,)."""
        prices = self.prices
        none = len(prices.ratios)
        cells = [*product(prices.contexts, prices.tables)]
        return {
            "latency": np.array(["ratio"] * none + [t.latency for _, t in cells]),
            "gpu": np.array([ANY] * none + [t.gpu for _, t in cells]),
            "scaled": np.array([False] * none + [t.scaled for _, t in cells], dtype=bool),
            "scale_error": np.array([0.0] * none + [t.error for _, t in cells]),
            "fit_error": np.array([0.0] * none + [t.fit_error for _, t in cells]),
            "context": np.array(
                [np.nan] * none + [np.nan if k is None else float(k) for k, _ in cells]
            ),
        }  # fmt: skip

    @cached_property
    def _weights(self) -> Floats | None:
        """Return how often each prompt is drawn, shape (resamples, prompts); None: no interval."""
        prompts = len(self.trace.requests)
        if not self.resamples or prompts < 2:
            return None
        return resamples(prompts, self.resamples, self.seed)


def _at_context(log: RoundLog, context: int) -> RoundLog:
    """Return the rounds as if every prompt had `context` tokens."""
    requests = [replace(r, prompt_length=context, prompt_ids=None) for r in log.requests]
    return replace(log, requests=requests)
