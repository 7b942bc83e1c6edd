"""The layers that rounds of early exit run, of all rounds at once (`LayerLedger` counts one).

A layer runs where a token goes deeper, together with all positions of the round that have not
passed it.  So each layer by itself tells its widths: positions since it last ran.  Layers between
two exits run alike, which leaves as many cases as there are exits.
"""

from __future__ import annotations

import numpy as np

from policies.lanes.base import Ints
from traces.replay.calls import HEAD, LAYER, Counted
from traces.sources.exits.early_exit import ExitTape


class Steps:
    """The tokens that rounds ran up to their exits, flat.

    ``asked`` (rounds,) of each round, ``node`` (steps,) where they stand in the recording.
    """

    def __init__(self, asked: Ints, node: Ints) -> None:
        self.node = node
        self.begin: Ints = np.cumsum(asked) - asked
        self.round: Ints = np.repeat(np.arange(len(asked)), asked)
        self.offset: Ints = np.arange(len(node)) - self.begin[self.round]


def layer_calls(tape: ExitTape, steps: Steps, positions: Ints) -> list[Counted]:
    """Layers and output heads of rounds that each verify so many positions."""
    record, at = tape.recording, tape.choices[steps.node]
    depth = np.where(at < 0, tape.deepest, np.array(record.exit_layers)[at])
    rounds = np.arange(len(positions))
    calls = [Counted(True, HEAD, rounds, positions, np.ones_like(positions))]
    before = 0
    for until in [*np.unique(depth).tolist(), record.layers]:
        layers, before = until - before, until
        # The step of each round at which these layers ran last, up to each step and in all.
        ran = np.flatnonzero(depth >= until)
        offset, of = steps.offset[ran], steps.round[ran]
        previous = np.full(len(ran), -1)
        same = of[1:] == of[:-1]
        previous[1:][same] = offset[:-1][same]
        calls.append(_layers(False, of, offset - previous, layers))
        newest = np.full(len(positions), -1)
        newest[of] = offset
        lacking = positions - 1 - newest
        short = lacking > 0
        calls.append(_layers(True, rounds[short], lacking[short], layers))
    return calls


def _layers(verify: bool, rounds: Ints, width: Ints, layers: int) -> Counted:
    return Counted(verify, LAYER, rounds, width, np.full_like(width, layers))
