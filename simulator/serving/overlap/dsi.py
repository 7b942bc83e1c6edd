"""DSI: verification hides in the shadow of drafting that never waits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from policies.core import Round
from simulator.serving.overlap.base import Overlapped
from simulator.serving.sequence import Slot
from simulator.serving.source import Events

Process = Generator[simpy.Event, Any, None]


class Dsi(Overlapped):
    """Distributed speculative inference (Timor et al. 2024).

    The drafter drafts block after block and never waits; every finished block is verified by a
    target server of its own while drafting goes on.  The first rejection ends the segment.  Another
    target decodes plainly all the while, and the first to confirm the segment's last token ends it,
    so on devices of their own DSI is never slower than plain decoding.  On a shared device
    everything overlaps, hence everything slows down by the interference.
    """

    def decode(self, slot: Slot) -> Events:
        """Segments from one confirmed token to the next rejection."""
        env, decoder = self.env, slot.decoder
        servers = simpy.Resource(env, self.devices.target_servers or 1 << 30)
        self._slowed = 1 + self.devices.interference
        self._busy: set[int] = set()
        while not decoder.ended:
            left = decoder.segment_left - 1
            run = decoder.judge([None] * left)
            segment = _Segment(env.event(), left, run)
            drafter = env.process(self._drafter(slot, segment, servers))
            plain = env.process(self._plain(slot, run + 1))
            yield segment.verdict | plain
            for process in (drafter, plain, *segment.verifiers):
                if process.is_alive:
                    process.interrupt()
            by_draft = segment.verdict.triggered
            accepted = segment.confirmed if by_draft else run
            forwards = segment.drafted
            if by_draft and segment.drafted < left:
                # It drafted on until the verdict came, all in vain.
                each = self.passes_s(slot.context + segment.drafted, 1) * self._slowed
                spare = env.now - segment.decided_s
                forwards += min(int(spare / each) if each else 0, left - segment.drafted)
            position = decoder.position
            decoder.commit(accepted)
            emitted = decoder.position - position
            outcome = Round(
                position, max(segment.drafted, accepted), accepted, emitted, forwards, 1
            )
            # Where plain decoding was first, tokens were confirmed that nobody had drafted.
            self.emit(slot, outcome, segment.draft, max(forwards - accepted, 0))

    def _drafter(self, slot: Slot, segment: _Segment, servers: simpy.Resource) -> Process:
        env, run, left = self.env, segment.run, segment.left
        ahead = 0
        try:
            while True:
                block = self.block(slot, ahead, min(self.lookahead, left - ahead))
                began = env.now
                yield env.timeout(self.passes_s(slot.context + ahead, len(block)) * self._slowed)
                self._draw(1, "draft model", began, "draft", drafted=len(block))
                start, ahead = ahead, ahead + len(block)
                decisive = run < ahead or ahead >= left or not block
                segment.drafted = ahead
                segment.draft += block
                segment.confirmed, segment.decided_s = min(run, ahead), env.now
                verifier = self._verifier(slot, start, len(block), servers, segment, decisive)
                segment.verifiers.append(env.process(verifier))
                if decisive:
                    return
        except simpy.Interrupt:
            return

    def _verifier(
        self, slot: Slot, ahead: int, tokens: int, servers: simpy.Resource, segment: _Segment,
        decisive: bool,
    ) -> Process:  # fmt: skip
        try:
            with servers.request() as server:
                yield server
                start = self.env.now
                seconds = self.verify_s(tokens + 1, slot.context + ahead) * self._slowed
                track = min(set(range(len(self._busy) + 1)) - self._busy)
                self._busy.add(track)
                label = "cancelled"
                try:
                    yield self.env.timeout(seconds)
                    label = "verify"
                finally:
                    self._busy.discard(track)
                    self._draw(2 + track, f"target server {track}", start, label, drafted=tokens)
        except simpy.Interrupt:
            return
        if decisive and not segment.verdict.triggered:
            segment.verdict.succeed()

    def _draw(self, track: int, name: str, start: float, label: str, **args: int) -> None:
        if self.timeline is not None and self.env.now > start:
            self.timeline.device(track, name, start, self.env.now - start, label, **args)

    def _plain(self, slot: Slot, tokens: int) -> Process:
        start, label = self.env.now, "plain decoding, overtaken"
        seconds = sum(self.verify_s(1, slot.context + i) for i in range(tokens))
        try:
            yield self.env.timeout(seconds * self._slowed)
            label = "plain decoding"
        except simpy.Interrupt:
            return
        finally:
            self._draw(0, "target model", start, label)


class _Segment:
    """Tokens between one confirmed token and the next rejection, or the request's end."""

    def __init__(self, verdict: simpy.Event, left: int, run: int) -> None:
        self.verdict = verdict
        self.left = left
        self.run = run
        self.drafted = 0
        self.confirmed = 0
        self.decided_s = 0.0
        self.draft: list[Any] = []
        self.verifiers: list[simpy.Process] = []
