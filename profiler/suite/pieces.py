"""What the latency stage measures one after another, most important first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

SINGLE, BATCHED, WANTED = range(3)
"""Ranks of pieces: what every prediction needs, what batches need, and what makes it better."""
RANKS = (SINGLE, BATCHED, WANTED)


class Piece(NamedTuple):
    """Something measured as a whole, or not at all."""

    name: str
    rank: int
    run: Callable[[], None]

    @property
    def kind(self) -> str:
        """What it has in common with its like at other batch sizes."""
        return self.name.rpartition("batch")[0]
