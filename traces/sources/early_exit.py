"""Drafting by early exit of the target: SpecBound, AdaDecode and Kangaroo as one source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools, Floats, Ints, next_true, ranges
from policies.spec import describe_spec, flag, parameter, ratio, whole, within
from policies.vectorised import UNBOUNDED, VectorisedPlan
from traces.acceptance.trace import Trace, signal_in
from traces.errors import DraftsimError, TailError
from traces.replay.calls import (
    ADAPTER,
    EXIT_HEAD,
    HEAD,
    LAYER,
    CallRows,
    Calls,
    pack_calls,
    pack_counted,
)
from traces.replay.decoder import RecordedToken
from traces.replay.layout import Lockstep, Places, carried
from traces.replay.rounds import Fidelity, Rounds
from traces.sources.base import (
    DRAFTER_SIGNALS,
    ReplayedRounds,
    Source,
    SourceReplay,
    eos_of,
    true_tokens,
)
from traces.sources.exit_recording import ExitRecording, ExitSetting, depth_layers, usable_exits
from traces.sources.recording import DRAWN, Recordings, SourceRecording


class ChosenExits:
    """The exits that one setting takes over a recording."""

    def __init__(self, trace: Trace, recording: ExitRecording, source: EarlyExit) -> None:
        self.recording, self.source, self._trace = recording, source, trace
        self.eos = eos_of(trace)
        at = recording.choices(source.tau, source.omega, source.depth, source.layers)
        deepest = depth_layers(source.depth, recording.layers)
        used = usable_exits(recording.exit_layers, deepest, source.layers)
        self.choices: Ints = at
        self.heads: Ints = np.where(at < 0, len(used), np.searchsorted(used, at) + 1)
        """Exit heads asked at each node, the accepted one included."""
        self.depths: Ints = np.where(at < 0, deepest, np.array(recording.exit_layers)[at])
        """Layers run for the token of each node."""
        true = np.asarray(true_tokens(trace, sampled=True))
        path = np.arange(recording.request_starts[-1])
        exited = self.choices[path]
        self.right = (exited >= 0) & (recording["argmax"][path, exited] == true)
        """True for each position on the path at which the exit's token is the target's."""

    @cached_property
    def places(self) -> ExitPlaces:
        """All that was recorded, for policies that are asked before every token."""
        return ExitPlaces(self._trace, self, UNBOUNDED)


class EarlyExitReplay(SourceReplay):
    """One recorded request, drafted by early exit of its target."""

    def __init__(self, trace: Trace, request: int, exits: ChosenExits, first: int) -> None:
        super().__init__(trace, request, first, sampled=True)
        self.exits = exits
        self._begin = exits.recording.request_starts[request]
        # Tokens run up to their exits, or the depth bound.
        self._asked, self._asked_by_round = 0, list[int]()

    @property
    def noted(self) -> tuple[ChosenExits, int, list[int]]:
        """The exits, where the request begins among all outputs, and what was asked by round."""
        return self.exits, self._begin, self._asked_by_round

    def run_length(self) -> int:
        """Return the number of positions from here whose exit is right."""
        return int(self.exits.places.runs[self._begin + self.position])

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Run the last token up to its exit; None if it reaches the depth bound."""
        places, start, drafted = self.exits.places, self._begin + self.position, len(so_far)
        if drafted >= places.recorded[start]:
            raise TailError(
                f"early exit drafted {drafted + 1} tokens at position {self.position} of request "
                f"{self.info.id!r}, past what was recorded after its wrong exit: draft fewer, or "
                "record this setting with a larger gamma_max"
            )
        self._asked = drafted + 1
        return places.token(int(places.rows[start]) + drafted)

    def charge(self, submitted: int) -> int:
        """Note what was asked; the calls follow from it (`ExitPlaces.calls`)."""
        positions = verified(self._asked, submitted, self.exits.source.bonus)
        self._asked_by_round.append(self._asked)
        self._asked = 0
        return positions

    def at_once(
        self, trace: Trace, plan: VectorisedPlan, first: int, chosen: Sequence[int]
    ) -> ReplayedRounds | None:
        """Return the rounds of a plan without a state, unless a draft leaves what was recorded."""
        exits = self.exits
        places = ExitPlaces(trace, exits, plan.cap)
        lockstep = Lockstep(places, first, False)
        if (drafts := lockstep.drafts(plan)) is None:
            return None
        asked, sent = drafts
        at = np.append(places.rows, 0) + asked - 1
        vain = (asked > 0) & places.vain.take(at, mode="clip")
        forwards = asked - vain
        if vain.any():
            # How much is sent is decided of a draft without the token that there was none of.
            places.most = np.where(vain, forwards, np.append(places.most, 0))[:-1]
            _, sent = lockstep.drafts(plan) or drafts
        accepted = np.minimum(sent, lockstep.runs)
        positions = sent + 1 if exits.source.bonus else np.minimum(np.maximum(asked, 1), sent + 1)
        start, rounds = lockstep.of(chosen, forwards, sent, accepted, positions)
        if (asked[start] > lockstep.recorded[start]).any():
            return None
        return rounds, places.calls(start, asked[start].astype(np.int64), rounds)


