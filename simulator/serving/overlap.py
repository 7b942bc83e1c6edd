"""Drafting and verifying at the same time, as SimPy processes: PEARL and DSI.

One stream per pair of devices, first come first served.  Drafter and target run as
processes of their own; how long each step takes comes from the latency table, how long
each draft is from the same policies as everywhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from policies.core import DraftPolicy, Round, drafting
from simulator.serving.arrivals import Job
from simulator.serving.sequence import Slot
from simulator.serving.source import Events, Replica
from traces.replay.decoder import BLANK
from traces.store.identity import ROLES


@dataclass(eq=False)
class Overlapped(Replica):
    """A server of one stream at a time.  Subclass it and define `decode`."""

    policy: DraftPolicy
    interference: float
    """As in `simulator.serving.scenario.Scenario`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy = self.policy.for_run()
        self.waiting: deque[Slot] = deque()
        """Requests in order of arrival; the first is served until it ends."""
        self._blank = not self.policy.reads
        self._host = self.cost.host(1)
        readers = self.cost.readers
        self._target, self._draft = readers["target"], readers.get("later")
        self._prefill = [
            readers[f"{model}_prefill"] for model in ROLES if f"{model}_prefill" in readers
        ]

    def together(self, a_s: float, b_s: float) -> tuple[float, float]:
        """Return the ends of two steps begun together, in seconds from their start."""
        shared_s = self.interference * min(a_s, b_s)
        return a_s + shared_s, b_s + shared_s

    @abstractmethod
    def decode(self, slot: Slot) -> Events:
        """Decode one request from its first token to its end."""

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self.waiting.append(self.slot_of(job))
        self.wake()

    def run(self) -> Events:
        """Serve request after request."""
        env, recorder = self.env, self.recorder
        while True:
            if not self.waiting:
                if self.source.exhausted:
                    return
                yield self.sleep()
                continue
            slot = self.waiting[0]
            start = env.now
            # The two prompts are independent: each device processes its own.
            prefill: Sequence[float] = [
                read(1, slot.job.prompt_tokens, 0) for read in self._prefill
            ]
            if prefill[1:]:
                prefill = self.together(*prefill)
            if prefill:
                yield env.timeout(max(prefill))
            if self.timeline is not None:
                for read, seconds in zip(self._prefill, prefill, strict=True):
                    track = ROLES.index(read.model)
                    self.timeline.device(track, f"{read.model} model", start, seconds, "prefill")
                waited_s = start - slot.arrival_s
                self.timeline.request(slot.index, slot.arrival_s, waited_s, "waiting")
                self.timeline.request(slot.index, start, env.now - start, "prefill")
            self.emit_first(slot)
            slot.policy = self.policy.fresh()
            slot.decoder.declare(self.policy.reads)
            yield from self.decode(slot)
            recorder.busy_s += env.now - start
            recorder.peak_batch = 1
            recorder.batch.add(start, env.now, 1)
            self.waiting.popleft()
            recorder.leave(slot, env.now)
            self.source.completed()

    @property
    def unfinished(self) -> Sequence[Slot]:
        """Requests that wait or run."""
        return self.waiting

    def block(self, slot: Slot, ahead: int, limit: int) -> list[Any]:
        """Return the tokens the policy drafts next, `ahead` tokens after the output so far.

        Raises TailError if a policy that reads signals drafts past the recorded tail.
        """
        policy, decoder = slot.policy, slot.decoder
        policy.begin_round(decoder.load)
        draft: list[Any] = []
        for _ in drafting(policy.keep_drafting, limit, draft, draft):
            # A policy that reads nothing needs no recorded token, so no tail can run out.
            token = BLANK if self._blank else decoder.draft([None] * (ahead + len(draft)))
            if token is not None:
                draft.append(token)
        return draft

    def passes_s(self, context: int, count: int) -> float:
        """Return seconds of `count` draft passes after `context` tokens, the host's included."""
        if self._draft is None:  # an engine without a drafter
            return 0.0
        return self._draft.run(1, context, count) + count * self._host.draft_s

    def verify_s(self, tokens: int, context: int) -> float:
        """Return seconds of a target pass over `tokens` tokens, and of the host's around it."""
        tokens = max(tokens, 1)
        around_s = self._host.round_s + self.cost.verdict_s(1, tokens - 1)
        return self._target(1, tokens, max(context - 1, 0)) + around_s

    def draw(self, track: int, name: str, start: float, label: str, **args: int) -> None:
        """Draw what a device did from `start` until now."""
        if self.timeline is not None:
            self.timeline.device(track, name, start, self.env.now - start, label, **args)

    def emit(self, slot: Slot, outcome: Round, draft: list[Any], wasted: int) -> None:
        """Book a verification's outcome at this moment; `wasted` drafts are lost by it."""
        recorder, now = self.recorder, self.env.now
        recorder.iterations += 1
        recorder.count_round(slot, outcome)
        if outcome.emitted:
            recorder.gap(slot, now - slot.last_s)
            if self.timeline is not None:
                since = slot.last_s
                self.timeline.round(slot.index, since, now - since, outcome, wasted)
                self.timeline.tokens(since, now - since, outcome.accepted, wasted)
            slot.last_s = now
        # Tokens that plain decoding confirmed before they were drafted teach nothing.
        accepted = min(outcome.accepted, len(draft))
        slot.policy.observe(outcome._replace(drafted=len(draft), accepted=accepted), draft)


