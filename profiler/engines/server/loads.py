"""Loads of a server, from its clients and from what its processes note."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from profiler.engines.bench import Control
from profiler.engines.drafts import Forced
from profiler.engines.loads import Job
from profiler.engines.server.client import Answer, send_load
from profiler.engines.server.log import EngineLog, LogReader
from profiler.engines.server.process import Server
from profiler.engines.server.share import ServedRun, served_run
from profiler.engines.setup import FORCED
from profiler.engines.texts import TEXTS, prompts_of
from profiler.recording.checkpoint import Checkpoint, once
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

CONTROL = 8
"""Requests of a control loop, at least."""


class Clients:
    """Loads that go to a server, its drafts those of a recording.

    Parameters
    ----------
    server:
        One that has started.
    trace:
        What is accepted; requests are its prompts.
    device:
        The server's, whose speed a control load tells.
    """

    def __init__(self, server: Server, trace: Trace, device: str) -> None:
        torch.set_num_threads(server.options.threads)  # of the control load, as in the engine
        self.server, self.trace = server, trace
        self.prompts: dict[int, list[int]] = {0: [3, 3]}
        self.texts: dict[int, list[int]] = {}
        """The engine's own outputs, by sequence."""
        self._reader = LogReader(server.notes)
        self._control = Control(device)
        self._drafts = ""
        self.run([Job(0, 0.0, 2)], 1)
        about = self._reader.engine
        self.engine: Any = SimpleNamespace(
            options=server.options, blocks=about["blocks"], block_size=about["block_size"],
            vocabulary=int(about["vocabulary"]),
        )  # fmt: skip

    def learn(self, sequences: set[int], seed: int, kept: Checkpoint | None = None) -> None:
        """Let the engine decode these sequences' prompts, and dictate verdicts from now on.

        Where their outputs are `kept`, it decodes only some of them, to warm up.
        """
        most, vocabulary = self.server.options.max_batch, self.engine.vocabulary
        prompts = prompts_of(self.trace, vocabulary, seed)
        self.prompts = {i: prompt for i, prompt in prompts.items() if i in sequences}
        jobs = [Job(i, 0.0, self.trace.requests[i].tokens) for i in self.prompts]
        if kept is not None and TEXTS in kept.names():
            self._sent(jobs[:most], most)

        def decoded() -> dict[int, list[int]]:
            return {answer.sequence: answer.tokens for answer in self._sent(jobs, most)[0]}

        self.texts = {int(i): text for i, text in once(kept, TEXTS, decoded).items()}
        forced = Forced(self.trace, self.texts, vocabulary)
        self._drafts = FORCED + str(forced.write(self.server.folder))
        self.decide("autoregressive")
        self.run(jobs[:1], 1)  # the recording is read before anything is timed

    def decide(self, policy: str) -> None:
        """Put the requests to come under this policy."""
        self.server.decide(policy, self._drafts)

    def run(self, jobs: Sequence[Job], concurrency: int | None) -> ServedRun:
        """Send `jobs`, and wait for what the engine says of them."""
        before_s = self._control.seconds()
        answers, log = self._sent(jobs, concurrency)
        return served_run(answers, log, (before_s + self._control.seconds()) / 2)

    def _sent(self, jobs: Sequence[Job], concurrency: int | None) -> tuple[list[Answer], EngineLog]:
        try:
            answers = send_load(self.server.url, jobs, self.prompts, concurrency)
            return answers, self._reader.take([answer.name for answer in answers])
        except DraftsimError as error:
            raise self.server.failed(str(error)) from None

    def control(self, size: int) -> ServedRun:
        """Plain decoding of the known prompts, `size` of them at a time."""
        self.decide("autoregressive")
        around = itertools.islice(itertools.cycle(self.prompts), max(CONTROL, 2 * size))
        return self.run([Job(i, 0.0, self.trace.requests[i].tokens) for i in around], size)
