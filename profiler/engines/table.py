"""Timed iterations of an engine as a latency table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from profiler.engines.bench import Sample
from profiler.engines.engine import PARTS
from profiler.engines.plan import Cell
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable

Samples = Mapping[Cell, Sequence[Sample]]
DISTURBED = 1.1
"""Samples are dropped, if enough remain, where the control load took this times its usual time."""
USUAL = 0.25
"""Quantile of the control load's times that is taken as usual."""
SWING = float(np.log(1.5))
"""Beyond this a moment was an exception, whether the control load's or the engine's."""
HOST = ("schedule", "update", "output")
PROPOSE = PARTS.index("propose")


def quiet(samples: Samples) -> dict[Cell, list[Sample]]:
    """The samples taken while the machine was as fast as usual; all of a cell where none was."""
    usual = usual_control_s(samples)
    kept = {}
    for cell, own in samples.items():
        still = [s for s in own if s.control_s < DISTURBED * usual]
        kept[cell] = still or list(own)
    return kept


def follows(samples: Samples) -> float:
    """Return the exponent, 0 to 1, with which the engine's time follows the control load's.

    Told from visits to the same decoding cells at other moments: a machine that is slow for memory
    is so for both, one that has less of a processor perhaps for either.  Noise of the control
    load makes the power smaller, as it should: so much the less does one say of the other.
    """
    both = product = 0.0
    for cell, own in samples.items():
        if cell.kind == "decode" and len(own) > 1:
            logs = np.log([(s.control_s, s.seconds) for s in own])
            control, seconds = np.clip(logs - np.median(logs, axis=0), -SWING, SWING).T
            control, seconds = control - control.mean(), seconds - seconds.mean()
            both += float(control @ control)
            product += float(control @ seconds)
    return float(np.clip(product / both, 0.0, 1.0)) if both else 0.0


def usual_control_s(samples: Samples) -> float:
    """The control load's lower quartile over the whole measurement."""
    return float(np.quantile([s.control_s for own in samples.values() for s in own], USUAL))


def cells_of(kept: Samples, own_passes: bool = False) -> pd.DataFrame:
    """Cells as in `traces.latency.schema.CELL_COLUMNS`, of the samples that are to count.

    ``forward`` is the engine's pass with sampling, ``host_round`` the rest of an iteration
    without drafts, ``host_draft`` what a drafted token adds to the proposer's time.
    ``prefill`` and ``mixed`` hold the whole iteration, and the adding of its requests.  With
    ``own_passes`` the proposer's time is that of the engine's own drafter (`drafter_cells`).
    """
    rows: list[tuple[Any, ...]] = []
    for cell, own in kept.items():
        if cell.kind == "decode":
            device = [s.parts[PARTS.index("execute")] + s.parts[PARTS.index("sample")] for s in own]
            context = round(float(np.mean([s.context for s in own])))
            rows.append(_row("forward", cell.batch, cell.width, context, device))
        elif cell.kind == "prompt":
            rows.append(_row("prefill", cell.prompts, cell.tokens, 0, [s.seconds for s in own]))
    rows += _mixed(kept)
    batches = sorted({c.batch for c in kept if c.kind == "decode"})
    for batch in batches:
        mine = {c: own for c, own in kept.items() if c.kind == "decode" and c.batch == batch}
        rounds = [sum(s.parts[PARTS.index(p)] for p in HOST) for own in mine.values() for s in own]
        idle_s, drafting_s = (0.0, 0.0) if own_passes else _proposing(mine)
        rows.append(_row("host_round", batch, 1, 0, [r + idle_s for r in rounds]))
        rows.append(_row("host_draft", batch, 1, 0, [drafting_s]))
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    drafter = drafter_cells(kept) if own_passes else _free_drafts(frame)
    return pd.concat([frame, drafter], ignore_index=True)


def _mixed(kept: Samples) -> list[tuple[Any, ...]]:
    """Return the cost of prompts by tokens decoded: several batches and widths may have as many."""
    added: dict[tuple[int, int], list[float]] = {}
    for cell, own in kept.items():
        if cell.kind == "mixed":
            key = cell.batch * cell.width, cell.prompts * cell.tokens
            added.setdefault(key, []).extend(max(s.seconds - s.base_s, 0.0) for s in own)
    return [_row("mixed", decoded, tokens, 0, own) for (decoded, tokens), own in added.items()]


