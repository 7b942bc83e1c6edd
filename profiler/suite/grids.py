"""The coarse grids of the latency stage."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.latency import FIRST_WIDTHS

REPEATS = 5


class Grids:
    """The coarse grids by batch; `quick` for a CPU in seconds."""

    def __init__(self, quick: bool) -> None:
        self.widths: Sequence[int] = (1, 2, 4) if quick else (1, 2, 3, 5, 9, 17, 25)
        self.contexts: Sequence[int] = (16, 80) if quick else (128, 1024, 4096, 16384)
        self.batch_widths: Sequence[int] = (1, 3) if quick else (1, 2, 5, 9, 17)
        self.batch_contexts: Sequence[int] = (16, 80) if quick else (128, 1024, 4096, 16384)
        self.batches: Sequence[int] = (4,) if quick else (4, 16, 64)
        self.first_widths: Sequence[int] = (1, 2) if quick else FIRST_WIDTHS
        self.between: Sequence[int] = (2,) if quick else (2, 8, 32)
        self.prompts: Sequence[int] = (16, 64) if quick else (64, 256, 1024, 4096)
        self.host_batches: Sequence[int] = (1, 4) if quick else (1, 4, 16)
        self.gammas: Sequence[int] = (0, 1, 3) if quick else (0, 1, 2, 4, 8, 16)
        self.random_points = 2 if quick else 4
        self.least_gap = 16 if quick else 128
        self.repeats = 2 if quick else REPEATS
        self.enough_s = 0.0 if quick else 0.008
        self.loop_tokens = 8 if quick else 40
        self.loop_prompt = 16 if quick else 64
