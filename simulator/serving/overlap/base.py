"""Drafting and verifying at the same time, as SimPy processes: what `Pearl` and `Dsi` share.

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
from simulator.serving.cost.reader import Coverage, PassReader
from simulator.serving.outcome.metrics import Recorder
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.replica import Replica
from simulator.serving.sequence import EngineState, ServedSequence, Slot
from simulator.serving.source import Events, Source
from traces.acceptance.tape import BLANK
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

TRACKS = ("target", "draft")
"""Models, in the order of their timeline tracks."""


@dataclass(frozen=True)
class Devices:
    """Where drafter and target run.

    Parameters
    ----------
    interference:
        0: each on its own device.  f > 0: they share one, and each runs (1 + f) times
        slower while the other is busy too.
    target_servers:
        Verifications that may run at the same time (DSI); None: as many as are needed.
    """

    interference: float = 0.0
    target_servers: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.interference < float("inf"):
            raise DraftsimError(f"interference is {self.interference}, expected >= 0")
        if self.target_servers is not None and self.target_servers < 1:
            raise DraftsimError(f"target_servers is {self.target_servers}, expected at least 1")

    def together(self, a_s: float, b_s: float) -> tuple[float, float]:
        """When two steps begun together end, in seconds from their start."""
        short = min(a_s, b_s)
        return a_s + self.interference * short, b_s + self.interference * short


class Overlapped(Replica):
    """A server of one stream at a time.  Subclass it and define `decode`."""

    def __init__(
        self,
        env: simpy.Environment,
        trace: Trace,
        source: Source,
        policy: DraftPolicy,
        latency: LatencyTable,
        lookahead: int,
        recorder: Recorder,
        devices: Devices,
        timeline: Timeline | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.env = env
        self.trace = trace
        self.source = source
        self.policy = policy.for_run()
        self.lookahead = lookahead
        self.recorder = recorder
        self.devices = devices
        self.timeline = timeline
        self.max_tokens = max_tokens
        self.waiting: deque[Slot] = deque()
        self._target = PassReader(latency, "target")
        self._draft = PassReader(latency, "draft")
        self._prefill = [
            PassReader(latency, m, "prefill") for m in TRACKS if latency.has(m, "prefill")
        ]
        self._blank = not policy.reads
        self._wakeup: simpy.Event | None = None

    @abstractmethod
    def decode(self, slot: Slot) -> Events:
        """Decode one request from its first token to its end."""

    def submit(self, job: Job) -> None:
        """Queue a request."""
        now = self.env.now
        self.recorder.arrive(job.number, now, self.emitted)
        self.recorder.enter(now, 1)
        self.recorder.carried += job.prompt_tokens
        decoder = ServedSequence(self.trace, job, self.lookahead, EngineState())
        self.waiting.append(Slot(job.number, job, now, decoder))
        self.wake()

    def wake(self) -> None:
        """Let an idle server look at its queue again."""
        if self._wakeup is not None and not self._wakeup.triggered:
            self._wakeup.succeed()

    def run(self) -> Events:
        """Serve request after request."""
        env, recorder = self.env, self.recorder
        while self.max_tokens is None or recorder.tokens < self.max_tokens:
            if not self.waiting:
                if self.source.exhausted:
                    return
                self._wakeup = env.event()
                yield self._wakeup
                self._wakeup = None
                continue
            slot = self.waiting.popleft()
            start = env.now
            # The two prompts are independent: each device processes its own.
            prefill: Sequence[float] = [
                read(1, slot.job.prompt_tokens, 0) for read in self._prefill
            ]
            if prefill[1:]:
                prefill = self.devices.together(*prefill)
            if prefill:
                yield env.timeout(max(prefill))
            if self.timeline is not None:
                for read, seconds in zip(self._prefill, prefill, strict=True):
                    track = TRACKS.index(read.model)
                    self.timeline.device(track, f"{read.model} model", start, seconds, "prefill")
                if start > slot.arrival_s:
                    waited = start - slot.arrival_s
                    self.timeline.request(slot.index, slot.arrival_s, waited, "waiting")
                if env.now > start:
                    self.timeline.request(slot.index, start, env.now - start, "prefill")
            slot.first_s = slot.last_s = env.now
            slot.tokens = 1
            slot.context += 1
            recorder.tokens += 1
            slot.policy = self.policy.fresh()
            slot.decoder.declare(self.policy.reads)
            yield from self.decode(slot)
            recorder.busy_s += env.now - start
            recorder.peak_batch = 1
            recorder.batch.add(start, env.now, 1)
            recorder.leave(slot, env.now)
            self.source.completed()

    @property
    def unfinished(self) -> list[Slot]:
        """Requests that wait."""
        return list(self.waiting)

    @property
    def coverage(self) -> list[Coverage]:
        """How many passes were measured, interpolated and extrapolated, per model and phase."""
        return [row for r in (self._target, self._draft, *self._prefill) for row in r.coverage]

    def block(self, slot: Slot, ahead: int, limit: int) -> list[Any]:
        """The tokens the policy drafts next, `ahead` tokens after the output so far.

        Raises
        ------
        TailError
            If a policy that reads signals drafts past the recorded tail.
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
        """Seconds of `count` draft passes after `context` tokens."""
        return self._draft.run(1, context, count)

    def verify_s(self, tokens: int, context: int) -> float:
        """Seconds of a target pass over `tokens` tokens."""
        return self._target(1, max(tokens, 1), max(context - 1, 0))

    def emit(self, slot: Slot, outcome: Round, draft: list[Any], wasted: int) -> None:
        """Book a verification's outcome at this moment; `wasted` drafts are lost by it."""
        recorder, now = self.recorder, self.env.now
        recorder.iterations += 1
        recorder.tokens += outcome.emitted
        recorder.drafted += outcome.drafted
        recorder.accepted += outcome.accepted
        recorder.draft_forwards += outcome.draft_forwards
        slot.steps += 1
        slot.tokens += outcome.emitted
        slot.context += outcome.emitted
        slot.drafted += outcome.drafted
        slot.accepted += outcome.accepted
        slot.draft_forwards += outcome.draft_forwards
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
