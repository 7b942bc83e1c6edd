"""Early exit: the drafts of all starts laid out at once, and the rounds that lengths make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.lanes.base import UNBOUNDED, Bools, Floats, Ints, LanePlan
from traces.acceptance.trace import Trace
from traces.replay.calls import ADAPTER, EXIT_HEAD, Counted, pack_counted
from traces.replay.layout import Places
from traces.replay.walk import Rounds, Walk, carried
from traces.sources.columns import read_columns
from traces.sources.exits.early_exit import EarlyExitReplay, ExitTape, StandInReplay
from traces.sources.exits.kangaroo import KangarooReplay
from traces.sources.exits.ledger import Steps, layer_calls

KINDS = (EarlyExitReplay, StandInReplay, KangarooReplay)
"""Whose drafts are known: what a class of its own makes of them is not."""
READ = ("prob", "entropy", "logit_margin", "prob_margin", "top_prob", "raw_prob")
"""Signals in the order of `traces.sources.columns.read_columns`."""


class ExitPlaces(Places):
    """Every output position of a trace, with what a setting of early exit drafts from there.

    A row is a token that was run up to its exit: those of the path in their order, and behind
    each wrong one the tail that was recorded.  So a draft is a slice of rows, of which the last
    may be `vain`: asked for, but it reaches the depth bound and yields no token.

    Parameters
    ----------
    stand_in:
        Go on along the path where nothing was recorded behind a wrong exit
        (`traces.sources.exits.early_exit.StandInExit`).
    longest:
        Tokens that are asked for at most.
    """

    def __init__(self, trace: Trace, tape: ExitTape, stand_in: bool, longest: int) -> None:
        super().__init__(trace)
        self.tape = tape
        self._eos = np.array(sorted(tape.eos), dtype=np.int64)
        index = np.arange(len(self.position))
        at_end, right = index == self.ends - 1, tape.right
        ends = self._ends(index)
        owners, nodes = self._tails(index[~right & ~ends], ends, stand_in, longest)
        tail = np.bincount(np.concatenate([index[:0], *owners]), minlength=len(index))
        self.rows = index + np.cumsum(tail) - tail
        node = np.empty(len(index) + int(tail.sum()), dtype=np.int64)
        node[self.rows] = index
        for k, (owner, behind) in enumerate(zip(owners, nodes, strict=True), 1):
            node[self.rows[owner] + k] = behind
        self.node: Ints = node
        self.vain: Bools = tape.choices[node] < 0
        # A draft walks on through right exits and the tail of the next wrong one.
        last = _next(~right | ends | at_end)
        held = last - index + 1 + tail[last]
        self.recorded = np.where(ends[last], UNBOUNDED - 1, held)
        self.most = np.minimum(self.left, held + ~ends[last])
        last = _next(~right | at_end)
        self.runs = last - index + right[last]
        self.run_lengths = np.minimum(self.runs, self.left)
        self.open_ended = np.zeros(len(index), dtype=bool)
        self._columns: Floats | None = None

    def _ends(self, node: Ints) -> Bools:
        """Whether a draft ends with what is asked for at each node."""
        at = self.tape.choices[node]
        return (at < 0) | np.isin(self.tape.recording.argmax[node, at], self._eos)

    def _tails(
        self, owner: Ints, ends: Bools, stand_in: bool, longest: int
    ) -> tuple[list[Ints], list[Ints]]:
        """Per token of the tails, the wrong exits on the path that have one, and its nodes.

        `ends` is set of those whose tail ends by itself, and not with what was recorded.
        """
        record, owners, nodes = self.tape.recording, [], []
        node = owner
        for k in range(1, min(longest, int(self.left.max(initial=0)))):
            if not len(owner):
                break
            behind = record.behind(node, record.argmax[node, self.tape.choices[node]])
            if stand_in:
                along = np.minimum(owner + k, self.ends[owner] - 1)
                behind = np.where(behind < 0, along, behind)
            owner, node = owner[behind >= 0], behind[behind >= 0]
            owners.append(owner)
            nodes.append(node)
            over = self._ends(node)
            ends[owner[over]] = True
            owner, node = owner[~over], node[~over]
        return owners, nodes

    def read(self, name: str) -> Floats:
        if self._columns is None:
            record = self.tape.recording
            where = self.node, self.tape.choices[self.node]
            drawn: list[Any] = [record.log_prob]
            drawn.append(None if record.sampling.plain else record.raw_log_prob)
            self._columns = read_columns(
                {name: values[where] for name, values in record.signals.items()},
                *(None if values is None else values[where] for values in drawn),
            )
            self._columns[self.vain] = np.nan
        return self._columns[:, READ.index(name)]


def exit_rounds(
    trace: Trace, decoder: EarlyExitReplay, plan: LanePlan, first: int, chosen: Sequence[int]
) -> tuple[Rounds, npt.NDArray[np.void]] | None:
    """The rounds of the requests `chosen`, ascending, as of `decoder`, which is one of theirs.

    With the calls that they ran; None under a plan with a state, and where a draft leaves what was
    recorded.
    """
    tape = decoder.tape
    places = ExitPlaces(trace, tape, isinstance(decoder, StandInReplay), plan.cap)
    walk = Walk(places, first, False)
    if (drafts := walk.drafts(plan)) is None:
        return None
    asked, sent = drafts
    at = np.append(places.rows, 0) + asked - 1
    vain = (asked > 0) & places.vain.take(at, mode="clip")
    forwards = asked - vain
    if vain.any():
        # How much is sent is decided of a draft without the token that there was none of.
        places.most = np.where(vain, forwards, np.append(places.most, 0))[:-1]
        _, sent = walk.drafts(plan) or drafts
    accepted = np.minimum(sent, walk.runs)
    positions = sent + 1 if tape.source.bonus else np.minimum(np.maximum(asked, 1), sent + 1)
    emitted = np.minimum(accepted + 1, positions)
    start = walk.begun(emitted, chosen)
    if (asked[start] > walk.recorded[start]).any():
        return None
    rounds = walk.told(start, *(v[start] for v in (forwards, sent, accepted, positions)))
    rounds["request"] = np.searchsorted(chosen, rounds["request"])
    passed: Ints = asked[start].astype(np.int64)
    steps = Steps(passed, places.node[_slices(places.rows[start], passed)])
    calls = layer_calls(tape, steps, positions[start].astype(np.int64))
    if isinstance(decoder, KangarooReplay):
        refused, missed = (accepted < sent)[start], (sent[start] + 1) - passed
        waiting = np.where(refused, 0, np.maximum(missed, 0))
        waiting = carried(walk.enters[start], passed, waiting, 0)
        width = np.where(steps.offset == 0, waiting[steps.round] + 1, 1)
        calls.append(Counted(False, ADAPTER, steps.round, width, np.ones_like(width)))
    else:
        calls.append(_heads(tape, steps))
    return rounds, pack_counted(calls)


def _heads(tape: ExitTape, steps: Steps) -> Counted:
    """Every exit up to the chosen one is asked, and all where none is chosen."""
    at = tape.choices[steps.node]
    many = np.where(at < 0, len(tape.used), np.searchsorted(tape.used, at) + 1)
    return Counted(False, EXIT_HEAD, steps.round, np.ones_like(many), many)


def _next(which: Bools) -> Ints:
    """Of every position the next, itself included, that is one of `which`; the last one is."""
    places = np.where(which, np.arange(len(which)), len(which))
    found: Ints = np.minimum.accumulate(places[::-1])[::-1]
    return found


def _slices(begin: Ints, length: Ints) -> Ints:
    """The indices of slices, one after another."""
    offset = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(begin, length) + offset
