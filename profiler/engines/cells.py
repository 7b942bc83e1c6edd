"""Cells of an engine's latency table: the grid of sizes, and the iterations timed at each.

`CellTimer` puts an engine into the state of a cell and times iterations there, with a control load.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from policies.batch.base import BatchPolicy
from policies.core import Load
from profiler.engines.drafts import Asked, CountedDrafts, Drafts, DraftSource
from profiler.engines.engine import Engine, EngineOptions
from profiler.engines.session import Setup
from profiler.engines.texts import FIRST_ID
from traces.errors import DraftsimError
from traces.latency.table import UNIFORM
from traces.store.engine_runs import PARTS, EngineStep

UNTIMED = 2
"""Iterations before a prompt, because the first still verifies drafts of the previous cell."""
LARGE = 1024
"""Iterations with this many prompt tokens are timed once per sweep: they take seconds on a CPU."""
SHORT = 128
"""Tokens of a prompt that decodes alone before other prompts arrive."""


class Cell(NamedTuple):
    """Sizes of an iteration.

    ``batch`` sequences decode ``width`` tokens each after about ``context`` tokens, and
    ``prompts`` prompts of ``tokens`` tokens each are processed.
    """

    kind: Literal["decode", "prompt", "mixed"]
    batch: int = 0
    width: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class EngineGrid:
    """The sizes to measure.

    Parameters
    ----------
    batches, widths, contexts:
        Sizes of decoding: sequences, tokens per sequence, tokens in the cache.
    prompts: (count, tokens each) of prompts alone.
    beside_batches, beside_widths, beside_prompts: Decoding sequences, their width and the prompt's
        tokens where both share a pass, at the middle context.
    sweeps: Times that everything is measured, in a fresh order each time.
    steps: Timed iterations of a decoding cell per sweep.  Cells of prompts have half as many, those
        of large prompts and mixed passes have one.
    held_out:
        A held-out batch or width is added to the grid from this relative error of interpolation on.
    """

    batches: Sequence[int] = (1, 2, 4, 8, 16)
    widths: Sequence[int] = (1, 2, 3, 5, 9)
    contexts: Sequence[int] = (32, 256, 640)
    prompts: Sequence[tuple[int, int]] = (
        (1, 16), (1, 64), (1, 256), (1, 512), (1, 1024), (1, 1536), (4, 16), (4, 64), (4, 256),
        (16, 256),
    )  # fmt: skip
    beside_batches: Sequence[int] = (1, 4, 15)
    beside_widths: Sequence[int] = (1, 5)
    beside_prompts: Sequence[int] = (16, 64, 256, 1024)
    sweeps: int = 3
    steps: int = 4
    held_out: float = 0.03

    def room(self, options: EngineOptions) -> int:
        """Return the shortest context that is too long for the engine.

        Sequences grow by a token an iteration while they are measured, and verify drafts.
        """
        cells = max(len(self.widths), len(self.beside_widths) * len(self.beside_prompts)) + 3
        return options.max_model_len - 2 * (options.longest + 1) - cells * 2 * (self.steps + 1)

    def fitted(self, options: EngineOptions, graphs: str | None = None) -> EngineGrid:
        """Return the grid within what the engine was started with, its ends included.

        With ``graphs`` of `UNIFORM` steps the longest width but one is measured as well: nothing
        is read between a full graph and another pass.
        """
        most, wide, length = options.max_batch, options.longest + 1, options.max_model_len
        ends = {wide - 1, wide} if graphs in UNIFORM and wide > 2 else {wide}
        room = self.room(options)
        contexts = [c for c in self.contexts if c < room] or [max(room // 2, 8)]
        return replace(
            self,
            batches=sorted({*(b for b in self.batches if b < most), most}),
            widths=sorted({*(w for w in self.widths if w < wide), *ends}),
            contexts=contexts,
            prompts=[
                (n, t) for n, t in dict.fromkeys((min(n, most), t) for n, t in self.prompts)
                # Some tokens stay free: one is sampled after the prompt.
                if t + 8 < length and n * t <= options.token_budget
            ],
            beside_batches=sorted({min(b, most - 1) for b in self.beside_batches if most > 1}),
            beside_widths=sorted({min(w, wide) for w in self.beside_widths}),
            beside_prompts=[t for t in self.beside_prompts if t < room],
        )  # fmt: skip

    @property
    def middle(self) -> int:
        """The context at which prompts join and batches and widths are held out."""
        return self.contexts[len(self.contexts) // 2]

    def blocks(self) -> list[list[Cell]]:
        """Return cells by block: those of a number of sequences, prompts alone, and mixed ones.

        Lengths, and contexts, are compared with one another, so they are measured close in time.
        """
        decoding = [
            [Cell("decode", b, w, c) for c in self.contexts for w in self.widths]
            for b in self.batches
        ]
        alone = [Cell("prompt", prompts=n, tokens=t) for n, t in self.prompts]
        mixed = [
            Cell("mixed", b, w, self.middle, 1, t)
            for b in self.beside_batches
            for w in self.beside_widths
            for t in self.beside_prompts
        ]
        return [block for block in (*decoding, alone, mixed) if block]

    def between(self) -> list[Cell]:
        """Return held-out cells at the middle context: between batches, and between widths."""
        batches = [
            Cell("decode", (a + b) // 2, w, self.middle)
            for a, b in zip(self.batches, self.batches[1:], strict=False)
            if b - a > 1
            for w in (self.widths[0], self.widths[len(self.widths) // 2], self.widths[-1])
        ]
        widths = [
            Cell("decode", b, (v + w) // 2, self.middle)
            for v, w in zip(self.widths, self.widths[1:], strict=False)
            if w - v > 1
            for b in (self.batches[0], self.batches[-1])
        ]
        return sorted({*batches, *widths}, key=lambda c: (-c.batch, c.width))


SIZES = list(Cell._fields)
SAMPLE = [*SIZES, "cached", "seconds", *PARTS, "base_s", "control_s"]
"""Columns of samples: the cell, and one iteration timed in it.

