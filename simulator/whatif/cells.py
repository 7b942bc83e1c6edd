"""One part of a sweep: some policies at one acceptance rate and batch, at every price.

`SweepRunner` replays a `SweepPart` once and prices its rounds at all cost ratios, latency tables,
contexts and GPUs of `Prices`.  A policy that weighs costs, or reads contexts where these are swept,
is replayed for each of them.  A batch whose KV cache exceeds the memory of its GPU has no price.
Only composed tables say which GPU and models they are of.  A sequence is taken to hold its whole
prompt and output, at their means over the recording's requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from policies.batch.base import IterationCost, TextbookCost
from policies.core import DraftPolicy
from policies.lengths.basic import Fixed, Oracle
from policies.registry import lacks, supplied
from simulator.bootstrap import intervals, resamples
from simulator.hardware.roofline import WeightFormat
from simulator.hardware.scaling import (
    bounds_of,
    carry_over,
    home_device,
    interval_words,
    scaling_error,
    scaling_words,
)
from simulator.pricing import always_drafted, autoregressive, extras_of, price
from simulator.ratios import ratio_costs
from simulator.serving.cost import TableCost
from simulator.summary import totals
from simulator.tune.costs import longest_draft
from simulator.whatif.batching import InBatches, Speedups
from simulator.whatif.ladder import GAMMAS
from simulator.whatif.tilt import Tilter, acceptance, iid_like
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.operators.compose import BLOCK, UTILISATION, kv_blocks
from traces.operators.devices import find_device
from traces.replay.calls import drafting_always, passes_always
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many

Recorded = TypeVar("Recorded", RoundLog, Trace)

POINT = ("alpha_asked", "alpha", "source", "c", "latency", "gpu", "batch", "context")
"""Columns that name one point of a sweep, the policies apart."""
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
  (`simulator.whatif.cells.with_regrets`).
* ``tilt_error``: relative error to expect of a speedup after changing alpha; NaN if not known.
  ``tilt_tried``: True if it was measured for a change this large.
* ``cache_fits``: False if the batch's KV cache exceeds the memory of a composed table's GPU.
"""
CARRIED = ("carried_lo", "carried_hi")
"""The columns of the bounds, of `COLUMNS`."""
TEXT = ("policy", "family", "source", "latency", "gpu", "fidelity")
"""The columns that hold text, of `COLUMNS`."""
ANY = "any"
"""The device of a cost ratio."""


