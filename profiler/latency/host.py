"""Measures what a round costs outside the models: the loop, the policy's call, the verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from policies.core import Round, speculate
from policies.lengths.basic import Fixed
from profiler.decoding.single import ModelDecoder
from profiler.latency.passes import random_ids
from profiler.latency.table import Stopwatch, rows_of
from profiler.machine import Repeats, Timing, sweeps
from profiler.models.runner import Runner

HOST_GAMMAS = (0, 1, 2, 4, 8, 16)
"""Draft lengths over which the host's time per round and per drafted token is fitted."""


class _Watched:
    """A model's runner whose passes are made for real, and timed."""

    def __init__(self, runner: Runner, watch: Stopwatch) -> None:
        self._runner, self._watch = runner, watch
        self.spent = Timing(0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, *args: Any, **settings: Any) -> Tensor:
        """Return the runner's own pass."""
        out: list[Tensor] = []
        run = self._runner.forward
        self.spent += self._watch.measure(lambda: out.append(run(*args, **settings)))
        return out[0]


class _Idle(Runner):
    """Stands in for a model: right shapes, no work.  What is left is the host's own time."""

    spent = Timing(0.0)

    def __init__(self, like: Runner) -> None:
        self.cache, self.max_positions = like.cache, like.max_positions
        rows = max(HOST_GAMMAS) + 1
        self._rows = torch.randn(rows, like.vocab_size, device=like.device, dtype=like.model.dtype)

    def forward(
        self, tokens: Tensor, start: int, *, keep: int = 0, mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the first `keep` of some fixed rows."""
        del tokens, start, mask, positions
        return self._rows[:keep]


def measure_host(
    target: Runner, draft: Runner, *, repeats: int = 7, tokens: int = 10
) -> pd.DataFrame:
    """Return seconds per round and per drafted token outside the models, by a linear fit.

    The real loop decodes `tokens` tokens, and what its passes take is subtracted: between real
    passes the loop finds the processor's caches full of weights, and takes several times as long
    as by itself.  On a GPU, where timing each pass would keep host and device from working at the
    same time, both models are replaced by ones that do nothing.
    """
    prompt, watch, again = random_ids(draft, 4), Stopwatch(target.device), Repeats()
    fits = np.empty((repeats, 2))
    for repeat in sweeps(repeats):  # what warms up is overwritten
        samples, counts = np.empty(len(HOST_GAMMAS)), np.empty((len(HOST_GAMMAS), 2))
        for i, gamma in enumerate(HOST_GAMMAS):

            def run(gamma: int = gamma) -> tuple[Timing, tuple[float, int, int]]:
                models = [_stand_in(runner, watch) for runner in (target, draft)]
                decoder = ModelDecoder(models[0], models[1], prompt, tokens, watch_eos=False)
                before = sum((m.spent for m in models), Timing(0.0))
                log: list[Round] = []
                whole = watch.measure(_run_into(log, decoder, Fixed(gamma)))
                passes = sum((m.spent for m in models), Timing(0.0))
                host = whole.wall_s - whole.off_s
                for timing, sign in ((passes, -1), (before, 1)):
                    host += sign * (timing.wall_s - timing.off_s)
                return whole, (host, len(log), sum(r.draft_forwards for r in log))

            _, (samples[i], *counts[i]) = again.best(run)
        fits[repeat] = np.linalg.lstsq(counts, samples, rcond=None)[0]
    cells = [("target", phase, 1, 1, 0) for phase in ("host_round", "host_draft")]
    return rows_of(cells, fits.clip(min=0))


def _stand_in(runner: Runner, watch: Stopwatch) -> Any:
    return _Idle(runner) if runner.device.type == "cuda" else _Watched(runner, watch)


def _run_into(log: list[Round], decoder: ModelDecoder, policy: Fixed) -> Callable[[], object]:
    return lambda: log.extend(speculate(decoder, policy))
