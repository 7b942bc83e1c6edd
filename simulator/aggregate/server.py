"""Seconds of a serving engine's step as a function of load, and what runs tell of it.

A step serves `batch` requests, verifies batch x (k + 1) tokens, and emits batch x E, where E is
the acceptance length.  Its seconds are the sum of

    fixed + (weights^s + (weights x tokens / knee)^s)^(1/s)      reading weights, then computing
    + sequence x batch + cached x batch x context                per request, and per cached token
    + speculating + speculating_sequence x batch        if k > 0 (the drafter's first pass over what
                                                        was verified, the sampler)
    + passes x (draft + draft_sequence x batch)              draft passes: k, or `passes`
    + prefill x batch x E x prompt / answer                  prompts, per emitted token

Up to about `knee` tokens a pass takes as long as reading the weights does; beyond, it grows with
the tokens.  Prompts are work for every emitted token: a request that emits `answer` tokens has
brought `prompt` of them.

Every cost has a prior relative to the shortest step measured (`COSTS`), as wide as GPUs, engines
and models differ.  Runs narrow the priors together.  So two runs already give a prediction, with
a wide interval; a cost that the runs say nothing about keeps its prior, and is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.aggregate.hazard import HAZARD, Interval, lengths
from simulator.aggregate.hazard import gaps as gaps_of
from simulator.aggregate.posterior import Prior, draws_of
from traces.acceptance.schema import MOST_DRAFTED, MOST_TOKENS
from traces.errors import DraftsimError

Floats = npt.NDArray[np.float64]


class Cost(NamedTuple):
    """A cost's prior, log-normal."""

    median: float
    """Relative to the shortest step measured, but for `knee` (tokens), `sharpness`, `prompts`."""
    spread: float
    """Standard deviation of its logarithm."""
    meaning: str


COSTS: Mapping[str, Cost] = {
    "fixed": Cost(0.15, 0.8, "a step, whatever is in it"),
    "weights": Cost(0.7, 0.4, "reading the weights once"),
    "knee": Cost(120.0, 0.9, "tokens from which computing takes longer than reading weights"),
    "sharpness": Cost(2.0, 0.4, "how suddenly"),
    "sequence": Cost(0.004, 1.2, "a request in the step"),
    "cached": Cost(8e-6, 1.0, "a cached token that a request attends to"),
    "speculating": Cost(0.08, 1.0, "speculation being on, whatever the draft length"),
    "speculating_sequence": Cost(0.004, 1.2, "the same, per request"),
    "draft": Cost(0.08, 1.0, "a draft pass"),
    "draft_sequence": Cost(0.0015, 1.2, "a request in a draft pass"),
    "prefill": Cost(0.8, 0.5, "a prompt token, relative to weights / knee"),
    "prompts": Cost(1.0, 1.2, "prompt tokens per emitted token, where the runs do not say"),
}
"""Costs of a step."""

MISFIT = Cost(0.035, 0.5, "relative error of the model about a run")
TOLD = 0.75
"""A cost is undetermined if the runs leave more than this part of its prior's spread."""
SECONDS = tuple(name for name in COSTS if name not in ("knee", "sharpness", "prefill", "prompts"))
"""Costs in seconds once they are scaled."""


@dataclass(frozen=True)
class ServerRun:
    """One measured run of a server.

    Parameters
    ----------
    batch:
        Requests that run at once (concurrency).
    k:
        Draft length, 0 without speculation.
    tokens_per_s:
        Output tokens per second of all requests.
    context:
        Mean tokens in a request's cache; 0 where unknown.
    emitted, accepted:
        Acceptance length, or the chances that the first 1, 2, ... drafted tokens are all accepted.
        With neither, the acceptance is estimated together with the costs.
    prompt, answer:
        Mean prompt and output tokens of a request.

    Raises DraftsimError for impossible values.
    """

    batch: int
    k: int
    tokens_per_s: float
    context: float = 0.0
    emitted: float | None = None
    accepted: tuple[float, ...] = ()
    prompt: float | None = None
    answer: float | None = None

    def __post_init__(self) -> None:
        finite = all(np.isfinite([self.tokens_per_s, self.context]))
        if (
            self.batch < 1
            or self.k < 0
            or self.context < 0
            or not (self.tokens_per_s > 0 and finite)
        ):
            raise DraftsimError(
                f"batch {self.batch}, k {self.k}, context {self.context:g}, tokens_per_s "
                f"{self.tokens_per_s:g}: expected at least 1, 0, 0 and more than 0, all finite"
            )
        if self.k > MOST_DRAFTED or not self.context <= MOST_TOKENS:
            raise DraftsimError(
                f"k {self.k}, context {self.context:g}: expected at most {MOST_DRAFTED} and "
                f"{MOST_TOKENS}"
            )
        if not all(0 <= b <= a for a, b in pairwise((1.0, *self.accepted))):
            raise DraftsimError(
                f"acceptance {self.accepted}: expected chances from 1 to 0 that do not rise"
            )
        if self.accepted and len(self.accepted) != self.k:
            raise DraftsimError(
                f"acceptance of {len(self.accepted)} positions at k = {self.k}: name all of them"
            )
        if self.round_tokens is not None and not 1 <= self.round_tokens <= self.k + 1:
            raise DraftsimError(
                f"{self.round_tokens:g} tokens a round at k = {self.k}: expected 1 to {self.k + 1}"
            )
        if any(size is not None and not 0 < size < np.inf for size in (self.prompt, self.answer)):
            raise DraftsimError(
                f"prompt {self.prompt} and answer {self.answer} tokens: expected more than 0"
            )

    @property
    def round_tokens(self) -> float | None:
        """Acceptance length, if it is known."""
        if self.k == 0:
            return 1.0
        return 1.0 + sum(self.accepted) if self.accepted else self.emitted

    @property
    def prompts(self) -> float:
        """Prompt tokens per output token; NaN where unknown."""
        if self.prompt is None or self.answer is None:
            return np.nan
        return self.prompt / self.answer

    @property
    def held(self) -> float:
        """Mean tokens in a request's cache, from prompt and answer where not given."""
        if self.context or self.prompt is None:
            return self.context
        return self.prompt + (self.answer or 0.0) / 2