``cached`` is the mean number of tokens cached by the decoding sequences, and ``seconds`` excludes
the passes of the engine's own drafter.  ``base_s`` is the mean of the decoding iterations before
and after a mixed one, else 0; ``control_s`` that of the control load before and after the cell.
"""


class Dictated(BatchPolicy):
    """A policy that drafts a settable number of tokens for every sequence."""

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
    """A source of random tokens: a verification costs the same if they are accepted or not."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary, self.seed = vocabulary, seed
        self._rng = np.random.default_rng(seed)

    def open(self, request: Asked, output: Sequence[int]) -> Drafts:
        return CountedDrafts(request, len(output), self._ids)

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(FIRST_ID, self.vocabulary, count).tolist()  # type: ignore[no-any-return]


class Control:
    """A fixed computation outside the engine, which shows how fast the machine is at the moment.

    It is a matrix product and a sum over memory, a few milliseconds together on a CPU.

    ``device``: "cpu", or the name of a GPU (``Engine.meta["device"]``).
    """

    def __init__(self, device: str = "cpu") -> None:
        import torch

        from profiler.machine import Stopwatch

        where = torch.device("cpu" if device == "cpu" else "cuda")
        generator = torch.Generator().manual_seed(0)
        square = torch.rand(384, 384, generator=generator).to(where)
        long = torch.rand(4_000_000, generator=generator).to(where)
        self._watch, self._run = Stopwatch(where), lambda: (square @ square, long.sum())
        for _ in range(3):
            self.seconds()

    def seconds(self) -> float:
        """Return the time of one run.

        On a GPU a drafter's pass that nothing has waited for is not its time.
        """
        return self._watch.measure(self._run)[0].wall_s


