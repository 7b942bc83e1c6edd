"""Recordings laid out for many replays, and the rounds of many settings in lockstep over them.

`Places` are the positions of a recording, as arrays.  `Lockstep` advances all requests of all
settings together over them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools, Floats, Ints, next_true, ranges
from policies.vectorised import UNBOUNDED, Lengths, VectorisedPlan, VectorisedState, Watch
from traces.acceptance.trace import Trace, once_per_trace
from traces.replay.decoder import ends_drafts
from traces.replay.rounds import ROUND_DTYPE, Rounds

Lengths32 = npt.NDArray[np.int32]

KEPT = 8
"""Arrays of watched values, of the size of the recording, that are kept."""
CELLS = 1 << 18
"""Starts of a recording, times settings, that are laid out together: they stay in cache."""
_JUMPS = 4
"""Rounds between two checks of which requests have ended."""
_FULL = 0.9
"""Share of runs still going below which the others are taken out."""


class Places(ABC):
    """Every output position of a trace, as one where a round may begin.

    ``rows``, ``most``, ``context`` and ``run_lengths`` are as in `policies.vectorised.Starts`.
    ``runs``: drafts accepted in a row from each start; ``open_ended``: more might have been.
    ``recorded``: drafted tokens that are held; a longer draft has left the recording.  ``position``
    and ``request``: output tokens before each start, and its request.  ``begins``: the first start
    of each request; ``ends``: one past the last of each start's own.  ``left``: tokens that may be
    drafted, as verification emits the last of a request's limit.
    """

    rows: Ints
    most: Ints
    runs: Ints
    run_lengths: Ints
    recorded: Ints
    open_ended: Bools

    def __init__(self, trace: Trace) -> None:
        starts = np.asarray(trace.request_starts, dtype=np.int64)
        tokens = np.diff(starts)

        def each(field: str) -> Ints:
            values = [getattr(r, field) for r in trace.requests]
            return np.repeat(np.array(values, dtype=np.int64), tokens)

        self.begins = starts[:-1]
        self.ends: Ints = trace.request_ends
        self.position = ranges(tokens)
        self.request: Ints = np.repeat(np.arange(len(tokens)), tokens)
        self.context: Ints = self.position + each("prompt_length")
        self.left: Ints = each("max_new_tokens") - self.position - 1
        self._signals: dict[str, Floats] = {}
        self._watched: dict[Hashable, Floats] = {}

    @abstractmethod
    def read(self, name: str) -> Floats:
        """Return a draft signal of every row."""

    def signal(self, name: str) -> Floats:
        if name not in self._signals:
            self._signals[name] = self.read(name)
        return self._signals[name]

    def watched(self, watch: Watch) -> Floats:
        if watch not in self._watched:
            while len(self._watched) >= KEPT:
                del self._watched[next(iter(self._watched))]
            self._watched[watch] = watch.values(self)
        return self._watched[watch]


class Layout(Places):
    """The starts of a trace that a draft model drafted (`policies.vectorised.Starts`)."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        # Not the trace itself: data cached for a trace must not keep it alive.
        self._trace = ref(trace)
        count = len(self.position)
        left = self.left
        self.runs = np.asarray(trace.run_lengths, dtype=np.int64)
        self.open_ended = np.asarray(trace.open_ended)
        self.run_lengths = np.minimum(self.runs, left)
        if not trace.by_start:
            self.run_lengths[self.open_ended] = -1
        self.recorded = np.full(count, UNBOUNDED - 1, dtype=np.int64)
        if trace.signals:
            self.rows = np.asarray(trace.on_path, dtype=np.int64)
            self.recorded = trace.draft_ends - self.rows
            at_eos = next_true(ends_drafts(trace))[self.rows] - self.rows + 1
            self.most = np.minimum(np.minimum(left, at_eos), self.recorded + (not trace.drafts_end))
        else:
            # Without signals a draft ends the output only where it matches all the way there.
            self.rows = np.zeros(count, dtype=np.int64)
            until = self.ends - np.arange(count)
            ended = np.array([r.ended == "eos" for r in trace.requests], dtype=bool)
            eos = ended[self.request] & (self.runs >= until)
            self.most = np.where(eos, np.minimum(left, until), left)

    def read(self, name: str) -> Floats:
        trace = self._trace()
        assert trace is not None
        return trace.signal(name)


