"""Distributed speculative inference (Timor et al., arXiv:2405.14105).

Expected latency of `tokens` tokens under i.i.d. acceptance, computed exactly by recursion
over the tokens left.  Cost model of the authors' offline simulator
(github.com/keyboardAnt/distributed-speculative-inference, dsi/offline): ``draft`` is the
latency of one draft pass, ``target`` of one target pass, ``lookahead`` the drafts a block
holds.  Distributed inference hides verification by drafting: only the pass that rejects, or that
ends the output, adds to the latency; and it is never slower than plain decoding, which runs in
parallel.
"""

from __future__ import annotations

import math

from simulator.formulas.bounds import require


def sequential_latency(
    tokens: int, alpha: float, lookahead: int, draft: float, target: float = 1.0
) -> float:
    """Return expected latency of ordinary speculation: every round drafts, then verifies."""
    _check(tokens, alpha, lookahead, draft, target)
    latency = [0.0] * (tokens + 1)
    for left in range(1, tokens + 1):
        k = min(lookahead, left - 1)
        tail = sum(alpha**i * (1 - alpha) * latency[left - i - 1] for i in range(k))
        latency[left] = k * draft + target + tail + alpha**k * latency[left - k - 1]
    return latency[tokens]


def distributed_latency(
    tokens: int, alpha: float, lookahead: int, draft: float, target: float = 1.0
) -> float:
    """Return expected latency of DSI: never above ``tokens * target``.

    alpha = 0 gives exactly that; alpha = 1 gives ``(tokens - 1) * draft + target`` where
    drafting is the faster.
    """
    _check(tokens, alpha, lookahead, draft, target)
    latency = [0.0] * (tokens + 1)
    for left in range(1, tokens + 1):
        total = 0.0
        for accepted in range(left):
            last = accepted == left - 1
            chance = alpha**accepted * (1.0 if last else 1 - alpha)
            # Blocks drafted up to and including the one that holds the rejection.
            blocks = accepted // lookahead + 1
            drafted = accepted if last else min(blocks * lookahead, left - 1)
            segment = min(drafted * draft + target, (accepted + 1) * target)
            total += chance * (segment + latency[left - accepted - 1])
        latency[left] = total
    return latency[tokens]


def servers(lookahead: int, draft: float, target: float = 1.0) -> int:
    """Return the number of target servers that keep every verification off the critical path."""
    require("lookahead", lookahead, 0)
    if draft <= 0:
        require("draft", draft, 1e-12)
    return math.ceil(target / (max(1, lookahead) * draft))


def _check(tokens: int, alpha: float, lookahead: int, draft: float, target: float) -> None:
    require("tokens", tokens, 1)
    require("alpha", alpha, 0, 1)
    require("lookahead", lookahead, 1)
    require("draft", draft, 0)
    require("target", target, 0)
