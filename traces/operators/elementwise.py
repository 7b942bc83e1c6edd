"""Operators that do little more than move their tokens: norms, positions, activations."""

from __future__ import annotations

from policies.arrays import Floats
from traces.operators.devices import Device
from traces.operators.shapes import BYTES, Architecture

LAUNCH_S = 2.2e-6
"""A fused norm's or rotary kernel's least time: 1.9 to 2.7 us over the five models timed inside
vLLM on an RTX 4090 and an RTX PRO 6000."""
MOVED = 0.8
"""Share of the memory's bandwidth that a long fused kernel reaches."""


def moved_per_token(operator: str, model: Architecture, shared: int = 1) -> float:
    """Return bytes that an operator reads and writes for a token, on one of the GPUs that share it.

    A norm reads and writes the token and the residual; an activation reads a gate and what it
    gates, and writes their product.
    """
    turned = (model.heads + model.kv_heads) * model.head_dim / shared
    return BYTES * {
        "embedding": 2.0 * model.hidden, "norm": 4.0 * model.hidden,
        "final_norm": 4.0 * model.hidden, "add": 3.0 * model.hidden, "rope": 2 * turned,
        "qk_norm": 2 * turned, "act": (3 if model.gated else 2) * model.inner / shared,
    }[operator]  # fmt: skip


def fused_s(
    operator: str, model: Architecture, device: Device, tokens: Floats, *, shared: int = 1,
    launch_s: float = LAUNCH_S,
) -> Floats:  # fmt: skip
    """Return seconds of one fused kernel: its launch, and the bytes that it moves."""
    moved = tokens * moved_per_token(operator, model, shared)
    found: Floats = launch_s + moved / (MOVED * device.bandwidth)
    return found