@dataclass(frozen=True)
class SweepPart:
    """Replays that share a trace: the unit that is computed, kept and, if need be, lost."""

    alpha: float | None
    """Acceptance to tilt to; None leaves the recording as it is."""
    batch: int
    policies: tuple[str, ...]


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
        """Return the rows of `part` as columns, without those about other policies and tilts.

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
        for replayed, prices in self._replayed(trace, part):
            log = always_drafted(replayed, self.prices.passes_always)
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
            repeated = {k: np.repeat(np.array(v), prices.rows) for k, v in fixed.items()}
            streams: _Singles | InBatches = (
                _Singles(log, self._weights, plain) if part.batch == 1
                else InBatches(log, part.batch, min(self.resamples, 30), self.seed, plain)
            )  # fmt: skip
            plain = streams.plain
            blocks.append({**repeated, **self._priced(streams, prices), **prices.labels})
        return {k: np.concatenate([b[k] for b in blocks]) for k in blocks[0]}

    def _replayed(self, trace: Trace, part: SweepPart) -> Iterator[tuple[RoundLog, _Priced]]:
        """Yield logs of the policies in turn, each with the prices that its rounds are decided at.

        A reference that the recording does not reach is left out.
        """
        prices, always = self.prices, self.prices.passes_always
        every = _Priced(tuple(prices.ratios), tuple(product(prices.contexts, prices.tables)))
        own = {name: self.policies[name] for name in part.policies}
        alike = {name: policy for name, policy in own.items() if every.decide_alike(policy)}
        logs = replay_many(
            trace, alike, batch=part.batch, leave_out=lambda n, _: n in self.references
        )
        found = {log.policy: log for log in logs}
        contexts = prices.contexts if len(alike) < len(own) else ()
        traces = {context: _at_context(trace, context) for context in contexts}
        for name, policy in own.items():
            if name in alike:
                if name in found:
                    yield found[name], every
                continue
            for c in every.ratios:
                cost: IterationCost = TextbookCost(draft=c, verify=prices.verify, always=always)
                [log] = replay_many(trace, {name: supplied(policy, cost=cost)}, batch=part.batch)
                yield log, _Priced((c,))
            for context, table in every.cells:
                extras = extras_of(sampling=self.trace.sampling)
                cost = TableCost(drafting_always(table.table, always or None), extras)
                told = supplied(policy, cost=cost)
                [log] = replay_many(traces[context], {name: told}, batch=part.batch)
                # Prices replace the context themselves.
                yield replace(log, requests=trace.requests), _Priced(cells=((context, table),))

    def _priced(
        self, streams: _Singles | InBatches, prices: _Priced
    ) -> dict[str, npt.NDArray[Any]]:
        found: list[dict[str, Any]] = []
        if len(prices.ratios):
            c = np.asarray(prices.ratios, dtype=np.float64)
            none = dict.fromkeys(CARRIED, np.full(len(c), np.nan))
            found.append({"c": c, **streams.at_ratios(c, self.prices.verify)._asdict(), **none})
        for context, at in prices.cells:
            own = streams.at_latency(at.table, context)
            ends = sorted(
                streams.at_latency(table, context).speedup[0]
                for table in bounds_of(at.table) or ()
            ) or [np.nan, np.nan]  # fmt: skip
            carried = {name: np.array([end]) for name, end in zip(CARRIED, ends, strict=True)}
            found.append({"c": np.array([np.nan]), **own._asdict(), **carried})
        return {k: np.concatenate([p[k] for p in found]) for k in found[0]}

    @cached_property
    def _weights(self) -> Floats | None:
        """Return how often each prompt is drawn, shape (resamples, prompts); None: no interval."""
        prompts = len(self.trace.requests)
        if not self.resamples or prompts < 2:
            return None
        return resamples(prompts, self.resamples, self.seed)


class _Priced(NamedTuple):
    """Some of the prices of a sweep."""

    ratios: tuple[float, ...] = ()
    cells: tuple[tuple[int | None, DeviceTable], ...] = ()
    """Contexts with tables."""

    @property
    def rows(self) -> int:
        return len(self.ratios) + len(self.cells)

    def decide_alike(self, policy: DraftPolicy) -> bool:
        """Return True if the rounds of `policy` are the same at all of these prices."""
        contexts = {context for context, _ in self.cells} - {None}
        return not (lacks(policy, "cost") or (contexts and policy.decides_by_load()))

    @property
    def labels(self) -> dict[str, npt.NDArray[Any]]:
        """Return the labels that tell the prices of one log apart, shape (prices,)."""
        rows = [("ratio", ANY, False, 0.0, 0.0, np.nan)] * len(self.ratios)
        for context, at in self.cells:
            rows.append((*at[:-1], np.nan if context is None else float(context)))
        names = ("latency", "gpu", "scaled", "scale_error", "fit_error", "context")
        columns = zip(*rows, strict=True)
        return {name: np.array(column) for name, column in zip(names, columns, strict=True)}


class _Singles:
    """A log of single streams against plain decoding: prices any table or cost ratio.

    `weights` tell how often each prompt is drawn, shape (resamples, prompts); None: no interval.
    ``plain`` is that of another log of the same requests.
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
        """Price with draft passes of c, verifications of `verify` target passes; shape of `c`."""
        costs = ratio_costs(self._held[None])
        return self._compared(costs.plain, costs.at(c, verify), 0.0)

    def _compared(self, plain: Floats, ours: Floats, outside: float) -> Speedups:
        """Compare costs `ours`, (prices, prompts), with `plain`, (prompts,)."""
        total = ours.sum(axis=1)
        low = high = np.full(len(ours), np.nan)
        if (weights := self._weights) is not None:
            drawn = (weights @ plain)[:, None] / (weights @ ours.T)
            low, high = intervals(drawn, prompts=len(plain))
        counted = plain > 0
        slower = ours[:, counted] > plain[counted] * (1 + 1e-12)
        return Speedups(
            total, plain.sum() / total, low, high, slower.mean(axis=1),
            np.full(len(ours), outside),
        )  # fmt: skip


def _at_context(recorded: Recorded, context: int | None) -> Recorded:
    """Return a log or a trace as if every prompt had `context` tokens; None: as recorded."""
    if context is None:
        return recorded
    requests = [replace(r, prompt_length=context, prompt_ids=None) for r in recorded.requests]
    return replace(recorded, requests=requests)


