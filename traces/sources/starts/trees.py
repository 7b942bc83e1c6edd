"""Draft trees by draft position, and EAGLE-2's dynamic tree as a source.

A tree of candidates is cut to a number of nodes and to a depth, and greedy verification follows the
one path in it that the target takes.  So only ranks are kept: for each draft position, layer j and
depth d, the rank of layer j's true token among all candidates of the first d layers.  Cut to d
layers and `budget` nodes, a tree holds it exactly if that rank is below `budget`.  Whatever else is
in the tree costs a pass its width, which the shape tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats, Ints
from policies.spec import parameter, whole
from policies.vectorised import VectorisedPlan
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.replay.calls import DRAFTER, DRAFTER_TREE, TREE, Calls, pack_counted
from traces.replay.decoder import RecordedToken
from traces.replay.layout import Foreseen, Lockstep
from traces.sources.base import DRAFTER_SIGNALS, ReplayedRounds, Source, SourceReplay
from traces.sources.recording import MOST_LAYERS, Layout, Recordings, SourceRecording
from traces.sources.starts.parallel import OnFeatures
from traces.sources.starts.sources import WIDER
from traces.store.header import PathLike, check, is_whole

TREE_SIGNALS = ("score", "log_top", "log_second", "entropy")


class TreeRecording(SourceRecording):
    """The draft trees of every start of every request of one trace, greedily decoded.

    A row per output position, requests in turn. The arrays are ``rank``, the upper triangles of
    `TreeRecording.rank`, because no tree holds a token below its last layer; and `TREE_SIGNALS`,
    (starts, layers), of the first candidate of every layer: the sum of the log-probabilities along
    its path, and of the distribution that it was taken from the two largest log-probabilities and
    the entropy (nats) at T = 1.  In ``meta`` is ``topk``: the nodes expanded in every layer and the
    children of each.
    """

    kind = "trees"
    said = "recording of draft trees"

    @property
    def layers(self) -> int:
        """Depth of the trees."""
        return int(self["score"].shape[-1])

    @property
    def topk(self) -> int:
        """Nodes expanded in every layer, and children of each."""
        return int(self.meta["topk"])

    @property
    def header(self) -> dict[str, Any]:
        """The depth."""
        return {"layers": self.layers}

    @classmethod
    def layout(cls, header: Mapping[str, Any]) -> Layout:
        """Return the arrays of trees of this depth."""
        n = int(header["layers"])
        rank = ("int32", (n * (n + 1) // 2,))
        return {"rank": rank, **dict.fromkeys(TREE_SIGNALS, ("float32", (n,)))}

    @classmethod
    def checked(cls, path: PathLike, header: Mapping[str, Any]) -> dict[str, Any]:
        """Check the depth and ``topk``."""
        layers, topk = header.get("layers"), header["meta"].get("topk")
        check(path, "layers", layers, is_whole(layers, 1, MOST_LAYERS), f"1 to {MOST_LAYERS}")
        check(path, "meta.topk", topk, is_whole(topk, 1), "1 or more")
        return {}

    @cached_property
    def rank(self) -> npt.NDArray[np.int32]:
        """(starts, layers, layers): ``[s, j, d]`` is the place, 0 = first, of the true token of
        layer j + 1 among the candidates of the first d + 1 layers, -1 if it is not among them."""
        n = self.layers
        rank = np.full((self.rows, n, n), -1, np.int32)
        rank[:, *np.triu_indices(n)] = self["rank"]
        return rank

    def accepted(self, row: int, layers: int, budget: int) -> int:
        """Return the true tokens in a row's tree, cut to `layers` layers and `budget` nodes."""
        if not layers:
            return 0
        rank = self.rank[row, :layers, layers - 1]
        # A node precedes its children: once one is missing, so are all below.
        return int(((rank >= 0) & (rank < budget)).sum())

    @cached_property
    def columns(self) -> Floats:
        """(starts, layers, 6): what policies read of each layer (`layer_columns`)."""
        return layer_columns(self.arrays)


def candidates(topk: int, layers: int) -> int:
    """Return the number of nodes that a tree of `layers` layers is cut from.

    >>> candidates(10, 1), candidates(10, 6)
    (10, 510)
    """
    return topk + (layers - 1) * topk**2 if layers else 0


def layer_columns(signals: Mapping[str, npt.NDArray[np.float32]]) -> Floats:
    """Return (..., 6): prob, entropy, logit_margin, prob_margin, top_prob, raw_prob of layers.

    They are those of a layer's first candidate: ``prob`` the probability of its whole path, which
    EAGLE-2 takes for that of being accepted (sec. 4.1); the others of the distribution that it was
    taken from, of which it is the likeliest token.
    """
    score, top, second, entropy = (signals[n].astype(np.float64) for n in TREE_SIGNALS)
    own = np.exp(top)
    return np.stack([np.exp(score), entropy, top - second, own - np.exp(second), own, own], axis=-1)


