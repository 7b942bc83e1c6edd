"""The trained modules of a target (the run's own, the bundled target's, or trained now), timed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.common.progress import progress_bar

if TYPE_CHECKING:
    import pandas as pd

    from profiler.models.loading import Pair
    from profiler.models.stack import LayerRunner
    from profiler.recording.run import RunInfo
    from profiler.sources.modules import Modules
    from profiler.sources.start_record import GrownTrees
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

HEADS = "exit_heads"
"""Folder of the trained modules inside a run folder."""


def heads_digest(modules: Modules) -> str:
    """A digest of all trained weights but the adapter's."""
    return digest(modules.exits, *modules.parallel.values(), modules.masks)


def adapter_digest(modules: Modules) -> str:
    """A digest of the adapter's weights."""
    return digest(modules.adapter)


def digest(*modules: Any) -> str:
    """A digest of the weights of `modules`, those that are not None."""
    made = hashlib.sha256()
    for module in modules:
        if module is not None:
            for name, weights in sorted(module.state_dict().items()):
                made.update(name.encode() + weights.detach().float().cpu().numpy().tobytes())
    return made.hexdigest()[:16]


def modules_of(
    pair: Pair, info: RunInfo, out: Path, trace: Trace | None = None, text: Path | None = None
) -> Modules:
    """The target's trained modules: the run's own, those the project has, or trained now.

    Without ``trace`` nothing is trained.
    """
    from profiler.features.heads import FILES
    from profiler.recording.run import shipped_heads
    from profiler.sources.modules import load_modules

    own = out / HEADS
    absent = [name for name, file in FILES.items() if not (own / file).is_file()]
    shipped = shipped_heads(info.target)
    if len(absent) == len(FILES) and shipped is not None and text is None:
        return load_modules(shipped, pair.target)
    if absent and trace is not None:
        _train(pair, own, absent, trace, text)
    return load_modules(own, pair.target)


def _train(pair: Pair, own: Path, absent: Sequence[str], trace: Trace, text: Path | None) -> None:
    """Train the absent modules into `own`, each file whole or not at all."""
    import tempfile

    from profiler.features.heads import FILES
    from profiler.models.stack import LayerRunner
    from profiler.prompts import read_prompts
    from profiler.train.heads import own_text, train_all
    from traces.sources.base import prompt_tokens

    if text is not None:
        encoded = [pair.encode(p.text).tolist() for p in read_prompts(text)]
    else:
        note(
            "no heads for this target: training them on the recorded prompts, which flatters "
            "them; give other texts with --heads-text"
        )
        encoded = [prompt_tokens(trace, i) for i in range(len(trace.requests))]
    own.mkdir(parents=True, exist_ok=True)
    limit = int(pair.target.config.get_text_config().max_position_embeddings)
    with progress_bar() as progress, tempfile.TemporaryDirectory(dir=own) as made:
        task = progress.add_task("training heads", total=len(absent) + 1)
        samples = own_text(pair.target, encoded)
        progress.advance(task)
        runner = LayerRunner(pair.target, min(512, limit))
        for name in absent:
            train_all(runner, samples, Path(made), [name])
            (Path(made) / FILES[name]).replace(own / FILES[name])
            progress.advance(task)


def timed_layers(
    pair: Pair, longest: int, trees: Mapping[str, GrownTrees] | None = None
) -> LayerRunner:
    """Return a runner with room for timing sources, and requests of `longest` tokens.

    ``trees``: those that are timed among them.
    """
    from profiler.latency.table import reaching
    from profiler.models.stack import LayerRunner
    from profiler.sources.latency import CONTEXTS, WIDTHS, widest_tree

    limit = int(pair.target.config.get_text_config().max_position_embeddings)
    widest = max(*WIDTHS, widest_tree(trees) if trees else 0)
    return LayerRunner(pair.target, min(limit, max(reaching(CONTEXTS, longest)) + widest))


def with_sources(table: LatencyTable, found: pd.DataFrame) -> LatencyTable:
    """Return `table` with the cells of sources in place of its own of the same parts."""
    import pandas as pd

    from traces.latency.table import LatencyTable

    # The same part timed in two ways does not belong into one grid.
    ours = set(zip(found["model"], found["phase"], strict=True))
    keep = [key not in ours for key in zip(table.cells["model"], table.cells["phase"], strict=True)]
    return LatencyTable(pd.concat([table.cells[keep], found], ignore_index=True), table.meta)
