"""Draft trees grown from every start, kept as what any cut of them accepts.

A tree of candidates is cut to a number of nodes and to a depth, and greedy verification follows the
one path in it that the target takes.  So of every start's tree are kept the places of the true
tokens alone: of the true token j layers down its rank among all candidates of the first d layers,
for every d.  Cut to d layers and `budget` nodes, a tree holds it exactly if that rank is below
`budget`.  Whatever else is in the tree costs a pass its width, which the shape tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.acceptance.sampling import Sampling
from traces.sources.columns import Floats
from traces.sources.shapes import check_shapes

TREE_SIGNALS = ("score", "log_top", "log_second", "entropy")


@dataclass(frozen=True, eq=False)
class TreeRecording:
    """The draft trees of every start of every request of one trace, greedily decoded.

    Parameters
    ----------
    rank:
        (starts, layers, layers) int32; one row per output position, requests in turn.
        ``[s, j, d]`` is the place, 0 = first, of the true token of layer j + 1 among the candidates
        of the first d + 1 layers; -1 where it is not among them.
    signals:
        `TREE_SIGNALS`, (starts, layers) float32 each, of the first candidate of every layer: the
        sum of the log-probabilities along its path, and of the distribution that it was taken from
        the two largest log-probabilities and the entropy (nats) at T = 1.
    request_starts:
        First row of each request, and the number of rows at the end.
    meta:
        Provenance, and what the replay needs: ``topk``, the nodes expanded in every layer and the
        children of each.

    Raises
    ------
    DraftsimError
        If the arrays disagree.
    """

    rank: npt.NDArray[np.int32]
    signals: Mapping[str, npt.NDArray[np.float32]]
    request_starts: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        starts, layers = self.request_starts[-1], self.layers
        signals = {name: (self.signals[name], (starts, layers)) for name in TREE_SIGNALS}
        rank = self.rank, (starts, layers, layers)
        check_shapes("recording of draft trees", {"rank": rank, **signals})

    @property
    def layers(self) -> int:
        """Depth of the trees."""
        return int(self.rank.shape[-1])

    @property
    def topk(self) -> int:
        """Nodes expanded in every layer, and children of each."""
        return int(self.meta["topk"])

    @property
    def sampling(self) -> Sampling:
        """How the outputs that it follows were drawn: greedily."""
        return Sampling.of(self.meta.get("sampling"))

    def accepted(self, row: int, layers: int, budget: int) -> int:
        """Return the number of true tokens in a row's tree, cut to `layers` layers and `budget`
        nodes.
        """
        if not layers:
            return 0
        rank = self.rank[row, :layers, layers - 1]
        # A node precedes its children: once one is missing, so are all below.
        return int(((rank >= 0) & (rank < budget)).sum())

    @cached_property
    def columns(self) -> Floats:
        """(starts, layers, 6): what policies read of each layer (`layer_columns`)."""
        return layer_columns(self.signals)


def candidates(topk: int, layers: int) -> int:
    """Return the number of nodes that a tree of `layers` layers is cut from.

    >>> candidates(10, 1), candidates(10, 6)
    (10, 510)
    """
    return topk + (layers - 1) * topk**2 if layers else 0


def layer_columns(signals: Mapping[str, npt.NDArray[np.float32]]) -> Floats:
    """(..., 6): prob, entropy, logit_margin, prob_margin, top_prob, raw_prob of layers.

    They are those of a layer's first candidate: ``prob`` the probability of its whole path, which
    EAGLE-2 takes for that of being accepted (sec. 4.1); the others of the distribution that it was
    taken from, of which it is the likeliest token.
    """
    score, top, second, entropy = (signals[n].astype(np.float64) for n in TREE_SIGNALS)
    own = np.exp(top)
    return np.stack([np.exp(score), entropy, top - second, own - np.exp(second), own, own], axis=-1)