class TreeReplay(SourceReplay):
    """A layer is a pass; what is verified is read from the ranks of the true tokens."""

    takes_verified = True

    def __init__(
        self, trace: Trace, request: int, recording: TreeRecording, first: int, source: Eagle2
    ) -> None:
        super().__init__(trace, request, first)
        self.recording, self.budget, self.depth = recording, source.budget, source.depth
        self._row0 = recording.request_starts[request]
        # Output tokens known when the drafter last took them in; the prefill does first.
        self._ran = 0

    def run_length(self) -> int:
        """Return the number of nodes followed in the tree of the depth at which these are most."""
        row, deepest = self._row0 + self.position, self.depth or self.recording.layers
        # A deeper tree may lose a node to its budget, never gain one but at its end.
        return max(self.recording.accepted(row, d, self.budget) for d in range(1, deepest + 1))

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the next layer, without a token of its own; None at the tree's full depth."""
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
        # In the order of a token's fields.
        read = record.columns[self._row0 + self.position, layer].tolist()
        return RecordedToken(-1, False, *read)

    def verify(self, draft: Sequence[Any]) -> int:
        """Verify the last token and the best nodes in one pass; emit the path it agrees with."""
        layers = len(draft)
        accepted = self.recording.accepted(self._row0 + self.position, layers, self.budget)
        nodes = min(self.budget, candidates(self.recording.topk, layers))
        self.calls.add(TREE, nodes + 1, verify=True)
        self.calls.end_round()
        self.position = min(self.position + accepted + 1, self.length)
        return accepted

    def at_once(
        self, trace: Trace, plan: VectorisedPlan, first: int, chosen: Sequence[int]
    ) -> ReplayedRounds | None:
        """Return the rounds of a length, unless it asks for more layers than were recorded."""
        record, places = self.recording, Foreseen(trace)
        depth = np.minimum(places.left, plan.cap)
        if not plan.is_length or (self.depth is None and (depth > record.layers).any()):
            return None
        depth = np.minimum(depth, self.depth or record.layers)
        row = np.array(record.request_starts)[places.request] + places.position
        places.foresee(depth, _accepted(record, row, depth, self.budget))
        lockstep = Lockstep(places, first, self.takes_verified)
        layers = np.append(depth, 0)
        start, rounds = lockstep.of(chosen, layers, layers, lockstep.runs)
        # The drafter takes in what was verified since it last ran; the prefill, the prompt.
        ran = np.flatnonzero(rounds["draft_forwards"])
        before = np.append(0, rounds["position"][ran][:-1])
        before[np.diff(rounds["request"][ran], prepend=-1) > 0] = 0
        own = layers[start]
        deepest = own.max(initial=0)  # outputs may all end in the prefill
        nodes = [min(self.budget, candidates(record.topk, d)) for d in range(deepest + 1)]
        calls = [
            Calls.of(DRAFTER, ran, rounds["position"][ran] - before),
            Calls.of(DRAFTER_TREE, ran, record.topk, own[ran] - 1),
            Calls.of(TREE, np.arange(len(start)), np.array(nodes)[own] + 1, verify=True),
        ]
        return rounds, pack_counted(calls)


@dataclass(eq=False)
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
    recorded_as = TreeRecording
    record = "`draftsim profile sources --source eagle2:model=DIR`"
    unlike = WIDER
    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS - {"token_id"}
    what = "EAGLE-2's dynamic tree (arXiv:2406.16858) on an EAGLE, EAGLE-3 or MTP drafter; exact"

    budget: int = parameter(59, whole, 1)
    depth: int | None = parameter(None, whole, 1)
    topk: int | None = parameter(None, whole, 1)

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Return the decoder of one request."""
        recording = self.recording(recordings)
        recording.check_follows(self.recorded(recordings), trace, first)
        return lambda request: TreeReplay(trace, request, recording, first, self)

    def recording(self, recordings: Recordings) -> Any:
        """Return the one that ``model`` names.

        Raises DraftsimError unless there is exactly one, of such trees.
        """
        found = super().recording(recordings)
        name = self.recorded(recordings).removeprefix(f"{self.name}.")
        if self.topk not in (None, found.topk):
            raise DraftsimError(
                f"trees of {name!r} were recorded with topk={found.topk}, not {self.topk}: leave "
                f"it out, or record them with `draftsim profile sources --source eagle2:model=DIR,"
                f"topk={self.topk}`"
            )
        if self.depth is not None and self.depth > found.layers:
            raise DraftsimError(
                f"trees of {name!r} were recorded {found.layers} layers deep, not {self.depth}: "
                f"lower depth, or record them with `draftsim profile sources --source eagle2:"
                f"model=DIR,depth={self.depth}`"
            )
        return found

    def for_decoding(self, recordings: Recordings) -> Source:
        """Return the source with its drafter's folder and the shape of its trees."""
        found = self.recording(recordings)
        own = replace(self, depth=self.depth or found.layers, topk=found.topk)
        return OnFeatures.for_decoding(own, recordings)

    def label(self, recordings: Recordings) -> str:
        """Return the drafter, and how its trees are cut."""
        cut = f",depth={self.depth}" if self.depth else ""
        return f"{super().label(recordings)},budget={self.budget}{cut}"

    def longest(self, trace: Trace, recordings: Recordings) -> int:
        """Return the depth of its trees."""
        return self.depth or int(self.recording(recordings).layers)


def _accepted(record: TreeRecording, row: Ints, depth: Ints, budget: int) -> Ints:
    """Return the same as `TreeRecording.accepted`, of many rows and as many depths."""
    found = np.zeros(len(row), dtype=np.int64)
    for layers in np.unique(depth).tolist():
        own = np.flatnonzero(depth == layers)
        rank = record.rank[row[own], :layers, layers - 1]
        found[own] = ((rank >= 0) & (rank < budget)).sum(axis=1)
    return found