@dataclass(eq=False)
class EarlyExit(Source):
    """A token leaves the target at the first layer whose exit head is confident enough.

    SpecBound (arXiv:2604.12247): at layer l of L the head's logits are softened by
    ``1 + omega (1 - l / L)`` and the token exits where the largest probability reaches
    ``tau`` (eq. 1-2).  A token that has not exited at the depth bound is *difficult*: it
    ends the draft, and as its own layers run on, verification gives one token more than was
    drafted.  Otherwise (the length policy, SpecBound's width bound, or EOS ended the draft)
    the last drafted token is not processed, and a full match emits no bonus token.  States
    that an exit skipped are computed, exactly, together with the next deeper token.

    Along sampled outputs an exit draws its token from the head under the same sampling, and
    rejection sampling verifies it; where to exit is decided as above.

    Parameters
    ----------
    tau:
        Confidence to exit with; 0 exits at the first exit layer.
    omega:
        Annealing strength; 0 is plain softmax confidence.
    depth:
        Depth bound as a share of the layers, in (0, 1]; 1 is no bound, as in AdaDecode.
    layers:
        Exit layers used; None for every layer with a head.
    bonus:
        Process the last drafted token as well, as Kangaroo does: the verification then
        covers one position more than was drafted.
    """

    name = "early-exit"
    what = "early exit of the target with trained heads; skipped states are recomputed exactly"
    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS
    recorded_as = ExitRecording
    runs_layers = True
    sampled = True
    stands_in: ClassVar[bool] = False
    """True if drafts go on along the true text where nothing was recorded after a wrong exit."""

    tau: float = parameter(0.5, within, 0, 1)
    omega: float = parameter(0.3, within, 0)
    depth: float = parameter(0.5, ratio)
    layers: Sequence[int] | None = None
    bonus: bool = parameter(False, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer in self.layers or ():
            whole("layers", layer, 1)
        if self.layers is not None and not self.layers:
            raise ValueError("layers is empty, expected at least one exit layer")

    def held(self, recordings: Recordings) -> frozenset[str]:
        """Return all signals, but for a draw's raw probability where it was not recorded."""
        exits = recordings.get(self.key)
        return self.signals - ({"raw_prob"} if exits is not None and lacks_raw(exits) else set())

    def setting(self, gamma_max: int) -> ExitSetting:
        """Return the setting that a recording of drafts up to `gamma_max` must have followed."""
        layers = None if self.layers is None else tuple(self.layers)
        return ExitSetting(self.tau, self.omega, self.depth, layers, gamma_max)

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Return the decoder of one request, from a recording of the same requests."""
        recording = self.recording(recordings)
        recording.check_follows(self.key, trace, first)
        exits = ChosenExits(trace, recording, self)
        return lambda request: EarlyExitReplay(trace, request, exits, first)

    def counted_in(self, rounds: Rounds, noted: Sequence[Any]) -> CallRows:
        """Return the calls of all rounds, given what was asked in them."""
        if not len(rounds):
            return pack_calls([])
        exits, begin, asked = zip(*noted, strict=True)
        start = np.repeat(begin, [*map(len, asked)]) + rounds["position"]
        places: ExitPlaces = exits[0].places
        return places.calls(start, np.array([*chain(*asked)], dtype=np.int64), rounds)

    def drafted(self, exits: ChosenExits, steps: ExitSteps, waiting: Ints) -> Calls:
        """Return the calls of what drafts: the exit heads.

        ``waiting``, (rounds,), are positions that the drafting of the rounds before left out.
        """
        many = exits.heads[steps.node]
        return Calls.of(EXIT_HEAD, steps.round, 1, many)

    def longest(self, trace: Trace, recordings: Recordings) -> int:
        """Return the longest draft that was followed after wrong exits under its setting.

        Raises DraftsimError if none was, and names the recorded settings.
        """
        settings = self.recording(recordings).settings
        wanted = self.setting(1)[:-1]
        if lengths := [int(s.gamma_max) for s in settings if s[:-1] == wanted]:
            return max(lengths)
        own, *recorded = (
            describe_spec(EarlyExit(s.tau, s.omega, s.depth, s.layers), EarlyExit.name)
            for s in (self.setting(1), *settings)
        )
        raise DraftsimError(
            f"drafts of {own!r} were not recorded after wrong exits (recorded: "
            f"{', '.join(dict.fromkeys(recorded))}): choose one of these, or record it with "
            f"`draftsim profile sources --exit-layers --source {own}`"
        )


class StandInExit(EarlyExit):
    """Early exit that, after an unrecorded wrong exit, goes on with the steps of the true text.

    Accepted tokens do not depend on them; only the cost of useless drafts does.  This replay is for
    settings that no recording followed.
    """

    fidelity: ClassVar[Fidelity] = "approximate"
    stands_in = True


def verified(processed: int, submitted: int, bonus: bool) -> int:
    """Return the number of positions a verification covers, of those processed while drafting.

    A difficult token was processed beyond the last drafted one; so is the last drafted one
    where a bonus position is wanted; a round without a draft processes the last true token.
    """
    return submitted + 1 if bonus else min(max(processed, 1), submitted + 1)


class ExitSteps:
    """The tokens that rounds ran to their exits: ``asked`` (rounds,), ``node`` (steps,) of each."""

    def __init__(self, asked: Ints, node: Ints) -> None:
        self.node = node
        self.round: Ints = np.repeat(np.arange(len(asked)), asked)
        self.offset = ranges(asked)


def layer_calls(exits: ChosenExits, steps: ExitSteps, positions: Ints) -> list[Calls]:
    """Return layers and output heads of rounds that each verify `positions`.

    A layer runs where a token goes deeper, together with all positions of the round that have not
    passed it.  So each layer by itself tells its widths: positions since it last ran.  Layers
    between two exits run alike, which leaves as many cases as there are exits.
    """
    depth = exits.depths[steps.node]
    rounds = np.arange(len(positions))
    calls = [Calls.of(HEAD, rounds, positions, verify=True)]
    before = 0
    for until in [*np.unique(depth).tolist(), exits.recording.layers]:
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


def _layers(verify: bool, rounds: Ints, width: Ints, layers: int) -> Calls:
    return Calls.of(LAYER, rounds, width, layers, verify)


class ExitPlaces(Places):
    """Every output position of a trace, with what a setting of early exit drafts from there.

    A row is a token that was run up to its exit: those of the path in their order, and after
    each wrong one the tail that was recorded.  So a draft is a slice of rows, of which the last
    may be `vain`: asked for, but it reaches the depth bound and yields no token.

    ``longest``: tokens that are asked for at most.
    """

    def __init__(self, trace: Trace, exits: ChosenExits, longest: int) -> None:
        super().__init__(trace)
        self.exits = exits
        self._eos = np.array(sorted(exits.eos), dtype=np.int64)
        index = np.arange(len(self.position))
        at_end, right = index == self.ends - 1, exits.right
        ends = self._ends(index)
        owners, nodes = self._tails(index[~right & ~ends], ends, longest)
        tail = np.bincount(np.concatenate([index[:0], *owners]), minlength=len(index))
        self.rows = index + np.cumsum(tail) - tail
        node = np.empty(len(index) + int(tail.sum()), dtype=np.int64)
        node[self.rows] = index
        for k, (owner, own) in enumerate(zip(owners, nodes, strict=True), 1):
            node[self.rows[owner] + k] = own
        self.node: Ints = node
        self.vain: Bools = exits.choices[node] < 0
        # A draft goes on through right exits and the tail of the next wrong one.
        last = next_true(~right | ends | at_end)
        held = last - index + 1 + tail[last]
        self.recorded = np.where(ends[last], UNBOUNDED - 1, held)
        self.most = np.minimum(self.left, held + ~ends[last])
        last = next_true(~right | at_end)
        self.runs = last - index + right[last]
        self.run_lengths = np.minimum(self.runs, self.left)
        self.open_ended = np.zeros(len(index), dtype=bool)
        self._tokens: dict[int, RecordedToken | None] = {}
        lacks = {"raw_prob"} if lacks_raw(exits.recording) else set()
        self._read = DRAFTER_SIGNALS - {"token_id", *lacks}

    def _ends(self, node: Ints) -> Bools:
        """Return True for each node at which a draft ends with what is asked for."""
        at = self.exits.choices[node]
        return (at < 0) | np.isin(self.exits.recording["argmax"][node, at], self._eos)

    def _tails(self, owner: Ints, ends: Bools, longest: int) -> tuple[list[Ints], list[Ints]]:
        """Return per token of the tails, the wrong exits on the path that have one, and its nodes.

        `ends` is set of those whose tail ends by itself, and not with what was recorded.
        """
        record, owners, nodes = self.exits.recording, [], []
        node = owner
        for k in range(1, min(longest, int(self.left.max(initial=0)))):
            if not len(owner):
                break
            found = record.after(node, record["argmax"][node, self.exits.choices[node]])
            if self.exits.source.stands_in:
                along = np.minimum(owner + k, self.ends[owner] - 1)
                found = np.where(found < 0, along, found)
            owner, node = owner[found >= 0], found[found >= 0]
            owners.append(owner)
            nodes.append(node)
            over = self._ends(node)
            ends[owner[over]] = True
            owner, node = owner[~over], node[~over]
        return owners, nodes

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        return self.exits.recording.drafted((self.node, self.exits.choices[self.node]))

    def read(self, name: str) -> Floats:
        values = signal_in(self._columns, name, self.exits.recording.sampling)
        return np.where(self.vain, np.nan, values)

    def token(self, row: int) -> RecordedToken | None:
        """Return the token of a row; None if it is `vain`."""
        if row not in self._tokens:
            record, node = self.exits.recording, self.node[row]
            token = int(record["argmax"][node, self.exits.choices[node]])
            signals = {name: float(self.signal(name)[row]) for name in self._read}
            made = RecordedToken(token, token in self.exits.eos, **signals)
            self._tokens[row] = None if self.vain[row] else made
        return self._tokens[row]

    def calls(self, start: Ints, asked: Ints, rounds: Rounds) -> CallRows:
        """Return the calls of rounds that began at `start` and ran `asked` tokens, (rounds,)."""
        source, sent = self.exits.source, rounds["drafted"].astype(np.int64)
        positions = sent + 1 if source.bonus else np.minimum(np.maximum(asked, 1), sent + 1)
        steps = ExitSteps(asked, self.node[ranges(asked, self.rows[start])])
        left = np.where(rounds["accepted"] < sent, 0, np.maximum(sent + 1 - asked, 0))
        begins = np.diff(rounds["request"], prepend=-1) != 0
        waiting = carried(begins, asked, left, 0).astype(np.int64)
        drafted = source.drafted(self.exits, steps, waiting)
        return pack_counted([*layer_calls(self.exits, steps, positions), drafted])


def lacks_raw(recording: SourceRecording) -> bool:
    """Return True if a draw's raw probability was not recorded."""
    return not recording.sampling.plain and DRAWN[1] not in recording.arrays


class Kangaroo(EarlyExit):
    """Kangaroo (arXiv:2404.18911): a fixed shallow exit, and an attention block after it.

    The adapter keeps keys and values of its own over the exit's states, which are exact; so a
    draft depends on the fed tokens alone.  A draft of n tokens takes n + 1 shallow passes and
    n of the adapter; verification runs the other layers over n + 1 positions, the last of
    which may give a bonus token.  When to stop is the length policy's: the paper's is a
    confidence threshold.
    """

    name = "kangaroo"
    what = "Kangaroo's adapter after a shallow exit of the target; exact"

    def __init__(self) -> None:
        super().__init__(tau=0, omega=0, depth=1, bonus=True)

    def drafted(self, exits: ChosenExits, steps: ExitSteps, waiting: Ints) -> Calls:
        """Return the adapter's passes: the first of a round takes in what is `waiting`."""
        width = np.where(steps.offset == 0, waiting[steps.round] + 1, 1)
        return Calls.of(ADAPTER, steps.round, width)
