"""A table of lengths held, as a whole, against each length alone, and mended where one wins.

Lengths that are best each by itself need not be best together: while an engine fills, drains
or waits for memory it runs at other batches than its limit, and under the lengths chosen for
those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.tune.served import beaten

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NEGLIGIBLE = 5e-4
"""A loss this small is not worth a range of its own."""

Serve = Callable[[Ints], Floats]
"""Tokens per second of a table at every searched batch, shape (batches, replications)."""


@dataclass(frozen=True, eq=False)
class Held:
    """A table of options, shape (batches, contexts), and how it did when served.

    ``rates`` are its tokens per second, shape (batches, replications).  ``gains`` is its mean
    rate over that of the best option throughout, at every batch, ``best`` that option,
    ``worse`` whether it is slower beyond the interval, each of shape (batches,).
    """

    table: Ints
    rates: Floats
    gains: Floats
    best: Ints
    worse: Bools

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is better: at how many batches it is worse, then by how much at worst."""
        return int(self.worse.sum()), -float(self.gains.min())


def held(table: Ints, fixed: Sequence[Floats], serve: Serve) -> Held:
    """`table` served at every batch against single options throughout.

    Parameters
    ----------
    fixed:
        For each batch the rates of every option alone, shape (options, replications), in
        the same replications as `serve` runs.
    """
    best = np.array([int(rates.mean(axis=1).argmax()) for rates in fixed])
    own = serve(table)
    rivals = [rates[k] for rates, k in zip(fixed, best, strict=True)]
    gains = np.array([o.mean() / max(r.mean(), 1e-300) for o, r in zip(own, rivals, strict=True)])
    worse = np.array([beaten(o, r) for o, r in zip(own, rivals, strict=True)])
    worse &= gains < 1 - NEGLIGIBLE
    return Held(table, own, gains, best, worse)


def mended(table: Ints, fixed: Sequence[Floats], serve: Serve) -> Held:
    """`table`, or one near it that single options beat at fewer batches, if any is found.

    Where one option throughout wins it is put in that batch's row, at one context, and if this does
    not help at all contexts, and if not in all rows up to it or all there are: served at that
    batch, such a table *is* that option.  A change stays if the table as a whole does
    better for it; there are at most as many as cells.
    """
    now = held(table, fixed, serve)
    for _ in range(table.size):
        found = _improved(now, fixed, serve)
        if found is None:
            break
        now = found
    return now


def smoothed(now: Held, fixed: Sequence[Floats], serve: Serve) -> Held:
    """`now` without rises of the option along the batches that serving cannot tell from noise.

    Options are in the order of how much they draft.  Where a larger batch drafts more than the one
    before, the smaller batches are raised or the larger ones lowered, if the whole table is then
    slower at no batch beyond the search's interval.
    """
    for i in range(1, len(now.table)):
        if not (now.table[i] > now.table[i - 1]).any():
            continue
        raised, lowered = now.table.copy(), now.table.copy()
        raised[:i] = np.maximum(raised[:i], now.table[i])
        lowered[i:] = np.minimum(lowered[i:], now.table[i - 1])
        for table in (lowered, raised):
            found = held(table, fixed, serve)
            same = not any(map(beaten, found.rates, now.rates))
            if same and found.worse.sum() <= now.worse.sum():
                now = found
                break
    return now


def _improved(now: Held, fixed: Sequence[Floats], serve: Serve) -> Held | None:
    for i in sorted(np.flatnonzero(now.worse), key=lambda i: float(now.gains[i])):
        row = slice(i, i + 1)
        places = [(row, slice(j, j + 1)) for j in range(now.table.shape[1])]
        rows = [row, slice(0, i + 1), slice(None)]
        for place in [*places, *((chosen, slice(None)) for chosen in rows)]:
            table = now.table.copy()
            table[place] = now.best[i]
            found = held(table, fixed, serve)
            if found.rank < now.rank:
                return found
    return None
