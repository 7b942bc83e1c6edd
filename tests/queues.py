"""Waiting in queues: jobs of one token, and closed forms for one server and for several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from simulator.formulas.general import require
from tests.serving import table_of
from traces.acceptance.trace import Request, Trace


def pollaczek_khinchine(rate: float, mean_s: float, second_moment_s2: float) -> float:
    """Mean seconds of waiting in M/G/1: lambda E[S^2] / (2 (1 - rho)) (Khinchine 1932).

    Each of N servers that a Poisson stream is split among at random is such a queue, at a rate
    of lambda / N.
    """
    load = _load(rate * mean_s)
    return rate * second_moment_s2 / (2 * (1 - load))


def rate_within(target_s: float, share: float, mean_s: float) -> float:
    """The highest rate at which M/M/1 answers a `share` of requests within `target_s` seconds.

    The time in it is exponential at a rate of mu - lambda: 1 - exp(-(mu - lambda) t) = share.
    0 where an empty server is too slow already.
    """
    require("share", share, 0, math.nextafter(1, 0))
    return max(1 / mean_s + math.log1p(-share) / target_s, 0.0)


def erlang_c(load: float, servers: int) -> float:
    """Share of arrivals that wait in M/M/c, of `load` = lambda E[S] < c (Erlang 1917)."""
    require("servers", servers, 1)
    busy = _load(load / servers)
    # Erlang's loss formula by its recursion, which overflows nowhere.
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - busy * (1 - blocked))


def waiting_in_mmc(rate: float, mean_s: float, servers: int) -> float:
    """Mean seconds of waiting in M/M/c, whose servers share one queue.

    No way to deal requests out to servers with queues of their own waits less.
    """
    return erlang_c(rate * mean_s, servers) * mean_s / (servers - rate * mean_s)


def waiting_in_turn(rate: float, mean_s: float, servers: int) -> float:
    """Mean seconds of waiting where a Poisson stream is dealt to exponential servers in turn.

    Each is a queue E_N/M/1: with sigma = A(mu (1 - sigma)), A the transform of Erlang gaps,
    sigma / (mu (1 - sigma)) (Kleinrock, Queueing Systems I, section 6.4).
    """
    from scipy.optimize import brentq

    require("servers", servers, 1)
    _load(rate * mean_s / servers)

    def excess(sigma: float) -> float:
        return (rate / (rate + (1 - sigma) / mean_s)) ** servers - sigma

    # At 1 it is zero for any queue; below that it is negative again if the queue is stable.
    sigma = float(brentq(excess, 0.0, 1 - 1e-9))
    return sigma * mean_s / (1 - sigma)


def _load(load: float) -> float:
    """A server's share of busy time, below 1 where it keeps up."""
    require("load", load, 0, math.nextafter(1, 0))
    return load


def one_token_jobs(prompts: Sequence[int]) -> Trace:
    """Requests that are all prompt: service is the prefill alone."""
    count = len(prompts)
    columns = {
        "request": np.arange(count, dtype=np.int32),
        "position": np.zeros(count, np.int32),
        "offset": np.zeros(count, np.int16),
        "match": np.zeros(count, np.int8),
    }
    return Trace(
        columns, [Request(str(i), "x", int(p), 1, 1, "length") for i, p in enumerate(prompts)]
    )


PER_TOKEN_S = 1e-6
SERVICE = table_of(
    [("target", "prefill", 1, n, 0, n * PER_TOKEN_S) for n in (1, 10_000_000)]
    + [("target", "forward", b, n, 0, 1.0) for b in (1, 2) for n in (1, 2)]
)
"""A prompt of n tokens is a job of n microseconds.

Nobody decodes; passes of a single size would be no table for the compiled engine.
"""


def exponential(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.exponential(1.0, size)
