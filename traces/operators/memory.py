"""Cache blocks that fit into memory with a model's weights, as an engine counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from traces.errors import DraftsimError
from traces.operators.attention import heads_of
from traces.operators.devices import find_device
from traces.operators.shapes import BYTES, find_architecture

GIB = 2**30
USABLE = 0.985
"""Share of a GPU's memory that CUDA reports: 0.98 to 0.99 of as many GiB as the data sheet says
GB."""
OVERHEAD_B = (0.7e9, 1.2e9, 1.7e9)
"""Bytes of activations, buffers and the CUDA context, least, assumed and most: 1.24 GB on the one
server whose blocks are known (an 8B model, 2,048 tokens an iteration)."""
UTILISATION = 0.9
BLOCK = 16
"""Tokens of a cache block."""


class Blocks(NamedTuple):
    """Blocks of a pool."""

    least: int
    blocks: int
    most: int
    said: str
    """One sentence on how the blocks were computed."""


def kv_blocks(meta: Mapping[str, Any], utilisation: float = UTILISATION) -> Blocks:
    """Return the blocks of one GPU of an engine with the models of a composed latency table.

    ``(memory x utilisation - weights - overhead) / (block size x cached bytes of a token)``, with
    the weights and the cache of the draft counted with the target's.

    Raises
    ------
    DraftsimError
        If the table's provenance does not say GPU and models, or nothing is left for the cache.
    """
    if "composed" not in meta:
        raise DraftsimError(
            "cache blocks are counted for composed latencies alone (--latency GPU/TARGET+DRAFT): "
            "give their number"
        )
    if not 0 < utilisation <= 1:
        raise DraftsimError(f"memory utilisation is {utilisation}, expected a share in (0, 1]")
    device = find_device(str(meta["device"]))
    models = [
        (find_architecture(str(hub)), int(meta["tensor_parallel"][role]))
        for role, hub in meta["models"].items()
    ]
    memory = device.memory / 1e9 * GIB * USABLE * utilisation
    weights = sum(BYTES * model.parameters / shared for model, shared in models)
    token = sum(model.layers * heads_of(model, shared).cached_bytes for model, shared in models)
    most, own, least = (
        int((memory - weights - overhead) // (BLOCK * token)) for overhead in OVERHEAD_B
    )
    if own < 1:
        names = " + ".join(model.name for model, _ in models)
        raise DraftsimError(
            f"{names}: the weights leave no memory for a cache on {device.name} at a utilisation "
            f"of {utilisation:g}: share the target between more GPUs"
        )
    said = (
        f"{own} blocks of {BLOCK} tokens ({max(least, 0)} to {most}): {memory / 1e9:.1f} GB "
        f"of {device.name} at {utilisation:g}, {weights / 1e9:.1f} GB of weights, an assumed "
        f"{OVERHEAD_B[1] / 1e9:.1f} GB of everything else, {token / 1e3:.0f} kB a token"
    )
    return Blocks(max(least, 0), own, most, said)