class CellTimer:
    """Measures cells of one engine."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.control = Control(engine.meta["device"])
        self._policy = Dictated(engine.options.longest)
        self._setup = Setup(self._policy, Noise(engine.vocabulary, seed))
        self._drafter_runs = engine.proposer.own_passes
        self._rng = np.random.default_rng(seed)
        self._numbers = itertools.count()
        self._running: list[str] = []

    def block(self, cells: Sequence[Cell], steps: int) -> pd.DataFrame:
        """Return samples of the cells (`SAMPLE`).

        New sequences are started for every batch and context.

        Decoding cells are interleaved iteration by iteration, so that changes of the machine's
        speed affect all of them.  From then on the engine drafts as the cells say.
        """
        self.engine.enter()
        self.engine.proposer.use(self._setup)
        self._running = []
        found: list[tuple[Any, ...]] = []
        states = sorted({(c.batch, c.context) for c in cells})
        for place in self._rng.permutation(len(states)).tolist():
            batch, context = states[place]
            own = [c for c in cells if (c.batch, c.context) == states[place]]
            if batch:
                self._fill(batch, context)
            decoding = [c for c in own if c.kind == "decode"]
            for _ in range(steps):
                for i in self._rng.permutation(len(decoding)).tolist():
                    found += self._measured(decoding[i], 1)
            prompted = [c for c in own if c.kind != "decode"]
            for i in self._rng.permutation(len(prompted)).tolist():
                found += self._measured(prompted[i], -(-steps // 2))
            if self._running:
                self.engine.abort(self._running)
            self._running = []
        return pd.DataFrame(found, columns=SAMPLE)

    def _measured(self, cell: Cell, steps: int) -> list[tuple[Any, ...]]:
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
            (*cell, float(np.mean([d.context - 1 for d in step.decoded])) if step.decoded else 0.0,
             self._seconds(step) + added_s, *(step.parts[p] for p in PARTS), base_s, control_s)
            for step, added_s, base_s in taken
        ]  # fmt: skip

    def _decoding(self, cell: Cell) -> tuple[EngineStep, float, float]:
        self._policy.length = cell.width - 1
        self._step()  # verifies the last cell's drafts
        return self._step(), 0.0, 0.0

    def _alone(self, cell: Cell) -> tuple[EngineStep, float, float]:
        """Run prompts as in a server: after decoding iterations, not after other prompts.

        Directly after a prompt, its weights and buffers would still be in the processor's caches.
        """
        other = self._add(SHORT, 1 + UNTIMED)
        self._policy.length = 0
        for _ in range(UNTIMED):
            self._step()
        self.engine.abort([other])
        return self._prompts(cell)

    def _prompts(self, cell: Cell) -> tuple[EngineStep, float, float]:
        began = time.perf_counter()
        names = [self._add(cell.tokens, 2) for _ in range(cell.prompts)]
        added_s = time.perf_counter() - began
        step = self._step()
        self.engine.abort(names)
        return step, added_s, 0.0

    def _mixed(self, cell: Cell) -> tuple[EngineStep, float, float]:
        """Add one prompt to the decoding sequences, which decode without it before and after."""
        self._policy.length = cell.width - 1
        for _ in range(UNTIMED):
            self._step()
        before_s = self._seconds(self._step())
        mixed, added_s, _ = self._prompts(cell)
        self._step()
        return mixed, added_s, (before_s + self._seconds(self._step())) / 2

    def _seconds(self, step: EngineStep) -> float:
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
        name = f"{next(self._numbers)}/cell"
        ids = self._rng.integers(FIRST_ID, self.engine.vocabulary, prompt).tolist()
        self.engine.add(name, ids, tokens)
        return name

    def _step(self) -> EngineStep:
        step = self.engine.step()
        if step is None:
            raise DraftsimError(
                "the engine had nothing to run while it was measured: lower --max-batch or raise "
                f"its cache ({self.engine.cache_settings})"
            )
        return step
