"""Rounds of drafters on the target's features, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import torch

from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import DrafterRunner
from profiler.latency.passes import UNTIMED
from profiler.latency.table import Block, Step, Sweeps, reaching
from profiler.models.runner import Runner
from profiler.models.stack import LayerRunner

LATER = 3
"""Passes of one token after a round's first."""
DRAFTER_WIDTHS = (1, 2, 3, 5, 9)
CONTEXTS = (32, 128, 256)
PROMPTS = (32, 64, 128, 256)


def measure_drafters(
    target: LayerRunner, drafters: Mapping[str, FeatureDrafter], repeats: int,
    widths: Sequence[int] = DRAFTER_WIDTHS, contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,), longest: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Cells of the passes of `drafters` alone; columns as in `traces.latency.table`.

    ``contexts`` go on to ``longest``, the tokens that a request gets to.
    """
    contexts = reaching(contexts, longest)
    with torch.inference_mode():
        blocks = [*drafter_rounds(target, drafters, widths, contexts)]
        if (largest := max(batches)) > 1:
            wide = Runner(target.model, target.cache.slots, largest)
            for batch in [b for b in batches if b > 1]:
                blocks += drafter_rounds(wide, drafters, widths, contexts, batch)
        cells = swept(blocks, target.device, repeats)
    return cells[cells["model"] != "target"].reset_index(drop=True)


def swept(blocks: Sequence[Block], device: torch.device, repeats: int) -> pd.DataFrame:
    """Return the cells of `blocks` from `repeats` sweeps; columns as in `traces.latency.table`."""
    sweeps = Sweeps(blocks, device)
    for _ in range(repeats):
        sweeps.run()
    return sweeps.cells()


def drafter_rounds(
    target: Runner, drafters: Mapping[str, FeatureDrafter], widths: Sequence[int],
    contexts: Sequence[int], batch: int = 1,
) -> Iterator[Block]:  # fmt: skip
    """A first pass over several tokens, some of one, and the target's pass that verifies them.

    Cells, under each drafter's name: ``forward`` over widths and contexts, head and choice of the
    token included, and ``prefill`` over prompts.  ``target`` is a `LayerRunner` where `batch` is
    1, and has room for `batch` sequences.
    """
    for name, drafter in drafters.items():
        yield from _drafter_rounds(target, _Part(name, drafter), widths, contexts, batch)


class _Part(NamedTuple):
    name: str
    drafter: FeatureDrafter


def _drafter_rounds(
    target: Runner, part: _Part, widths: Sequence[int], contexts: Sequence[int], batch: int
) -> Iterator[Block]:
    room, (name, drafter) = target.cache.slots, part
    runner = DrafterRunner(drafter, room, batch)
    longest = max(*widths, LATER + 1, *PROMPTS)
    tokens = torch.zeros(batch, longest, dtype=torch.long, device=target.device)
    features = torch.zeros(batch, longest, drafter.feature_width, device=target.device)
    features = features.to(target.model.dtype)
    one = isinstance(target, LayerRunner)
    own = drafter.fuse(features[:, :1])

    def states(
        width: int, context: int, module: int = 0, fused: torch.Tensor | None = None
    ) -> torch.Tensor:
        fed = tokens[:, :width], drafter.fuse(features[:, :width]) if fused is None else fused
        if one:
            return runner.run(fed[0][0], fed[1][0], context, module=module)[0][None]
        return runner.run_batch(*fed, context, module=module)[0]

    def draft(width: int, context: int, fused: torch.Tensor | None = None) -> Step:
        def run() -> object:
            logits = drafter.logits(states(width, context, fused=fused)[:, -1])
            return drafter.target_ids(logits.argmax(-1))

        return Step(name, "forward", width, context, run, batch)

    def prompt(width: int) -> Step:
        def run() -> object:
            return [states(width, 0, module) for module in range(drafter.modules_in_turn)]

        return Step(name, "prefill", width, 0, run, batch)

    for context in contexts:
        for width in [w for w in widths if context + max(w, LATER + 1) <= room]:
            verify = Step(
                "target", "pass", LATER + 1, context, _verify(target, drafter, context, batch),
                batch,
            )  # fmt: skip
            # Later passes are fed the drafter's own output: nothing of the target's is fused.
            round_ = [draft(width, context), *[draft(1, context, own)] * LATER, verify]
            yield Block([round_] * (UNTIMED + 3), UNTIMED)
    for width in [w for w in PROMPTS if w <= room]:
        yield Block([[prompt(width)]])


def _verify(
    target: Runner, drafter: FeatureDrafter, context: int, batch: int
) -> Callable[[], object]:
    """The target's pass over a draft of every sequence."""
    if isinstance(target, LayerRunner):
        runner, pieces = target, list(torch.zeros(LATER + 1, dtype=torch.long).split(1))
        pieces = [piece.to(target.device) for piece in pieces]

        def run() -> object:
            fed = torch.cat(pieces)
            logits, _ = runner.forward_with_states(fed, context, drafter.feature_layers)
            return logits.argmax(-1).tolist()

        return run
    ids = torch.zeros(batch, LATER + 1, dtype=torch.long, device=target.device)
    places = torch.arange(context, context + LATER + 1, device=target.device).expand_as(ids)
    visible = context + LATER + 1
    return lambda: target.forward_batch(ids, places, visible).argmax(-1).tolist()
