"""Points of a sweep whose KV cache exceeds the memory of the GPU.

Only composed tables say which GPU and models they are of.  A sequence is taken to hold its whole
prompt and output, at their means over the recording's requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.whatif.sweep.prices import Prices
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.operators.memory import UTILISATION, blocks_of_meta

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 16
"""Tokens of a cache block."""


def blocks_of(prices: Prices) -> dict[tuple[str, str], int]:
    """Return the cache blocks of each composed table, by its name and its GPU's."""
    found = {}
    for at in prices.tables:
        if "composed" in at.table.meta and not at.scaled:
            try:
                found[at.latency, at.gpu] = blocks_of_meta(at.table.meta, block_size=BLOCK).blocks
            except DraftsimError:  # the weights alone leave no memory
                found[at.latency, at.gpu] = 0
    return found


def needed_blocks(frame: pd.DataFrame, trace: Trace) -> npt.NDArray[np.int64]:
    """Return the cache blocks that the batch of each row holds, (rows,)."""
    prompt = float(np.mean([r.prompt_length for r in trace.requests]))
    output = float(np.mean([r.tokens for r in trace.requests]))
    held = np.ceil((frame["context"].fillna(prompt).to_numpy(float) + output) / BLOCK)
    return np.asarray(frame["batch"].to_numpy(float) * held, dtype=np.int64)


def cache_fits(frame: pd.DataFrame, prices: Prices, trace: Trace) -> npt.NDArray[np.bool_]:
    """Return True for each row whose cache fits, or whose latencies do not say the memory."""
    blocks = blocks_of(prices)
    pairs = zip(frame["latency"].astype(str), frame["gpu"].astype(str), strict=True)
    held = np.array([blocks.get(pair, math.inf) for pair in pairs])
    return np.asarray(needed_blocks(frame, trace) <= held)


def said_too_large(frame: pd.DataFrame, prices: Prices, trace: Trace) -> Iterator[str]:
    """Yield a sentence for each table and context with batches whose cache does not fit."""
    blocks = blocks_of(prices)
    large = frame[~frame["cache_fits"]].assign(needed=lambda rows: needed_blocks(rows, trace))
    large = large.sort_values("batch", kind="stable")
    for row in large.drop_duplicates(["latency", "gpu", "context"]).to_dict("records"):
        at = "" if math.isnan(row["context"]) else f" and context {row['context']:g}"
        yield (
            f"{row['latency']}: left out from batch {row['batch']}{at}: its KV cache needs "
            f"{row['needed']} blocks of {BLOCK} tokens, and {blocks[row['latency'], row['gpu']]} "
            f"fit at a memory utilisation of {UTILISATION:g}"
        )
