"""Seconds of a serving engine's step as a function of load, fitted to a server's runs.

A step serves `batch` requests, verifies batch x (k + 1) tokens, and emits batch x E, where E is
the acceptance length.  Its seconds are the sum of

    fixed + (read^s + (weights x tokens / knee)^s)^(1/s)         reading weights, then computing
    + sequence x batch + cached x batch x context                per request, and per cached token
    + speculating + speculating_sequence x batch        if k > 0 (the drafter's first pass over what
                                                        was verified, the sampler)
    + passes x (draft + draft_sequence x batch)              draft passes: k, or `passes`, or
                                                             those of drafts that stop early
    + prefill x batch x E x prompt / answer                  prompts, per emitted token

Up to about `knee` tokens a pass takes as long as reading the weights does; beyond, it grows with
the tokens.  Prompts are work for every emitted token: a request that emits `answer` tokens has
brought `prompt` of them.

A pass reads `weights`, and with a mixture of experts also those that the tokens choose:
`experts` x (1 - (1 - chosen / count)^tokens).  In llama.cpp a pass of up to about 8 tokens runs
kernels that compute from some 4 tokens on, and one of more tokens other kernels (`Target`).

Where drafts stop early (llama.cpp's p-min), a step verifies the mean `drafted` tokens of a round
instead of k, and runs the draft passes that found them, the rejected last one included.

Every cost has a prior relative to the shortest step measured (`COSTS`), as wide as GPUs, engines
and models differ.  Runs narrow the priors together.  So two runs already give a prediction, with
a wide interval; a cost that the runs say nothing about keeps its prior, and is named.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from simulator.aggregate import hazard
from simulator.bootstrap import Interval
from simulator.formulas.general import geometric_sum, require
from simulator.formulas.leviathan import acceptance_rate
from traces.acceptance.trace import MOST_DRAFTED, MOST_TOKENS
from traces.errors import DraftsimError


class Cost(NamedTuple):
    """A cost's prior, log-normal."""

    median: float
    """Relative to the shortest step measured, but for `knee` (tokens), `sharpness`, `prompts`."""
    spread: float
    """Standard deviation of its logarithm."""
    meaning: str

    @property
    def prior(self) -> hazard.Prior:
        """The prior of its logarithm."""
        return hazard.Prior(float(np.log(self.median)), self.spread)


COSTS: Mapping[str, Cost] = {
    "fixed": Cost(0.15, 0.8, "a step, whatever is in it"),
    "weights": Cost(0.7, 0.4, "reading the weights once"),
    "knee": Cost(120.0, 0.9, "tokens from which computing takes longer than reading weights"),
    "sharpness": Cost(2.0, 0.4, "how suddenly"),
    "sequence": Cost(0.004, 1.2, "a request in the step"),
    "cached": Cost(8e-6, 1.0, "a cached token that a request attends to"),
    "speculating": Cost(0.08, 1.0, "speculation being on, whatever the draft length"),
    "speculating_sequence": Cost(0.004, 1.2, "speculation being on, per request"),
    "draft": Cost(0.08, 1.0, "a draft pass"),
    "draft_sequence": Cost(0.0015, 1.2, "a request in a draft pass"),
    "prefill": Cost(0.8, 0.5, "a prompt token, relative to weights / knee"),
    "prompts": Cost(1.0, 1.2, "prompt tokens per emitted token, where the runs do not say"),
}
"""Costs of a step."""

EXPERTS = Cost(1.5, 0.7, "reading all experts of a mixture once")
MATRIX = Cost(1.35, 0.2, "reading the weights in matrix kernels, relative to weights")
VECTOR_WIDTH = Cost(8.5, 0.25, "tokens from which a pass runs in matrix kernels")
VECTOR_KNEE = Cost(3.7, 0.35, COSTS["knee"].meaning)
"""Priors of single targets, see `Target`."""
MATRIX_KNEE = 30.0
"""Tokens from which llama.cpp's matrix kernels compute."""

