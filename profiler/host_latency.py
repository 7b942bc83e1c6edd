"""Measures what a round costs outside the models: the loop, the policy's call, the verdict."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from policies.basic import Fixed
from policies.core import Round, speculate
from profiler.decoder import ModelDecoder
from profiler.latency import Stopwatch
from profiler.pass_latency import random_ids
from profiler.runner import Runner
from traces.latency import CELL_COLUMNS

HOST_GAMMAS = (0, 1, 2, 4, 8, 16)
"""Draft lengths over which the host's time per round and per drafted token is fitted."""


class _Idle(Runner):
    """Stands in for a model: right shapes, no work.  What is left is the host's own time."""

    def __init__(self, like: Runner) -> None:
        self.cache, self.max_positions = like.cache, like.max_positions
        rows = max(HOST_GAMMAS) + 1
        self._rows = torch.randn(rows, like.vocab_size, device=like.device, dtype=like.model.dtype)

    def forward(
        self, tokens: Tensor, start: int, *, keep: int = 0, mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The first `keep` of some fixed rows."""
        del tokens, start, mask, positions
        return self._rows[:keep]


def measure_host(
    target: Runner, draft: Runner, *, repeats: int = 15, tokens: int = 40
) -> pd.DataFrame:
    """Seconds per round and per drafted token outside the models, by a linear fit.

    The real loop decodes `tokens` tokens with both models replaced by ones that do nothing.
    """
    idle = _Idle(target), _Idle(draft)
    prompt = random_ids(draft, 4)
    watch = Stopwatch(target.device)
    samples = np.empty((repeats, len(HOST_GAMMAS)))
    counts = np.empty((repeats, len(HOST_GAMMAS), 2))
    for repeat in range(-1, repeats):  # the first sweep warms up and is overwritten
        for i, gamma in enumerate(HOST_GAMMAS):
            decoder = ModelDecoder(*idle, prompt, tokens, watch_eos=False)
            log: list[Round] = []
            samples[repeat, i] = watch.time(_run_into(log, decoder, Fixed(gamma)))
            counts[repeat, i] = len(log), sum(r.draft_forwards for r in log)
    fits = np.array(
        [np.linalg.lstsq(counts[r], samples[r], rcond=None)[0] for r in range(repeats)]
    ).clip(min=0)
    low, median, high = np.quantile(fits, [0.25, 0.5, 0.75], axis=0)
    rows = [
        ("target", phase, 1, 1, 0, median[i], (high[i] - low[i]) / 2, repeats)
        for i, phase in enumerate(("host_round", "host_draft"))
    ]
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def _run_into(log: list[Round], decoder: ModelDecoder, policy: Fixed) -> Callable[[], object]:
    return lambda: log.extend(speculate(decoder, policy))
