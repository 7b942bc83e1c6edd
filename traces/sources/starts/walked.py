"""Draft trees: the rounds of a policy that grows so many layers, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.lanes.base import Ints, LanePlan
from traces.acceptance.trace import Trace
from traces.replay.calls import DRAFTER, DRAFTER_TREE, TREE, Counted, pack_counted
from traces.replay.layout import Foreseen
from traces.replay.walk import Rounds, Walk
from traces.sources.starts.tree_source import TreeReplay
from traces.sources.starts.trees import TreeRecording, candidates


def tree_rounds(
    trace: Trace, decoder: TreeReplay, plan: LanePlan, first: int, chosen: Sequence[int]
) -> tuple[Rounds, npt.NDArray[np.void]] | None:
    """The rounds of the requests `chosen`, ascending, as of `decoder`, which is one of theirs.

    With the calls that they ran; ``plan`` has a length alone.  None where more layers are asked
    for than were recorded.
    """
    record, places = decoder.recording, Foreseen(trace)
    depth = np.minimum(places.left, plan.cap)
    if decoder.depth is None and (depth > record.layers).any():
        return None
    depth = np.minimum(depth, decoder.depth or record.layers)
    row = np.array(record.request_starts)[places.request] + places.position
    places.foresee(depth, _accepted(record, row, depth, decoder.budget))
    walk = Walk(places, first, decoder.takes_verified)
    layers, accepted = np.append(depth, 0), walk.runs
    start = walk.begun(accepted + 1, chosen)
    rounds = walk.told(start, *(values[start] for values in (layers, layers, accepted)))
    # The drafter takes in what was verified since it last ran; the prefill, the prompt.
    ran = np.flatnonzero(rounds["draft_forwards"])
    before = np.append(0, rounds["position"][ran][:-1])
    before[np.diff(rounds["request"][ran], prepend=-1) > 0] = 0
    own, ones = layers[start], np.ones(len(start), dtype=np.int64)
    deepest = own.max(initial=0)  # outputs may all end in the prefill
    nodes = np.array([min(decoder.budget, candidates(record.topk, d)) for d in range(deepest + 1)])
    calls = [
        Counted(False, DRAFTER, ran, rounds["position"][ran] - before, ones[ran]),
        Counted(False, DRAFTER_TREE, ran, ones[ran] * record.topk, own[ran] - 1),
        Counted(True, TREE, np.arange(len(start)), nodes[own] + 1, ones),
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
