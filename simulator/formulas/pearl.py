"""PEARL (arXiv:2408.11850): draft and verify at the same time on two devices.

A step lasts as long as the slower of gamma draft passes and one target pass.  While the
draft is unconfirmed the target checks its first token only (*pre-verify*); once that is
accepted, it checks gamma tokens per step (*post-verify*), until one is rejected.
"""

from __future__ import annotations

from simulator.formulas.bounds import geometric_sum, require


def tokens_per_step(alpha: float, gamma: int) -> float:
    """Return expected tokens per step under i.i.d. acceptance.

    A cycle from one pre-verify to the next emits 1 / (1 - alpha) tokens in
    1 + alpha / (1 - alpha**gamma) steps (renewal argument); written without the pole at
    alpha = 1.  gamma = 1 gives 1.
    """
    require("gamma", gamma, 1)
    return geometric_sum(alpha, gamma) / (1 + alpha - alpha**gamma)
