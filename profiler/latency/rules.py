"""Timing of what a lossy rule adds to a round: its scores, and its verdict.

Lossless verification compares token ids.  A lossy rule reads the target's scores of every
drafted token (top logits, log-sum-exp, entropy, rank), and some rules the draft's signals as
well; both are computed when the target's pass is done.  That work depends on what a rule
reads, hardly on what it then decides, so there is one phase for each of the two families,
over the number of drafted tokens: the seconds of a real decoder's verification under a rule
less those of its lossless one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from policies.rules.base import VerifyRule
from policies.rules.threshold import CMASDVerification, SpecVerification
from profiler.decoding.single import ModelDecoder
from profiler.decoding.tokens import DraftStep, ModelToken
from profiler.latency.passes import random_ids
from profiler.machine import Repeats, Stopwatch, Timing, sweeps
from profiler.models.runner import Runner
from traces.latency.schema import CELL_COLUMNS

DRAFTED = (0, 1, 2, 4, 8, 16, 24)
"""Drafted tokens at which a rule's judging is measured."""

RULES: dict[str, VerifyRule] = {"judge": SpecVerification(), "judge_signals": CMASDVerification()}
"""Phase -> the rule that is timed for its family."""


LOSSLESS = "lossless"


class _Given(Runner):
    """A replacement for a model after its pass; `rows` are its logits."""

    def __init__(self, like: Runner) -> None:
        self.cache, self.max_positions = like.cache, like.max_positions
        self.rows = torch.zeros(1, like.vocab_size, device=like.device, dtype=like.model.dtype)

    def forward(
        self, tokens: Tensor, start: int, *, keep: int = 0, mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the last `keep` rows."""
        return self.rows[-keep:]


def measure_rules(
    target: Runner,
    draft: Runner,
    *,
    drafted: Sequence[int] = DRAFTED,
    longest: int = max(DRAFTED),
    repeats: int = 25,
) -> pd.DataFrame:
    """Return seconds per round that a rule of each family takes beyond lossless verification.

    Every draft is one that the target agrees with, so that a rule judges all of it.  Numbers
    of drafted tokens that do not fit the caches are left out, and those above `longest`.

    Parameters
    ----------
    target, draft:
        Runners over a shared vocabulary; their caches are overwritten.
    drafted:
        Drafted tokens per round, the ``new_tokens`` of the cells.
    longest:
        Tokens of the pair's longest draft.
    repeats:
        Timed repeats; within one the cells and families come in a fresh random order.

    Returns
    -------
    Rows as in `traces.latency.schema.CELL_COLUMNS`, of the target, phases as in `RULES`.
    """
    room = min(target.cache.slots, target.max_positions, draft.cache.slots, draft.max_positions)
    counts = [n for n in drafted if n <= longest and 2 * n + 8 <= room]
    prepared: dict[str, VerifyRule | None] = {LOSSLESS: None}
    for phase, rule in RULES.items():
        prepared[phase] = own = rule.fresh()
        own.begin_run(target.vocab_size, 0.0)
    watch, again, rng = Stopwatch(target.device), Repeats(), np.random.default_rng(0)
    given = _Given(target), _Given(draft)
    smaller = min(target, draft, key=lambda runner: runner.vocab_size)
    ids = random_ids(smaller, max([0, *counts]) + 1).to(target.device)
    # An encoder-decoder needs a source before any pass.
    prompts = target.begin(ids[:1]), draft.begin(ids[:1])
    samples = {phase: np.empty((repeats, len(counts))) for phase in prepared}
    for repeat in sweeps(repeats, 2):
        for i in rng.permutation(len(counts)):
            for phase in rng.permutation(list(prepared)).tolist():
                parts = given, (target, draft), prompts, ids[: counts[i]], prepared[phase]

                def judge(parts: tuple[Any, ...] = parts) -> tuple[Timing, None]:
                    return watch.measure(_round(*parts)), None

                taken, _ = again.best(judge)
                if repeat >= 0:
                    samples[phase][repeat, i] = taken.seconds
    rows = []
    for phase in RULES:
        extra = samples[phase] - samples[LOSSLESS]
        low, median, high = np.quantile(extra, [0.25, 0.5, 0.75], axis=0)
        rows += [
            ("target", phase, 1, n, 0, max(0.0, median[i]), (high[i] - low[i]) / 2, repeats)
            for i, n in enumerate(counts)
        ]
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def _round(
    given: tuple[_Given, _Given], models: tuple[Runner, Runner], prompts: tuple[Tensor, Tensor],
    ids: Tensor, rule: VerifyRule | None,
) -> Callable[[], int]:  # fmt: skip
    """Return the verification of the drafted `ids`, ready to be timed: its passes are done."""
    count = int(ids.shape[0])
    prompt = ids.new_zeros(4)
    decoder = ModelDecoder(*given, prompt, count + 4, watch_eos=False, rule=rule)
    # Real passes come first: what they leave in the processor's caches is part of the cost.
    proposals = models[1].forward(torch.cat([prompts[1], ids]), 0, keep=count or 1)
    given[0].rows = models[0].forward(torch.cat([prompts[0], ids]), 0, keep=count + 1)
    picks = given[0].rows.argmax(-1).clamp(max=models[1].vocab_size - 1)
    parts = [slice(i, i + 1) for i in range(count)]
    tokens = [ModelToken(DraftStep(proposals[at], picks[at])) for at in parts]
    return partial(decoder.verify, tokens)
