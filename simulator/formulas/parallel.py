"""Drafting while the target verifies: PEARL and distributed speculative inference (DSI).

PEARL (arXiv:2408.11850) runs both on two devices.  A step lasts as long as the slower of gamma
draft passes and one target pass.  While the draft is unconfirmed the target checks its first token
only (*pre-verify*); once that is accepted, it checks gamma tokens per step (*post-verify*), until
one is rejected.

DSI (Timor et al., arXiv:2405.14105): expected latency of `tokens` tokens under i.i.d. acceptance,
computed exactly by recursion over the tokens left, in target passes.  Cost model of the authors'
offline simulator (github.com/keyboardAnt/distributed-speculative-inference, dsi/offline): ``draft``
is the latency of one draft pass, ``lookahead`` the drafts a block holds.  Distributed inference
hides verification by drafting: only the pass that rejects, or that ends the output, adds to the
latency; and it is never slower than plain decoding, which runs in parallel.
"""

from __future__ import annotations

from simulator.formulas.general import geometric_sum, require


def tokens_per_step(alpha: float, gamma: int) -> float:
    """Return PEARL's expected tokens per step under i.i.d. acceptance.

    A cycle from one pre-verify to the next emits 1 / (1 - alpha) tokens in
    1 + alpha / (1 - alpha**gamma) steps (renewal argument); written without the pole at
    alpha = 1.  gamma = 1 gives 1.
    """
    require("gamma", gamma, 1)
    return geometric_sum(alpha, gamma) / (1 + alpha - alpha**gamma)


def sequential_latency(tokens: int, alpha: float, lookahead: int, draft: float) -> float:
    """Return expected latency of ordinary speculation: every round drafts, then verifies."""
    _check(tokens, alpha, lookahead, draft)
    latency = [0.0] * (tokens + 1)
    for left in range(1, tokens + 1):
        k = min(lookahead, left - 1)
        tail = sum(alpha**i * (1 - alpha) * latency[left - i - 1] for i in range(k))
        latency[left] = k * draft + 1 + tail + alpha**k * latency[left - k - 1]
    return latency[tokens]


def distributed_latency(tokens: int, alpha: float, lookahead: int, draft: float) -> float:
    """Return expected latency of DSI: never above `tokens`.

    alpha = 0 gives exactly that; alpha = 1 gives ``(tokens - 1) * draft + 1`` where drafting is the
    faster.
    """
    _check(tokens, alpha, lookahead, draft)
    latency = [0.0] * (tokens + 1)
    for left in range(1, tokens + 1):
        total = 0.0
        for accepted in range(left):
            last = accepted == left - 1
            chance = alpha**accepted * (1.0 if last else 1 - alpha)
            # Blocks drafted up to and including the one that holds the rejection.
            blocks = accepted // lookahead + 1
            drafted = accepted if last else min(blocks * lookahead, left - 1)
            segment = min(drafted * draft + 1, accepted + 1)
            total += chance * (segment + latency[left - accepted - 1])
        latency[left] = total
    return latency[tokens]


def _check(tokens: int, alpha: float, lookahead: int, draft: float) -> None:
    require("tokens", tokens, 1)
    require("alpha", alpha, 0, 1)
    require("lookahead", lookahead, 1)
    require("draft", draft, 0)