@dataclass(frozen=True)
class Load:
    """Loads to predict: arrays that broadcast, with the fields of `ServerRun`.

    If `prompts` is NaN, the runs' own prompt tokens per output token are used.
    """

    batch: npt.ArrayLike
    k: npt.ArrayLike
    context: npt.ArrayLike = 0.0
    prompts: npt.ArrayLike = np.nan


def step_s(
    values: Mapping[str, Floats], load: Load, emitted: npt.ArrayLike, passes: int | None
) -> Floats:
    """Seconds of a step, (draws, loads).

    ``values``: a column (draws, 1) per name of `COSTS`; ``emitted``: acceptance lengths, (loads,)
    or (draws, loads); ``passes``: draft passes of a step that speculates, None for k.
    """
    batch, k, context, prompts = (
        np.asarray(v, dtype=float)[None]
        for v in np.broadcast_arrays(load.batch, load.k, load.context, load.prompts)
    )
    runs = k if passes is None else np.where(k > 0, passes, 0)
    s, compute = values["sharpness"], values["weights"] / values["knee"]
    target = (values["weights"] ** s + (compute * batch * (k + 1)) ** s) ** (1 / s)
    return np.asarray(
        values["fixed"] + target + values["sequence"] * batch
        + values["cached"] * batch * context
        + (k > 0) * (values["speculating"] + values["speculating_sequence"] * batch)
        + runs * (values["draft"] + values["draft_sequence"] * batch)
        + values["prefill"] * compute * batch * np.asarray(emitted)
        * np.where(np.isnan(prompts), values["prompts"], prompts)
    )  # fmt: skip


