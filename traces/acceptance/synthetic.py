"""Traces drawn from known distributions, on which formulas and estimators are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats, Ints, ranges
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Request, Trace
from traces.errors import DraftsimError

VOCABULARY = 32000
"""Tokens that the synthetic draft distribution spreads over."""
EOS = 1
OUTPUT = 256
"""Output tokens of a request by default."""
PLAIN_DECODING = "plain decoding"
"""Source of a trace that drafts nothing."""
ORDINARY = EOS + 1
"""The first id of the tokens that end nothing."""


class MatchProcess(Protocol):
    """A model of the chance that each draft of a request matches."""

    def probabilities(self, tokens: int, rng: np.random.Generator) -> Floats:
        """Return the chance of a match at each output position, shape (tokens,)."""


@dataclass(frozen=True)
class Iid:
    """The same chance everywhere: the assumption of the textbook formulas."""

    alpha: float = 0.7

    def __post_init__(self) -> None:
        _probability("alpha", self.alpha)

    def probabilities(self, tokens: int, rng: np.random.Generator) -> Floats:
        return np.full(tokens, float(self.alpha))


@dataclass(frozen=True)
class Bursty:
    """Easy and hard stretches: a two-state Markov chain (Gilbert 1960, Elliott 1963).

    Stretches last `easy_length` and `hard_length` tokens on average; a request begins in
    the stationary distribution.
    """

    easy: float = 0.95
    hard: float = 0.3
    easy_length: float = 20.0
    hard_length: float = 10.0

    def __post_init__(self) -> None:
        _probability("easy", self.easy)
        _probability("hard", self.hard)
        for name in ("easy_length", "hard_length"):
            if not 1 <= getattr(self, name) < np.inf:
                raise DraftsimError(f"{name} is {getattr(self, name)}, expected >= 1 token")

    @property
    def alpha(self) -> float:
        """Long-run share of matches."""
        total = self.easy_length + self.hard_length
        return (self.easy * self.easy_length + self.hard * self.hard_length) / total

    def probabilities(self, tokens: int, rng: np.random.Generator) -> Floats:
        hard = bool(rng.random() < self.hard_length / (self.easy_length + self.hard_length))
        means = {False: self.easy_length, True: self.hard_length}
        lengths: list[int] = []
        states: list[bool] = []
        while sum(lengths) < tokens:
            lengths.append(int(rng.geometric(1 / means[hard])))
            states.append(hard)
            hard = not hard
        return np.where(np.repeat(states, lengths)[:tokens], self.hard, self.easy).astype(float)


def synthetic_trace(
    process: MatchProcess | float = 0.7,
    *,
    requests: int = 20,
    tokens: int = 500,
    seed: int = 0,
    concentration: float | None = None,
    max_gamma: int = 24,
    eos_fraction: float = 0.0,
    prompt_length: int = 64,
) -> Trace:
    """Return a trace whose matches follow `process`.

    Parameters
    ----------
    process:
        A `MatchProcess`; a number means `Iid`.
    requests, tokens:
        Number of requests, and the token limit of each.
    concentration:
        None records no signals, which is enough for policies that read none.  Otherwise
        every draft gets a probability drawn from a Beta distribution with the process's
        chance as its mean and this concentration, and matches with exactly that probability.  The
        smaller it is, the more the signals predict.  Off-path tails are recorded, so that every
        policy can be replayed.
    max_gamma:
        Longest draft the tails allow.
    eos_fraction:
        Chance that a request ends with EOS, at a length uniform below the limit.

    Raises
    ------
    DraftsimError
        On impossible parameters.
    """
    for name, value in (("requests", requests), ("tokens", tokens), ("max_gamma", max_gamma)):
        if value < 1:
            raise DraftsimError(f"{name} is {value}, expected >= 1")
    if concentration is not None and not 0 < concentration < np.inf:
        raise DraftsimError(f"concentration is {concentration}, expected > 0 or None")
    _probability("eos_fraction", eos_fraction)
    if isinstance(process, int | float):
        process = Iid(float(process))
    if not hasattr(process, "probabilities"):
        raise DraftsimError(f"process is {process!r}, expected a number or a MatchProcess")
    rng = np.random.default_rng(seed)
    table, chances = [], []
    for i in range(requests):
        ends = bool(rng.random() < eos_fraction)
        length = int(rng.integers(1, tokens + 1)) if ends else tokens
        ended: Literal["eos", "length"] = "eos" if ends else "length"
        name = f"synthetic-{i}"
        table.append(Request(name, "synthetic", prompt_length, length, tokens, ended))
        chances.append(process.probabilities(length, rng))
    chance = np.concatenate(chances)
    lengths = np.array([r.tokens for r in table])
    told = asdict(process) if isinstance(process, Iid | Bursty) else {"parameters": repr(process)}
    meta = {
        "kind": "synthetic",
        "process": {"name": type(process).__name__, **told},
        "seed": seed,
        "concentration": concentration,
        "sampling": {"temperature": 0.0},
        "eos_token_ids": [EOS],
        "vocab_size": VOCABULARY,
    }
    if concentration is None:
        match = (rng.random(len(chance)) < chance).astype(np.int8)
        return Trace.without_tails(table, None, meta, match=match)
    prob = drawn_chances(chance, concentration, rng)
    match = (rng.random(len(chance)) < prob).astype(np.int8)
    last = np.cumsum(lengths) - 1
    token = rng.integers(ORDINARY, VOCABULARY, len(chance))
    token[last[[r.ended == "eos" for r in table]]] = EOS
    # A wrong draft is any other token, and never EOS.
    others = VOCABULARY - ORDINARY
    wrong = ORDINARY + (token - ORDINARY + rng.integers(1, others, len(chance))) % others
    repeats = np.where(match == MISMATCH, max_gamma, 1)
    rows = np.repeat(np.arange(len(chance)), repeats)
    offset = ranges(repeats)
    tail = offset > 0
    prob = prob[rows]
    prob[tail] = drawn_chances(chance[rows[tail]], concentration, rng)
    drafted = np.where(match == MATCH, token, wrong)[rows]
    drafted[tail] = rng.integers(ORDINARY, VOCABULARY, int(tail.sum()))
    columns: dict[str, npt.NDArray[Any]] = {
        "request": np.repeat(np.arange(requests), lengths)[rows],
        "position": ranges(lengths)[rows],
        "offset": offset,
        "match": np.where(tail, UNKNOWN, match[rows]),
        "token": np.where(tail, -1, token[rows]),
        "draft_token": drafted,
        **logits_of(prob),
    }
    return Trace(columns, table, max_gamma, meta)


def trace_by_position(
    survival: Sequence[float],
    *,
    requests: int = 200,
    tokens: int = OUTPUT,
    prompt_length: int = 256,
    meta: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Trace:
    """Return a trace with a server's acceptance by draft position.

    Every start of a round has its own draft, whose accepted tokens are drawn independently, because
    counters do not hold the order of rounds.  So fixed lengths have the given acceptance lengths,
    and policies that learn from earlier rounds gain nothing.  ``survival`` are the chances that the
    first 1, 2, ... drafted tokens are all accepted, ``meta`` further provenance.

    Raises DraftsimError if the chances rise, or are none.
    """
    alive = np.asarray(survival, dtype=np.float64)
    if not len(alive) or not np.all(np.diff([1.0, *alive, 0.0]) <= 0):
        raise DraftsimError(
            f"acceptance {', '.join(f'{a:g}' for a in alive)}: expected chances that fall from 1"
        )
    accepted = _accepted(alive, requests, tokens, np.random.default_rng(seed))
    table = [
        Request(f"request-{i}", "", prompt_length, tokens, tokens, "length")
        for i in range(requests)
    ]
    about = {
        "kind": "acceptance", "survival": alive.tolist(), "seed": seed, "fidelity": "approximate",
        "draft_lengths": "by start", "draft_lengths_known": True,
    }  # fmt: skip
    return Trace.without_tails(table, len(alive), {**about, **(meta or {})}, accepted=accepted)


def _accepted(alive: Floats, requests: int, tokens: int, rng: np.random.Generator) -> Ints:
    """Return the accepted tokens of a draft from each output position, shape (positions,).

    Each number of accepted tokens occurs as often as its chance says, so that a short trace has
    the right mean: among all positions, and among those where rounds of the longest draft begin.
    """

    def drawn(starts: int) -> Ints:
        strata = (rng.permutation(starts) + 0.5) / starts
        return np.asarray((strata[:, None] < alive).sum(axis=1), dtype=np.int64)

    accepted = drawn(requests * tokens)
    rounds = math.ceil(len(accepted) / (1 + alive.sum()))
    longest = chain.from_iterable(drawn(rounds).tolist() for _ in count())
    for begin in range(0, len(accepted), tokens):
        at = begin + 1  # the first token comes with the prompt
        while at < begin + tokens:
            accepted[at] = next(longest)
            at += 1 + accepted[at]
    return accepted


def drawn_chances(mean: Floats, concentration: float, rng: np.random.Generator) -> Floats:
    """Draw chances around `mean` from a Beta distribution; 0 and 1 stay as they are."""
    inner = np.clip(mean, 1e-9, 1 - 1e-9)
    drawn = rng.beta(inner * concentration, (1 - inner) * concentration)
    return np.where((mean == 0) | (mean == 1), mean, drawn)


def logits_of(prob: Floats) -> dict[str, npt.NDArray[np.float32]]:
    """Return draft columns with this top probability; the runner-up has half of the rest."""
    top = np.clip(prob, 1e-3, 1 - 1e-6)
    second = np.minimum(0.5 * (1 - top), 0.9 * top)
    rest = 1 - top - second
    entropy = -(top * np.log(top) + second * np.log(second))
    entropy -= rest * np.log(rest / (VOCABULARY - 2))
    likeliest = top + second + rest * 8 / (VOCABULARY - 2)  # the ten of them
    signals = {
        "draft_logprob": np.log(top),
        "draft_top10_logprob": np.log(top / likeliest),
        "draft_top1": np.log(top),
        "draft_top2": np.log(second),
        "draft_logsumexp": np.zeros(top.shape),
        "draft_entropy": entropy,
    }
    return {name: values.astype(np.float32) for name, values in signals.items()}


def _probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise DraftsimError(f"{name} is {value}, expected between 0 and 1")
