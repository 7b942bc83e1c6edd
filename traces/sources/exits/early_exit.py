"""Drafting by early exit of the target: SpecBound and AdaDecode as one source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from policies.parameters import flag, whole, within
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.replay.calls import EXIT_HEAD, CallCounter, CallKey, LayerLedger
from traces.replay.rounds import Fidelity
from traces.sources.base import (
    DRAFTER_SIGNALS,
    Recordings,
    Source,
    SourceReplay,
    SourceToken,
    eos_of,
    true_tokens,
)
from traces.sources.exits.recording import ExitRecording, ExitSetting, depth_layers, usable_exits


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

    def __init__(
        self,
        tau: float = 0.5,
        omega: float = 0.3,
        depth: float = 0.5,
        layers: Sequence[int] | None = None,
        bonus: bool = False,
    ) -> None:
        within("tau", tau, 0, 1)
        within("omega", omega, 0)
        within("depth", depth, 0, 1)
        flag("bonus", bonus)
        for layer in layers or ():
            whole("layers", layer, 1)
        if layers is not None and not layers:
            raise ValueError("layers is empty, expected at least one exit layer")
        self.tau, self.omega, self.depth = tau, omega, depth
        self.layers, self.bonus = layers, bonus

    def held(self, recordings: Recordings) -> frozenset[str]:
        """All signals, but for a draw's raw probability where it was not recorded."""
        exits = recordings.exits
        lacks = exits is not None and not exits.sampling.plain and exits.raw_log_prob is None
        return self.signals - {"raw_prob"} if lacks else self.signals

    def setting(self, gamma_max: int) -> ExitSetting:
        """Return the setting that a recording must have followed for drafts of up to `gamma_max`
        tokens.
        """
        layers = None if self.layers is None else tuple(self.layers)
        return ExitSetting(self.tau, self.omega, self.depth, layers, gamma_max)

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Needs an early-exit recording of the same requests."""
        if recordings.exits is None:
            options = " ".join(filter(None, ("--exit-layers", trace.sampling.options)))
            raise DraftsimError(
                f"no early-exit recording: make one with `draftsim profile {options}`"
            )
        if first < 1:
            raise DraftsimError("early exit is recorded after the prefill: replay with first=1")
        tape = ExitTape(trace, recordings.exits, self)
        return lambda request: self.decoder(trace, request, tape, first)

    def decoder(self, trace: Trace, request: int, tape: ExitTape, first: int) -> SourceReplay:
        """The replay of one request."""
        return EarlyExitReplay(trace, request, tape, first)


class ExitStep(NamedTuple):
    """The source's step at a node."""

    token: SourceToken | None
    heads: int
    """Exit heads asked, the accepted one included."""
    deepest: int
    """Layers run for the token."""


class ExitTape:
    """One setting laid out over a recording; a step is made when first taken."""

    def __init__(self, trace: Trace, recording: ExitRecording, source: EarlyExit) -> None:
        counts = [r.tokens for r in trace.requests]
        if np.diff(recording.path_starts).tolist() != counts:
            raise DraftsimError(
                "the early-exit recording is of other requests than the trace: record both in "
                "one run"
            )
        if recording.sampling != trace.sampling:
            raise DraftsimError(
                f"the early-exit recording follows {recording.sampling.label} outputs, those of "
                f"the trace are {trace.sampling.label}: record both in one run"
            )
        self.recording, self.source = recording, source
        self._raw_unknown = not recording.sampling.plain and recording.raw_log_prob is None
        self.eos = eos_of(trace)
        self.choices = recording.choices(source.tau, source.omega, source.depth, source.layers)
        self.deepest = depth_layers(source.depth, recording.layers)
        self.used = usable_exits(recording.exit_layers, self.deepest, source.layers)
        self._steps: list[ExitStep | None] = [None] * len(self.choices)
        self._calls: dict[tuple[int, ...], Mapping[CallKey, int]] = {}
        true = np.asarray(true_tokens(trace, sampled=True))
        path = np.arange(recording.path_starts[-1])
        exited = self.choices[path]
        self.right = (exited >= 0) & (recording.argmax[path, exited] == true)
        """Of every position on the path, whether the exit's token is the target's."""

    def step(self, node: int) -> ExitStep:
        """The step at a node."""
        if (step := self._steps[node]) is None:
            step = self._steps[node] = self._make(node)
        return step

    def calls(self, depths: list[int], positions: int) -> Mapping[CallKey, int]:
        """Return the calls of a round that drafted down to these layers and verified this many
        positions.
        """
        key = positions, *depths
        # There are few layers to exit at: most rounds are like one before.
        if (found := self._calls.get(key)) is None:
            counter = CallCounter()
            ledger = LayerLedger(self.recording.layers, counter)
            for depth in depths:
                ledger.enter()
                ledger.deepen(depth)
            ledger.finish(positions)
            found = self._calls[key] = counter.open
        return found

    def _make(self, node: int) -> ExitStep:
        at = int(self.choices[node])
        if at < 0:
            return ExitStep(None, len(self.used), self.deepest)
        record = self.recording
        token = int(record.argmax[node, at])
        layer = record.exit_layers[at]
        prob, entropy, margin, prob_margin, top, raw = record.columns[node, at].tolist()
        if self._raw_unknown:
            raw = None
        return ExitStep(
            SourceToken(
                token, token in self.eos, prob, entropy, margin, prob_margin, layer, top, raw
            ),
            self.used.index(at) + 1, layer,
        )  # fmt: skip