SEVERAL = 1.2
"""Contexts whose longest exceeds the shortest by this factor tell of the cost of context."""
FAR = 2.0
"""A context outside those measured by more than this factor is extrapolated."""
MISFIT = Cost(0.035, 0.5, "relative error of the model about a run")
STEP = 0.04
"""Relative error by doubling of a pass's tokens beyond those measured: where the next kernel or
graph begins, and how much faster or slower it is, is not known."""
WIDTH = 0.65
"""Width of intervals relative to the draws': about the narrowest at which every public server with
20 predicted runs has 80% of them inside (``python -m benchmarks.server_left_out --widths``).  The
draws are wider, as every cost's prior covers every server."""
ALIKE = 0.003
"""Relative difference of two steps that counts as much as a cost's standard deviation where one
draw is chosen for all."""
MISSED = 0.25
"""Relative difference from its fitted speed at which a run contradicts the others.  The runs of
public servers differ by 5% at most, those of docs/server.md, on a shared machine, by 21%."""
TOLD = 0.75
"""A cost is undetermined if the runs leave more than this part of its prior's spread."""
GUESSED = (
    "the runs tell no acceptance, so the costs of drafting belong to an estimated one: at another "
    "acceptance speedups can be far outside their intervals; give calibrate or recommend the "
    "server's counters (--metrics)"
)
"""Said where costs that were fitted together with the acceptance meet another acceptance."""
SECONDS = (
    *(name for name in COSTS if name not in ("knee", "sharpness", "prefill", "prompts")), "experts"
)  # fmt: skip
"""Costs in seconds once they are scaled."""


@dataclass(frozen=True)
class Target:
    """Knowledge of the target's passes before any run.

    Parameters
    ----------
    experts:
        Experts of a mixture, and how many of them a token chooses; None: no mixture.
    vectors:
        True for quantised weights in llama.cpp: up to 8 tokens (``MMVQ_MAX_BATCH_SIZE`` of
        ggml-cuda) are multiplied one by one, but not in every build and on every GPU
        (`VECTOR_WIDTH`).  Priors are from llama-bench (`simulator.published`, "llama.cpp, tokens a
        pass"): on an RTX 3090 a pass of 8 tokens takes 2.1 times one of a single token.

    Raises DraftsimError for impossible numbers of experts.
    """

    experts: tuple[int, int] | None = None
    vectors: bool = False

    def __post_init__(self) -> None:
        if self.experts is not None and not 1 <= self.experts[1] <= self.experts[0]:
            raise DraftsimError(
                f"{self.experts[1]} of {self.experts[0]} experts a token: expected 1 to all of them"
            )

    @property
    def costs(self) -> dict[str, Cost]:
        """Priors of the costs that other targets do not have."""
        found = {} if self.experts is None else {"experts": EXPERTS}
        kernels = {"matrix": MATRIX, "vector_width": VECTOR_WIDTH} if self.vectors else {}
        return found | kernels

    def prior(self, name: str) -> Cost:
        """Return the prior of a cost of `COSTS`."""
        return VECTOR_KNEE if self.vectors and name == "knee" else COSTS[name]

    def read_s(self, values: Mapping[str, Floats], tokens: Floats) -> Floats:
        """Return seconds of reading what a pass of this many tokens reads."""
        if self.experts is None:
            return np.asarray(values["weights"])
        count, chosen = self.experts
        reached = 1 - (1 - chosen / count) ** tokens
        return np.asarray(values["weights"] + values["experts"] * reached)

    def pass_s(self, values: Mapping[str, Floats], tokens: Floats) -> Floats:
        """Return seconds of reading weights and computing in a pass of this many tokens."""
        s, read = values["sharpness"], self.read_s(values, tokens)
        found = (read**s + (values["weights"] / values["knee"] * tokens) ** s) ** (1 / s)
        if self.vectors:
            read, compute = read * values["matrix"], values["weights"] / MATRIX_KNEE
            wide = (read**s + (compute * tokens) ** s) ** (1 / s)
            found = np.where(tokens > values["vector_width"], wide, found)
        return np.asarray(found)