class Foreseen(Places):
    """Places from which drafts were found beforehand; no signal of theirs is read."""

    def foresee(self, most: Ints, runs: Ints) -> None:
        """Set the longest draft from each position, and how many of its tokens are right."""
        self.rows = np.zeros(len(self.position), dtype=np.int64)
        self.most = np.minimum(most, self.left)
        self.runs = self.run_lengths = runs
        self.recorded = np.full(len(self.position), UNBOUNDED - 1, dtype=np.int64)
        self.open_ended = np.zeros(len(self.position), dtype=bool)

    def read(self, name: str) -> Floats:
        raise NotImplementedError(f"{name} of a token that is only counted")


layout_of = once_per_trace(Layout)


class Tried(NamedTuple):
    """Drafts by setting and start, flat; the last start of each setting marks its end."""

    visited: Bools
    """True if a round began there, shape (settings * (starts + 1),)."""
    forwards: Lengths32
    sent: Lengths32

    def part(self, begin: int, end: int) -> Tried:
        return Tried(self.visited[begin:end], self.forwards[begin:end], self.sent[begin:end])


class Lockstep:
    """Rounds of many settings over one recording, all advancing together.

    Decoding begins at output position ``first``; ``takes_verified`` as in `Trace`.
    """

    def __init__(self, layout: Places, first: int, takes_verified: bool) -> None:
        self.layout = layout
        self.first = first
        self.takes_verified = takes_verified
        self.starts = len(layout.runs)
        # One entry more: where a setting that has ended stays.
        self.width = self.starts + 1
        index = np.arange(self.starts)
        self.runs = np.append(layout.runs, 0).astype(np.int32)
        self.room = np.append(layout.ends - index, 0).astype(np.int32)
        self.recorded = np.append(layout.recorded, 0).astype(np.int32)
        self.open_ended = np.append(layout.open_ended, False)
        self.blank = np.zeros(self.width, dtype=ROUND_DTYPE)
        self.blank["request"][:-1] = layout.request
        self.blank["position"][:-1] = layout.position
        closes = np.append(layout.begins[1:], self.starts)
        entry = np.minimum(layout.begins + first, closes)
        self.entries: Ints = entry[entry < closes]
        self.enters = np.zeros(self.width, dtype=bool)
        self.enters[self.entries] = True
        later = np.append(self.entries, self.starts)
        # Past a request, a run that learns goes on with the next one that has rounds.
        ends = np.append(layout.ends, self.starts)
        self.onward: Ints = later[np.searchsorted(self.entries, ends)]

    def steady(self, plans: Sequence[VectorisedPlan]) -> Tried:
        """Return the rounds of plans without a state: lengths known before the first round."""
        forwards, sent = self._matrix(plans)
        count = len(plans)
        emitted = np.minimum(sent, self.runs) + np.int32(1)
        offset = np.arange(count)[:, None] * self.width
        after = np.where(emitted < self.room, np.arange(self.width) + emitted, self.starts)
        after += offset
        visited = self.visited(after.ravel(), (self.entries + offset).ravel())
        return Tried(visited, forwards.ravel(), sent.ravel())

    def begun(
        self, emitted: npt.NDArray[np.integer], requests: Sequence[int] | None = None
    ) -> Ints:
        """Return the starts, ascending, at which rounds of `requests` (None: all) begin.

        ``emitted``, (starts + 1,): tokens that a round from each start emits.
        """
        after = np.where(emitted < self.room, np.arange(self.width) + emitted, self.starts)
        entries = self.entries
        if requests is not None:
            entries = entries[np.isin(self.layout.request[entries], requests)]
        return np.flatnonzero(self.visited(after, entries)[:-1])

    def of(
        self, requests: Sequence[int], forwards: Lengths32 | Ints, sent: Lengths32 | Ints,
        accepted: Lengths32 | Ints, positions: Lengths32 | Ints | None = None,
    ) -> tuple[Ints, Rounds]:  # fmt: skip
        """Return where the rounds of `requests`, ascending, begin, and these rounds.

        The lengths, (starts + 1,), are those of a round from every start; ``positions`` as in
        `told`. The requests of the rounds are places in `requests`.
        """
        given = accepted + 1 if positions is None else np.minimum(accepted + 1, positions)
        start = self.begun(given, requests)
        rounds = self.told(
            start, forwards[start], sent[start], accepted[start],
            None if positions is None else positions[start],
        )  # fmt: skip
        rounds["request"] = np.searchsorted(requests, rounds["request"])
        return start, rounds

    def visited(self, after: Ints, at: Ints) -> Bools:
        """Return where rounds begin: at `at`, and after each round at its entry of `after`."""
        visited = np.zeros(len(after), dtype=bool)
        going = np.tile(np.arange(self.width) < self.starts, len(after) // self.width)
        while len(at):
            for _ in range(_JUMPS):
                visited[at] = True
                at = after.take(at)
            at = at[going.take(at)]
        return visited

    def adaptive(self, plans: Sequence[VectorisedPlan], learns: bool) -> Tried:
        """Return the rounds of plans with one kind of state; ``learns``: it outlives requests."""
        width, count = self.width, len(plans)
        entries = self.entries[: 1 if learns else None]
        states = [plan.state for plan in plans if plan.state is not None]
        state: VectorisedState = type(states[0]).stacked(states, len(entries))
        kinds = list(dict.fromkeys((p.cap, p.stop) for p in plans))
        longest, verified = (m.ravel() for m in self._matrix([VectorisedPlan(*k) for k in kinds]))
        watch = _WatchedSignal(self, plans, len(entries)) if plans[0].watch is not None else None
        own = np.array([kinds.index((p.cap, p.stop)) for p in plans]) * width
        begins = np.repeat(np.stack([np.arange(count) * width, own]), len(entries), axis=1)
        forwards = np.full(count * width, -1, dtype=np.int32)
        given = forwards.copy()
        at = np.tile(entries, count)
        while len(at):
            place = begins[1] + at
            length = np.minimum(longest.take(place), state.caps())
            sent = np.minimum(length, verified.take(place))
            if watch is not None:
                length, sent = watch.cut(at, state.thresholds(), length, sent)
            if (allotted := state.sent()) is not None:
                sent = np.minimum(sent, allotted)
            place = begins[0] + at
            forwards[place], given[place] = length, sent
            accepted = np.minimum(sent, self.runs.take(at))
            state.observe(sent, accepted)
            within = accepted + 1 < self.room.take(at)
            beyond = self.onward.take(at) if learns else self.starts
            at = np.where(within, at + accepted + 1, beyond)
            going = at < self.starts
            if np.count_nonzero(going) < _FULL * len(at):
                at, begins = at[going], begins[:, going]
                state.keep(going)
                if watch is not None:
                    watch.keep(going)
        return Tried(forwards >= 0, forwards, given)

    def drafts(self, plan: VectorisedPlan) -> tuple[Lengths32, Lengths32] | None:
        """Return (drafted, sent) from every start of a plan without a state; None for one with."""
        if plan.state is not None:
            return None
        forwards, sent = self._matrix([plan])
        return forwards[0], sent[0]

    def rounds(self, tried: Tried) -> list[Rounds | None]:
        """Return the rounds of each setting; None if one left what was recorded."""
        block = self.width * max(1, CELLS // self.width)
        return [
            rounds
            for i in range(0, len(tried.visited), block)
            for rounds in self._rounds(tried.part(i, i + block))
        ]

    def _rounds(self, tried: Tried) -> list[Rounds | None]:
        width = self.width
        count = len(tried.visited) // width
        tried.visited[self.starts :: width] = False
        index = np.flatnonzero(tried.visited)
        bounds = np.searchsorted(index, np.arange(count + 1) * width)
        start = index - np.repeat(np.arange(count) * width, np.diff(bounds))
        forwards, sent = tried.forwards.take(index), tried.sent.take(index)
        runs = self.runs.take(start)
        accepted = np.minimum(sent, runs)
        left = forwards > self.recorded.take(start)
        if self.layout.open_ended.any():
            left |= (sent > runs) & self.open_ended.take(start)
        rounds = self.told(start, forwards, sent, accepted)
        lost = np.unique(np.searchsorted(bounds, np.flatnonzero(left), side="right") - 1)
        gone = set(lost.tolist())
        return [
            None if i in gone else rounds[begin:end]
            for i, (begin, end) in enumerate(pairwise(bounds.tolist()))
        ]

    def told(
        self, start: Ints, forwards: Lengths32 | Ints, sent: Lengths32 | Ints,
        accepted: Lengths32 | Ints, positions: Lengths32 | Ints | None = None,
    ) -> Rounds:  # fmt: skip
        """Return the rounds that began at `start`, in the order of requests and positions.

        ``positions``: those that a verification gives true tokens for; None: one more than sent.
        """
        rounds = self.blank.take(start)
        rounds["drafted"] = sent
        rounds["accepted"] = accepted
        given = accepted + 1 if positions is None else np.minimum(accepted + 1, positions)
        rounds["emitted"] = np.minimum(given, self.room.take(start))
        rounds["draft_forwards"] = forwards
        begins = self.enters.take(start)
        rounds["catch_up"] = caught_up(begins, forwards, accepted, self.takes_verified)
        return rounds

    def _matrix(self, plans: Sequence[VectorisedPlan]) -> tuple[Lengths32, Lengths32]:
        """Return (forwards, sent) that no state decides, shape (plans, starts + 1) each."""
        forwards = np.zeros((len(plans), self.width), dtype=np.int32)
        sent = forwards
        known: dict[Hashable, Lengths] = {None: Lengths(self.layout.most)}
        for i, plan in enumerate(plans):
            if plan.stop is not None and plan.stop not in known:
                known[plan.stop] = plan.stop.lengths(self.layout)
            found = known[plan.stop]
            forwards[i, :-1] = np.minimum(found.forwards, plan.cap)
            if found.sent is not None and sent is forwards:
                sent = forwards.copy()
            if sent is not forwards:
                both = forwards[i, :-1]
                sent[i, :-1] = both if found.sent is None else np.minimum(both, found.sent)
        return forwards, sent


def caught_up(
    begins: Bools, forwards: Lengths32 | Ints, accepted: Lengths32 | Ints, takes_verified: bool
) -> npt.NDArray[np.integer]:
    """Return `policies.core.caught_up` of many rounds, of which `begins` marks requests' first."""
    left = accepted + 1
    if not takes_verified:
        left = left - np.minimum(accepted, forwards - 1)
    return carried(begins, forwards, left, 1)


def carried(
    begins: Bools, forwards: Lengths32 | Ints, left: Lengths32 | Ints, first: int
) -> npt.NDArray[np.integer]:
    """Return the tokens that wait for the next draft pass as each round begins: what was `left`.

    A request begins with `first`, and every round without a draft adds one.
    """
    waiting = np.full_like(left, first)
    np.copyto(waiting[1:], left[:-1], where=~begins[1:])
    anchors = begins.copy()
    anchors[1:] |= forwards[:-1] > 0
    if anchors.all():
        return waiting
    index = np.arange(len(forwards))
    anchor = np.maximum.accumulate(np.where(anchors, index, 0))
    return waiting.take(anchor) + (index - anchor)


class _WatchedSignal:
    """Positions where the watched signal first falls below the threshold of each run."""

    def __init__(self, lockstep: Lockstep, plans: Sequence[VectorisedPlan], count: int) -> None:
        longest = max(plan.cap for plan in plans)
        self._longest = 1 << (longest - 1).bit_length()
        watches = list(dict.fromkeys(plan.watch for plan in plans))
        rows = np.append(lockstep.layout.rows, 0)[:, None] + np.arange(self._longest)
        size = rows.size
        lowest: list[Floats] = []
        for watch in watches:
            assert watch is not None
            values = lockstep.layout.watched(watch).take(rows, mode="clip")
            lowest.append(np.fmin.accumulate(values, axis=1).ravel())
        self._lowest = np.concatenate(lowest)
        self._base = np.repeat([watches.index(p.watch) * size for p in plans], count)
        self._drops = np.repeat([p.drops for p in plans], count)

    def cut(self, at: Ints, thresholds: Floats, length: Ints, sent: Ints) -> tuple[Ints, Ints]:
        """Return (drafted, sent), no longer than to the first token below the thresholds."""
        # What was lowest so far never rises: the tokens that hold are found by halving.
        place = self._base + at * self._longest
        holds, step = np.zeros(len(at), dtype=np.int64), self._longest // 2
        while step:
            below = self._lowest.take(place + (holds + (step - 1))) < thresholds
            holds += step * ~below
            step //= 2
        holds += ~(self._lowest.take(place + holds) < thresholds)
        length = np.minimum(length, holds + 1)
        sent = np.minimum(sent, length)
        return length, np.where(self._drops, np.minimum(sent, holds), sent)

    def keep(self, which: Bools) -> None:
        self._base, self._drops = self._base[which], self._drops[which]
