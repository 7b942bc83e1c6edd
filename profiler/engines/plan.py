"""The plan of an engine's measurement: cells of three kinds, in blocks that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from profiler.engines.start import EngineOptions

Kind = Literal["decode", "prompt", "mixed"]

SPARE = 8
"""Tokens of a sequence that the longest prompt leaves free: one is sampled after the prompt."""


class Cell(NamedTuple):
    """Sizes of an iteration.

    ``batch`` sequences decode ``width`` tokens each after about ``context`` tokens, and
    ``prompts`` prompts of ``tokens`` tokens each are processed.
    """

    kind: Kind
    batch: int = 0
    width: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Grid:
    """The sizes to measure.

    Parameters
    ----------
    batches, widths, contexts:
        Of decoding: sequences, tokens a sequence, tokens known before.
    prompts:
        (count, tokens each) of prompts alone.
    beside_batches, beside_widths, beside_prompts:
        Decoding sequences, their width and the prompt's tokens where both share a pass, at
        the middle context.
    sweeps:
        Times that everything is measured, in a fresh order each time.
    steps:
        Timed iterations of a decoding cell in a sweep; half as many of a prompt, of a large one
        and of a mixed one a single one.
    held_out:
        Relative error of interpolation from which a held-out batch or width joins the grid.
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

    def fitted(self, options: EngineOptions) -> Grid:
        """Return the grid within what the engine was started with, its ends included."""
        most, wide, length = options.max_batch, options.longest + 1, options.max_model_len
        # Sequences grow by a token an iteration while the cells of their state are measured.
        cells = max(len(self.widths), len(self.beside_widths) * len(self.beside_prompts)) + 3
        grown = cells * 2 * (self.steps + 1)
        room = length - 2 * wide - grown
        contexts = [c for c in self.contexts if c < room] or [max(room // 2, 8)]
        return replace(
            self,
            batches=sorted({*(b for b in self.batches if b < most), most}),
            widths=sorted({*(w for w in self.widths if w < wide), wide}),
            contexts=contexts,
            prompts=[
                (n, t) for n, t in dict.fromkeys((min(n, most), t) for n, t in self.prompts)
                if t + SPARE < length and n * t <= options.token_budget
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

        What is compared with each other is measured in the same seconds: lengths, and contexts.
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
        """Held-out cells at the middle context: between batches, and between widths."""
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
