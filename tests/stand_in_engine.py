"""An engine without a model, on a clock of its own: what it takes follows from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from profiler.engines import cells, loads
from profiler.engines.cells import EngineGrid
from profiler.engines.engine import EngineOptions
from profiler.engines.session import Governed
from traces.store.engine_runs import PARTS, Decoded, EngineStep, PromptRead
from traces.store.files import write_latency

GRID = EngineGrid((1, 2), (1, 3), (16, 32), ((1, 8), (1, 32)), (1,), (1, 3), (8, 32), 1, 1, 0.5)
OPTIONS = EngineOptions("stand-in", longest=4, max_batch=2, max_model_len=512)
TICK_S = 2.0**-16
"""Times are whole ticks, so that differences of them are exact, whenever they are taken."""


class Clock:
    """The time of the engine and of who measures it."""

    now_s: ClassVar[float] = 0.0
    slower: ClassVar[float] = 1.0
    """How many times longer everything takes."""

    @classmethod
    def advance(cls, seconds: float) -> float:
        """Let time pass; how much it was in whole ticks."""
        taken_s = round(seconds * cls.slower / TICK_S) * TICK_S
        cls.now_s += taken_s
        return taken_s

    @classmethod
    def use(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let loads and cells be timed by it; every control load takes a millisecond."""
        time = SimpleNamespace(perf_counter=lambda: cls.now_s, sleep=cls.advance)
        monkeypatch.setattr(loads, "time", time)
        monkeypatch.setattr(cells, "time", time)
        monkeypatch.setattr(cells, "Control", Control)
        monkeypatch.setattr(loads, "Control", Control)
        monkeypatch.setattr(cls, "slower", 1.0)


class Control:
    """A replacement of `profiler.engines.cells.Control`."""

    def __init__(self, device: str = "cpu") -> None:
        del device

    def seconds(self) -> float:
        return Clock.advance(1e-3)


class StandIn:
    """A `profiler.engines.engine.Engine` without a model, whose texts follow from the prompts."""

    cache_settings = "VLLM_CPU_KVCACHE_SPACE"

    def __init__(self, options: EngineOptions) -> None:
        self.options, self.vocabulary = options, 97
        self.blocks, self.block_size = 1000, 16
        self.meta: dict[str, Any] = {
            "engine": {
                "name": "stand-in", "version": "1", "method": "custom_class", "own_drafter": False,
                "longest": options.longest, "max_batch": options.max_batch,
                "max_model_len": options.max_model_len, "token_budget": options.token_budget,
            },
            "target": options.target, "draft": None, "dtype": "float32", "device": "cpu",
            "threads": 1,
        }  # fmt: skip
        self.proposer = Governed(options.longest, self.vocabulary)
        self._requests: dict[str, Any] = {}
        self._drafts: dict[str, list[int]] = {}
        self._own = self._requests, self._drafts

    @contextmanager
    def tenants(self, blocks: Sequence[int]) -> Iterator[list[Any]]:
        assert sum(blocks) < self.blocks
        yield [({}, {}) for _ in blocks]
        assert not self.busy
        self.enter()

    def enter(self, tenant: Any = None) -> None:
        self._requests, self._drafts = self._own if tenant is None else tenant

    def add(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        self._requests[name] = SimpleNamespace(
            name=name, forked=False, prompt_token_ids=list(prompt), output_token_ids=[],
            sampling_params=SimpleNamespace(max_tokens=tokens),
        )  # fmt: skip

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._requests.pop(name, None)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def step(self) -> EngineStep | None:
        running = dict(list(self._requests.items())[: self.options.max_batch])
        if not running:
            return None
        verified = {n: self._drafts[n] for n in running if self._drafts.get(n)}
        decoded, prompts, sampled = [], [], []
        for name, request in running.items():
            ids, output = request.prompt_token_ids, request.output_token_ids
            known, limit = len(ids) + len(output), request.sampling_params.max_tokens
            draft = verified.get(name, [])[: limit - len(output) - 1]
            tokens = self._sampled(request, draft)
            if output:
                decoded.append(Decoded(name, known, len(draft), len(tokens)))
            else:
                prompts.append(PromptRead(name, len(ids), 0, len(ids)))
            output += tokens
            sampled.append(tokens)
        work = sum(1 + d.drafted for d in decoded) + sum(p.tokens for p in prompts)
        parts = dict.fromkeys(PARTS, 0.0) | {"execute": Clock.advance(4e-3 + 5e-4 * work)}
        rows = self._rows([*zip(running, sampled, strict=True)])
        names = [name for name, _ in rows]
        drafts = self.proposer.session.advance(
            names, [tokens for _, tokens in rows], verified, self._requests
        )
        self._drafts.clear()
        self._drafts.update(zip(names, drafts, strict=True))
        ended = [
            n for n, r in running.items()
            if len(r.output_token_ids) >= r.sampling_params.max_tokens
        ]  # fmt: skip
        emitted = {n: len(r.output_token_ids) for n, r in running.items()}
        for name in ended:
            del self._requests[name]
        return EngineStep(Clock.now_s, parts["execute"], parts, decoded, prompts, emitted, ended)

    def _rows(self, found: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
        """Return the results of an iteration, in the order of the engine's rows."""
        return found

    def _sampled(self, request: Any, draft: Sequence[int]) -> list[int]:
        """The text's next tokens: as many as the draft has right, and one more."""
        done, width = len(request.output_token_ids), len(draft) + 1
        text = [self._token(request, done + k, width) for k in range(width)]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == text[accepted]:
            accepted += 1
        return text[: accepted + 1]

    def _token(self, request: Any, position: int, width: int) -> int:
        """The text's token, as a pass over `width` tokens decides it."""
        return (sum(request.prompt_token_ids) + 5 * position) % self.vocabulary


class Reordering(StandIn):
    """A stand-in whose rows change places as requests come and go, as vLLM's do."""

    def _rows(self, found: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
        return found[::-1]


class Forking(StandIn):
    """A stand-in whose wider passes decide otherwise at `POSITION` of `SEQUENCE`.

    From there on the request's text is another.
    """

    SEQUENCE: ClassVar[int] = 1
    POSITION: ClassVar[int] = 5

    def _token(self, request: Any, position: int, width: int) -> int:
        usual = super()._token(request, position, width)
        if not request.name.startswith(f"{self.SEQUENCE}/") or position < self.POSITION:
            return usual
        if position == self.POSITION and width > 1:
            request.forked = True
        return (usual + 40) % self.vocabulary if request.forked else usual


def use_for_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``--engine vllm`` of the commands start a `StandIn`, measured over `GRID`."""
    from commands.engine import profile
    from profiler.engines import vllm
    from profiler.engines.vllm import engine

    Clock.use(monkeypatch)
    monkeypatch.setattr(vllm, "check_installed", lambda server=False: None)
    monkeypatch.setattr(engine, "VllmEngine", StandIn)
    monkeypatch.setattr(profile, "EngineGrid", lambda: GRID)


def write_measured_engine(folder: Path) -> None:
    """Write ``latency.parquet`` of a `StandIn` into `folder`."""
    from profiler.engines.measure import EngineTable

    with pytest.MonkeyPatch.context() as patch:
        Clock.use(patch)
        made: Any = StandIn(OPTIONS)
        table = EngineTable(made, GRID.fitted(OPTIONS)).run()
    folder.mkdir(parents=True, exist_ok=True)
    write_latency(table, folder / "latency.parquet")
