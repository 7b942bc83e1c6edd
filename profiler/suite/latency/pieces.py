"""The measurements of the latency stage, one after another, most important first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from profiler.suite.latency.pass_grids import Passes
from profiler.suite.latency.passes import COMPILED

if TYPE_CHECKING:
    from profiler.suite.latency.pair import PairMeasurement

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
        """The name that it shares with the same measurement at other batch sizes."""
        return self.name.rpartition("batch")[0]


def pieces_of(of: PairMeasurement) -> list[Piece]:
    """Everything to measure of a pair in a mode, most important first."""
    grids = of.grids
    names = [name for name, model in of.models.items() if model is not None]
    paired = len(names) == 2
    hosted = [b for b in grids.host_batches if paired and (b == 1 or b in grids.batches)]

    def at(batch: int, rank: int) -> list[Piece]:
        found = [Piece(f"{n}, batch {batch}", rank, partial(of.coarse, n, batch))
                 for n in names]  # fmt: skip
        if paired:
            name = f"first draft passes, batch {batch}"
            first = partial(of.coarse, "draft", batch, "catch_up")
            found.append(Piece(name, rank, first))
        if batch in hosted:
            run = partial(of.host, batch)
            found.append(Piece(f"the host at batch {batch}", rank, run))
        return found

    def finer(*wanted: Passes) -> list[Piece]:
        return [
            Piece(f"finer: {o.model}, {o.phase}, batch {o.batch}", WANTED,
                  partial(of.finer, o)) for o in wanted
        ]  # fmt: skip

    def between(batch: int) -> Piece:
        return Piece(f"between, batch {batch}", WANTED, partial(of.between, batch))

    layers = [
        Piece(f"{n}, layer by layer", WANTED if paired else BATCHED, partial(of.layers, n))
        for n in names if of.mode != COMPILED  # which compiles no layer by itself
    ]  # fmt: skip
    first = [Passes("draft", "catch_up", 1)] if paired else []
    pieces = at(1, SINGLE)
    pieces += [piece for b in grids.batches if b in hosted for piece in at(b, BATCHED)]
    pieces += layers + finer(*first, *(Passes(n, "forward", 1) for n in names))
    pieces += [piece for b in grids.batches if b not in hosted for piece in at(b, WANTED)]
    pieces += [between(b) for b in grids.between]
    pieces += finer(*(Passes("target", "forward", b) for b in grids.batches))
    return pieces
