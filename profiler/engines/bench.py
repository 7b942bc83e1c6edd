"""Puts an engine into the state of a cell and times iterations there, with a control load."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from policies.batch.base import BatchPolicy
from policies.core import Load
from profiler.engines.drafts import Asked, Drafts, DraftSource
from profiler.engines.engine import PARTS, Engine, Step
from profiler.engines.plan import Cell
from profiler.engines.setup import Setup
from profiler.engines.texts import FIRST_ID
from traces.acceptance.tape import RecordedToken
from traces.errors import DraftsimError

UNTIMED = 2
"""Iterations before a prompt's: the first still verifies drafts of the last cell."""
LARGE = 1024
"""Prompt tokens of an iteration from which it is timed once a sweep: seconds, on a CPU."""
SHORT = 128
"""Tokens of a prompt that decodes by itself before others come."""


class Sample(NamedTuple):
    """One timed iteration; its seconds, and those around it, without the engine's own drafter."""

    seconds: float
    parts: tuple[float, ...]
    """As `profiler.engines.engine.PARTS`."""
    context: float
    """Mean tokens cached by the decoding sequences."""
    base_s: float
    """Mean seconds of the decoding iterations around a mixed one; else 0."""
    control_s: float
    """The control load's, around the cell."""


class Dictated(BatchPolicy):
    """Drafts the number of tokens that it is told to, for every sequence."""

    def __init__(self, longest: int = 8) -> None:
        self.longest = longest
        self.length = 0

    def plan(self, loads: Sequence[Load]) -> int:
        del loads
        return self.length

    def fresh(self) -> Dictated:
        """Return the policy itself: the measurement changes its length while it runs."""
        return self


