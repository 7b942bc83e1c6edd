"""Colours, markers and dashes of every plot, and of the report's page; matplotlib is not needed.

The colours are Okabe and Ito's, told apart by the colour-blind.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from policies.from_file import split_name
from policies.registry import is_bound

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))
INK, GREY = "#222222", "#8C8C8C"


class PolicyPlaces:
    """Places of policies among the colours, the same in all figures that share this object."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, policies: Iterable[str]) -> dict[str, int]:
        """Return the places of the policies of one figure, of different colours as far as they go.

        A name without settings takes the place of a policy of that name that has some and was seen
        before.  Bounds have a look of their own and no place.
        """
        names = [name for name in dict.fromkeys(policies) if not is_bound(name)]
        found = {name: self._known[name] for name in names if name in self._known}
        for name in names:
            if name not in found:
                found[name] = self._known[name] = self._next(name, {*found.values()})
        return found

    def _next(self, name: str, here: set[int]) -> int:
        """Return a place for `name` next to the places `here`, which its figure has already."""
        for other, place in self._known.items():
            if split_name(other)[0] == name and place not in here:
                return place
        taken = {*self._known.values()}
        colours = {place % len(COLOURS) for place in here}
        full = len(colours) == len(COLOURS)
        free = (place for place in count() if place not in taken)
        return next(place for place in free if full or place % len(COLOURS) not in colours)