def _proposing(own: Samples) -> tuple[float, float]:
    """Return the proposer's seconds without drafts, and per token of a sequence's draft."""
    pairs = [
        (c.width - 1, float(np.median([s.parts[PROPOSE] for s in samples])))
        for c, samples in own.items()
    ]
    lengths, seconds = np.array(pairs).T
    if len(set(lengths)) < 2:
        return float(seconds.mean()), 0.0
    slope, start = np.polyfit(lengths, seconds, 1)
    return max(float(start), 0.0), max(float(slope), 0.0)


def drafter_cells(kept: Samples) -> pd.DataFrame:
    """Return the cells of the engine's own drafter, from iterations that ask for 0, 1, ... tokens.

    ``along`` is its pass where none was asked for, ``catch_up`` the first of a draft, over the
    tokens that its iteration verified, and ``forward`` a later one.  Iterations that verify K and
    ask for K show both together: what a token more adds to a first pass is that of prompts.
    """
    rows: list[tuple[Any, ...]] = []
    prompts = {
        c: np.median([s.parts[PROPOSE] for s in own]) for c, own in kept.items()
        if c.kind == "prompt"
    }  # fmt: skip
    for cell, seconds in prompts.items():
        rows.append(_row("prefill", cell.prompts, cell.tokens, 0, [seconds], "draft"))
    sizes = np.array([c.prompts * c.tokens for c in prompts])
    token_s = max(float(np.polyfit(sizes, list(prompts.values()), 1)[0]), 0.0) if len(
        set(sizes.tolist())
    ) > 1 else 0.0  # fmt: skip
    lines: dict[tuple[int, int], dict[int, Sequence[Sample]]] = {}
    for c, own in kept.items():
        if c.kind == "decode":
            lines.setdefault((c.batch, c.context), {})[c.width] = own
    for (batch, _), by_width in lines.items():
        context = round(float(np.mean([s.context for own in by_width.values() for s in own])))
        taken = {
            w - 1: float(np.median([s.parts[PROPOSE] for s in own])) for w, own in by_width.items()
        }
        if 0 in taken:
            rows.append(_row("along", batch, 1, context, [taken[0]], "draft"))
        lengths = sorted(k for k in taken if k)
        # Without the first pass's time for the K tokens after its first.
        bare = [taken[k] - token_s * batch * k for k in lengths]
        later_s, first_s = (
            np.polyfit([k - 1 for k in lengths], bare, 1) if len(lengths) > 1 else (0.0, bare[0])
        )  # fmt: skip
        rows.append(_row("forward", batch, 1, context, [max(float(later_s), 0.0)], "draft"))
        for width in (1, 1 + max(lengths)):
            taken_s = max(float(first_s), 0.0) + token_s * batch * (width - 1)
            rows.append(_row("catch_up", batch, width, context, [taken_s], "draft"))
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def _free_drafts(frame: pd.DataFrame) -> pd.DataFrame:
    """Draft passes of a proposer without a model take no time but the host's."""
    forward = frame[frame["phase"] == "forward"]
    free = forward.assign(model="draft", median_s=0.0, spread_s=0.0)
    prompts = frame[frame["phase"] == "prefill"].assign(model="draft", median_s=0.0, spread_s=0.0)
    return pd.concat([free, prompts], ignore_index=True)


def _row(
    phase: str, batch: int, width: int, context: int, seconds: Sequence[float],
    model: str = "target",
) -> tuple[Any, ...]:  # fmt: skip
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return model, phase, batch, width, context, median, (high - low) / 2, len(seconds)


def host_parts(kept: Samples) -> list[dict[str, float]]:
    """Median seconds of every part of a decoding iteration, by batch and width."""
    return [
        {
            "batch": c.batch, "width": c.width, "context": c.context,
            **{f"{p}_s": float(np.median([s.parts[i] for s in own]))
               for i, p in enumerate(PARTS)},
        }
        for c, own in kept.items() if c.kind == "decode"
    ]  # fmt: skip


def held_out_errors(samples: Samples, held_out: Samples) -> dict[Cell, float]:
    """Relative error of reading each held-out cell between the others."""
    table = LatencyTable(cells_of(quiet(samples)))
    errors = {}
    for cell, own in quiet(held_out).items():
        width, context = cell.width, float(np.mean([s.context for s in own]))
        device = [s.parts[PARTS.index("execute")] + s.parts[PARTS.index("sample")] for s in own]
        measured = float(np.median(device))
        read = table.seconds("target", "forward", batch=cell.batch, new_tokens=width,
                             context=context)  # fmt: skip
        errors[cell] = float(read) / measured - 1
    return errors
