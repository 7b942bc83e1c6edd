"""Lossless sampling: one recorded coin per position replays true rejection sampling."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from policies.core import Round
from policies.lengths.basic import Fixed
from policies.rules.base import RejectionSampling
from tests.rule_positions import acceptance_probability, residual
from traces.acceptance.trace import Request, Trace
from traces.replay.rounds import RoundLog
from traces.replay.run import replay

PAIR_RNG = np.random.default_rng(2)
TARGET, DRAFT = (PAIR_RNG.dirichlet(np.full(4, 0.8), 4) for _ in range(2))
"""Next-token distributions given the last token, (4, 4)."""


def sampled_trace(rng: np.random.Generator, requests: int, length: int) -> Trace:
    """Sampled outputs of the bigram target, with one coin per position."""
    coins = rng.random((requests, length))
    match = np.zeros((requests, length), np.int8)
    last = np.zeros(requests, int)
    for t in range(length):
        cumulative = TARGET.cumsum(1)[last]
        x = np.minimum((rng.random(requests)[:, None] > cumulative).sum(1), 3)
        match[:, t] = coins[:, t] < DRAFT[last, x] / TARGET[last, x]
        last = x
    columns: dict[str, Any] = {
        "request": np.repeat(np.arange(requests, dtype=np.int32), length),
        "position": np.tile(np.arange(length, dtype=np.int32), requests),
        "offset": np.zeros(requests * length, np.int16),
        "match": match.ravel(),
    }
    table = [Request(str(i), "sampled", 1, length, length, "length") for i in range(requests)]
    return Trace(columns, table, meta={"sampling": {"temperature": 1.0}})


def rejection_sampling(rng: np.random.Generator, length: int, gamma: int) -> list[Round]:
    """True speculative sampling of one output: draw, toss, correct (Leviathan, Alg. 1)."""
    last, position, rounds = 0, 0, []
    while position < length:
        count, accepted = min(gamma, length - position - 1), 0
        drafted = [last]
        for _ in range(count):
            drafted.append(int(rng.choice(4, p=DRAFT[drafted[-1]])))
        for before, d in itertools.pairwise(drafted):
            if rng.random() >= acceptance_probability(TARGET[before, d], DRAFT[before, d]):
                break
            accepted += 1
        before = drafted[accepted]
        rejected = accepted < count
        last = int(
            rng.choice(4, p=residual(TARGET[before], DRAFT[before]) if rejected else TARGET[before])
        )
        rounds.append(Round(position, count, accepted, accepted + 1, count, 1))
        position += accepted + 1
    return rounds


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_first_round_of_a_sampled_replay_has_the_exact_distribution(gamma: int) -> None:
    # P(A >= k | last) = (M^k 1)(last), with M the sub-stochastic matrix min(target, draft).
    requests = 4000
    log = replay(
        sampled_trace(np.random.default_rng(gamma), requests, 8), Fixed(gamma),
        RejectionSampling(), first=0,
    )  # fmt: skip
    accepted = log.rounds["accepted"][log.rounds["position"] == 0]
    overlap = np.minimum(TARGET, DRAFT)
    survival = [np.linalg.matrix_power(overlap, k).sum(1)[0] for k in range(gamma + 2)]
    survival[-1] = 0.0
    for k in range(gamma + 1):
        share = survival[k] - survival[k + 1]
        error = math.sqrt(share * (1 - share) / requests)
        assert abs((accepted == k).mean() - share) < 4 * error
    emitted = 1 + sum(survival[1 : gamma + 1])
    error = accepted.std(ddof=1) / math.sqrt(requests)
    assert abs(accepted.mean() + 1 - emitted) < 4 * error


@pytest.mark.parametrize("gamma", [2, 5])
def test_whole_sampled_replays_are_distributed_as_true_rejection_sampling(gamma: int) -> None:
    requests, length = 1000, 16
    trace = sampled_trace(np.random.default_rng(10 + gamma), requests, length)
    rng = np.random.default_rng(20 + gamma)
    true = RoundLog.pack(rejection_sampling(rng, length, gamma) for _ in range(requests))
    ours = replay(trace, Fixed(gamma), first=0).rounds

    def per_request(rounds: Any, count: int) -> Any:
        """Rounds of each request in which exactly `count` were accepted; requests are i.i.d."""
        return np.bincount(rounds["request"], rounds["accepted"] == count, minlength=requests)

    for count in range(gamma + 1):
        a, b = per_request(ours, count), per_request(true, count)
        error = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / requests)
        assert abs(a.mean() - b.mean()) < 4 * error
