"""The coarse grids of the latency stage."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.latency.table import FIRST_WIDTHS

REPEATS = 5


class Grids:
    """The coarse grids by batch; `quick` for a CPU in seconds.

    Host time is a fit of two numbers, for which three draft lengths are enough, and in miniatures
    two: whole runs cost the most.  A miniature's times are not used, so each is measured once.
    """

    def __init__(self, quick: bool) -> None:
        self.widths: Sequence[int] = (1, 2, 4) if quick else (1, 2, 3, 5, 9, 17, 25)
        self.contexts: Sequence[int] = (16, 48) if quick else (128, 1024, 4096, 16384)
        # As wide as at batch 1: policies draft as far in a batch as alone.
        self.batch_widths: Sequence[int] = (1, 3) if quick else (1, 3, 9, 17, 25)
        self.batch_contexts: Sequence[int] = (16, 48) if quick else (128, 1024, 4096, 16384)
        self.batches: Sequence[int] = (4,) if quick else (4, 16, 64)
        self.first_widths: Sequence[int] = (1, 2) if quick else FIRST_WIDTHS
        self.between: Sequence[int] = (2,) if quick else (2, 8, 32)
        self.prompts: Sequence[int] = (16, 64) if quick else (64, 256, 1024, 4096)
        self.host_batches: Sequence[int] = (1, 4) if quick else (1, 4, 16)
        self.gammas: Sequence[int] = (0, 2) if quick else (0, 2, 8)
        self.random_points = 1 if quick else 4
        self.least_gap = 16 if quick else 128
        self.repeats = 1 if quick else REPEATS
        self.enough_s = 0.0 if quick else 0.008
        self.loop_tokens = 6 if quick else 24
        self.loop_prompt = 16 if quick else 64

    def points(self, model: str, phase: str, batch: int) -> tuple[Sequence[int], Sequence[int]]:
        """Widths and contexts of the coarse grid of a model's passes at a batch size."""
        widths = self.widths if batch == 1 else self.batch_widths
        if phase == "catch_up":
            widths = self.first_widths if batch == 1 else self.first_widths[:2]
        elif model == "draft":
            widths = (1, 2)
        return widths, self.contexts if batch == 1 else self.batch_contexts
