"""Loads of a server: sent as its clients do, and joined with the notes of its processes.

The endpoint is OpenAI's ``/v1/completions`` with token ids for a prompt, streamed; ids come back
with every part (``return_token_ids``).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from policies.json_text import parse_json
from policies.registry import PLAIN
from profiler.engines.cells import Control
from profiler.engines.drafts import Forced
from profiler.engines.engine import Server
from profiler.engines.notes import EngineLog, LogReader
from profiler.engines.session import FORCED
from profiler.engines.texts import prompts_of, texts_once
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import Demand, EngineStep, LoadRun, PlannedRequest, ServedRun

MODEL = "target"
"""Name that a server gives its model."""
CONTROL = 8
"""Requests of a control loop, at least."""


@dataclass
class Reply:
    """One request as its client saw it; times are those of `time.perf_counter`."""

    name: str
    sequence: int
    arrival_s: float
    """Time when it was due; in a closed loop, when it was sent."""
    tokens: list[int] = field(default_factory=list)
    parts: list[tuple[float, int]] = field(default_factory=list)
    """When each part came, and how many tokens it had."""


async def sent(url: str, demand: Demand, prompts: Mapping[int, Sequence[int]]) -> list[Reply]:
    """Return the answers to the requests of a load.

    Requests are called SEQUENCE/INDEX.  Raises DraftsimError if the server refuses one, or goes.
    """
    import aiohttp

    waiting, answers = deque(enumerate(demand.jobs)), []
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        start_s = time.perf_counter()

        async def send(index: int, job: PlannedRequest, due_s: float | None = None) -> None:
            arrival_s = time.perf_counter() if due_s is None else due_s
            answer = Reply(f"{job.sequence}/{index}", job.sequence, arrival_s)
            answers.append(answer)
            await _ask(session, answer, prompts[job.sequence], job.tokens)

        async def client() -> None:
            while waiting:
                await send(*waiting.popleft())

        async def at_its_time(index: int, job: PlannedRequest) -> None:
            due_s = start_s + job.arrival_s
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            await send(index, job, due_s)

        sending = (
            [at_its_time(i, job) for i, job in waiting] if demand.concurrency is None
            else [client() for _ in range(demand.concurrency)]
        )  # fmt: skip
        try:
            async with asyncio.TaskGroup() as group:
                for each in sending:
                    group.create_task(each)
        except* (aiohttp.ClientError, DraftsimError) as errors:
            raise _named(errors) from None
    return answers


def _named(errors: BaseExceptionGroup[Any]) -> DraftsimError:
    error = errors.exceptions[0]
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, DraftsimError):
        return error
    return DraftsimError(f"the server went away while it was asked: {error}")


async def _ask(session: Any, answer: Reply, prompt: Sequence[int], tokens: int) -> None:
    body = {
        "model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    named = {"X-Request-Id": answer.name}
    async with session.post("/v1/completions", json=body, headers=named) as response:
        if response.status != 200:
            said = (await response.text())[:300]
            raise DraftsimError(
                f"the server refuses request {answer.name} ({response.status}): {said}"
            )
        async for line in response.content:
            now_s = time.perf_counter()
            _, data, text = line.partition(b"data: ")
            if not data or text.startswith(b"[DONE]"):
                continue
            part = parse_json(text)
            if "error" in part:
                raise DraftsimError(f"the server breaks off {answer.name}: {part['error']}")
            ids = part["choices"][0].get("token_ids") or []
            if ids:
                answer.tokens += ids
                answer.parts.append((now_s, len(ids)))
    if len(answer.tokens) != tokens:
        raise DraftsimError(
            f"the server answers {answer.name} with {len(answer.tokens)} tokens, not with {tokens}"
        )


def served_run(answers: Sequence[Reply], log: EngineLog, control_s: float) -> ServedRun:
    """Combine what clients and engine saw of a load; seconds from its first arrival on."""
    start_s = min(answer.arrival_s for answer in answers)
    requests = pd.DataFrame([
        {"name": a.name, "sequence": a.sequence, "arrival_s": a.arrival_s - start_s,
         "first_s": a.parts[0][0] - start_s, "finish_s": a.parts[-1][0] - start_s,
         "tokens": len(a.tokens)}
        for a in answers
    ])  # fmt: skip
    steps = [
        replace(step, start_s=step.start_s - start_s, seconds=step.seconds + gap_s)
        for step, gap_s in zip(log.steps, gaps(log), strict=True)
    ]
    texts = {answer.name: answer.tokens for answer in answers}
    load = LoadRun(requests, steps, log.rounds, control_s, texts)
    around = [s.seconds - sum(s.parts[p] for p in ("schedule", "execute", "update")) for s in steps]
    queued = sorted(log.queued[answer.name] for answer in answers)
    return ServedRun(load, around_requests(answers, log), around, [at - queued[0] for at in queued])


def gaps(log: EngineLog) -> list[float]:
    """Return seconds from each step's end to the next one's start; 0 if nothing was left."""
    following = [*log.steps[1:], None]
    return [
        max(after.start_s - (step.start_s + step.seconds), 0.0) if left and after else 0.0
        for step, after, left in zip(log.steps, following, log.left, strict=True)
    ]


def around_requests(answers: Sequence[Reply], log: EngineLog) -> list[float]:
    """Return by request the seconds on the way to the engine and back.

    The way back begins at the end of its last step.  If no step ran when the request arrived, the
    time until its first step belongs to the server, which had to wake up; else to the engine.
    """
    first: dict[str, EngineStep] = {}
    last: dict[str, EngineStep] = {}
    for step in log.steps:
        for prompt in step.prompts:
            first.setdefault(prompt.name, step)
        last |= dict.fromkeys(step.finished, step)
    ends = np.array([step.start_s + step.seconds for step in log.steps])
    found = []
    for answer in answers:
        queued_s, taken_s = log.queued[answer.name], first[answer.name].start_s
        at_work = bool(((ends > queued_s) & (ends <= taken_s)).any())
        end = last[answer.name]
        back_s = answer.parts[-1][0] - (end.start_s + end.seconds)
        found.append(
            queued_s - answer.arrival_s + (0.0 if at_work else taken_s - queued_s) + back_s
        )
    return found


class Clients:
    """Loads for a server whose drafts are those of a recording.

    Parameters
    ----------
    server: One that has started.
    trace: Recording that decides what is accepted; requests are its prompts.
    device: Device of the server, whose speed a control load measures.
    """

    def __init__(self, server: Server, trace: Trace, device: str) -> None:
        torch.set_num_threads(server.options.threads)  # of the control load, as in the engine
        self.server, self.trace = server, trace
        self.prompts: dict[int, list[int]] = {0: [3, 3]}
        self.texts: dict[int, list[int]] = {}
        """The engine's own outputs, by sequence."""
        self._reader = LogReader(server.notes, server.unnoted)
        self._control = Control(device)
        self._drafts = ""
        self.run(Demand([PlannedRequest(0, 0.0, 2)], 1))
        about = self._reader.engine
        self.engine: Any = SimpleNamespace(
            options=server.options, blocks=about["blocks"], block_size=about["block_size"],
            vocabulary=int(about["vocabulary"]),
        )  # fmt: skip

    def learn(self, sequences: set[int], seed: int, kept: Checkpoint | None = None) -> None:
        """Let the engine decode these sequences' prompts, and dictate verdicts from now on.

        If their outputs are `kept`, it decodes only some of them, to warm up.
        """
        most, vocabulary = self.server.options.max_batch, self.engine.vocabulary
        self.prompts = prompts_of(self.trace, vocabulary, seed, sequences)
        jobs = [PlannedRequest(i, 0.0, self.trace.requests[i].tokens) for i in self.prompts]

        def decoded(some: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
            demand = Demand([job for job in jobs if job.sequence in some], most)
            return {answer.sequence: answer.tokens for answer in self._sent(demand)[0]}

        self.texts = texts_once(kept, self.prompts, most, decoded)
        forced = Forced(self.trace, self.texts, vocabulary)
        self._drafts = FORCED + str(forced.write(self.server.folder))
        self.decide(PLAIN)
        self.run(Demand(jobs[:1], 1))  # the recording is read before anything is timed

    def decide(self, policy: str) -> None:
        """Use this policy for the requests that follow."""
        self.server.decide(policy, self._drafts)

    def run(self, demand: Demand) -> ServedRun:
        """Send the requests of a load, and wait for the engine's notes."""
        before_s = self._control.seconds()
        answers, log = self._sent(demand)
        return served_run(answers, log, (before_s + self._control.seconds()) / 2)

    def _sent(self, demand: Demand) -> tuple[list[Reply], EngineLog]:
        try:
            answers = asyncio.run(sent(self.server.url, demand, self.prompts))
            return answers, self._reader.take([answer.name for answer in answers])
        except DraftsimError as error:
            raise self.server.failed(str(error)) from None

    def control(self, size: int) -> ServedRun:
        """Run plain decoding of the known prompts, `size` of them at a time."""
        self.decide(PLAIN)
        around = itertools.islice(itertools.cycle(self.prompts), max(CONTROL, 2 * size))
        jobs = [PlannedRequest(i, 0.0, self.trace.requests[i].tokens) for i in around]
        return self.run(Demand(jobs, size))
