"""Small event simulations of methods that are not one draft after one verification.

They walk along recorded or synthetic matches, given as the run length at every position:
how many drafts in a row would be accepted from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.formulas.bounds import require

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Cycles(NamedTuple):
    """Independent stretches of a run; arrays of shape (cycles,)."""

    tokens: Ints
    steps: Ints


def pearl_cycles(run_lengths: Sequence[int], gamma: int) -> Cycles:
    """PEARL over one output: tokens and steps of each cycle from pre-verify to pre-verify.

    Pre-verify checks the first token being drafted; once accepted, each post-verify step
    checks gamma tokens while the next gamma are drafted; a rejection after n accepted ones
    emits n and the correction.  There is no bonus token.  The last, unfinished cycle is
    left out.
    """
    require("gamma", gamma, 1)
    runs = np.asarray(run_lengths).tolist()
    cycles: list[tuple[int, int]] = []
    at = 0
    while at + 1 < len(runs):
        start, steps = at, 1
        confirmed = runs[at] > 0
        at += 1
        while confirmed and at + gamma < len(runs):
            steps += 1
            accepted = min(runs[at], gamma)
            confirmed = accepted == gamma
            at += accepted if confirmed else accepted + 1
        if confirmed:
            break
        cycles.append((at - start, steps))
    table = np.array(cycles, dtype=np.int64).reshape(len(cycles), 2)
    return Cycles(table[:, 0], table[:, 1])


def dsi_latency(
    run_lengths: Sequence[int], lookahead: int, draft: float, target: float = 1.0
) -> float:
    """Latency of one output under distributed speculative inference, block by block."""
    require("lookahead", lookahead, 1)
    total, at, length = 0.0, 0, len(run_lengths)
    while at < length:
        begin, speculative = at, 0.0
        while True:
            block = min(lookahead, length - 1 - at)
            accepted = min(int(run_lengths[at]), block)
            speculative += block * draft
            at += accepted
            if block == 0 or accepted < block:
                break
        at += 1
        total += min(speculative + target, (at - begin) * target)
    return total


def truncated_rounds(run_lengths: npt.ArrayLike, gamma: int) -> Ints:
    """Tokens per round and sequence of a batch that keeps what all sequences accepted.

    ``run_lengths`` has shape (sequences, positions); the result has shape (rounds,).
    """
    require("gamma", gamma, 0)
    shortest = np.asarray(run_lengths).min(axis=0).tolist()
    emitted, at = [], 0
    while at + gamma < len(shortest):
        emitted.append(min(shortest[at], gamma) + 1)
        at += emitted[-1]
    return np.array(emitted, dtype=np.int64)