class Noise(DraftSource):
    """Random tokens: a verification costs the same whatever it finds."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary, self.seed = vocabulary, seed
        self._rng = np.random.default_rng(seed)

    def open(self, request: Asked, output: Sequence[int]) -> Drafts:
        """Endless drafts of random tokens."""
        return _NoiseDrafts(request, len(output), self._rng, self.vocabulary)


class _NoiseDrafts(Drafts):
    def __init__(self, request: Asked, position: int, rng: Any, vocabulary: int) -> None:
        self._request, self._rng, self._vocabulary = request, rng, vocabulary
        self.position = position

    @property
    def remaining(self) -> int:
        return max(self._request.limit - self.position, 0)

    @property
    def load(self) -> Load:
        return Load(1, len(self._request.prompt) + self.position)

    def draft(self, so_far: Sequence[Any]) -> RecordedToken:
        return RecordedToken(0)

    def ids(self, draft: Sequence[Any]) -> list[int]:
        return self._rng.integers(FIRST_ID, self._vocabulary, len(draft)).tolist()  # type: ignore[no-any-return]

    def advance(self, emitted: Sequence[int]) -> None:
        self.position += len(emitted)


class Control:
    """A load that is no engine's: how fast the machine is at this moment.

    A matrix product and a sum over memory, a few milliseconds together on a CPU.
    """

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self._torch, self._cuda = torch, device == "cuda"
        generator = torch.Generator().manual_seed(0)
        self._square = torch.rand(384, 384, generator=generator).to(device)
        self._long = torch.rand(4_000_000, generator=generator).to(device)
        for _ in range(3):
            self.seconds()

    def seconds(self) -> float:
        """Return the time of one run."""
        began = time.perf_counter()
        product = self._square @ self._square
        total = self._long.sum()
        if self._cuda:
            self._torch.cuda.synchronize()
        del product, total
        return time.perf_counter() - began


class Bench:
    """Measures cells of one engine."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.control = Control("cuda" if engine.meta["device"] == "cuda" else "cpu")
        self._policy = Dictated(engine.options.longest)
        self._setup = Setup(self._policy, Noise(engine.vocabulary, seed))
        self._drafter_runs = engine.proposer.own_passes
        self._rng = np.random.default_rng(seed)
        self._numbers = itertools.count()
        self._running: list[str] = []

    def block(self, cells: Sequence[Cell], steps: int) -> dict[Cell, list[Sample]]:
        """Return samples of the cells; new sequences are started for every batch and context.

        Cells that decode take turns, an iteration at a time: a machine whose speed changes by the
        second is then the same for all of them.
        The engine drafts as the cells say from then on, whatever it ran before.
        """
        self.engine.enter()
        self.engine.proposer.use(self._setup)
        self._running = []
        found: dict[Cell, list[Sample]] = {}
        states = sorted({(c.batch, c.context) for c in cells})
        for place in self._rng.permutation(len(states)).tolist():
            batch, context = states[place]
            own = [c for c in cells if (c.batch, c.context) == states[place]]
            if batch:
                self._fill(batch, context)
            decoding = [c for c in own if c.kind == "decode"]
            for _ in range(steps):
                for i in self._rng.permutation(len(decoding)).tolist():
                    found.setdefault(decoding[i], []).extend(self._measured(decoding[i], 1))
            prompted = [c for c in own if c.kind != "decode"]
            for i in self._rng.permutation(len(prompted)).tolist():
                found[prompted[i]] = self._measured(prompted[i], -(-steps // 2))
            self.clear()
        return found

    def clear(self) -> None:
        """Drop every request."""
        if self._running:
            self.engine.abort(self._running)
        self._running = []

    def _measured(self, cell: Cell, steps: int) -> list[Sample]:
        before_s = self.control.seconds()
        if cell.kind == "decode":
            taken = [self._decoding(cell)]
        elif cell.kind == "prompt":
            large = cell.prompts * cell.tokens >= LARGE
            taken = [self._alone(cell) for _ in range(1 if large else steps)]
        else:
            taken = [self._mixed(cell)]
        control_s = (before_s + self.control.seconds()) / 2
        return [
            Sample(
                self._seconds(step) + added_s, tuple(step.parts[p] for p in PARTS),
                float(np.mean([d.context - 1 for d in step.decoded])) if step.decoded else 0.0,
                base_s, control_s,
            )
            for step, added_s, base_s in taken
        ]  # fmt: skip

    def _decoding(self, cell: Cell) -> tuple[Step, float, float]:
        self._policy.length = cell.width - 1
        self._step()  # verifies the last cell's drafts
        return self._step(), 0.0, 0.0

    def _alone(self, cell: Cell) -> tuple[Step, float, float]:
        """Run prompts as they arrive in a server: after iterations that decode, not after prompts.

        Weights and buffers of a prompt just processed are still in the processor's caches.
        """
        other = self._add(SHORT, 1 + UNTIMED)
        self._policy.length = 0
        for _ in range(UNTIMED):
            self._step()
        self.engine.abort([other])
        return self._prompts(cell)

    def _prompts(self, cell: Cell) -> tuple[Step, float, float]:
        began = time.perf_counter()
        names = [self._add(cell.tokens, 2) for _ in range(cell.prompts)]
        added_s = time.perf_counter() - began
        step = self._step()
        self.engine.abort(names)
        return step, added_s, 0.0

    def _mixed(self, cell: Cell) -> tuple[Step, float, float]:
        """One prompt joins those that decode; before and after, they decode by themselves."""
        self._policy.length = cell.width - 1
        for _ in range(UNTIMED):
            self._step()
        before_s = self._seconds(self._step())
        mixed, added_s, _ = self._prompts(cell)
        self._step()
        return mixed, added_s, (before_s + self._seconds(self._step())) / 2

    def _seconds(self, step: Step) -> float:
        """Return the seconds of the step, without the passes of the engine's own drafter."""
        return step.seconds - self._drafter_runs * step.parts["propose"]

    def _fill(self, batch: int, context: int) -> None:
        self._policy.length = 0
        room = self.engine.options.max_model_len - context - 1
        self._running = [self._add(context, room) for _ in range(batch)]
        # A prompt that is processed emits its first token: then all decode.
        while (step := self._step()).prompts or len(step.decoded) < batch:
            pass

    def _add(self, prompt: int, tokens: int) -> str:
        name = f"{next(self._numbers)}/bench"
        ids = self._rng.integers(FIRST_ID, self.engine.vocabulary, prompt).tolist()
        self.engine.add(name, ids, tokens)
        return name

    def _step(self) -> Step:
        step = self.engine.step()
        if step is None:
            raise DraftsimError(
                "the engine had nothing to run while it was measured: lower --max-batch or raise "
                "its cache (VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization)"
            )
        return step
