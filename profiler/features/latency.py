"""Rounds of drafters on the target's features, to be timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
import torch

from profiler.features.base import FeatureDrafter
from profiler.features.runner import DrafterRunner
from profiler.latency import Block, Step, Sweeps
from profiler.pass_latency import UNTIMED
from profiler.sources.stack import LayerRunner

LATER = 3
"""Passes of one token behind a round's first."""
WIDTHS = (1, 2, 3, 5, 9)
CONTEXTS = (32, 128, 256)


def measure_drafters(
    target: LayerRunner, drafters: Mapping[str, FeatureDrafter], repeats: int,
    widths: Sequence[int] = WIDTHS, contexts: Sequence[int] = CONTEXTS,
) -> pd.DataFrame:  # fmt: skip
    """Cells of the passes of `drafters` alone; columns as in `traces.latency.CELL_COLUMNS`."""
    with torch.inference_mode():
        sweeps = Sweeps([*drafter_rounds(target, drafters, widths, contexts)], target.device)
        for _ in range(repeats):
            sweeps.run()
    cells = sweeps.cells()
    return cells[cells["model"] != "target"].reset_index(drop=True)


def drafter_rounds(
    target: LayerRunner, drafters: Mapping[str, FeatureDrafter], widths: Sequence[int],
    contexts: Sequence[int],
) -> Iterator[Block]:  # fmt: skip
    """A first pass over several tokens, some of one, and the target's pass that verifies them.

    Cells: ``KIND``/``forward`` over widths and contexts, head and choice of the token included;
    of drafters of one kind the first is timed.
    """
    kinds = {d.kind: d for d in reversed(list(drafters.values()))}
    for drafter in kinds.values():
        yield from _rounds(target, drafter, widths, contexts)


def _rounds(
    target: LayerRunner, drafter: FeatureDrafter, widths: Sequence[int], contexts: Sequence[int]
) -> Iterator[Block]:
    room, widest = target.cache.slots, max(*widths, LATER + 1)
    runner = DrafterRunner(drafter, room)
    tokens = torch.zeros(widest, dtype=torch.long, device=target.device)
    features = torch.zeros(widest, drafter.feature_width, device=target.device)
    features = features.to(target.model.dtype)

    def draft(width: int, context: int) -> Step:
        def run() -> object:
            states, _ = runner.run(tokens[:width], drafter.fuse(features[:width]), context)
            return drafter.target_ids(drafter.logits(states[-1:]).argmax(-1))

        return Step(drafter.kind, "forward", width, context, run)

    def verify(context: int) -> Step:
        pieces = list(tokens[: LATER + 1].split(1))

        def run() -> object:
            fed = torch.cat(pieces)
            logits, _ = target.forward_with_states(fed, context, drafter.feature_layers)
            return logits.argmax(-1).tolist()

        return Step("target", "pass", LATER + 1, context, run)

    for context in contexts:
        for width in [w for w in widths if context + max(w, LATER + 1) <= room]:
            round_ = [draft(width, context), *[draft(1, context)] * LATER, verify(context)]
            yield Block([round_] * (UNTIMED + 3), UNTIMED)