ANY_TARGET = Target()


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
    drafted:
        Mean tokens drafted and verified in a round, where drafts stop early; None: k.
    p_min:
        Probability below which drafts stop (llama.cpp), 0 if they do not.
    ttft_s:
        Mean time to the first token; None where unknown.

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
    drafted: float | None = None
    p_min: float = 0.0
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        require("batch", self.batch, 1)
        require("k", self.k, 0, MOST_DRAFTED)
        require("context", self.context, 0, MOST_TOKENS)
        if not 0 < self.tokens_per_s < math.inf:
            raise DraftsimError(f"tokens_per_s is {self.tokens_per_s:g}, expected more than 0")
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
        if not 0 <= self.p_min < 1 or (self.p_min and not self.k):
            raise DraftsimError(f"p_min {self.p_min:g} at k = {self.k}: expected 0 to 1 and drafts")
        if self.p_min and self.drafted is None:
            raise DraftsimError(
                f"a run with p_min {self.p_min:g} says not how many tokens its drafts had: give "
                "accepted, drafted and rounds"
            )
        if self.drafted is not None and not (self.round_tokens or 1) - 1 <= self.drafted <= self.k:
            raise DraftsimError(
                f"{self.drafted:g} tokens drafted a round at k = {self.k}: expected no fewer than "
                "were accepted and no more than k"
            )
        if self.ttft_s is not None and not 0 < self.ttft_s < math.inf:
            raise DraftsimError(f"ttft_s is {self.ttft_s:g}, expected more than 0")
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
    def verified(self) -> float:
        """Drafted tokens that a step verifies for each request."""
        return float(self.k if self.drafted is None else self.drafted)

    @property
    def draft_passes(self) -> float:
        """Draft passes of a round; if drafts stop early, including that of the dropped token."""
        return passes_of(self.verified, self.k)

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


def passes_of(drafted: float, k: int) -> float:
    """Return draft passes of rounds with a mean of `drafted` tokens, whose drafts stop early.

    Every token is kept with the same chance q, so that drafted = q + q^2 + ... + q^k, and the
    passes are 1 + q + ... + q^(k - 1) = drafted / q.
    """
    if drafted >= k:
        return float(k)
    return geometric_sum(acceptance_rate(1 + drafted, k), k)


def step_s(
    values: Mapping[str, Floats], emitted: npt.ArrayLike, batch: npt.ArrayLike, k: npt.ArrayLike,
    context: npt.ArrayLike = 0.0, prompts: npt.ArrayLike = np.nan, *,
    verified: npt.ArrayLike | None = None, passes: npt.ArrayLike | None = None,
    target: Target = ANY_TARGET,
) -> Floats:  # fmt: skip
    """Return seconds of a step, (draws, loads).

    ``values``: a column (draws, 1) per name of `COSTS` and `Target.costs`; ``emitted``: acceptance
    lengths, (loads,) or (draws, loads).  The others broadcast to (loads,) and are those of
    `ServerRun`: drafted tokens ``verified`` for each request and draft ``passes`` of a step that
    speculates are k by default.  If ``prompts`` is NaN, the fitted prompt tokens per output token
    are used.
    """
    passes, verified = (k if given is None else given for given in (passes, verified))
    given = np.broadcast_arrays(batch, k, context, prompts, passes, verified)
    batch, k, context, prompts, passes, verified = (np.asarray(v, dtype=float)[None] for v in given)
    # Prompts are read in matrix kernels.
    compute = values["weights"] / (MATRIX_KNEE if target.vectors else values["knee"])
    return np.asarray(
        values["fixed"] + target.pass_s(values, batch * (verified + 1)) + values["sequence"] * batch
        + values["cached"] * batch * context
        + (k > 0) * (values["speculating"] + values["speculating_sequence"] * batch)
        + (k > 0) * passes * (values["draft"] + values["draft_sequence"] * batch)
        + values["prefill"] * compute * batch * np.asarray(emitted)
        * np.where(np.isnan(prompts), values["prompts"], prompts)
    )  # fmt: skip