@dataclass(frozen=True)
class Prices:
    """The costs at which every round log is priced.

    Raises DraftsimError if there is no price, one is impossible, a GPU is not known, or a table
    cannot be carried over.

    Parameters
    ----------
    ratios:
        Cost ratios c = T_draft / T_target, with verification at `verify` target passes.
    latencies:
        Tables by name, each read at every context of `contexts` (None: as recorded).
    gpus:
        Devices, by their data-sheet names, that each table is carried over to (see
        `simulator.hardware.scaling.carry_over`); none leaves them on the device measured.
    weights:
        By role, formats that the models' weights are kept in instead of those measured.
    always:
        Draft passes that every round runs, whatever it drafts (`traces.replay.calls`).
    """

    ratios: Sequence[float] = ()
    latencies: Mapping[str, LatencyTable] = field(default_factory=dict)
    contexts: Sequence[int | None] = (None,)
    verify: float = 1.0
    gpus: Sequence[str] = ()
    weights: Mapping[str, WeightFormat] = field(default_factory=dict)
    always: int = 0

    def __post_init__(self) -> None:
        if not len(self.ratios) and not self.latencies:
            raise DraftsimError("nothing to price with: give --c or --latency")
        for c in self.ratios:
            if not 0 <= c < np.inf:
                raise DraftsimError(f"cost ratio c is {c}, expected a finite number >= 0")
        if not 0 < self.verify < np.inf:
            raise DraftsimError(f"verify is {self.verify}, expected > 0 target passes (of --c)")
        if self.verify != 1 and not len(self.ratios):
            raise DraftsimError("no --c is given: drop --verify-ratio")
        if not len(self.contexts):
            raise DraftsimError("context is empty: give at least one number")
        contexts = [k for k in self.contexts if k is not None]
        if min(contexts, default=0) < 0:
            raise DraftsimError(f"context is {min(contexts)}, expected 0 tokens or more")
        needing = {"--context": contexts, "--gpu": self.gpus, "--weights": self.weights}
        if given := [name for name, values in needing.items() if values and not self.latencies]:
            raise DraftsimError(f"{given[0]} needs a latency table: give --latency")
        _ = self.tables  # refused now, not in a worker

    @property
    def passes_always(self) -> int:
        """Draft passes of every round: as asked, or as a drafter of the tables runs them."""
        return max([self.always, *(passes_always(at.table) for at in self.tables)])

    @property
    def count(self) -> int:
        """Rows of every log priced."""
        return len(self.ratios) + len(self.tables) * len(self.contexts)

    @cached_property
    def tables(self) -> tuple[DeviceTable, ...]:
        """Every table on every device, in the order of the rows priced."""
        if not self.gpus and not self.weights:
            return tuple(
                DeviceTable(n, device_name(t), *_scaling(t), t) for n, t in self.latencies.items()
            )
        devices = {d.name: d for d in map(find_device, self.gpus)}
        found = []
        for name, table in self.latencies.items():
            try:
                home = home_device(table)
                for gpu, device in (devices or {home.name: home}).items():
                    same = device == home and not self.weights
                    there = table if same else carry_over(table, device, weights=self.weights)
                    found.append(DeviceTable(name, gpu, *_scaling(there), there))
            except DraftsimError as error:
                raise DraftsimError(f"{name}: {error}") from None
        return tuple(found)


class DeviceTable(NamedTuple):
    """A latency table on one device."""

    latency: str
    """Name of the table that was measured or assumed."""
    gpu: str
    """Device whose seconds these are: the data-sheet entry's name where there is one."""
    scaled: bool
    """True if they were carried over from another device."""
    error: float
    """Median relative error of the carrying model against published figures; 0 unless `scaled`."""
    fit_error: float
    """The same on the passes measured, which it was fitted to."""
    table: LatencyTable


def carried_words(tables: Iterable[DeviceTable]) -> list[str]:
    """Return in words what tables were carried over to: other GPUs, and other weights."""
    notes = [(at.gpu, at.table.meta.get("scaled")) for at in tables]
    carried = [(gpu, how) for gpu, how in notes if isinstance(how, Mapping)]
    gpus = dict.fromkeys(gpu for gpu, how in carried if gpu != how["from"])
    forms = dict.fromkeys(
        f"{role} in {form}" for _, how in carried for role, form in how["weights"].items()
    )
    return [*([f"scaled to {' and '.join(gpus)}"] if gpus else []), *forms]