class Pearl(Overlapped):
    """PEARL (Liu et al. 2024; smart-lty/ParallelSpeculativeDecoding).

    Every step drafts a block while the target verifies.  *Pre-verify*: it checks the
    first token of that very block.  *Post-verify*: it checks what is left of the previous
    block and the first token of this one.  A rejection emits the correction and wastes
    the block being drafted.  There is no bonus token.  A block of a policy that reads
    signals holds at most half the recorded tail (`Limits.lookahead` says otherwise).
    """

    def decode(self, slot: Slot) -> Events:
        """Yield steps of max(draft, verify) until the request's last token."""
        decoder = slot.decoder
        pending: list[Any] = []
        while not decoder.ended:
            left = decoder.limit_left
            # Nothing follows a drafted end of the output, right or wrong.
            ended = bool(pending) and pending[-1].ends
            # A recording holds no draft of the limit's last token after a mismatch.
            room = left - len(pending) - (not self._blank)
            block = self.block(
                slot, len(pending), 0 if ended else max(min(self.lookahead, room), 0)
            )
            checked = [*pending, *block[:1]]
            draft_s = self.passes_s(slot.context + len(pending), len(block))
            # A pass's logits judge the token after each it reads: as many tokens as checked.
            target_s = self.verify_s(len(checked), slot.context)
            run = decoder.judge([None] * len(checked))
            drafter = self.env.process(self._busy(1, draft_s, target_s, drafted=len(block)))
            verified = {"drafted": len(checked), "accepted": run}
            target = self.env.process(self._busy(0, target_s, draft_s, **verified))
            yield drafter & target
            position = decoder.position
            rejected = run < len(checked) or not checked
            decoder.commit(run if rejected else run - 1)
            emitted = decoder.position - position
            kept = [] if rejected or decoder.ended else block[1:]
            wasted = len(pending) + len(block) - run - len(kept)
            pending = kept
            outcome = Round(position, len(checked), run, emitted, len(block), 1)
            self.emit(slot, outcome, checked, wasted)

    def _busy(self, track: int, own_s: float, other_s: float, **args: int) -> Events:
        start = self.env.now
        yield self.env.timeout(self.together(own_s, other_s)[0])
        name, label = (("target model", "verify"), ("draft model", "draft"))[track]
        self.draw(track, name, start, label, **args)


class Dsi(Overlapped):
    """Distributed speculative inference (Timor et al. 2024).

    The drafter drafts block after block and never waits; every finished block is verified by a
    target server of its own while drafting goes on.  The first rejection ends the segment.  Another
    target decodes plainly all the while, and the first to confirm the segment's last token ends it,
    so on devices of their own DSI is never slower than plain decoding.  On a shared device
    everything overlaps, hence everything slows down by the interference.
    """

    def decode(self, slot: Slot) -> Events:
        """Yield segments from one confirmed token to the next rejection."""
        env, decoder = self.env, slot.decoder
        self._slowed = 1 + self.interference
        self._busy: set[int] = set()
        while not decoder.ended:
            left = decoder.segment_left - 1
            run = decoder.judge([None] * left)
            segment = _Segment(env.event(), left, run)
            drafter = env.process(self._drafter(slot, segment))
            plain = env.process(self._plain(slot, run + 1))
            yield segment.verdict | plain
            for process in (drafter, plain, *segment.verifiers):
                if process.is_alive:
                    process.interrupt()
            by_draft = segment.verdict.triggered
            accepted = segment.confirmed if by_draft else run
            forwards = segment.drafted
            if self.lookahead and by_draft and segment.drafted < left:
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

    def _drafter(self, slot: Slot, segment: _Segment) -> Events:
        env, run, left = self.env, segment.run, segment.left
        ahead = 0
        try:
            while True:
                block = self.block(slot, ahead, min(self.lookahead, left - ahead))
                began = env.now
                yield env.timeout(self.passes_s(slot.context + ahead, len(block)) * self._slowed)
                self.draw(1, "draft model", began, "draft", drafted=len(block))
                start, ahead = ahead, ahead + len(block)
                decisive = run < ahead or ahead >= left or not block
                segment.drafted = ahead
                segment.draft += block
                segment.confirmed, segment.decided_s = min(run, ahead), env.now
                verifier = self._verifier(slot, start, len(block), segment, decisive)
                segment.verifiers.append(env.process(verifier))
                if decisive:
                    return
        except simpy.Interrupt:
            return

    def _verifier(
        self, slot: Slot, ahead: int, tokens: int, segment: _Segment, decisive: bool
    ) -> Events:
        start, label = self.env.now, "cancelled"
        seconds = self.verify_s(tokens + 1, slot.context + ahead) * self._slowed
        track = min(set(range(len(self._busy) + 1)) - self._busy)
        self._busy.add(track)
        try:
            yield self.env.timeout(seconds)
            label = "verify"
        except simpy.Interrupt:
            return
        finally:
            self._busy.discard(track)
            self.draw(2 + track, f"target server {track}", start, label, drafted=tokens)
        if decisive and not segment.verdict.triggered:
            segment.verdict.succeed()

    def _plain(self, slot: Slot, tokens: int) -> Events:
        start, label = self.env.now, "plain decoding, overtaken"
        seconds = sum(self.verify_s(1, slot.context + i) for i in range(tokens))
        try:
            yield self.env.timeout(seconds * self._slowed)
            label = "plain decoding"
        except simpy.Interrupt:
            return
        finally:
            self.draw(0, "target model", start, label)


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
