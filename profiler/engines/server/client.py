"""Sends requests to a server as its clients do, and notes when each piece of an answer came.

The endpoint is OpenAI's ``/v1/completions`` with token ids for a prompt, streamed; ids come back
with every piece (vLLM's ``return_token_ids``).  The client is aiohttp, as in ``vllm bench serve``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.json_text import parse_json
from profiler.engines.loads import Job
from profiler.engines.server.process import NAME
from traces.errors import DraftsimError


@dataclass
class Answer:
    """One request as its client saw it; times are those of `time.perf_counter`."""

    name: str
    sequence: int
    arrival_s: float
    """When it was due; in a closed loop, when it was sent."""
    sent_s: float
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """When each piece came, and how many tokens it had."""


def send_load(
    url: str, jobs: Sequence[Job], prompts: Mapping[int, Sequence[int]], concurrency: int | None
) -> list[Answer]:
    """Return the answers to `jobs`: sent at their times, or in a closed loop of `concurrency`.

    Requests are called SEQUENCE/INDEX.  Raises DraftsimError if the server refuses one, or goes.
    """
    return asyncio.run(_sent(url, jobs, prompts, concurrency))


async def _sent(
    url: str, jobs: Sequence[Job], prompts: Mapping[int, Sequence[int]], concurrency: int | None
) -> list[Answer]:
    import aiohttp

    waiting, answers = deque(enumerate(jobs)), []
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        start_s = time.perf_counter()

        async def send(index: int, job: Job, due_s: float | None = None) -> None:
            now_s = time.perf_counter()
            answer = Answer(
                f"{job.sequence}/{index}", job.sequence, now_s if due_s is None else due_s, now_s
            )
            answers.append(answer)
            await _ask(session, answer, prompts[job.sequence], job.tokens)

        async def client() -> None:
            while waiting:
                await send(*waiting.popleft())

        async def at_its_time(index: int, job: Job) -> None:
            due_s = start_s + job.arrival_s
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            await send(index, job, due_s)

        sending = (
            [at_its_time(i, job) for i, job in waiting] if concurrency is None
            else [client() for _ in range(concurrency)]
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


async def _ask(session: Any, answer: Answer, prompt: Sequence[int], tokens: int) -> None:
    body = {
        "model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0,
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
            piece = parse_json(text)
            if "error" in piece:
                raise DraftsimError(f"the server breaks off {answer.name}: {piece['error']}")
            ids = piece["choices"][0].get("token_ids") or []
            if ids:
                answer.tokens += ids
                answer.pieces.append((now_s, len(ids)))
    if len(answer.tokens) != tokens:
        raise DraftsimError(
            f"the server answers {answer.name} with {len(answer.tokens)} tokens, not with {tokens}"
        )