@dataclass(frozen=True)
class ServerFit:
    """Costs and acceptance that agree with a server's runs."""

    runs: Sequence[ServerRun]
    passes: int | None
    """Draft passes of every step that speculates; None: as many as the draft length."""
    scale_s: float
    """Seconds of the shortest step measured."""
    draws: Floats
    """(draws, costs + misfit + hazards + the target's costs): logarithms of costs relative to
    `scale_s`; logits of the hazards."""
    known: Mapping[int, float] = field(default_factory=dict)
    """Measured acceptance lengths by draft length."""
    without: tuple[str, ...] = ()
    """Costs taken to be zero."""
    target: Target = ANY_TARGET
    width: float = WIDTH
    """Width of predicted speeds relative to the draws'."""
    noise: float = 0.0
    """Relative standard deviation of a run's tokens/s, which `misfit` then leaves out."""
    at_other: bool = False
    """True if acceptance is not that of the runs (`at_acceptance`)."""

    @cached_property
    def central(self) -> Mapping[str, float]:
        """One value per cost: what is printed and written.  Seconds (`SECONDS`).

        They are the costs of one draw.  Medians of each cost would not do: costs of a draw
        compensate one another, so steps made of medians are too short.  The chosen draw is nearest
        to the predicted steps and their ratios at the loads of the runs, and to the median costs.
        """
        runs = self.runs
        batches, longest = {run.batch for run in runs}, max(run.k for run in runs)
        batch, ks = zip(*product(sorted(batches), range(longest + 1)), strict=True)
        emitted = np.stack([self.emitted(k) for k in ks], axis=1)
        steps = step_s(
            _values(self.draws, self.without, self.target), emitted, batch, ks, *self.usual,
            passes=self.passes, target=self.target,
        )  # fmt: skip
        logs = np.log(steps).reshape(len(steps), len(batches), -1)
        told = np.concatenate([logs, logs[..., 1:] - logs[..., :1]], axis=2).reshape(len(logs), -1)
        apart = told - np.median(told, axis=0)
        costs = np.delete(self.draws, range(len(COSTS), OWN), axis=1)
        far = (costs - np.median(costs, axis=0)) / np.maximum(costs.std(axis=0), 1e-12)
        misses = np.square(apart / ALIKE).mean(axis=1) + np.square(far).mean(axis=1)
        shown = [i for i, name in enumerate((*COSTS, *self.target.costs)) if name in self._told]
        low, high = np.quantile(costs[:, shown], [0.1, 0.9], axis=0)
        outside = ((costs[:, shown] < low) | (costs[:, shown] > high)).any(axis=1)
        misses[outside & ~outside.all()] = np.inf  # a cost lies in the interval printed with it
        values = _values(self.draws[[np.argmin(misses)]], self.without, self.target)
        return {
            name: float(value[0, 0]) * (self.scale_s if name in SECONDS else 1.0)
            for name, value in values.items()
        }

    def intervals(self, level: float) -> dict[str, Interval]:
        """Return every cost that the runs determine at least partly, with its interval."""
        ends = np.quantile(self.draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
        out = {}
        for i, name in [*enumerate(COSTS), *enumerate(self.target.costs, OWN)]:
            if name in self._told:
                low, high = np.exp(ends[:, i]) * (self.scale_s if name in SECONDS else 1.0)
                out[name] = Interval(self.central[name], float(low), float(high))
        return out

    @cached_property
    def _told(self) -> tuple[str, ...]:
        """Costs that the runs determine at least partly."""
        silent = {*self.undetermined, *self._absent}
        return (*(name for name in COSTS if name not in silent), *self.target.costs)

    @cached_property
    def undetermined(self) -> tuple[str, ...]:
        """Costs about which the runs say little: predictions use their prior."""
        left = self.draws[:, : len(COSTS)].std(axis=0)
        spreads = [self.target.prior(name).spread for name in COSTS]
        wide = [n for n, sd, own in zip(COSTS, left, spreads, strict=True) if sd > TOLD * own]
        return tuple(name for name in wide if name not in self._absent)

    @cached_property
    def _absent(self) -> tuple[str, ...]:
        """Costs that are zero, or that the runs give."""
        given = not any(np.isnan(run.prompts) for run in self.runs)
        return (*self.without, *(["prompts"] if given else []))

    @property
    def misfit(self) -> float:
        """Relative standard deviation of runs about the model."""
        return float(np.exp(np.median(self.draws[:, len(COSTS)])))

    @property
    def computing_knee(self) -> float:
        """Tokens from which reading prompts computes longer than it reads weights."""
        return MATRIX_KNEE if self.target.vectors else self.central["knee"]

    def step_s(
        self, emitted: npt.ArrayLike, batch: npt.ArrayLike, k: npt.ArrayLike,
        context: npt.ArrayLike = 0.0, prompts: npt.ArrayLike = np.nan,
        verified: npt.ArrayLike | None = None,
    ) -> Floats:  # fmt: skip
        """Return seconds of a step with the central costs, (loads,)."""
        values = {name: np.array([[value]]) for name, value in self.central.items()}
        found = step_s(
            values, emitted, batch, k, context, prompts, verified=verified, passes=self.passes,
            target=self.target,
        )  # fmt: skip
        return np.asarray(found[0])

    def at_acceptance(self, known: Mapping[int, float]) -> ServerFit:
        """Return the same costs with another acceptance: that of another workload or drafter.

        ``known``: measured acceptance lengths by draft length; others are drawn about them.
        """
        drawn = hazard.draws_near(tuple(known.items()))
        chosen = np.random.default_rng(0).integers(len(drawn), size=len(self.draws))
        draws = self.draws.copy()
        draws[:, HAZARDS] = drawn[chosen]
        return replace(self, draws=draws, known=dict(known), at_other=True)

    def emitted(self, k: int) -> Floats:
        """Return acceptance lengths at draft length `k`, (draws,)."""
        if k == 0:
            return np.ones(len(self.draws))
        if k in self.known:
            # Measured: as it is, up to what differs from run to run.
            return np.full(len(self.draws), self.known[k])
        return hazard.further(self.draws[:, HAZARDS], self.known, k)

    @property
    def guessed(self) -> bool:
        """True if no run with drafts tells its acceptance, which was then fitted like the costs."""
        return any(run.k for run in self.runs) and not mean_lengths(self.runs)

    @property
    def usual(self) -> tuple[float, float]:
        """Mean context, and prompt tokens per output token (NaN if unknown), of the runs."""
        runs = self.runs
        return float(np.mean([run.held for run in runs])), float(np.mean([r.prompts for r in runs]))

    def tpot_s(self, batch: int, tokens_per_s: float) -> float | None:
        """Return the time per token after the first at a load; None if no run tells TTFT.

        A request stays for its TTFT and these.  TTFT is that of the runs, between whose loads it is
        interpolated.
        """
        told = [(r.batch, r.ttft_s, r.answer) for r in self.runs if r.ttft_s and r.answer]
        if not told:
            return None
        batches, ttft, answers = np.array(told, dtype=float).T
        loads = np.unique(batches)
        first_s = np.interp(batch, loads, [ttft[batches == load].mean() for load in loads])
        answer = float(answers.mean())
        stay_s = answer * batch / tokens_per_s
        return max(0.0, stay_s - float(first_s)) / (answer - 1) if answer > 1 else None

    @property
    def tells_context(self) -> bool:
        """True if the runs have several contexts, which determine the cost of a cached token."""
        held = [run.held for run in self.runs]
        return max(held) > SEVERAL * max(min(held), 1.0)

    def far(self, context: float) -> bool:
        """Return True if a context is far outside those measured (`FAR`)."""
        held = [run.held for run in self.runs]
        return context > FAR * max(held) or FAR * context < min(held)

    @property
    def tells_passes_apart(self) -> bool:
        """True if the runs can separate the cost of a draft pass from that of a verified token.

        They cannot at one concurrency if every drafted token is verified: both are one slope.
        """
        drafting = [run for run in self.runs if run.k]
        several = len({run.batch for run in drafting}) > 1 and len({run.k for run in drafting}) > 1
        return several or (any(run.p_min for run in drafting) and len(drafting) > 1)

    def stopping(self) -> list[ServerRun]:
        """Return one run of each setting whose drafts are shorter, by draft length and p-min.

        None at another acceptance than theirs, at which their drafts would have other lengths.
        """
        if self.at_other:
            return []
        found = {(r.k, r.p_min): r for r in self.runs if r.p_min or r.verified < r.k}
        return [found[key] for key in sorted(found)]

    def tokens_per_s(
        self, batch: int, k: int, context: float = 0.0, prompts: float = np.nan,
        *, noisy: bool = True, like: ServerRun | None = None,
    ) -> Floats:  # fmt: skip
        """Return output tokens per second of all requests, (draws,).

        With `noisy` these are speeds that a further run would measure: they include the model's
        misfit, the runs' noise, and the effect of other kernels or graphs for larger passes
        (`STEP`).  Their width is scaled to that of real servers (`WIDTH`), or to misfit and noise
        of these runs if they are larger, up to the width of the draws.
        ``like`` is a run whose drafts stop early, which gives acceptance and draft passes.
        """
        emitted, verified = self.emitted(k), float(k)
        passes: float | None = self.passes
        if like is not None:
            if like.round_tokens is not None:
                emitted = np.full(len(self.draws), like.round_tokens)
            verified = like.verified
            passes = like.draft_passes if passes is None else passes
        seconds = step_s(
            _values(self.draws, self.without, self.target), emitted[:, None], batch, k, context,
            prompts, verified=verified, passes=passes, target=self.target,
        )  # fmt: skip
        speeds = batch * emitted / (seconds[:, 0] * self.scale_s)
        if not noisy:
            return np.asarray(speeds)
        noise = np.random.default_rng([batch, k]).standard_normal(len(self.draws))
        counted = k == 0 or k in self.known or like is not None
        unsure = 0.0 if counted else hazard.ANOTHER_RUN
        beyond = np.hypot(STEP * self._away(batch, verified), unsure)
        spread = np.hypot(np.exp(self.draws[:, len(COSTS)]), np.hypot(self.noise, beyond))
        speeds = speeds * np.exp(spread * noise)
        apart = math.hypot(self.misfit, self.noise) / MISFIT.median
        width = min(1.0, self.width * max(1.0, apart))
        return np.asarray(np.median(speeds) ** (1 - width) * speeds**width)

    @cached_property
    def contradicting(self) -> tuple[ServerRun, float] | None:
        """Return the run farthest from its fitted speed, and that speed, tokens/s.

        None if it differs by less than `MISSED`.
        """
        # At another acceptance, runs that did not tell theirs are not predicted.
        runs = [r for r in self.runs if r.round_tokens is not None or not self.at_other]
        speeds = [
            float(
                np.median(self.tokens_per_s(r.batch, r.k, r.held, r.prompts, noisy=False, like=r))
            )
            for r in runs
        ]
        far = [
            abs(math.log(fitted / run.tokens_per_s))
            for run, fitted in zip(runs, speeds, strict=True)
        ]
        at = max(range(len(runs)), key=far.__getitem__, default=None)
        if at is None or far[at] < math.log1p(MISSED):
            return None
        return runs[at], speeds[at]

    def _away(self, batch: int, verified: float) -> float:
        """Return doublings between a pass's tokens and the nearest that were measured."""
        tokens = batch * (verified + 1)
        return min(abs(math.log2(tokens / (r.batch * (r.verified + 1)))) for r in self.runs)


def calibrate(
    runs: Sequence[ServerRun],
    *,
    passes: int | None = None,
    noise: float | None = None,
    without: Collection[str] = (),
    target: Target = ANY_TARGET,
) -> ServerFit:
    """Return the costs that agree with a server's runs, from as few as one.

    Parameters
    ----------
    passes:
        Draft passes of every step that speculates: 1 for a drafter that drafts all tokens at
        once; None: as many as the draft length.
    noise:
        Relative standard deviation of a run's tokens/s, if repeated runs tell it.
    without:
        Names of `COSTS` to set to zero, to compare errors with and without them.
    target:
        Knowledge of the target's passes.

    Raises DraftsimError if there are no runs, or only some say their context.
    """
    if not runs:
        raise DraftsimError("no runs to calibrate with: give at least one")
    silent = [run for run in runs if not run.held]
    if silent and len(silent) < len(runs):
        raise DraftsimError(
            f"the run of batch {silent[0].batch} at k = {silent[0].k} does not say its context, as "
            "others do: give each its context, or prompt and answer (mean lengths)"
        )
    full = [run for run in runs if not run.p_min]
    known = mean_lengths(full)
    curve = dict(known)
    for run in full:
        for place, total in enumerate(np.cumsum(run.accepted), 1):
            curve.setdefault(place, 1.0 + float(total))
    batch, ks, held, prompts, verified, drafting, speeds = np.array([
        (r.batch, r.k, r.held, r.prompts, r.verified, r.draft_passes, r.tokens_per_s) for r in runs
    ], dtype=float).T  # fmt: skip
    emitted = np.array([run.round_tokens or np.nan for run in runs])
    unknown = [i for i, run in enumerate(runs) if run.round_tokens is None]
    guess = np.where(np.isnan(emitted), 1.0, emitted)
    scale = float((batch * guess / speeds).min())
    left_out = tuple(without)

    def likelihood(x: Floats) -> Floats:
        values = _values(x, left_out, target)
        tokens = np.broadcast_to(emitted, (len(x), len(runs)))
        if unknown:
            tokens = tokens.copy()
            for i in unknown:
                tokens[:, i] = hazard.lengths(x[:, HAZARDS], runs[i].k)
        with np.errstate(over="ignore", invalid="ignore"):
            seconds = step_s(
                values, tokens, batch, ks, held, prompts, verified=verified, target=target,
                passes=drafting if passes is None else passes,
            )  # fmt: skip
            gaps = np.log(seconds * scale * speeds / (batch * tokens))
            variance = np.exp(2 * x[:, len(COSTS), None]) + (noise or 0.0) ** 2
            fit = (-0.5 * gaps**2 / variance - 0.5 * np.log(variance)).sum(axis=1)
        return np.asarray(fit - 0.5 * np.square(hazard.gaps(x[:, HAZARDS], curve)).sum(axis=1))

    draws = hazard.draws_of(priors_of(target), likelihood)
    return ServerFit(
        tuple(runs), passes, scale, draws, known, left_out, target, noise=noise or 0.0
    )  # fmt: skip


def mean_lengths(runs: Sequence[ServerRun]) -> dict[int, float]:
    """Return acceptance lengths by draft length, the means of the runs that tell theirs."""
    told = [(run.k, run.round_tokens) for run in runs if run.k and run.round_tokens is not None]
    ks = sorted({k for k, _ in told})
    return {k: float(np.mean([tokens for n, tokens in told if n == k])) for k in ks}


def priors_of(target: Target) -> dict[str, hazard.Prior]:
    """Return the prior of each column of `ServerFit.draws`."""
    shared = {name: target.prior(name).prior for name in COSTS}
    own = {name: cost.prior for name, cost in target.costs.items()}
    return {**shared, "misfit": MISFIT.prior, **hazard.HAZARD, **own}


OWN = len(COSTS) + 1 + len(hazard.HAZARD)
"""First column of a target's own costs."""
HAZARDS = slice(len(COSTS) + 1, OWN)
"""Columns of the hazard's parameters."""


def _values(draws: Floats, without: Collection[str], target: Target) -> dict[str, Floats]:
    """Return a column (draws, 1) per cost."""
    columns = {**dict(enumerate(COSTS)), **dict(enumerate(target.costs, OWN))}
    return {
        name: np.zeros((len(draws), 1)) if name in without else np.exp(draws[:, i, None])
        for i, name in columns.items()
    }