class EarlyExitReplay(SourceReplay):
    """One recorded request, drafted by early exit of its target."""

    sampled: ClassVar[bool] = True

    def __init__(self, trace: Trace, request: int, tape: ExitTape, first: int) -> None:
        super().__init__(trace, request, first)
        self.tape = tape
        self._path = tape.recording.path_starts[request]
        self._depths: list[int] = []
        """Of the round's drafts, the layers that they got to."""
        self._node = 0
        self._on_path = True

    def run_length(self) -> int:
        """Positions from here whose exit is right."""
        at, end = self._path + self.position, self._path + self.length
        wrong = np.flatnonzero(~self.tape.right[at:end])
        return int(wrong[0]) if len(wrong) else end - at

    def draft(self, so_far: Sequence[Any]) -> SourceToken | None:
        """Run the last token up to its exit; None if it reaches the depth bound."""
        step = self._step(so_far)
        self._depths.append(step.deepest)
        self.calls.add(EXIT_HEAD, 1, step.heads)
        return step.token

    def _step(self, so_far: Sequence[Any]) -> ExitStep:
        if not so_far:
            self._node, self._on_path = self._path + self.position, True
        else:
            self._walk(so_far)
        return self.tape.step(self._node)

    def _walk(self, so_far: Sequence[Any]) -> None:
        token = so_far[-1].token_id
        if self._on_path and token == self.output[self.position + len(so_far) - 1]:
            self._node += 1
            return
        child = self.tape.recording.children.get((self._node, token))
        self._node = self._unrecorded(len(so_far)) if child is None else child
        self._on_path = False

    def _unrecorded(self, drafted: int) -> int:
        """Return the node to go on from if none was recorded after a wrong exit."""
        raise TailError(
            f"early exit drafted {drafted + 1} tokens at position {self.position} of request "
            f"{self.info.id!r}, past what was recorded after its wrong exit: draft fewer, or "
            "record this setting with a larger gamma_max"
        )

    def charge(self, submitted: int) -> int:
        """The layers that the processed positions still lack."""
        positions = verified(len(self._depths), submitted, self.tape.source.bonus)
        self.calls.add_all(self.tape.calls(self._depths, positions))
        self._depths.clear()
        return positions


class StandInExit(EarlyExit):
    """Early exit that, after an unrecorded wrong exit, goes on with the steps of the true text.

    Accepted tokens do not depend on them; only the cost of useless drafts does.  This replay is for
    settings that no recording followed.
    """

    fidelity: ClassVar[Fidelity] = "approximate"

    def decoder(self, trace: Trace, request: int, tape: ExitTape, first: int) -> SourceReplay:
        """The replay of one request."""
        return StandInReplay(trace, request, tape, first)


class StandInReplay(EarlyExitReplay):
    """One recorded request, with the true text's exits where a wrong one's were not recorded."""

    def _unrecorded(self, drafted: int) -> int:
        return self._path + min(self.position + drafted, self.length - 1)


def verified(processed: int, submitted: int, bonus: bool) -> int:
    """Positions a verification covers, of those processed while drafting.

    A difficult token was processed beyond the last drafted one; so is the last drafted one
    where a bonus position is wanted; a round without a draft processes the last true token.
    """
    return submitted + 1 if bonus else min(max(processed, 1), submitted + 1)
