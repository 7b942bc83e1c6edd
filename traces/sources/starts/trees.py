"""Draft trees by draft position, and EAGLE-2's dynamic tree as a source.

A tree of candidates is cut to a number of nodes and to a depth, and greedy verification follows the
one path in it that the target takes.  So of every start's tree are kept the places of the true
tokens alone: of the true token j layers down its rank among all candidates of the first d layers,
for every d.  Cut to d layers and `budget` nodes, a tree holds it exactly if that rank is below
`budget`.  Whatever else is in the tree costs a pass its width, which the shape tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from policies.parameters import whole
from policies.vectorised import Ints, VectorisedPlan
from traces.acceptance.sampling import Sampling
from traces.acceptance.tape import RecordedToken
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.replay.calls import DRAFTER, DRAFTER_TREE, TREE, Counted, pack_counted
from traces.replay.layout import Foreseen
from traces.replay.walk import Walk
from traces.sources.base import (
    DRAFTER_SIGNALS,
    Drafter,
    Recordings,
    Source,
    SourceReplay,
    Walked,
)
from traces.sources.columns import Floats, check_shapes
from traces.sources.starts.features import OnFeatures
from traces.sources.starts.recording import WIDER, check_follows

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


RECORD_TREES = "`draftsim profile --source eagle2:model=DIR`"


class Eagle2(OnFeatures):
    """EAGLE-2's tree (arXiv:2406.16858, sec. 4), verified greedily in one pass of the target.

    The first layer are the `topk` likeliest tokens after the verified ones.  In every layer the
    `topk` nodes with the largest product of probabilities along their path are expanded, in one
    pass of the drafter, into `topk` children each.  Of all nodes the `budget` with the largest
    products are verified; of equal ones the one of the upper layer comes first, and within a layer
    the one that was reached first (parents in their order, then tokens in theirs), so that a node
    precedes its children.

    A *token* that a policy sees is a layer: the policy decides how deep the tree grows, the source
    how many nodes are verified.  ``drafted`` counts layers, ``accepted`` the nodes followed, and
    the signals are those of a layer's first node (`traces.sources.starts.trees.layer_columns`).

    In the authors' code (SafeAILab/EAGLE, ``eagle/model/cnets.py``) ``depth`` counts the passes
    after the first, here and in the paper the layers, one more; ``total_token`` counts the root
    (the target's own last token) too, ``budget`` does not.  Its 60 and depth 5 (EAGLE-2) are
    budget 59 and 6 layers.  There, the tree always has as many nodes; here, fewer where a
    shallow one has none left.

    Parameters
    ----------
    model:
        As for `Eagle`.
    budget:
        Nodes verified at most, besides the last token.
    depth:
        Layers at most, None: those recorded.
    topk:
        Nodes expanded in a layer, and children of each; None: as recorded, the only value that a
        recording can be replayed with.
    """

    name = "eagle2"
    prefix = "eagle2."
    record = RECORD_TREES
    unlike = WIDER
    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS - {"token_id"}
    what = "EAGLE-2's dynamic tree (arXiv:2406.16858) on an EAGLE, EAGLE-3 or MTP drafter; exact"

    def __init__(
        self, model: str | None = None, budget: int = 59, depth: int | None = None,
        topk: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model)
        whole("budget", budget, 1)
        whole("depth", depth, 1, none=True)
        whole("topk", topk, 1, none=True)
        self.budget, self.depth, self.topk = budget, depth, topk

    def found(self, recordings: Recordings) -> Mapping[str, TreeRecording]:
        """The recorded trees."""
        return recordings.trees

    def grown(self, depth: int, topk: int) -> Eagle2:
        """The same source with trees of this shape."""
        return Eagle2(self.model, self.budget, depth, topk)

    def recording(self, recordings: Recordings) -> TreeRecording:
        """The one that ``model`` names.

        Raises DraftsimError unless there is exactly one, of such trees.
        """
        key = self.recorded(recordings)
        found = recordings.trees[key]
        name = key.removeprefix(self.prefix)
        if self.topk not in (None, found.topk):
            raise DraftsimError(
                f"trees of {name!r} were recorded with topk={found.topk}, not {self.topk}: leave "
                f"it out, or record them with `draftsim profile --source eagle2:model=DIR,"
                f"topk={self.topk}`"
            )
        if self.depth is not None and self.depth > found.layers:
            raise DraftsimError(
                f"trees of {name!r} were recorded {found.layers} layers deep, not {self.depth}: "
                f"lower depth, or record them with `draftsim profile --source eagle2:model=DIR,"
                f"depth={self.depth}`"
            )
        return found

    def label(self, recordings: Recordings) -> str:
        """The drafter, and how its trees are cut."""
        cut = f",depth={self.depth}" if self.depth else ""
        return f"{super().label(recordings)},budget={self.budget}{cut}"

    def longest(self, trace: Trace, recordings: Recordings) -> int:
        """Return the depth of its trees."""
        del trace
        return self.depth or self.recording(recordings).layers

    def drafter(self, recordings: Recordings) -> Drafter:
        """Its passes are timed under the name of its recording, wide ones apart."""
        return Drafter(self.recorded(recordings), by_passes=False)

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Needs the recording of the same requests, greedily decoded."""
        recording = self.recording(recordings)
        check_follows(self.recorded(recordings), recording, trace, first)
        return lambda request: TreeReplay(trace, request, recording, self.budget, self.depth, first)


class TreeReplay(SourceReplay):
    """A layer is a pass; what is verified is read from the ranks of the true tokens."""

    takes_verified = True

    def __init__(
        self, trace: Trace, request: int, recording: TreeRecording, budget: int,
        depth: int | None = None, first: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(trace, request, first)
        self.recording, self.budget, self.depth = recording, budget, depth
        self._row0 = recording.request_starts[request]
        # Output tokens known when the drafter last took them in; the prefill does first.
        self._ran = 0

    def run_length(self) -> int:
        """Nodes followed in the tree of the depth at which these are most."""
        row, deepest = self._row0 + self.position, self.depth or self.recording.layers
        # A deeper tree may lose a node to its budget, never gain one but at its end.
        return max(self.recording.accepted(row, d, self.budget) for d in range(1, deepest + 1))

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """The next layer, without a token of its own; None at the tree's full depth."""
        layer, record = len(so_far), self.recording
        if layer == self.depth:
            return None
        if layer >= record.layers:
            raise TailError(
                f"the policy drafted {layer + 1} layers at position {self.position} of request "
                f"{self.info.id!r}, and {record.layers} were recorded: lower its maximum, or "
                "record deeper trees"
            )
        if layer:
            self.calls.add(DRAFTER_TREE, record.topk)
        else:
            self.calls.add(DRAFTER, self.position - self._ran)
            self._ran = self.position
        read = record.columns[self._row0 + self.position, layer].tolist()
        prob, entropy, margin, prob_margin, top, raw = read
        return RecordedToken(
            -1, False, prob, entropy, margin, prob_margin, top_prob=top, raw_prob=raw
        )

    def verify(self, draft: Sequence[Any]) -> int:
        """One pass over the last token and the best nodes; the path it agrees with is emitted."""
        layers = len(draft)
        accepted = self.recording.accepted(self._row0 + self.position, layers, self.budget)
        self.charge(layers)
        self.calls.end_round()
        self.position = min(self.position + accepted + 1, self.length)
        return accepted

    def charge(self, submitted: int) -> int:
        """Price a pass over the last token and the nodes that are kept of `submitted` layers."""
        nodes = min(self.budget, candidates(self.recording.topk, submitted))
        self.calls.add(TREE, nodes + 1, verify=True)
        return submitted + 1

    def at_once(
        self, trace: Trace, source: Source, plan: VectorisedPlan, first: int, chosen: Sequence[int]
    ) -> Walked | None:
        """Return the rounds of a length, unless it asks for more layers than were recorded."""
        del source
        record, places = self.recording, Foreseen(trace)
        depth = np.minimum(places.left, plan.cap)
        if not plan.is_length or (self.depth is None and (depth > record.layers).any()):
            return None
        depth = np.minimum(depth, self.depth or record.layers)
        row = np.array(record.request_starts)[places.request] + places.position
        places.foresee(depth, _accepted(record, row, depth, self.budget))
        walk = Walk(places, first, self.takes_verified)
        layers, accepted = np.append(depth, 0), walk.runs
        start = walk.begun(accepted + 1, chosen)
        rounds = walk.told(start, *(values[start] for values in (layers, layers, accepted)))
        # The drafter takes in what was verified since it last ran; the prefill, the prompt.
        ran = np.flatnonzero(rounds["draft_forwards"])
        before = np.append(0, rounds["position"][ran][:-1])
        before[np.diff(rounds["request"][ran], prepend=-1) > 0] = 0
        own, ones = layers[start], np.ones(len(start), dtype=np.int64)
        deepest = own.max(initial=0)  # outputs may all end in the prefill
        nodes = [min(self.budget, candidates(record.topk, d)) for d in range(deepest + 1)]
        calls = [
            Counted(False, DRAFTER, ran, rounds["position"][ran] - before, ones[ran]),
            Counted(False, DRAFTER_TREE, ran, ones[ran] * record.topk, own[ran] - 1),
            Counted(True, TREE, np.arange(len(start)), np.array(nodes)[own] + 1, ones),
        ]
        rounds["request"] = np.searchsorted(chosen, rounds["request"])
        return rounds, pack_counted(calls)


def _accepted(record: TreeRecording, row: Ints, depth: Ints, budget: int) -> Ints:
    """As `TreeRecording.accepted`, of many rows and as many depths."""
    found = np.zeros(len(row), dtype=np.int64)
    for layers in np.unique(depth).tolist():
        own = np.flatnonzero(depth == layers)
        rank = record.rank[row[own], :layers, layers - 1]
        found[own] = ((rank >= 0) & (rank < budget)).sum(axis=1)
    return found
