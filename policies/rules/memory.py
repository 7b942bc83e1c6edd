"""CSD's Online Correction Memory: how often each pair of tokens has disagreed."""

from __future__ import annotations

import copy
import heapq
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from policies.spec import whole

SCHEMA = 1

TokenPair = tuple[int, int]


class OnlineCorrectionMemory:
    """Counts of (draft token, target token) disagreements (CSD, 2604.13634).

    The counts carry no threshold: one calibrated memory serves every lambda.

    Parameters
    ----------
    capacity:
        Largest number of pairs, None for no bound.  A new pair beyond it evicts the
        least frequent pair, of several the one that entered first.

    Attributes
    ----------
    sizes:
        Pairs held after each request of the run, in request order.
    evictions:
        Pairs dropped so far.
    """

    def __init__(self, capacity: int | None = None) -> None:
        whole("capacity", capacity, 1, none=True)
        self.capacity = capacity
        self.sizes: list[int] = []
        self.evictions = 0
        self._counts: dict[TokenPair, int] = {}
        self._entered: dict[TokenPair, int] = {}
        self._clock = 0
        # Eviction candidates as (count, entry, pair); outdated ones are skipped when met.
        self._heap: list[tuple[int, int, TokenPair]] = []

    def __len__(self) -> int:
        return len(self._counts)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnlineCorrectionMemory:
        # Every run takes a copy, and what its containers hold is never changed itself.
        mine = copy.copy(self)
        for name in ("sizes", "_counts", "_entered", "_heap"):
            setattr(mine, name, copy.copy(getattr(self, name)))
        return mine

    def count(self, draft_token: int, target_token: int) -> int:
        """Return how often this pair has been counted, 0 if it is not held."""
        return self._counts.get((draft_token, target_token), 0)

    def add(self, draft_token: int, target_token: int, times: int = 1) -> None:
        """Count one disagreement, or several at once."""
        if times < 1:
            raise ValueError(f"times is {times}, expected at least 1")
        pair = (int(draft_token), int(target_token))
        if pair not in self._counts:
            if self.capacity is not None and len(self._counts) >= self.capacity:
                self._evict()
            self._counts[pair] = 0
            self._entered[pair] = self._clock
            self._clock += 1
        self._counts[pair] += times
        if self.capacity is not None:
            heapq.heappush(self._heap, (self._counts[pair], self._entered[pair], pair))
            if len(self._heap) > 4 * self.capacity + 64:
                self._rebuild()

    def calibrate(self, pairs: Iterable[TokenPair]) -> OnlineCorrectionMemory:
        """Count the pairs of an offline run, in order; returns itself."""
        for draft_token, target_token in pairs:
            self.add(draft_token, target_token)
        return self

    def items(self) -> list[tuple[TokenPair, int]]:
        """Return all pairs with their counts, in the order they entered."""
        return list(self._counts.items())

    def end_request(self) -> None:
        """Note the size after a request in `sizes`."""
        self.sizes.append(len(self))

    def content(self) -> bytes:
        """Return the content of a file (``.npz``) for `load`."""
        table = np.array([[*pair, n] for pair, n in self._counts.items()], dtype=np.int64)
        file = io.BytesIO()
        np.savez_compressed(
            file,
            schema=np.int64(SCHEMA),
            capacity=np.int64(self.capacity or 0),
            table=table.reshape(-1, 3),
        )
        return file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OnlineCorrectionMemory:
        """Read a memory from the file of its `content`.

        Raises ValueError if it is missing, truncated, of another schema or holds impossible counts.
        """
        again = "calibrate it again"
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                schema, capacity, table = (stored[n] for n in ("schema", "capacity", "table"))
                schema, memory = int(schema), cls(int(capacity) or None)
        except FileNotFoundError:
            raise ValueError(f"{path}: no such correction memory: calibrate one first") from None
        except Exception as error:  # of a damaged archive a dozen types
            raise ValueError(
                f"{path}: not a readable correction memory (truncated, or another kind of "
                f"file): {again}"
            ) from error
        if schema != SCHEMA:
            raise ValueError(
                f"{path}: correction memory of schema {schema}, this version reads {SCHEMA}: "
                f"{again}"
            )
        sound = isinstance(table, np.ndarray) and table.dtype == np.int64 and table.ndim == 2
        if not sound or table.shape[1] != 3 or (len(table) and table[:, 2].min() < 1):
            raise ValueError(
                f"{path}: field 'table' of the correction memory holds impossible counts: {again}"
            )
        for draft_token, target_token, times in table.tolist():
            memory.add(draft_token, target_token, times)
        if len(memory) != len(table):
            raise ValueError(
                f"{path}: field 'table' of the correction memory repeats pairs or exceeds "
                f"capacity {memory.capacity}: {again}"
            )
        return memory

    def _evict(self) -> None:
        while True:
            times, entry, pair = heapq.heappop(self._heap)
            if self._counts.get(pair) == times and self._entered[pair] == entry:
                del self._counts[pair], self._entered[pair]
                self.evictions += 1
                return

    def _rebuild(self) -> None:
        self._heap = [(n, self._entered[pair], pair) for pair, n in self._counts.items()]
        heapq.heapify(self._heap)