def said_scaled(prices: Prices) -> list[str]:
    """Return lines on what was carried over to another GPU, and on the model's known errors."""
    scaled, said = [t for t in prices.tables if t.scaled], []
    for name in dict.fromkeys(t.latency for t in scaled):
        own = [t for t in scaled if t.latency == name]
        table = own[0].table
        how = table.meta["scaled"]
        if not isinstance(how, Mapping):
            said.append(f"{name}: scaled, not measured: {scaling_words(table)}")
            continue
        known = "composed for" if "composed" in table.meta else "measured on"
        parts = [f"{known} {how['from']}", *carried_words(own)]
        said += [
            f"{name}: {', '.join(parts)}: approximate", f"  by {scaling_error(how)}",
            f"  {interval_words(table)}",
        ]  # fmt: skip
    return said


def device_name(latency: LatencyTable) -> str:
    """Return the data-sheet name of a table's device if there is one, else as it was recorded."""
    try:
        return home_device(latency).name
    except DraftsimError:
        return str(latency.meta.get("device") or "unknown")


def _scaling(latency: LatencyTable) -> tuple[bool, float, float]:
    """Return whether a table was carried over, and the errors of its carrying model."""
    note = latency.meta.get("scaled")
    if not note:
        return False, 0.0, 0.0
    if not isinstance(note, Mapping):
        return True, float("nan"), float("nan")
    return True, float(note["published_median"]), float(note["fit_error"])


def references(trace: Trace, policies: Mapping[str, DraftPolicy]) -> dict[str, DraftPolicy]:
    """Return the oracle and the fixed lengths that the tails allow, less what `policies` hold."""
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
    """Return the rows with what the best fixed length and the oracle do at the same point.

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


def blocks_of(prices: Prices) -> dict[tuple[str, str], int]:
    """Return the cache blocks of each composed table, by its name and its GPU's."""
    found = {}
    for at in prices.tables:
        if "composed" in at.table.meta and not at.scaled:
            try:
                found[at.latency, at.gpu] = kv_blocks(at.table.meta).blocks
            except DraftsimError:  # the weights alone leave no memory
                found[at.latency, at.gpu] = 0
    return found


def needed_blocks(frame: pd.DataFrame, trace: Trace) -> npt.NDArray[np.int64]:
    """Return the cache blocks that the batch of each row holds, (rows,)."""
    prompt = float(np.mean([r.prompt_length for r in trace.requests]))
    output = float(np.mean([r.tokens for r in trace.requests]))
    held = np.ceil((frame["context"].fillna(prompt).to_numpy(float) + output) / BLOCK)
    return np.asarray(frame["batch"].to_numpy(float) * held, dtype=np.int64)


def cache_fits(frame: pd.DataFrame, prices: Prices, trace: Trace) -> npt.NDArray[np.bool_]:
    """Return True for each row whose cache fits, or whose latencies do not say the memory."""
    blocks = blocks_of(prices)
    pairs = zip(frame["latency"].astype(str), frame["gpu"].astype(str), strict=True)
    held = np.array([blocks.get(pair, math.inf) for pair in pairs])
    return np.asarray(needed_blocks(frame, trace) <= held)


def fitting(frame: pd.DataFrame, prices: Prices, trace: Trace) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows whose cache fits, and a sentence for each table and context with others.

    Raises DraftsimError if no batch's cache fits.
    """
    blocks = blocks_of(prices)
    large = frame[~frame["cache_fits"]].assign(needed=lambda rows: needed_blocks(rows, trace))
    large = large.sort_values("batch", kind="stable")
    said = []
    for row in large.drop_duplicates(["latency", "gpu", "context"]).to_dict("records"):
        at = "" if math.isnan(row["context"]) else f" and context {row['context']:g}"
        said.append(
            f"{row['latency']}: left out from batch {row['batch']}{at}: its KV cache needs "
            f"{row['needed']} blocks of {BLOCK} tokens, and {blocks[row['latency'], row['gpu']]} "
            f"fit at a memory utilisation of {UTILISATION:g}"
        )
    if len(large) == len(frame):
        raise DraftsimError(said[0])
    return frame[frame["cache_fits"]], said