@dataclass(frozen=True)
class Server:
    """Costs and acceptance that agree with a server's runs."""

    runs: Sequence[ServerRun]
    passes: int | None
    """Draft passes of every step that speculates; None: as many as the draft length."""
    scale_s: float
    """Seconds of the shortest step measured."""
    draws: Floats
    """(draws, costs + misfit + hazards): logarithms of costs relative to `scale_s`, then logits."""
    known: Mapping[int, float] = field(default_factory=dict)
    """Measured acceptance lengths by draft length."""
    without: tuple[str, ...] = ()
    """Costs taken to be zero."""

    @cached_property
    def central(self) -> Mapping[str, float]:
        """One value per cost: what is printed, written and predicted with.  Seconds (`SECONDS`)."""
        middle = np.median(self.draws, axis=0)
        values = _values(middle[None], self.without)
        return {
            name: float(value[0, 0]) * (self.scale_s if name in SECONDS else 1.0)
            for name, value in values.items()
        }

    def intervals(self, level: float) -> dict[str, Interval]:
        """Every cost that the runs tell something of, with its interval."""
        ends = np.quantile(self.draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
        out = {}
        for i, name in enumerate(COSTS):
            if name not in (*self.undetermined, *self.without) and not (
                name == "prompts" and self._prompts_given
            ):
                unit = self.scale_s if name in SECONDS else 1.0
                low, high = np.exp(ends[:, i]) * unit
                out[name] = Interval(self.central[name], float(low), float(high))
        return out

    @cached_property
    def undetermined(self) -> tuple[str, ...]:
        """Costs about which the runs say little: predictions use their prior."""
        left = self.draws[:, : len(COSTS)].std(axis=0)
        wide = [n for n, sd in zip(COSTS, left, strict=True) if sd > TOLD * COSTS[n].spread]
        absent = {*self.without, *(["prompts"] if self._prompts_given else [])}
        return tuple(name for name in wide if name not in absent)

    @property
    def _prompts_given(self) -> bool:
        return not any(np.isnan(run.prompts) for run in self.runs)

    @property
    def misfit(self) -> float:
        """Relative standard deviation of runs about the model."""
        return float(np.exp(np.median(self.draws[:, len(COSTS)])))

    def step_s(self, load: Load, emitted: npt.ArrayLike) -> Floats:
        """Seconds of a step with the central costs, (loads,)."""
        values = {name: np.array([[value]]) for name, value in self.central.items()}
        return np.asarray(step_s(values, load, emitted, self.passes)[0])

    def emitted(self, k: int) -> Floats:
        """Acceptance lengths at draft length `k`, (draws,)."""
        if k == 0:
            return np.ones(len(self.draws))
        hazards = self.draws[:, len(COSTS) + 1 :]
        found = lengths(hazards, k)
        if k in self.known:
            # Measured: as it is, up to what differs from run to run.
            return np.full(len(found), self.known[k])
        return found

    def tokens_per_s(
        self, batch: int, k: int, context: float = 0.0, prompts: float = np.nan,
        *, noisy: bool = True,
    ) -> Floats:  # fmt: skip
        """Output tokens per second of all requests, (draws,).

        With `noisy` as a further run would measure it: the model's misfit is in the draws.
        """
        emitted = self.emitted(k)
        values = _values(self.draws, self.without)
        seconds = step_s(values, Load(batch, k, context, prompts), emitted[:, None], self.passes)
        speeds = batch * emitted / (seconds[:, 0] * self.scale_s)
        if not noisy:
            return np.asarray(speeds)
        noise = np.random.default_rng([batch, k]).standard_normal(len(self.draws))
        wrong = np.exp(np.exp(self.draws[:, len(COSTS)]) * noise)
        return np.asarray(speeds * wrong)


def calibrate(
    runs: Sequence[ServerRun],
    *,
    passes: int | None = None,
    noise: float | None = None,
    without: Collection[str] = (),
) -> Server:
    """The costs that agree with a server's runs, from as few as one.

    Parameters
    ----------
    passes:
        Draft passes of every step that speculates: 1 for a drafter that drafts all tokens at
        once; None: as many as the draft length.
    noise:
        Relative standard deviation of a run's tokens/s, if repeated runs tell it.
    without:
        Names of `COSTS` to take as zero: what a cost is worth shows in the errors without it.

    Raises
    ------
    DraftsimError
        If there are no runs.
    """
    if not runs:
        raise DraftsimError("no runs to calibrate with: give at least one")
    known: dict[int, float] = {}
    for k in sorted({run.k for run in runs if run.k}):
        told = [run.round_tokens for run in runs if run.k == k and run.round_tokens is not None]
        if told:
            known[k] = float(np.mean(told))
    curve = dict(known)
    for run in runs:
        for place, total in enumerate(np.cumsum(run.accepted), 1):
            curve.setdefault(place, 1.0 + float(total))
    load = Load(
        [run.batch for run in runs], [run.k for run in runs], [run.held for run in runs],
        [run.prompts for run in runs],
    )  # fmt: skip
    batch = np.array([run.batch for run in runs], dtype=float)
    speeds = np.array([run.tokens_per_s for run in runs])
    emitted = np.array([run.round_tokens or np.nan for run in runs])
    unknown = [i for i, run in enumerate(runs) if run.round_tokens is None]
    guess = np.where(np.isnan(emitted), 1.0, emitted)
    scale = float((batch * guess / speeds).min())
    count, left_out = len(COSTS), tuple(without)

    def likelihood(x: Floats) -> Floats:
        values = _values(x, left_out)
        tokens = np.broadcast_to(emitted, (len(x), len(runs)))
        if unknown:
            tokens = tokens.copy()
            for i in unknown:
                tokens[:, i] = lengths(x[:, count + 1 :], runs[i].k)
        with np.errstate(over="ignore", invalid="ignore"):
            seconds = step_s(values, load, tokens, passes)
            gaps = np.log(seconds * scale * speeds / (batch * tokens))
            variance = np.exp(2 * x[:, count, None]) + (noise or 0.0) ** 2
            fit = (-0.5 * gaps**2 / variance - 0.5 * np.log(variance)).sum(axis=1)
        return np.asarray(fit - 0.5 * np.square(gaps_of(x[:, count + 1 :], curve)).sum(axis=1))

    priors = {name: Prior(float(np.log(c.median)), c.spread) for name, c in COSTS.items()}
    priors["misfit"] = Prior(float(np.log(MISFIT.median)), MISFIT.spread)
    draws = draws_of({**priors, **HAZARD}, likelihood)
    return Server(tuple(runs), passes, scale, draws, known, left_out)


def _values(draws: Floats, without: Collection[str]) -> dict[str, Floats]:
    """A column (draws, 1) per cost."""
    return {
        name: np.zeros((len(draws), 1)) if name in without else np.exp(draws[:, i, None])
        for i, name in enumerate(COSTS)
    }


def interval_of(draws: Floats, level: float) -> Interval:
    """Median of draws, and the ends of their central interval."""
    low, value, high = np.quantile(draws, [(1 - level) / 2, 0.5, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))
